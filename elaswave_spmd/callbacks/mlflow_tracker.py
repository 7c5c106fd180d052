"""MLflow as a tracker: `run.trackers=[mlflow]`."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elaswave_spmd.callbacks.records import EndRecord, StartRecord
from elaswave_spmd.callbacks.tracker import PROJECT, Tracker, import_library
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.run_dir.directory import EVENTS, SUMMARY

_SETTING = "run.trackers=[mlflow]"
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_MOST_METRICS = 1000  # that MLflow takes at once, as it documents
_MOST_PARAMS = 100
_LONGEST_VALUE = 5000  # characters of a parameter or a tag
_FLUSH_SECONDS = 1.0


class MlflowTracker(Tracker):
    """Brings a run to an MLflow server or store.

    What is not given here is as MLflow's own environment says, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and so on;
    else the experiment is `elaswave_spmd`, and the name of the run that of its directory. Numbers are sent together,
    about once a second.

    Args:
        experiment: its name; made if it is not there.
        name: of the run.
        tracking_uri: of the server or store.

    Raises:
        ConfigError: MLflow is not installed, or lacks what it needs for a database.
    """

    SERVICE = "mlflow"

    def __init__(self, experiment: str | None = None, name: str | None = None, tracking_uri: str | None = None) -> None:
        super().__init__()
        self._mlflow: Any = import_library("mlflow", _SETTING, "mlflow")
        self._experiment, self._name = experiment, name
        self._uri: str = tracking_uri or self._mlflow.get_tracking_uri()
        self._client: Any = None
        self._run_id = ""
        self._waiting: list[Any] = []  # metrics that were not sent yet
        self._sent_at = 0.0
        self._check_store()

    def _check_store(self) -> None:
        """Refuse a database where MLflow's small package is installed, which has none."""
        scheme = self._uri.partition(":")[0].partition("+")[0]
        if scheme not in _DATABASES or importlib.util.find_spec("sqlalchemy") is not None:
            return
        raise ConfigError(
            f"mlflow cannot write to {scheme}, as sqlalchemy is not installed",
            rule="mlflow-skinny sends runs to a server; a database, also one on this machine, needs all of mlflow",
            where=f"MLFLOW_TRACKING_URI={_without_password(self._uri)}",
            fix="MLFLOW_TRACKING_URI=http://HOST:5000, or pip install mlflow",
        )

    def open(self, start: StartRecord, known: Mapping[str, Any]) -> dict[str, Any]:
        self._client, self._waiting = self._mlflow.tracking.MlflowClient(tracking_uri=self._uri), []
        store = _without_password(self._uri)
        params = _flat(start.settings)
        if known.get("tracking_uri") == store:
            self._run_id = known["run_id"]
            self._client.update_run(self._run_id, status="RUNNING")
            self._log_params(params, self._client.get_run(self._run_id).data.params)
        else:
            name = self._name or os.environ.get("MLFLOW_RUN_NAME") or start.run_dir.name
            self._run_id = self._client.create_run(self._experiment_id(), run_name=name).info.run_id
            self._log_params(params, {})
        return {"run_id": self._run_id, "tracking_uri": store}

    def _experiment_id(self) -> str:
        if self._experiment is None and (given := os.environ.get("MLFLOW_EXPERIMENT_ID")):
            return given
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if found is None else found.experiment_id

    def _log_params(self, params: Mapping[str, str], known: Mapping[str, str]) -> None:
        """Parameters cannot be changed: where a resumed run has another value, a tag has it."""
        from mlflow.entities import Param, RunTag  # pyright: ignore[reportMissingImports]

        new = [Param(name, value) for name, value in params.items() if name not in known]
        tags = [RunTag(f"resumed.{n}", value) for n, value in params.items() if n in known and known[n] != value]
        self._log_all("params", new, _MOST_PARAMS)
        self._log_all("tags", tags, _MOST_PARAMS)

    def _log_all(self, kind: str, entities: Sequence[Any], most: int) -> None:
        """Send entities of one kind, so many at once."""
        for first in range(0, len(entities), most):
            self._client.log_batch(self._run_id, **{kind: entities[first : first + most]})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = time.time()
        self._waiting += [Metric(name, float(value), int(1000 * now), step) for name, value in values.items()]
        if len(self._waiting) >= _MOST_METRICS // 2 or now - self._sent_at >= _FLUSH_SECONDS:
            self._send()

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._log_all("metrics", waiting, _MOST_METRICS)
        self._sent_at = time.time()

    def tell(self, step: int, name: str, text: str) -> None:
        self._client.set_tag(self._run_id, name, text[:_LONGEST_VALUE])

    def close(self, end: EndRecord) -> None:
        numbers = {f"summary/{n}": v for n, v in end.summary.items() if isinstance(v, (int, float))}
        if numbers:
            self.log(end.step, numbers)
        self._send()
        if end.error:
            self.tell(end.step, "error", end.error)
        for name in (EVENTS, SUMMARY):
            if (end.run_dir / name).exists():
                self._client.log_artifact(self._run_id, str(end.run_dir / name))
        self._client.set_terminated(self._run_id, "FINISHED" if end.is_finished else "FAILED")


def _flat(settings: Mapping[str, object]) -> dict[str, str]:
    """The settings by their whole names, as texts."""
    return {name: str(value)[:_LONGEST_VALUE] for name, value in _leaves(settings)}


def _leaves(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _without_password(uri: str) -> str:
    """The address without the name and password of a user in it."""
    scheme, mark, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return scheme + mark + host.rpartition("@")[2] + slash + path
