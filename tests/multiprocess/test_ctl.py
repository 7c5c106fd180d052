"""`ctl` of real runs: workers leave and join on demand, and no number shows it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.controller.admin_client import ask
from elaswave_spmd.errors import ControlError
from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from tests.multiprocess import patient_model, still_model
from tests.multiprocess.real_runs import SMALL, eventually, launch, train, write_text
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
RUN = [*SMALL, "train.validate_every=0", "mesh=dp2_pp2", "sharding=zero2", "model.dropout=0.1"]


def ctl(folder: Path, *words: str, code: int = 0) -> str:
    """Runs `python -m elaswave_spmd ctl run WORDS` and returns its output: stdout if it succeeds, else stderr."""
    command = [sys.executable, "-m", "elaswave_spmd", "ctl", "run", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == code, done
    assert (done.stdout if code else done.stderr) == ""
    return done.stderr if code else done.stdout


def status(folder: Path) -> dict[str, Any]:
    """In this process: a run that is asked often must not be over before."""
    return ask(str(folder / "run"), {"command": "status"})


def refusal(folder: Path, **request: object) -> str:
    with pytest.raises(ControlError) as caught:
        ask(str(folder / "run"), request)
    return str(caught.value)


def test_workers_leave_and_join_on_demand_without_a_changed_bit(tmp_path: Path) -> None:
    undisturbed, go = tmp_path / "undisturbed", tmp_path / "go"
    undisturbed.mkdir()
    write_text(undisturbed)
    write_text(tmp_path)
    waits = ["train.steps=60", *patient_model.write(tmp_path, go)]
    with launch(tmp_path, *RUN, *waits) as run:
        eventually(lambda: (tmp_path / "run" / "ctl.sock").exists(), run.process)
        assert stat.S_IMODE(os.lstat(tmp_path / "run" / "ctl.sock").st_mode) == 0o600
        run.wait_for_steps(3)
        before = status(tmp_path)
        assert before["stages"] == [[0, 1], [2, 3]] and before["version"] >= 3 and before["loss"] > 0
        assert sorted(worker["pid"] for worker in before["members"]) == sorted(run.workers())
        assert ctl(tmp_path, "drain", "1") == "worker 1 will leave, between two steps\n"
        eventually(lambda: status(tmp_path)["stages"] == [[0], [2, 3]], run.process)
        assert "only a member of the mesh can leave it" in refusal(tmp_path, command="drain", ranks=[1])
        assert "the last worker of a run stays" in refusal(tmp_path, command="drain", ranks=[0, 2, 3])
        assert ctl(tmp_path, "add", "1") == "worker 4 will join; training goes on meanwhile\n"
        eventually(lambda: status(tmp_path)["stages"] == [[0, 4], [2, 3]], run.process)
        assert any("join: worker 4 joined" in event["text"] for event in status(tmp_path)["events"])
        go.touch()
        done = run.finish()
    assert done.code == 0, done.err
    patient_model.write(undisturbed, go)
    assert train(undisturbed, *RUN, *waits).code == 0
    assert not (tmp_path / "run" / "ctl.sock").exists()
    assert "which has finished" in ctl(tmp_path, "status", code=2)
    kinds = [event["event"] for event in read_events(tmp_path / "run")]
    assert "leave" in kinds and "join" in kinds and "fail" not in kinds
    losses, expected = ([line.loss_hex for line in read_metrics(folder / "run")] for folder in (tmp_path, undisturbed))
    assert losses == expected
    weights = [read_summary(folder / "run")["weights_sha256"] for folder in (tmp_path, undisturbed)]
    assert weights[0] == weights[1]


def test_a_run_whose_controller_was_killed_is_dead(tmp_path: Path) -> None:
    write_text(tmp_path)
    still = tmp_path / "still"
    still_model.stand_still_in(still, 3)  # so that its workers live: with the last of them the socket is removed
    # Nor are they killed before `ctl` has started and asked, however long that takes.
    words = ["train.steps=1000000", *still_model.write(tmp_path, still), "timeouts.shutdown=1000"]
    with launch(tmp_path, *RUN, *words) as run:
        run.wait_for_steps(2)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        assert (tmp_path / "run" / "ctl.sock").exists(), "nobody could remove it"
        refusal = ctl(tmp_path, "status", code=2)
    assert refusal.startswith("error: ") and "without a word" in refusal, refusal
    assert "a run is named by its directory" in ctl(tmp_path / "run", "status", code=2)


def test_a_run_that_is_not_elastic_answers_but_does_not_change(tmp_path: Path) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *RUN, "train.steps=1000000", "elastic.enabled=false") as run:
        run.wait_for_steps(1)
        assert len(json.loads(ctl(tmp_path, "status", "--json"))["members"]) == 4
        assert "mesh       dp2_pp2, epoch 0\n" in ctl(tmp_path, "status")
        assert "elastic.enabled=false" in ctl(tmp_path, "add", "1", code=2)
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.finish().code == 130
    assert "which has stopped: the run stops: it was asked to by SIGINT" in ctl(tmp_path, "status", code=2)
