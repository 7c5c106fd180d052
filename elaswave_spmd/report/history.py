"""The history of a run, worked out of its events: incidents, plans before and after them, the workers of each stage,
time lost by cause. All of it is pure."""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elaswave_spmd.report.recorded import RecordedRun
from elaswave_spmd.run_dir.faults import UNDISTURBED_STEPS
from elaswave_spmd.run_dir.json_lines import float_of_hex
from elaswave_spmd.run_dir.metrics import MetricsLine
from elaswave_spmd.run_dir.observer import event_text
from elaswave_spmd.run_dir.rollback import still_valid

MARKED = ("fail", "corrupt", "leave", "join", "move", "link", "rollback", "restart", "resume")
"""The kinds of incidents that charts have a mark for."""
CAUSES = ("fail", "corrupt", "leave", "join", "link", "steps given up", "checkpoint", "validation", "not running")
_NO_INCIDENTS = (
    "validation",
    "checkpoint",
    "recovered",
    "model_check",
    "compile",
    "finish",
    "rejected",
    "rebalance",
    "generated",
    "not_generated",
)

_LARGEST = 2**53
"""The largest number that is believed of an event: floats have all whole numbers up to it, and no time, step or number
of bytes is larger."""


@dataclass(frozen=True)
class Plan:
    """Which workers a stage has, which layers, and how many micro-batches each worker.

    Args:
        mesh: the name of its shape.
        stages: ranks by stage.
        layer_cuts: stage s has layers `layer_cuts[s]` to `layer_cuts[s + 1] - 1`.
        microbatches: of each worker, by stage.
    """

    mesh: str
    stages: tuple[tuple[int, ...], ...]
    layer_cuts: tuple[int, ...]
    microbatches: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Incident:
    """Something that happened to a run. Times are in milliseconds; None: not told by the run's events.

    Args:
        kind: the event's kind; a `rebalance` with another plan is a `move`.
        step: the first step that it concerns.
        seconds: since the run began in its directory.
        ranks: the workers that it tells of.
        text: the line that was shown.
        before, after: the plans, if it began a mesh epoch.
        penalty_ms: the time of the first step after it that work does not explain.
    """

    kind: str
    step: int
    seconds: float
    ranks: tuple[int, ...]
    text: str
    before: Plan | None = None
    after: Plan | None = None
    detect_ms: float | None = None
    edit_ms: float | None = None
    penalty_ms: float | None = None
    redone: int = 0
    bytes_moved: int = 0
    bytes_bound: int = 0
    mesh_epoch: int | None = None


@dataclass(frozen=True)
class Placed:
    """A worker's time in one stage: from the begin of step `first` to the end of step `last`."""

    rank: int
    stage: int
    first: int
    last: int


@dataclass(frozen=True)
class Lost:
    """Time lost by one cause.

    Args:
        seconds: all of it.
        again: the part of it in which micro-batches or steps were computed again.
    """

    cause: str
    times: int
    seconds: float
    again: float


@dataclass(frozen=True)
class History:
    """The events of a run, in order.

    Args:
        first_plan: the plan that it began with, or None for runs whose events do not tell it.
        first_step: the step that it began with: above 1 for a run that was resumed into another directory.
        validations: (step, loss).
        state: finished, stopped or not ended.
    """

    incidents: tuple[Incident, ...]
    placed: tuple[Placed, ...]
    lost: tuple[Lost, ...]
    first_plan: Plan | None
    first_step: int
    validations: tuple[tuple[int, float], ...]
    state: str
    last_step: int

    def plans(self) -> list[tuple[int, Plan]]:
        """All plans, with the first step of each."""
        first = [(self.first_step, self.first_plan)] if self.first_plan is not None else []
        return first + [(i.step, i.after) for i in self.incidents if i.after is not None]


