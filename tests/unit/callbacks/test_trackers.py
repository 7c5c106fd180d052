"""Trackers: what they tell a service of a run, in which order, when it begins, and under which id it goes on."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from elaswave_spmd import EndRecord, EventRecord, StartRecord, StepRecord, ValidationRecord
from elaswave_spmd.callbacks import MlflowTracker, WandbTracker
from elaswave_spmd.callbacks.named import load_callbacks, load_trackers
from elaswave_spmd.callbacks.tracker import Tracker
from elaswave_spmd.errors import ConfigError
from tests.offline_services import read_offline, set_offline


class Kept(Tracker):
    """A service in memory."""

    SERVICE = "kept"

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[object, ...]] = []

    def open(self, start: StartRecord, known: Mapping[str, Any]) -> dict[str, Any]:
        self.told.append(("open", start.mesh, dict(known)))
        return {"id": "first", **known}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.told.append((step, dict(values)))

    def tell(self, step: int, name: str, text: str) -> None:
        self.told.append((step, name, text))

    def close(self, end: EndRecord) -> None:
        self.told.append(("close", end.step))


def start(run_dir: Path) -> StartRecord:
    run_dir.mkdir(exist_ok=True)
    return StartRecord(run_dir, "m", "dp2", "zero2", 10, 20, 1, 2, MappingProxyType({"seed": 3, "optim": {"lr": 0.1}}))


def line(step: int) -> StepRecord:
    return StepRecord.of(
        step=step, mesh_epoch=0, loss=1.0 / step, grad_norm=2.0, lr=0.1, tokens=8, seconds=0.5, workers=2
    )


def event(kind: str) -> EventRecord:
    return EventRecord(kind, 7.0, f"{kind}: worker 3", MappingProxyType({"ranks": [3]}))


def end(run_dir: Path, step: int, *, is_finished: bool = True) -> EndRecord:
    summary = {"steps": step, "final_loss": 1.0 / max(step, 1), "mesh": "dp2"} if is_finished else {}
    return EndRecord(run_dir, is_finished, step, MappingProxyType(summary), "" if is_finished else "nobody is left")


def tell_a_run(tracker: Tracker, run_dir: Path) -> None:
    """Three steps, a loss, a validation and the end."""
    tracker.on_start(start(run_dir))
    tracker.on_event(event("start"))
    for step in (1, 2):
        tracker.on_step(line(step))
    tracker.on_event(event("fail"))
    tracker.on_event(event("fail"))
    tracker.on_step(line(3))
    tracker.on_validation(ValidationRecord(3, 2.5, (2.5).hex(), 4, {"accuracy": 0.5}))
    tracker.on_end(end(run_dir, 3))


def test_a_tracker_tells_of_steps_events_validations_and_the_end_in_order(tmp_path: Path) -> None:
    tracker = Kept()
    tell_a_run(tracker, tmp_path / "run")
    numbers = {"train/grad_norm": 2.0, "train/lr": 0.1, "speed/tokens_per_second": 16.0, "speed/seconds": 0.5}
    steps = [(step, {"train/loss": 1.0 / step, **numbers, "mesh/workers": 2}) for step in (1, 2, 3)]
    assert tracker.told == [
        ("open", "dp2", {}),
        (0, {"events/start": 1}),
        (0, "event", "start: worker 3"),
        *steps[:2],
        (2, {"events/fail": 1}),
        (2, "event", "fail: worker 3"),
        (2, {"events/fail": 2}),
        (2, "event", "fail: worker 3"),
        steps[2],
        (3, {"validation/loss": 2.5, "validation/accuracy": 0.5}),
        ("close", 3),
    ]


def test_a_tracker_that_hears_of_a_second_run_begins_anew(tmp_path: Path) -> None:
    tracker = Kept()
    tell_a_run(tracker, tmp_path / "run")
    first, tracker.told = tracker.told, []
    tell_a_run(tracker, tmp_path / "other")
    assert tracker.told == first


def test_a_tracker_keeps_the_texts_that_the_model_generates(tmp_path: Path) -> None:
    tracker = Kept()
    tracker.on_start(start(tmp_path / "run"))
    tracker.on_step(line(1))
    fields = MappingProxyType({"step": 1, "text": "Once\nupon"})
    tracker.on_event(EventRecord("generated", 7.0, "generated: step 1: Once upon", fields))
    assert tracker.told[-1] == (1, "generated", "Once\nupon")


def test_a_run_without_a_step_leaves_no_trace(tmp_path: Path) -> None:
    tracker = Kept()
    tracker.on_start(start(tmp_path / "run"))
    tracker.on_event(event("start"))
    tracker.on_end(end(tmp_path / "run", 0, is_finished=False))
    assert not tracker.told and not list((tmp_path / "run").iterdir())


def test_a_resumed_run_goes_on_under_the_id_in_its_directory(tmp_path: Path) -> None:
    tell_a_run(Kept(), tmp_path / "run")
    file = tmp_path / "run" / "trackers" / "kept.json"
    assert json.loads(file.read_text()) == {"id": "first"}
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    again = Kept()
    tell_a_run(again, tmp_path / "run")
    assert again.told[0] == ("open", "dp2", {"id": "first"})


@pytest.mark.parametrize("service", ["wandb", "mlflow"])
def test_a_library_that_is_not_installed_is_named_with_its_extra(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, service, None)
    with pytest.raises(ConfigError) as caught:
        load_trackers([service])
    assert f"run.trackers=[{service}] needs {service}" in str(caught.value)
    assert caught.value.fix == f'pip install "elaswave-spmd[{service}]"'
    kind = {"wandb": WandbTracker, "mlflow": MlflowTracker}[service]
    with pytest.raises(ConfigError, match=f"needs {service}"):  # by its class, the same words
        load_callbacks([f"elaswave_spmd.callbacks.{kind.__name__}"])


# ---- the services' own libraries, offline


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's directory, and an environment in which nothing is sent."""
    set_offline(monkeypatch, tmp_path)
    return tmp_path / "run"


