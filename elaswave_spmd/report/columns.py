"""The columns of numbers that the charts of a report show, by the name of their source.

The charts of a page are drawn once. When the columns have changed, `watch` sends them to the page again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from elaswave_spmd.report.decimate import kept_points
from elaswave_spmd.report.history import CAUSES, MARKED, History, Incident
from elaswave_spmd.report.recorded import RecordedRun
from elaswave_spmd.report.timeline import Timeline
from elaswave_spmd.run_dir.metrics import MetricsLine

STAGE_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b3a300", "#7f7f7f")
KIND_COLORS = {"F": "#0072b2", "B": "#e69f00", "W": "#009e73", "I": "#c8c8c8"}
_SMOOTHED = 20  # the most steps that the shown speed is averaged over
_MOST_MARKS = 1000

Columns = Mapping[str, Sequence[Any] | np.ndarray]


def columns_of(run: RecordedRun, history: History) -> dict[str, Columns]:
    """The columns of all charts but the timeline."""
    lines = run.metrics
    steps = np.array([line.step for line in lines], dtype=float)
    loss = np.array([line.loss for line in lines], dtype=float)
    speed = _speed(lines)
    kept, kept_speed = kept_points(loss), kept_points(speed)
    found: dict[str, Columns] = {
        "loss": {"step": steps[kept], "loss": loss[kept]},
        "speed": {"step": steps[kept_speed], "speed": speed[kept_speed]},
        "validation": {"step": [s for s, _ in history.validations], "loss": [v for _, v in history.validations]},
        "workers": _workers(history),
        "lost": _lost(history),
        "moved": _moved(history),
    }
    for kind in MARKED:
        found[f"marks_{kind}"] = _marks(history, kind, lines, loss, speed)
    return found


def as_json(columns: Mapping[str, Columns]) -> dict[str, dict[str, list[Any]]]:
    """The columns as plain JSON. Numbers that are not finite become null."""
    return {
        name: {key: [_plain(value) for value in values] for key, values in table.items()}
        for name, table in columns.items()
    }


def timeline_columns(timeline: Timeline, kind: str) -> Columns:
    """The columns of the timeline's slices of one kind."""
    shown = [piece for piece in timeline.slices if piece.kind == kind]
    return {
        "left": [round(piece.began_ms, 3) for piece in shown],
        "right": [round(piece.ended_ms, 3) for piece in shown],
        "top": [piece.rank + 0.4 for piece in shown],
        "bottom": [piece.rank - 0.4 for piece in shown],
        "name": [piece.name for piece in shown],
    }


def _speed(lines: Sequence[MetricsLine]) -> np.ndarray:
    """Tokens per second at each step, averaged over it and up to `_SMOOTHED` - 1 steps before."""
    if not lines:
        return np.zeros(0)
    tokens = np.cumsum([0.0, *(line.tokens for line in lines)])
    seconds = np.cumsum([0.0, *(line.seconds for line in lines)])
    last = np.arange(1, len(lines) + 1)
    first = np.maximum(0, last - _SMOOTHED)
    took = seconds[last] - seconds[first]
    return np.divide(tokens[last] - tokens[first], took, out=np.full(len(lines), np.nan), where=took > 0)


def _marks(
    history: History, kind: str, lines: Sequence[MetricsLine], loss: np.ndarray, speed: np.ndarray
) -> dict[str, list[Any]]:
    """The marks on the curves for the incidents of one kind."""
    shown = [incident for incident in history.incidents if incident.kind == kind][:_MOST_MARKS]
    steps = [line.step for line in lines]
    found = np.searchsorted(steps, [incident.step for incident in shown]) if shown else np.zeros(0, dtype=int)
    at = [min(int(place), len(lines) - 1) for place in found]
    return {
        "step": [incident.step for incident in shown],
        "loss": [loss[place] if lines else math.nan for place in at],
        "speed": [speed[place] if lines else math.nan for place in at],
        "text": [incident.text for incident in shown],
    }


def _workers(history: History) -> dict[str, list[Any]]:
    placed = history.placed
    return {
        "left": [p.first - 0.5 for p in placed],
        "right": [p.last + 0.5 for p in placed],
        "top": [p.rank + 0.4 for p in placed],
        "bottom": [p.rank - 0.4 for p in placed],
        "rank": [p.rank for p in placed],
        "stage": [p.stage for p in placed],
        "color": [STAGE_COLORS[p.stage % len(STAGE_COLORS)] for p in placed],
    }


def _lost(history: History) -> dict[str, list[Any]]:
    """The seconds and times of all causes. Those that did not occur are included, so that the axis stays the same."""
    known = {lost.cause: lost for lost in history.lost}
    rows = [known.get(cause) for cause in CAUSES]
    return {
        "cause": [*CAUSES],
        "seconds": [row.seconds if row else 0.0 for row in rows],
        "times": [row.times if row else 0 for row in rows],
    }


def _moved(history: History) -> dict[str, list[Any]]:
    # An epoch with several kinds of incidents (a loss and a join at once) has one incident of each kind, and each of
    # them has the bytes of the whole epoch. Only the first one is shown. Each life of the run numbers its epochs anew.
    shown: list[Incident] = []
    life, newest = 0, None
    for incident in history.incidents:
        life += incident.kind == "start"
        if (incident.bytes_moved or incident.bytes_bound) and newest != (life, incident.mesh_epoch):
            newest = (life, incident.mesh_epoch)
            shown.append(incident)
    return {
        "step": [incident.step for incident in shown],
        "mib": [incident.bytes_moved / 2**20 for incident in shown],
        "bound": [incident.bytes_bound / 2**20 for incident in shown],
        "text": [incident.text for incident in shown],
    }


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
