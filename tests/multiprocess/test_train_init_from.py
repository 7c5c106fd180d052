"""`python train.py model.init_from=...`: equal bits on every mesh, from each kind of source, and refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from elaswave_spmd.run_dir import read_events, read_metrics
from elaswave_spmd.run_dir.lock import LOCK
from tests.multiprocess.real_runs import SMALL, eventually, launch, train, write_text
from tests.published_models import MODELS, Published
from tests.unit.weights.test_given_weights import sharded

LLAMA = [
    *SMALL,
    "model=llama_tiny",
    "model.layers=2",
    "model.d_model=16",
    "model.heads=4",
    "++model.args.kv_heads=2",
    "++model.args.hidden=24",
    "++model.args.theta=500000.0",
    "++model.args.norm_eps=0.001",
    "'++model.args.rope_scaling={factor: 8, low_freq_factor: 1, high_freq_factor: 4, "
    "original_max_position_embeddings: 16}'".strip("'"),
]


def bytes_llama() -> Published:
    """The tiny Llama 3 with a vocabulary of bytes."""
    of = MODELS["llama3"]
    shapes = {name: (256, 16) if "embed" in name else shape for name, shape in of.shapes.items()}
    return Published({**of.config, "vocab_size": 256}, shapes, of.target, of.sizes)


def trained(folder: Path, *words: str) -> dict[str, torch.Tensor]:
    done = train(folder, *words)
    assert done.code == 0, done.err
    name = next(word for word in reversed(words) if word.startswith("run.dir=")).removeprefix("run.dir=")
    return load_file(folder / name / "weights.safetensors")


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def test_a_published_model_on_two_meshes(tmp_path: Path) -> None:
    write_text(tmp_path)
    sharded(bytes_llama().write(tmp_path / "hf"))
    words = [*LLAMA, "model.init_from=hf"]
    single = trained(tmp_path, *words, "run.dir=single")
    kill = "chaos.events=[{kind: kill, step: 1, rank: 1}]"
    meshed = trained(tmp_path, *words, "run.dir=meshed", "mesh=dp2_pp2", "sharding=zero3", kill, "checkpoint.every=3")
    assert_equal(meshed, single)
    assert not torch.equal(single["embed.weight"], trained(tmp_path, *LLAMA, "run.dir=drawn")["embed.weight"])


def test_a_run_and_its_file(tmp_path: Path) -> None:
    write_text(tmp_path)
    trained(tmp_path, *SMALL, "train.steps=4", "run.dir=first")
    words = [*SMALL, "seed=7", "page.size=128"]  # other pages than those of the run
    wanted = trained(tmp_path, *words, "model.init_from=first/weights.safetensors", "run.dir=from_file")
    assert_equal(trained(tmp_path, *words, "model.init_from=first", "run.dir=of_run", "mesh=pp2"), wanted)


def test_a_checkpoint_and_the_newest_of_a_run_that_has_not_finished(tmp_path: Path) -> None:
    write_text(tmp_path)
    # A run that is asked to stop saves, and waits until that is on the disk; one that ends does not wait for the disk.
    with launch(tmp_path, *SMALL, "train.steps=100000", "checkpoint.every=2", "run.dir=first") as run:
        run.wait_for_steps(3, "first")
        run.process.send_signal(signal.SIGTERM)
        assert run.finish().code == 128 + signal.SIGTERM
    words = [*SMALL, "seed=7", "page.size=128"]
    newest = max(path.parent.name for path in (tmp_path / "first" / "checkpoints").glob("step_*/manifest.json"))
    step = f"model.init_from=first/checkpoints/{newest}"
    wanted = trained(tmp_path, *words, step, "run.dir=of_step", "mesh=dp2_pp2")
    assert_equal(trained(tmp_path, *words, "model.init_from=first", "run.dir=newest"), wanted)


def test_a_resumed_run_does_not_read_the_weights_again(tmp_path: Path) -> None:
    write_text(tmp_path)
    bytes_llama().write(tmp_path / "hf")
    wanted = trained(tmp_path, *LLAMA, "model.init_from=hf", "checkpoint.every=3", "run.dir=whole")
    shutil.rmtree(tmp_path / "hf")
    other = train(tmp_path, "train.resume=whole", "model.init_from=other", "run.dir=another")
    assert other.code == 2 and "model.init_from" in other.err, other.err
    assert_equal(trained(tmp_path, "train.resume=whole", "mesh=dp2", "run.dir=again"), wanted)


def test_a_run_that_began_with_the_weights_of_a_run_outlives_its_controller_and_is_resumed_by_its_own_words(
    tmp_path: Path,
) -> None:
    write_text(tmp_path)
    trained(tmp_path, *SMALL, "train.steps=2", "run.dir=first")
    words = [*SMALL, "model.init_from=first", "train.steps=100000", "run.dir=second"]
    with launch(tmp_path, "--supervise", *words) as run:
        run.wait_for_steps(2, "second")
        os.kill(int((tmp_path / "second" / LOCK).read_text()), signal.SIGKILL)
        eventually(lambda: any(e["event"] == "controller" for e in read_events(tmp_path / "second")), run.process)
        run.process.send_signal(signal.SIGTERM)
        done = run.finish()
    assert done.code == 128 + signal.SIGTERM and "another one takes its place" in done.err, done
    last = len(read_metrics(tmp_path / "second"))
    more = f"train.steps={last + 2}"
    by_hand = [*words, more, "train.reschedule=true", "train.resume=second"]
    assert (done := train(tmp_path, *by_hand)).code == 0, done.err
    assert len(read_metrics(tmp_path / "second")) == last + 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model.init_from=nowhere"], "there is no file or directory nowhere"),
        (["model.init_from=hf", "model.layers=3"], "model.layers: 2 there, 3 here"),
        (["model.init_from=hf", "model=gpt_tiny"], "is of model_type llama, and model.target=gpt"),
        (["model.init_from=hf/model.safetensors"], "lacks"),
    ],
    ids=["nowhere", "layers", "family", "names"],
)
def test_refused_before_any_worker(tmp_path: Path, words: list[str], told: str) -> None:
    write_text(tmp_path)
    bytes_llama().write(tmp_path / "hf")
    given = [word for word in LLAMA if not (words[-1] == "model=gpt_tiny" and word.startswith(("model=", "++")))]
    done = train(tmp_path, *given, *words)
    assert done.code == 2 and told in done.err and "fix:" in done.err, done.err
    assert not (tmp_path / "run").exists()


def test_a_run_of_another_configuration(tmp_path: Path) -> None:
    write_text(tmp_path)
    trained(tmp_path, *SMALL, "train.steps=2", "run.dir=first")
    done = train(tmp_path, *SMALL, "model.heads=4", "model.init_from=first", "run.dir=second")
    assert done.code == 2 and "model.heads: 2 there, 4 here" in done.err, done.err
    assert json.loads((tmp_path / "first" / "summary.json").read_text())["steps"] == 2