def history_of(run: RecordedRun) -> History:
    """The history of a run, as far as it is recorded."""
    start = _first_start(run.events)
    incidents, first_plan = _incidents(run.events, _number(start, "time") or 0.0)
    first_step = int(_number(start, "first_step") or 1)
    last_step = run.metrics[-1].step if run.metrics else 0
    return History(
        incidents=incidents,
        placed=_placed(first_plan, first_step, incidents, last_step),
        lost=_lost(run, incidents),
        first_plan=first_plan,
        first_step=first_step,
        validations=tuple(_validations(run.events)),
        state=_state(run.events),
        last_step=last_step,
    )


def _first_start(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The event with which a run began. Validations of a run that it goes on from may come before it."""
    starts = (event for event in events if event.get("event") == "start")
    return next(starts, events[0] if events else {})


def _incidents(events: Iterable[Mapping[str, Any]], zero: float) -> tuple[tuple[Incident, ...], Plan | None]:
    """The incidents, and the plan that the run began with; `zero`: when it did, in seconds since 1970."""
    found: list[Incident] = []
    plan = first_plan = None
    step, has_begun = 1, False
    for event in events:
        kind, at = _text(event, "event"), _number(event, "time") or 0.0
        step = _step_of(event, step)
        after = _plan_of(event)
        if kind in ("start", "begin"):
            first_plan = first_plan or after if kind == "start" else after or first_plan
            before, plan = None, after or plan
        else:
            before, plan = plan, after or plan
        if kind == "recovered":
            _add_penalty(found, event)
        moved = kind == "rebalance" and after is not None and before is not None and after != before
        is_first = kind == "start" and not has_begun
        has_begun |= is_first
        if (kind in _NO_INCIDENTS and not moved) or is_first:
            continue
        incident = Incident("move" if moved else kind, step, at - zero, _ranks(event), _line_of(kind, event))
        found.append(_with_change(incident, event, before, after) if after is not None else incident)
    return tuple(found), first_plan


def _with_change(incident: Incident, event: Mapping[str, Any], before: Plan | None, after: Plan) -> Incident:
    return replace(
        incident,
        before=before,
        after=after,
        detect_ms=_number(event, "detect_ms"),
        edit_ms=_number(event, "edit_ms"),
        redone=int(_number(event, "microbatches_redone") or 0),
        bytes_moved=int(_number(event, "bytes_moved") or 0),
        bytes_bound=int(_number(event, "bytes_bound") or 0),
        mesh_epoch=int(_number(event, "mesh_epoch") or 0),
    )


def _add_penalty(found: list[Incident], recovered: Mapping[str, Any]) -> None:
    """Give the incidents of the mesh epoch that a `recovered` event tells of their penalty."""
    epoch = _number(recovered, "mesh_epoch")
    for number in range(len(found) - 1, max(-1, len(found) - 9), -1):
        if found[number].kind == "start":  # epochs of earlier lives of the run have the same numbers
            return
        if found[number].mesh_epoch == epoch and epoch is not None:
            found[number] = replace(found[number], penalty_ms=_number(recovered, "penalty_ms"))


def _placed(first: Plan | None, first_step: int, incidents: Iterable[Incident], last_step: int) -> tuple[Placed, ...]:
    """The stages of each worker over time. Epochs in which a worker's stage stays the same are one."""
    plans = [(first_step, first)] if first is not None else []
    plans += [(i.step, i.after) for i in incidents if i.after is not None]
    since: dict[tuple[int, int], int] = {}
    found: list[Placed] = []
    for step, plan in plans:
        now = {(rank, stage) for stage, ranks in enumerate(plan.stages) for rank in ranks}
        for rank, stage in [*since.keys() - now]:
            found.append(Placed(rank, stage, since.pop((rank, stage)), step - 1))
        for key in now:
            since.setdefault(key, step)
    found += [Placed(rank, stage, first, last_step) for (rank, stage), first in since.items()]
    return tuple(sorted((p for p in found if p.last >= p.first), key=lambda p: (p.rank, p.first)))


def _lost(run: RecordedRun, incidents: Iterable[Incident]) -> tuple[Lost, ...]:
    """Time lost by cause; causes that took none are left out."""
    sums: dict[str, list[float]] = {cause: [0, 0.0, 0.0] for cause in CAUSES}

    def add(cause: str, seconds: float, again: float = 0.0) -> None:
        total = sums[cause]
        total[0], total[1], total[2] = total[0] + 1, total[1] + max(0.0, seconds), total[2] + max(0.0, again)

    wrong: set[int] = set()
    disturbed: dict[int, tuple[str, float]] = {}
    for incident in incidents:
        if incident.kind == "corrupt":
            wrong |= {*incident.ranks}
        if incident.penalty_ms is not None:
            cause = "corrupt" if incident.kind == "fail" and wrong & {*incident.ranks} else incident.kind
            disturbed.setdefault(incident.step, (cause if cause in sums else "fail", incident.penalty_ms / 1e3))
    seconds_of = {line.step: line.seconds for line in run.metrics}
    validated = {step + 1 for step, _ in _validations(run.events)}
    for line, usual in _with_usual(run.metrics, {*disturbed, *validated}):
        extra = line.seconds - usual
        if line.step in disturbed:
            cause, penalty = disturbed[line.step]
            add(cause, extra, min(extra, extra - penalty))
        elif line.step in validated:
            add("validation", extra)
    for event in run.events:
        kind = event.get("event")
        if kind == "checkpoint":
            add("checkpoint", (_number(event, "copy_ms") or 0.0) / 1e3)
        if kind == "rollback":  # it has removed their lines: those that there are now tell of the steps in their place
            given_up = _number(event, "seconds") or 0.0
            add("steps given up", given_up, given_up)
        if kind == "restart":
            kept, last = _number(event, "step") or 0, _number(event, "lost_after") or 0
            given_up = sum(seconds for step, seconds in seconds_of.items() if int(kept) < step <= int(last))
            add("steps given up", given_up, given_up)
    for pause in _pauses(run.events, seconds_of):
        add("not running", pause)
    return tuple(Lost(cause, int(times), all_, again) for cause, (times, all_, again) in sums.items() if times)


def _pauses(events: Sequence[Mapping[str, Any]], seconds_of: Mapping[int, float]) -> Iterable[float]:
    """The seconds for which a run stood still before each `start` but the first.

    Args:
        seconds_of: of each committed step.
    """
    starts = [number for number, event in enumerate(events) if event.get("event") == "start"]
    for last, now, following in zip(starts, starts[1:], [*starts[2:], len(events)], strict=False):
        yield _pause(events[last:now], events[now:following], seconds_of)


def _pause(
    ended: Sequence[Mapping[str, Any]], begun: Sequence[Mapping[str, Any]], seconds_of: Mapping[int, float]
) -> float:
    """The seconds between the end of one command and the begin of the next one.

    A controller that was killed has no event for its end. It trained on after its last event, for as long as the steps
    took that it has committed since.

    Args:
        ended, begun: the events of the two commands, each from its `start`.
    """
    for event in begun:  # it has adopted workers, who know how long there was no controller
        if event.get("event") == "controller" and (seconds := _number(event, "seconds")) is not None:
            return seconds
    begin = _number(begun[0], "time") or 0.0
    last = (_number(begun[0], "first_step") or 1) - 1
    for event in begun:
        if event.get("event") == "resume" and (step := _number(event, "step")) is not None:
            last = step + (_number(event, "steps_again") or 0)
    since = begin - (_number(ended[-1], "time") or 0.0)
    if any(event.get("event") in ("stop", "finish") for event in ended):
        return since
    at, committed = max(filter(None, map(_commit, ended)), default=(begin - since, last))
    return min(since, begin - at - sum(seconds for step, seconds in seconds_of.items() if committed < step <= last))


def _commit(event: Mapping[str, Any]) -> tuple[float, float] | None:
    """When about which step was committed, by an event that tells it: (seconds since 1970, step); else None."""
    kind, at = event.get("event"), _number(event, "time")
    if at is None:
        return None
    if kind == "start":
        return at, (_number(event, "first_step") or 1) - 1
    if (after := _number(event, "after_step")) is not None:
        return at, after
    if kind == "restart" and (lost_after := _number(event, "lost_after")) is not None:
        return at, lost_after  # `step` is that of the checkpoint that the run goes back to, which is older
    step = _number(event, "step")
    if step is None or kind not in ("validation", "checkpoint", "recovered", "restart", "rollback"):
        return None
    if kind == "checkpoint":  # it is written beside the steps that follow
        at -= (_number(event, "write_ms") or 0.0) / 1e3
    return at, step


def _with_usual(lines: Iterable[MetricsLine], unusual: set[int]) -> Iterable[tuple[MetricsLine, float]]:
    """The unusual steps, each with the median time of the usual ones before it. The first step is none of either."""
    usual: deque[float] = deque(maxlen=UNDISTURBED_STEPS)
    for line in lines:
        if line.step in unusual:
            if usual:
                yield line, statistics.median(usual)
        elif line.step > 1:
            usual.append(line.seconds)


def _validations(events: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(step, loss) of the validations, in order, without those that a later rollback has given up."""
    about = still_valid((e for e in events if "event" in e and _number(e, "step") is not None), "validation")
    return [(int(event["step"]), loss) for event in about if (loss := _validation_loss(event)) is not None]


def _validation_loss(event: Mapping[str, Any]) -> float | None:
    """The loss of a validation. The hex form has nan and inf as well, for which JSON has no numbers."""
    with contextlib.suppress(ValueError):
        return float_of_hex(event.get("loss_hex"))
    return _number(event, "loss")


def _state(events: Iterable[Mapping[str, Any]]) -> str:
    last = next((event for event in reversed([*events]) if event.get("event") in ("start", "finish", "stop")), {})
    return {"finish": "finished", "stop": "stopped"}.get(_text(last, "event"), "not ended")


def _step_of(event: Mapping[str, Any], known: int) -> int:
    """The first step that an event concerns; `known`: that of the event before, for events that name none."""
    if (after := _number(event, "after_step")) is not None:
        return int(after) + 1
    if event.get("event") == "start":
        return int(_number(event, "first_step") or known)
    step = _number(event, "step")
    return int(step) if step is not None and event.get("event") != "rollback" else known


def _plan_of(event: Mapping[str, Any]) -> Plan | None:
    """The plan that an event tells of, or None."""
    try:
        stages = tuple(tuple(_whole(rank) for rank in ranks) for ranks in event["stages"])
        cuts = tuple(_whole(cut) for cut in event["layer_cuts"])
        counts = tuple(tuple(_whole(count) for count in row) for row in event["microbatch_counts"])
    except (KeyError, TypeError, ValueError):
        return None
    return Plan(_text(event, "mesh"), stages, cuts, counts) if stages else None


def _line_of(kind: str, event: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in event.items() if name not in ("event", "time")}
    if kind == "start":
        return f"start: goes on at step {rest.get('first_step')} on {rest.get('mesh')}"
    return event_text(kind, rest)


def _ranks(event: Mapping[str, Any]) -> tuple[int, ...]:
    ranks = event.get("ranks")
    return tuple(rank for rank in ranks if isinstance(rank, int)) if isinstance(ranks, list) else ()


def _whole(value: Any) -> int:
    """A whole number that a plan may have. Charts draw it, with what numbers of the floats' size lack: a next one."""
    number = int(value)
    if abs(number) > _LARGEST:
        raise ValueError(value)
    return number


def _number(event: Mapping[str, Any], name: str) -> float | None:
    value = event.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return value if -_LARGEST <= value <= _LARGEST else None  # NaN is neither


def _text(event: Mapping[str, Any], name: str) -> str:
    value = event.get(name)
    return value if isinstance(value, str) else ""
