"""A mistake in the user's code late in a run: it ends, is resumed when the mistake is corrected, and lost no step."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_metrics
from tests import sample_models
from tests.faults.fault_runs import Bits
from tests.multiprocess import mistaken_model
from tests.multiprocess.real_runs import SMALL, fork_command, train, write_text

# One worker; two where the second one meets the mistake when the first one is lost; state without a mirror; no second
# chance.
RUNS = (
    ("mesh=single",),
    ("mesh=dp2", "sharding=zero2"),
    ("mesh=dp2_pp2", "sharding=zero3", "mirror.count=0"),
    ("mesh=dp2", "elastic.enabled=false", "checkpoint.every=2"),
)


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_the_run_goes_on_where_it_was(tmp_path: Path, words: tuple[str, ...]) -> None:
    write_text(tmp_path)
    model = mistaken_model.write(tmp_path, fails_from=4)
    done = train(tmp_path, *SMALL, *model, *words)
    assert done.code == 1 and done.err.count("Traceback") == 1, done.err
    error, *_, state, command = done.err.splitlines()
    assert error.startswith("error: worker ") and "ValueError: a sample that nobody had thought of" in done.err
    assert state == f"Its state after step 3 is in {tmp_path}/run/checkpoints/step_00000003"
    assert [line.step for line in read_metrics(tmp_path / "run")] == [1, 2, 3]
    mistaken_model.correct(tmp_path)
    _, _, *resumed = shlex.split(command.removeprefix("resume with: "))
    done = train(tmp_path, *resumed)
    assert done.code == 0, done.err
    assert "3" in done.out and Bits.of(tmp_path / "run") == undisturbed(tmp_path, model)


@pytest.mark.parametrize("words", [RUNS[1], RUNS[3]], ids=" ".join)
def test_nor_does_one_in_the_validation_after_the_last_step(tmp_path: Path, words: tuple[str, ...]) -> None:
    write_text(tmp_path)
    model = mistaken_model.write(tmp_path, validates_until=6)
    done = train(tmp_path, *SMALL, *model, *words)
    assert done.code == 1 and done.err.count("Traceback") == 1, done.err
    *_, state, command = done.err.splitlines()
    assert "ValueError: a sample that nobody had thought of" in done.err
    assert state == f"Its state after step 6 is in {tmp_path}/run/checkpoints/step_00000006"
    assert [line.step for line in read_metrics(tmp_path / "run")] == [*range(1, 7)]
    mistaken_model.correct(tmp_path)
    _, _, *resumed = shlex.split(command.removeprefix("resume with: "))
    done = train(tmp_path, *resumed)
    assert done.code == 0, done.err
    assert Bits.of(tmp_path / "run") == undisturbed(tmp_path, model)


# Workers are forks of the command, and write their state so late that whoever does not wait for them loses it.
A_BUG = """
import sys
import time

if __name__ == "__main__":
    from elaswave_spmd.cli import train
    from elaswave_spmd.controller.rescheduler import MeasuredCosts
    from elaswave_spmd.worker.process import WorkerProcess

    def fails(self, step, members, now):
        if step >= 4:
            raise OverflowError("a bug of the controller's")
        return 0

    def saves_late(self):
        time.sleep(1)
        return saves(self)

    MeasuredCosts.committed = fails
    saves, WorkerProcess.save_if_orphaned = WorkerProcess.save_if_orphaned, saves_late
    sys.exit(train())
"""


@pytest.mark.parametrize("mesh", ["single", "dp2"])
def test_nor_does_an_error_of_the_controllers_own(tmp_path: Path, mesh: str) -> None:
    """Its workers finish the step and write their state, all of them, as if it had been killed."""
    write_text(tmp_path)
    script = tmp_path / "with_a_bug.py"
    script.write_text(A_BUG)
    words = [*SMALL, "train.steps=40", "train.validate_every=0", f"mesh={mesh}"]
    done = fork_command(script, tmp_path, *words, environment=dict(os.environ))
    assert done.code == 1 and done.err.count("OverflowError: a bug of the controller's") == 1, done.err
    *_, newest, command = done.err.splitlines()
    step = len(read_metrics(tmp_path / "run"))
    assert 4 <= step < 40 and newest.endswith(f"/run/checkpoints/step_{step:08}, after step {step}")
    assert command.startswith("resume with: ") and f"train.resume={tmp_path}/run" in command
    done = train(tmp_path, f"train.resume={tmp_path}/run")
    assert done.code == 0, done.err
    assert [line.step for line in read_metrics(tmp_path / "run")] == [*range(1, 41)]


def undisturbed(folder: Path, model: list[str]) -> Bits:
    """The bits of the run without a mistake."""
    done = train(folder, *SMALL, *model, "mesh=dp2", "run.dir=undisturbed")
    assert done.code == 0, done.err
    return Bits.of(folder / "undisturbed")


def test_steps_without_an_update_end_the_run_with_its_state_saved(tmp_path: Path) -> None:
    write_text(tmp_path)
    model = mistaken_model.write(tmp_path, overflows="true")
    done = train(tmp_path, *SMALL, *model, "mesh=dp2", "optim.max_skipped=3", "runtime.check_model=false")
    assert done.code == 1, done.err
    first, *others = done.err.splitlines()
    assert first.startswith("error: 3 steps in a row had no update (optim.max_skipped)"), done.err
    assert "Its state after step " in first and others[-1].startswith("resume with: ")


def test_a_run_without_any_update_that_is_too_short_to_be_ended_says_so(tmp_path: Path) -> None:
    shutil.copy(sample_models.__file__, tmp_path)
    samples = ["data.target=sample_models.Images", "model.target=sample_models.Weightless"]
    sizes = ["train.global_batch=8", "train.microbatch_size=2", "train.validate_every=0", "run.tensorboard=false"]
    for number, told in ((1, "step 1, the only one, had no update"), (3, "none of the steps 1 to 3 had an update")):
        done = train(tmp_path, *samples, *sizes, f"train.steps={number}", f"run.dir=run{number}")
        assert done.code == 0, done.err
        events = [json.loads(line) for line in (tmp_path / f"run{number}" / "events.jsonl").read_text().splitlines()]
        *each, last = [event for event in events if event["event"] == "skip"]
        assert len(each) == number and all("the weight of its loss is 0" in event["message"] for event in each)
        assert last["steps"] == number and last["message"] == f"{told}: the weights are as they were before"
