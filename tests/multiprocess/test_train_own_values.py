"""`python train.py` with a model that brings its own initial values, some of them frozen: equal bits, and refusals."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.multiprocess.real_runs import SMALL, launch, train, write_text
from tests.multiprocess.test_resume import kill_after_checkpoint, no_longer_still, standing_still
from tests.own_values_model import write

FREEZE = 'optim.freeze="block*.scale block1.mix.*"'
STILL = """
from own_values_model import Own
from still_model import wait_in

class StillOwn(Own):
    def __init__(self, vocab_size, d_model, layers, factories, still, **others):
        super().__init__(vocab_size, d_model, layers, factories=factories)
        wait_in(self.layers[0], still)
"""


def settings(folder: Path, *words: str) -> list[str]:
    write_text(folder)
    return [*SMALL, write(folder), "train.steps=8", *words]


def trained(folder: Path, *words: str) -> None:
    done = train(folder, *words)
    assert done.code == 0, done.err


def weights(run_dir: Path) -> dict[str, np.ndarray]:
    return load_file(run_dir / "weights.safetensors")


@pytest.mark.parametrize("factories", ["false", "true"])
def test_meshes_a_kill_and_a_resume(tmp_path: Path, factories: str) -> None:
    words = settings(tmp_path, FREEZE, f"+model.args.factories={factories}")
    trained(tmp_path, *words, "run.dir=single")
    trained(tmp_path, *words, "run.dir=meshed", "mesh=dp2_pp2", "sharding=zero3")
    kill = "chaos.events=[{kind: kill, step: 1, rank: 1}]"
    trained(tmp_path, *words, "run.dir=killed", "mesh=dp2_pp2", "sharding=zero2", kill)
    still = [*standing_still(tmp_path, 6), "model.target=still_own.StillOwn"]
    (tmp_path / "still_own.py").write_text(STILL)
    with launch(tmp_path, *words, "run.dir=resumed", "mesh=dp2", "checkpoint.every=2", *still) as stopped:
        kill_after_checkpoint(stopped, "resumed", 2)
    no_longer_still(tmp_path)
    trained(tmp_path, "train.resume=resumed", "mesh=pp2", "sharding=zero3")
    wanted = weights(tmp_path / "single")
    for name in ("meshed", "killed", "resumed"):
        found = weights(tmp_path / name)
        assert found.keys() == wanted.keys()
        assert [n for n in wanted if found[n].tobytes() != wanted[n].tobytes()] == [], name
    assert (wanted["block0.scale"] == np.float32(1e-4)).all(), "frozen, at the value of its constructor"
    assert (wanted["block1.mix.weight"] == np.eye(16, dtype=np.float32)).all()
    near = np.abs(wanted["block0.mix.weight"] - np.eye(16, dtype=np.float32)).max()
    assert 0 < near < 0.2, "trained, from the identity on"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("clock", "the constructor of layer block0 made other values of parameter block0.up.bias on worker"),
        ("process", "the constructor of layer block0 made other values of constant block0.table on worker"),
        ("empty", "parameter block0.up.weight has no initial values"),
    ],
)
def test_constructors_that_differ_between_workers_are_refused(tmp_path: Path, wrong: str, told: str) -> None:
    words = settings(tmp_path, f"+model.args.wrong={wrong}", "mesh=dp2")
    done = train(tmp_path, *words)
    assert done.code == 2 and told in done.err
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "before the first step"


@pytest.mark.parametrize("check", ["false", "true"])
def test_factories_are_built_where_they_are_needed_alone(tmp_path: Path, check: str) -> None:
    """The check of the model needs one block for all of its kind."""
    words = settings(tmp_path, "model.layers=6", "+model.args.factories=true", f"+model.args.log={tmp_path}/built")
    trained(tmp_path, *words, "mesh=pp4", "elastic.enabled=false", f"runtime.check_model={check}")
    built = defaultdict(set)
    for line in (tmp_path / "built").read_text().splitlines():
        process, number = map(int, line.split())
        built[process].add(number)
    assert sum(0 in numbers for numbers in built.values()) == (4 if check == "true" else 1)
    owned = [numbers - {0} for numbers in built.values()]
    assert sorted(number for numbers in owned for number in numbers) == list(range(1, 6))
    assert len(built) > 1, "on the workers of several stages"


COUNTS = """
import gc
import torch
import own_values_model

class Block(own_values_model.Block):
    def __init__(self, d_model, wrong):
        super().__init__(d_model, wrong)
        self.odd = torch.nn.Parameter(torch.ones(7, 11))

    def forward(self, x, keys):
        if int(keys.step) >= 4:  # not the check of the model, which is of the first steps
            flat = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.ndim == 1]
            made = sum(one.numel() == self.odd.numel() for one in flat)
            with open("kept", "a") as file:
                print(made, file=file)
        return super().forward(x, keys)

own_values_model.Block = Block
Own = own_values_model.Own
"""


def test_a_resumed_run_keeps_no_values_of_constructors(tmp_path: Path) -> None:
    """It begins with its checkpoint; the check of the model has read the constructors' values."""
    words = settings(tmp_path)
    (tmp_path / "counting_model.py").write_text(COUNTS)
    words[words.index("model.target=own_values_model.Own")] = "model.target=counting_model.Own"
    saved = ("elastic.enabled=false", "chaos.events=[{step: 4, kind: term, rank: 0, point: forward}]")
    stopped = train(tmp_path, *words, "mesh=dp2", *saved)
    assert stopped.code == 1 and "resume with: " in stopped.err, stopped
    (tmp_path / "kept").unlink()
    trained(tmp_path, "train.resume=run")
    counted = (tmp_path / "kept").read_text().split()
    assert len(counted) > 8 and set(counted) == {"0"}
