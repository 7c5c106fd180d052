"""Real runs with models that break the promise: refused with exit code 2 before the first step; right ones run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from tests.faults.fault_runs import PATIENT
from tests.mistaken_model import BETWEEN_WORKERS, REFUSED, UNCOPIED, write
from tests.multiprocess import real_runs
from tests.multiprocess.real_runs import TRAIN, train, write_text
from tests.waiting import PATIENCE_S

SMALL = [*real_runs.SMALL, *PATIENT]
"""Workers are lost by their ends alone, and not by heartbeats that are late on a busy machine."""
QUICK = [*SMALL, "train.steps=2", "train.validate_every=0"]
OFF = "runtime.check_model=false"
SAVED = ("elastic.enabled=false", "chaos.events=[{step: 3, kind: term, rank: 0, point: forward}]")
"""A run that stops in step 3 and is saved."""


def refused(folder: Path, *arguments: str) -> str:
    """Starts a run that a worker refuses; returns its stderr. Asserts one screen, once, and that nothing is left."""
    done = train(folder, *SMALL, *arguments)
    assert done.code == 2, (done.code, done.out, done.err)
    assert done.err.startswith("error: ") and "Traceback" not in done.err and len(done.err.splitlines()) <= 8
    first = done.err.splitlines()[0].removeprefix("error: ")
    assert first not in done.out and done.err.count(first) == 1
    assert "lost" not in done.out and not (folder / "run").exists()
    return first


@pytest.mark.parametrize(
    "mistake, arguments",
    [
        ("torch_noise", ["mesh=single"]),
        ("running_mean", ["mesh=dp2_pp2", "sharding=zero3"]),
        ("mean_loss", ["mesh=dp2", "elastic.replace=true"]),
        ("remembers", ["mesh=dp2", "elastic.enabled=false"]),
        ("nan_backward", ["mesh=pp2", "elastic.spares=1"]),
        ("in_place", ["mesh=dp2", "runtime.activation_checkpointing=true"]),
        ("parameter_hook", ["mesh=dp2"]),
        ("lock", ["mesh=pp2"]),
        ("assigned_data", ["mesh=dp2", "train.microbatch_size=1"]),
    ],
)
def test_a_mistake_is_refused_before_the_first_step(tmp_path: Path, mistake: str, arguments: list[str]) -> None:
    write_text(tmp_path)
    told = refused(tmp_path, *write(tmp_path, mistake), *arguments)
    words = UNCOPIED[mistake][1] if mistake in UNCOPIED else REFUSED[mistake]
    told = told.replace("block1", "block0")  # Both have it, and the workers of either stage may be the first to say so.
    assert told.startswith(words) or (mistake == "in_place" and "changes its input in place" in told), told


@pytest.mark.parametrize("mistake", BETWEEN_WORKERS)
def test_what_only_two_workers_can_see_is_refused_with_both(tmp_path: Path, mistake: str) -> None:
    write_text(tmp_path)
    told = refused(tmp_path, *write(tmp_path, mistake), "mesh=dp2", "elastic.replace=true")
    assert told in {f"layer block0 computes other bits on worker {1 - one} than on worker {one}" for one in (0, 1)}


def test_a_model_that_raises_an_exception_is_refused_with_the_layer(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "wrong_model.py").write_text(
        "from torch import nn\nfrom elaswave_spmd import LayeredModel\n\n\n"
        "class Wrong(LayeredModel):\n    def __init__(self, vocab_size, **others):\n        super().__init__("
        '{"embed": nn.Embedding(vocab_size, 8), "mid": nn.Linear(9, 8), "head": nn.Linear(8, vocab_size)})\n'
    )
    told = refused(tmp_path, "model.target=wrong_model.Wrong", "mesh=dp2")
    assert "cannot be multiplied" in told and "in layer 'mid' (forward), input float32" in told


def test_models_that_are_right_have_the_same_bits_on_every_mesh(tmp_path: Path) -> None:
    """Other dtypes, lazy tables, hooks of modules, unused parameters, dicts, noise by keys: all in one model."""
    write_text(tmp_path)
    model = write(tmp_path, "none_of_many")
    meshes = {"single": ["mesh=single"], "wide": ["mesh=dp3", "sharding=zero1"]}
    killed = "chaos.events=[{step: 3, kind: kill, rank: 1, point: backward}]"
    meshes["deep"] = ["mesh=dp2_pp2", "sharding=zero3", killed]
    found = {}
    for name, arguments in meshes.items():
        done = train(tmp_path, *SMALL, *model, *arguments, f"run.dir={name}")
        assert done.code == 0, done.err
        lines = [(line.loss_hex, line.grad_norm_hex) for line in read_metrics(tmp_path / name)]
        found[name] = lines, read_summary(tmp_path / name)["weights_sha256"]
    assert len(found["single"][0]) == 6 and found["single"] == found["wide"] == found["deep"]
    checked = read_summary(tmp_path / "deep")["model_check"]
    assert checked["loss_unchecked"].startswith("ValueError: "), "half a micro-batch is none that this loss takes"
    rows = {row["layer"]: row for row in checked["layers"]}
    assert {"embed", "mixed_types", "backward_hook", "head"} <= set(rows)


def test_the_check_says_what_layers_need_and_can_be_switched_off(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert train(tmp_path, *QUICK, "mesh=dp2", "run.dir=checked").code == 0
    (event,) = [event for event in read_events(tmp_path / "checked") if event["event"] == "model_check"]
    summary = read_summary(tmp_path / "checked")["model_check"]
    assert summary["done"] and summary["layers"] == event["layers"]
    embed, block, head = summary["layers"]
    assert (embed["layer"], block["layer"], head["layer"]) == ("embed", "block0", "head")
    assert block["count"] == 2 and block["state_bytes"] == 3 * block["value_bytes"] > 0
    assert block["gradient_bytes"] == block["value_bytes"] and block["kept_bytes"] > block["output_bytes"] > 0

    model = write(tmp_path, "torch_noise")
    done = train(tmp_path, *QUICK, "mesh=dp2", *model, OFF, "run.dir=off")
    assert done.code == 0, done.err
    assert not [event for event in read_events(tmp_path / "off") if event["event"] == "model_check"]
    assert read_summary(tmp_path / "off")["model_check"] == {"done": False, "why": OFF}
    done = train(tmp_path, *QUICK, "mesh=dp2", "runtime.device=emulated", "run.dir=emulated")
    assert done.code == 0, done.err
    why = "runtime.device=emulated computes nothing with the model"
    assert read_summary(tmp_path / "emulated")["model_check"] == {"done": False, "why": why}


def test_backwards_are_in_two_parts_where_the_check_found_the_same_bits_and_there_is_room(tmp_path: Path) -> None:
    """The first stage has none, and without the check, or without memory for what is put off, no stage has any."""
    write_text(tmp_path)
    runs = {
        "split": ["mesh=pp2", "run.trace=true"],
        "unchecked": ["mesh=pp2", "run.trace=true", OFF],
        "full": ["mesh=pp2", "run.trace=true", "schedule.memory_limit=1"],
        "sharded": ["mesh=dp2_pp2", "sharding=zero3", "runtime.activation_checkpointing=true"],
    }
    weights, late = set(), {}
    for name, arguments in runs.items():
        done = train(tmp_path, *QUICK, *arguments, f"run.dir={name}")
        assert done.code == 0, done.err
        weights.add(read_summary(tmp_path / name)["weights_sha256"])
        if (trace := tmp_path / name / "trace.json").exists():
            names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
            late[name] = {one.partition(",")[0] for one in names if one.startswith("W ")}
    assert len(weights) == 1
    assert late == {"split": {f"W micro-batch {u}" for u in range(4)}, "unchecked": set(), "full": set()}
    summaries = {name: read_summary(tmp_path / name)["split_backward"] for name in runs}
    assert summaries.pop("unchecked") == {"kinds": [], "why": f"no worker has tried it: {OFF}"}
    assert all(found == {"kinds": ["block0", "head"]} for found in summaries.values())


def test_a_refusal_leaves_a_run_that_is_to_be_resumed_as_it_was(tmp_path: Path) -> None:
    """Also where the model was right before: its bits are those of the check before, or the run does not go on."""
    write_text(tmp_path)
    model = write(tmp_path, "none")
    stopped = train(tmp_path, *SMALL, *model, "mesh=dp2", *SAVED)
    assert stopped.code == 1 and "resume with: " in stopped.err, stopped
    file = tmp_path / "mistaken_model.py"
    good = file.read_text()
    kept = [path for path in (tmp_path / "run").rglob("*") if path.suffix in (".safetensors", ".json", ".yaml")]
    files = {path: path.read_bytes() for path in kept}
    for code, telling in [
        ("x + x.detach().mul(0.125)", "layer block0 computes other bits than it did when the run that is resumed"),
        ("x + torch.rand_like(x)", "layer block0 draws from torch's generator"),
    ]:
        head, tail = good.split("        return x\n", 1)
        file.write_text(f"{head}        return {code}\n{tail}")
        done = train(tmp_path, "train.resume=run")
        assert done.code == 2 and done.err.startswith(f"error: {telling}") and "Traceback" not in done.err, done
        assert {path: path.read_bytes() for path in files} == files
    file.write_text(good)
    done = train(tmp_path, "train.resume=run")
    assert done.code == 0, done.err
    assert [line.step for line in read_metrics(tmp_path / "run")] == list(range(1, 7))


def test_the_order_of_a_set_is_found_when_a_run_is_resumed(tmp_path: Path) -> None:
    """It is the same in all processes of a command, and other in the next command."""
    write_text(tmp_path)
    model = write(tmp_path, "order_of_a_set")

    def run(hash_seed: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
        words = [sys.executable, str(TRAIN), *arguments]
        return subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    stopped = run(1, *SMALL, *model, "mesh=single", *SAVED)
    assert stopped.returncode == 1 and "resume with: " in stopped.stderr, stopped
    done = run(2, "train.resume=run", "run.dir=again")
    assert done.returncode == 2 and "layer block0 computes other bits than it did when the run" in done.stderr, done
    assert not (tmp_path / "again").exists()
    assert run(1, "train.resume=run").returncode == 0
