"""Faults that a run cannot, or should not, survive: it ends with exit code 1 and one clear reason."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_events, read_metrics
from tests.faults.fault_runs import STEPS, TINY, Bits, Changes, chaos, made_once
from tests.multiprocess import patient_model
from tests.multiprocess.real_runs import Done, train, write_text

Undisturbed = Callable[[int], Bits]
# The last layer of the model meets a bug at step 3, on every worker that runs it, once the file `told` is there.
BROKEN = """
import os
import time
from pathlib import Path
import torch
from torch import nn
from elaswave_spmd.models import LayeredModel

class Embed(nn.Module):
    def __init__(self, vocab_size, d_model):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab_size, d_model) * 0.02)
    def forward(self, x, keys):
        return nn.functional.embedding(x, self.weight)

class Head(nn.Module):
    def __init__(self, vocab_size, d_model, way):
        super().__init__()
        self.weight, self.way = nn.Parameter(torch.randn(vocab_size, d_model) * 0.02), way
    def forward(self, x, keys):
        if int(keys.step) == 3:
            while not Path("told").exists():
                time.sleep(0.02)
            if self.way == "crash":
                os.abort()
            raise RuntimeError("a bug in the head")
        return nn.functional.linear(x, self.weight)

class Broken(LayeredModel):
    def __init__(self, vocab_size, d_model, way, **others):
        super().__init__({"embed": Embed(vocab_size, d_model), "head": Head(vocab_size, d_model, way)})