def written(run_dir: Path) -> None:
    """Files of a run that MLflow gets at its end."""
    run_dir.mkdir(exist_ok=True)
    for name in ("events.jsonl", "summary.json"):
        (run_dir / name).write_text("{}\n")


def test_wandb_gets_steps_events_validation_summary_and_settings(offline: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    before = sys.exit, sys.excepthook, sys.stdout, wandb.run
    tell_a_run(WandbTracker(project="mine"), offline)
    assert (sys.exit, sys.excepthook, sys.stdout, wandb.run) == before
    tell_a_run(WandbTracker(project="mine"), offline)
    first, again = (read_offline(folder) for folder in sorted((offline / "wandb").glob("offline-run-*")))
    assert first.id == again.id == json.loads((offline / "trackers" / "wandb.json").read_text())["id"]
    assert (first.project, first.name) == ("mine", "run")
    assert first.config["seed"] == 3 and first.config["optim"] == {"lr": 0.1} and first.config["params"] == 10
    losses = {row["step"]: row["train/loss"] for row in first.history if "train/loss" in row}
    assert losses == {1: 1.0, 2: 0.5, 3: 1.0 / 3}
    assert [(row["step"], row["events/fail"]) for row in first.history if "events/fail" in row] == [(2, 1), (2, 2)]
    assert [row["event"] for row in first.history if "event" in row] == ["start: worker 3", *["fail: worker 3"] * 2]
    assert [row["step"] for row in first.history if row.get("validation/loss") == 2.5] == [3]
    assert first.summary["final_loss"] == 1.0 / 3 and first.summary["finished"] is True
    assert first.exit_code == 0


def test_mlflow_gets_steps_events_validation_summary_and_settings(offline: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    written(offline)
    tell_a_run(MlflowTracker(), offline)
    tell_a_run(MlflowTracker(), offline)
    client = mlflow.tracking.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("elaswave_spmd").experiment_id])
    assert run.info.run_id == json.loads((offline / "trackers" / "mlflow.json").read_text())["run_id"]
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params == {"seed": "3", "optim.lr": "0.1"}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((m.step, m.value) for m in history) == sorted(2 * [(1, 1.0), (2, 0.5), (3, 1.0 / 3)])
    assert run.data.metrics["events/fail"] == 2 and run.data.metrics["validation/loss"] == 2.5
    assert run.data.metrics["summary/final_loss"] == 1.0 / 3 and run.data.tags["event"] == "fail: worker 3"
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"events.jsonl", "summary.json"}


def test_mlflow_keeps_what_is_set_otherwise_when_the_run_is_resumed(offline: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    tell_a_run(MlflowTracker(experiment="mine"), offline)
    tracker = MlflowTracker(experiment="mine")
    settings = MappingProxyType({"seed": 3, "optim": {"lr": 0.2}, "train": {"steps": 9}})
    tracker.on_start(dataclasses.replace(start(offline), settings=settings))
    tracker.on_step(line(4))
    tracker.on_end(end(offline, 4, is_finished=False))
    client = mlflow.tracking.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.data.params == {"seed": "3", "optim.lr": "0.1", "train.steps": "9"}
    assert run.data.tags["resumed.optim.lr"] == "0.2" and run.data.tags["error"] == "nobody is left"
    assert run.info.status == "FAILED"


def test_wandb_without_a_key_is_refused_before_it_asks_for_one(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("NETRC", str(offline / "none"))
    monkeypatch.setenv("WANDB_MODE", "online")
    wandb.teardown()  # it has read the environment
    with pytest.raises(ConfigError, match="wandb has no API key") as caught:
        load_trackers(["wandb"])
    assert "WANDB_MODE=offline" in caught.value.fix
    wandb.teardown()


def test_mlflow_without_a_database_library_is_refused_for_a_database(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{offline}/a.db")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="mlflow cannot write to sqlite") as caught:
        load_trackers(["mlflow"])
    assert "pip install mlflow" in caught.value.fix
