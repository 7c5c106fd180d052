"""Trackers of a real run, offline: they keep what the run's own files have, and cannot keep it from ending."""

from __future__ import annotations

import importlib.util
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from tests.multiprocess import patient_model
from tests.multiprocess.real_runs import SMALL, Launched, eventually, launch, train, write_text
from tests.offline_services import read_offline, set_offline

KILL = "chaos.events=[{step: 3, kind: kill, rank: 1, point: backward}]"


def test_trackers_keep_what_a_run_with_a_kill_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    services = [name for name in ("wandb", "mlflow") if importlib.util.find_spec(name) is not None]
    if not services:
        pytest.skip("neither the extra wandb nor mlflow is installed")
    set_offline(monkeypatch, tmp_path)
    write_text(tmp_path)
    done = train(tmp_path, *SMALL, "mesh=dp2", KILL, "timeouts.callbacks=300", f"run.trackers=[{','.join(services)}]")
    assert done.code == 0, done.err
    run = tmp_path / "run"
    losses = {line.step: line.loss for line in read_metrics(run)}
    validated = {event["step"]: event["loss"] for event in read_events(run) if event["event"] == "validation"}
    assert not [event for event in read_events(run) if event["event"] == "callback"]
    final = read_summary(run)["final_loss"]
    if "wandb" in services:
        (folder,) = (run / "wandb").glob("offline-run-*")
        kept = read_offline(folder)
        assert {row["step"]: row["train/loss"] for row in kept.history if "train/loss" in row} == losses
        assert {row["step"]: row["validation/loss"] for row in kept.history if "validation/loss" in row} == validated
        assert [row["events/fail"] for row in kept.history if "events/fail" in row] == [1]
        assert kept.config["train"]["steps"] == 6 and kept.summary["final_loss"] == final
    if "mlflow" in services:
        client = _client()
        (found,) = client.search_runs([client.get_experiment_by_name("elaswave_spmd").experiment_id])
        history = client.get_metric_history(found.info.run_id, "train/loss")
        assert {metric.step: metric.value for metric in history} == losses
        assert found.data.metrics["events/fail"] == 1 and found.data.metrics["summary/final_loss"] == final
        assert found.data.params["train.steps"] == "6" and found.info.status == "FINISHED"


def _client() -> Any:
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    return MlflowClient()


def services_of(run: Launched) -> list[int]:
    """The processes of wandb that the command has started itself. They start others, which may end at any time."""
    found = []
    for pid, parent in run.processes().items():
        with suppress(OSError):
            if parent == run.process.pid and "wandb-core" in Path(f"/proc/{pid}/comm").read_text():
                found.append(pid)
    return found


def test_a_run_ends_while_the_process_of_a_service_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    set_offline(monkeypatch, tmp_path)
    write_text(tmp_path)
    words = [*SMALL, "mesh=single", "train.steps=40", "run.trackers=[wandb]", "timeouts.callbacks=0.2"]
    with launch(tmp_path, *words, *patient_model.write(tmp_path, tmp_path / "asked")) as run:
        run.wait_for_steps(1)
        eventually(lambda: services_of(run), run.process)
        (service,) = services_of(run)
        os.kill(service, signal.SIGSTOP)
        (tmp_path / "asked").touch()
        done = run.finish()
    assert done.code == 0 and "Traceback" not in done.err, done.err
    states = [event["state"] for event in read_events(tmp_path / "run") if event["event"] == "callback"]
    assert states[-1] == "unfinished" and len(read_metrics(tmp_path / "run")) == 40