"""


def run(folder: Path, *arguments: str) -> Done:
    write_text(folder)
    return train(folder, *TINY, *arguments)


def last_event(folder: Path) -> dict[str, object]:
    return read_events(folder / "run")[-1]


def told(folder: Path, steps: int) -> AbstractContextManager[None]:
    """Makes the file `told` once these steps have their lines.

    Without it, who dies may die before the controller has read anything of what it has reported.
    """
    metrics = folder / "run" / "metrics.jsonl"
    return made_once(folder / "told", lambda: metrics.exists() and metrics.read_text().count("\n") >= steps)


def test_the_only_worker_killed(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    model = [*patient_model.write(tmp_path, tmp_path / "go"), *patient_model.held(4, tmp_path / "told")]
    with told(tmp_path, 3):
        done = run(tmp_path, *model, "mesh=single", chaos("step: 4, kind: kill, rank: 0, point: backward"))
    assert done.code == 1 and "Traceback" not in done.err + done.out
    assert done.err.startswith("error: ") and "no worker is left" in done.err
    assert last_event(tmp_path)["event"] == "stop"
    assert [line.step for line in read_metrics(tmp_path / "run")] == [1, 2, 3]
    assert not (tmp_path / "run" / "summary.json").exists()


def assert_saved(folder: Path, done: Done, undisturbed: Undisturbed) -> None:
    """The run has stopped, with a checkpoint of its newest step, and goes on from there with the same bits."""
    run_dir = folder / "run"
    assert done.code == 1 and "Traceback" not in done.err and done.err.startswith("error: the run stops: ")
    (checkpoint,) = run_dir.glob("checkpoints/*/manifest.json")
    step = int(checkpoint.parent.name.removeprefix("step_"))
    assert f"Its state after step {step} is in {checkpoint.parent}\n" in done.err
    command = done.err.splitlines()[-1].removeprefix("resume with: ")
    assert shlex.split(command)[-2:] == [f"train.resume={run_dir}", "run.tensorboard=false"]
    assert step in (len(read_metrics(run_dir)), len(read_metrics(run_dir)) - 1)
    assert [event["step"] for event in read_events(run_dir) if event["event"] == "checkpoint"] == [step]
    assert last_event(folder)["event"] == "stop" and f"error: {last_event(folder)['message']}\n" in done.err
    resumed = train(folder, f"train.resume={run_dir}", "mesh=single", "chaos.events=[]", "elastic.min_workers=1")
    assert (resumed.code, resumed.err) == (0, "")
    assert Bits.of(run_dir) == undisturbed(STEPS)


def test_fewer_than_the_least_number_of_workers(tmp_path: Path, undisturbed: Undisturbed) -> None:
    events = chaos("step: 2, kind: kill, rank: 0, point: norm", "step: 6, kind: kill, rank: 2, point: forward")
    done = run(tmp_path, "mesh=dp3", "sharding=zero2", "elastic.min_workers=2", events)
    assert "1 workers are left, elastic.min_workers is 2" in done.err
    fails = Changes.of(tmp_path / "run").of_kind("fail")
    assert [event["ranks"] for event in fails] == [[0], [2]]
    assert all(event["detect_from"] == "death" and event["detect_ms"] >= 0 for event in fails), fails
    assert fails[0]["bytes_moved"] >= fails[0]["bytes_bound"] > 0, "two workers have mirrors to make"
    assert (fails[1]["bytes_moved"], fails[1]["bytes_bound"], fails[1]["copies"]) == (0, 0, 0)
    assert_saved(tmp_path, done, undisturbed)


def test_an_exception_that_leaves_too_few_is_shown_with_the_checkpoint(tmp_path: Path) -> None:
    events = chaos("step: 4, kind: raise, rank: 3, point: backward")
    done = run(tmp_path, "mesh=dp2_pp2", "elastic.min_workers=4", events)
    assert done.code == 1 and done.err.startswith("error: the run stops: 3 workers are left, elastic.min_workers is 4.")
    assert "step_00000003" in done.err and done.err.count("Traceback") == 1 and "ChaosError" in done.err
    assert "Traceback" not in str(last_event(tmp_path)["message"])


def test_all_workers_asked_to_leave(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """A batch system ends the job so: with SIGTERM to every process."""
    events = chaos("step: 4, kind: term, rank: [0, 1], point: forward")
    done = run(tmp_path, "mesh=dp2", "sharding=zero1", events)
    assert "0 stay, elastic.min_workers is 1" in done.err
    assert_saved(tmp_path, done, undisturbed)


def test_what_is_whole_on_the_disk_is_a_checkpoint(tmp_path: Path) -> None:
    """A run that ends does not wait for reports of shards; those that are written count all the same."""
    events = chaos("step: 6, kind: kill, rank: 0, point: forward")
    done = run(tmp_path, "mesh=single", "elastic.enabled=false", "checkpoint.every=1", "checkpoint.keep=9", events)
    assert done.code == 1 and "SIGKILL" in done.err
    written = {path.parent for path in tmp_path.glob("run/checkpoints/*/shard_*")}
    assert written == {path.parent for path in tmp_path.glob("run/checkpoints/*/manifest.json")}
    assert not written or f"newest checkpoint: {max(written)}," in done.err


def test_both_replicas_of_a_page_killed_at_once(tmp_path: Path) -> None:
    done = run(tmp_path, "mesh=dp2", "sharding=zero3", chaos("step: 4, kind: kill, rank: [0, 1], point: reduce"))
    assert done.code == 1 and done.err.startswith("error: ") and "Traceback" not in done.err
    assert last_event(tmp_path)["event"] == "stop"


@pytest.mark.parametrize("mesh", ["dp3", "dp2_pp2"])
def test_a_bug_that_meets_a_second_worker_at_the_same_action(tmp_path: Path, mesh: str) -> None:
    write_text(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    settings = [setting for setting in TINY if not setting.startswith("model.")]
    model = ["model.target=broken.Broken", "model.d_model=32", "+model.args.way=raise"]
    with told(tmp_path, 2):
        done = train(tmp_path, *settings, *model, f"mesh={mesh}", "sharding=zero2")
    assert done.code == 1
    assert done.err.count("Traceback") == 1 and done.err.count("RuntimeError: a bug in the head") == 1, done.err
    assert 'broken.py", line' in done.err and "Traceback" not in done.out
    assert len(Changes.of(tmp_path / "run").of_kind("fail")) <= 1, "it is not taken for a lost device again and again"
    assert [line.step for line in read_metrics(tmp_path / "run")] == [1, 2]


def test_a_crash_that_meets_a_second_worker_at_the_same_action(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    settings = [setting for setting in TINY if not setting.startswith("model.")]
    model = ["model.target=broken.Broken", "model.d_model=32", "+model.args.way=crash"]
    with told(tmp_path, 2):
        done = train(tmp_path, *settings, *model, "mesh=dp4", "sharding=zero1")
    assert done.code == 1 and "SIGABRT" in done.err and "Traceback" not in done.err, done.err
    assert [line.step for line in read_metrics(tmp_path / "run")] == [1, 2]
