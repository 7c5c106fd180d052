"""Device frequencies (DVFS) of a run: when no move gains anything, devices that would have to wait are slowed down.

A pace is the list of frequencies of a worker's device within each step. Paces are planned by scheduling.dvfs and sent
to the workers, which keep to them (`worker.pacing`). Frequencies of real devices are set by a guard in another process,
which resets them even if this process dies; those of emulated devices are set by their workers. When the mesh changes
all devices return to the normal frequency. Workers report their times as they would be at the normal frequency. Energy
figures are modelled, not measured.

A plan knows the mean times of actions, but not how much they vary. So lower frequencies are tried first: if steps take
longer with them than without, all devices return to the normal frequency until the mesh changes. During a trial the
frequencies stay as they are. Measured times change all the time, and frequencies that followed them could never be
judged. They are judged once, by steps just before and after they were ordered: if steps get longer later, that has
another cause.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol, TypeAlias

from elaswave_spmd.conf.schema import ScheduleSettings
from elaswave_spmd.controller.actions import Action, PlanFrequencies, Record
from elaswave_spmd.controller.planning import Hinted, HintRequest
from elaswave_spmd.recovery.actions import Broadcast, Send
from elaswave_spmd.recovery.messages import Pace as PaceMessage
from elaswave_spmd.runtime.devices.dvfs import DeviceRange, GuardedFrequencies
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.dvfs import FrequencyPlan, FrequencyRange, Hint, Pace
from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, WEIGHTS
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.step_time import Assignment, stage_seconds

Pids: TypeAlias = Mapping[int, int | None]
"""Rank -> process id of a worker; None or missing if it runs on another machine."""

SOCKET = "frequencies.sock"
"""The guard's socket in the run's directory of sockets."""

_LEAST_CHANGE = 0.02  # a new pace is not sent if its frequencies differ by less than this from the present ones
_KINDS = {FORWARD: 0, BACKWARD: 1, WEIGHTS: 2}

TRIAL_STEPS = 8
"""Steps with paces, and steps before them, whose medians are compared."""

_UNDER_WAY = 4  # this many steps after an order are left out, as they may have run partly without it
_LONGER = 1.05  # a trial fails if its median step takes more than this many times as long, which is beyond noise


class Guard(Protocol):
    """The process that sets devices as workers request; `GuardedFrequencies` is the real one."""

    devices: Mapping[str, DeviceRange]

    def share(self, devices: Mapping[str, Sequence[int]]) -> None: ...
    def reset(self) -> None: ...
    def poll(self) -> str: ...
    def close(self) -> None: ...


@dataclass
class PaceTrial:
    """The times of steps in one mesh epoch, before the newest order of paces and since.

    Args:
        last_s: when the step before was committed; None: it was in another mesh epoch.
        before: seconds of the last steps before the order, without paces or with those that were kept.
        paced: seconds of the last steps with the paces that were ordered.
        times: how many times as long steps take, with the orders that were judged and kept, as without paces: the
            product of what each of them has changed. So no chain of orders that are each a little too slow is kept.
        under_way: steps that are not looked at, as the newest order may not have reached all workers.
        ordered_s: when the newest order was sent.
        is_judged: the newest order was judged.
        failed: steps took too long with paces.
    """

    last_s: float | None = None
    before: deque[float] = field(default_factory=lambda: deque(maxlen=TRIAL_STEPS))
    paced: deque[float] = field(default_factory=lambda: deque(maxlen=TRIAL_STEPS))
    times: float = 1.0
    under_way: int = 0
    ordered_s: float = 0.0
    is_judged: bool = False
    failed: bool = False

    @property
    def is_complete(self) -> bool:
        """True if as many steps had paces as they are judged by."""
        return len(self.paced) == TRIAL_STEPS

    def ordered(self, now_s: float) -> None:
        """Paces were sent."""
        self.ordered_s = now_s
        if self.is_complete:  # those before were kept
            self.before = self.paced.copy()
        self.paced.clear()
        self.under_way = _UNDER_WAY
        self.is_judged = False

    def committed(self, now_s: float, has_paces: bool) -> float | None:
        """A step is committed. Returns how many times as long steps take with the paces, if that is found too long."""
        last_s, self.last_s = self.last_s, now_s
        if last_s is None or self.failed:
            return None
        if not has_paces:
            self.before.append(now_s - last_s)
            return None
        if self.under_way:
            # Steps that come at once after the order waited for this thread while it did something else: they were run
            # before the order, and seem to have taken no time.
            if now_s - self.ordered_s >= median(self.before) / 2:
                self.under_way -= 1
            return None
        self.paced.append(now_s - last_s)
        if self.is_judged or not self.is_complete:
            return None
        self.is_judged = True
        self.times *= median(self.paced) / median(self.before)
        self.failed = self.times > _LONGER
        return self.times if self.failed else None


class Frequencies:
    """The paces of the workers of a run.

    Args:
        guard: sets the devices; None: they are emulated, or stay as they are.
        socket: of the guard.
    """

    def __init__(self, settings: ScheduleSettings, guard: Guard | None = None, *, socket: str | None = None) -> None:
        self.socket = socket
        self._limits = FrequencyRange(
            settings.f_min, settings.f_max, settings.f_margin, settings.f_changes, settings.f_change_ms / 1e3
        )
        self._active = settings.frequency != "none"
        self._guard = guard
        self._paces: dict[int, Pace] = {}  # of the present mesh epoch
        self._hinted: object = None  # what the last hints were for
        self._is_asked = False  # hints are being made
        self._trial = PaceTrial()  # of the present mesh epoch

    @classmethod
    def open(cls, settings: ScheduleSettings, scratch: str) -> Frequencies:
        """Start the guard of a run, if its settings ask for one.

        Args:
            scratch: the run's directory of sockets.

        Raises:
            ConfigError: frequencies cannot be set in the way that the settings name.
        """
        if settings.frequency in ("none", "simulated"):
            return cls(settings)
        socket = str(Path(scratch) / SOCKET)
        return cls(settings, GuardedFrequencies.start(settings.frequency, socket), socket=socket)

    @property
    def active(self) -> bool:
        """True if frequencies are set in this run."""
        return self._active

    def hint(self, placement: Placement, running: Assignment, costs: CostModel) -> list[Action]:
        """Asks for hints, as nothing else is to be changed: who would wait slows down, who is waited for is raised.

        Nothing happens if this very placement had its hints, while hints are made or judged, if steps took longer with
        those of this mesh epoch, or while there are too few steps to compare those with hints to.

        Args:
            running: the assignment of the placement with the limits that workers run with.
        """
        key = running, costs.speeds
        is_judging = bool(self._paces) and not self._trial.is_complete
        if not self._active or self._is_asked or key == self._hinted or is_judging or self._trial.failed:
            return []
        if len(self._trial.before) < TRIAL_STEPS:
            return []
        self._hinted, self._is_asked = key, True
        return [PlanFrequencies(HintRequest(placement, running, costs, self._limits))]

    def hinted(self, event: Hinted, step: int, now: float, pids: Pids, *, holds: bool) -> list[Action]:
        """The hints are made. They are sent, unless they are like those that are in force.

        Args:
            step: the last one that is committed.
            now: seconds of a clock that never runs back.
            pids: rank -> process id of a worker on this machine.
            holds: False if they are dropped: the mesh has changed meanwhile, or something else is to change.
        """
        self._is_asked = False
        if not holds or not self._active:
            self._hinted = None
            return []
        placement, running, costs = event.request.placement, event.request.running, event.request.costs
        wanted = {rank: hint.pace for hint in event.hints for rank in hint.ranks}
        if all(_alike(pace, self._paces.get(rank, Pace())) for rank, pace in wanted.items()):
            return []
        if self._guard is not None and not self._paces:
            self._guard.share(self._shares(placement.mesh.members, pids))
        self._paces = wanted
        self._trial.ordered(now)
        epoch = placement.mesh.epoch
        seconds = hold_seconds(running, costs)
        messages: list[Action] = [
            Send(rank, _message(epoch, hint, seconds[rank])) for hint in event.hints for rank in hint.ranks
        ]
        return [*messages, _event(event.plan, wanted, step, epoch)]

    def begun(self, placement: Placement, step: int) -> list[Action]:
        """A mesh epoch begins after `step`: workers have forgotten their paces, which were for another mesh."""
        self._hinted = None
        self._trial = PaceTrial()
        if not self._paces:
            return []
        if self._guard is not None:
            self._guard.reset()
        ranks = _slowed_or_raised(self._paces)
        self._paces = {}
        why = "the mesh has changed"
        fields = {"ranks": ranks, "paces": {}, "step": step, "mesh_epoch": placement.mesh.epoch, "why": why}
        return [Record("frequency", {**fields, "message": f"normal again: {why}"})]

    def committed(self, placement: Placement, step: int, now: float) -> list[Action]:
        """A step is committed: all devices are normal again if the guard has failed, or if steps take too long.

        Args:
            now: seconds of a clock that never runs back.
        """
        if not self._active:
            return []
        if self._guard is not None and (error := self._guard.poll()):
            self._guard.close()
            self._guard, self._active = None, False
            return self._withdrawn(placement, step, {"refused": error}, f"the run goes on at the normal ones: {error}")
        times = self._trial.committed(now, bool(self._paces))
        if times is None:
            return []
        why = f"steps took {times:.2f} times as long with hints as before them"
        return self._withdrawn(placement, step, {"why": why}, f"normal again: {why}")

    def leave_out(self) -> None:
        """Steps up to the last one that is committed are compared with no others: they were not all run in one way."""
        self._trial.before.clear()

    def _withdrawn(self, placement: Placement, step: int, about: Mapping[str, object], message: str) -> list[Action]:
        """All workers go on at the normal frequency, in no order but what is ready."""
        ranks = _slowed_or_raised(self._paces)
        self._paces = {}
        epoch = placement.mesh.epoch
        fields = {"ranks": ranks, "paces": {}, **about, "step": step, "mesh_epoch": epoch, "message": message}
        normal = PaceMessage(epoch, (0,), (1.0,), (), 0.0)
        return [Broadcast(placement.mesh.members, normal), Record("frequency", fields)]

    def close(self) -> None:
        """Puts all frequencies back."""
        if self._guard is not None:
            self._guard.close()

    def __enter__(self) -> Frequencies:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- devices

    def _shares(self, ranks: Sequence[int], pids: Pids) -> dict[str, list[int]]:
        """device -> the workers that run on it."""
        found: dict[str, list[int]] = {}
        for rank in ranks:
            for device in self._devices_of(rank, pids.get(rank)):
                found.setdefault(device, []).append(rank)
        return found

    def _devices_of(self, rank: int, pid: int | None) -> tuple[str, ...]:
        """The devices that a worker runs on."""
        assert self._guard is not None
        devices = self._guard.devices
        if all(not device.cpus for device in devices.values()):  # one device for each worker, in turn
            return (list(devices)[rank % len(devices)],)
        allowed = _allowed_cpus(pid)
        return tuple(name for name, device in devices.items() if allowed is None or allowed & set(device.cpus))


def hold_seconds(assignment: Assignment, costs: CostModel) -> dict[int, float]:
    """Rank -> the longest that a worker waits for its planned action though another is ready: a mean action of it.

    To let a planned action wait for another one costs as much.
    """
    forward, backward, _ = stage_seconds(assignment.layer_cuts, costs)
    return {
        rank: float(forward[s] + backward[s]) / 2 / costs.speed(rank)
        for s, members in enumerate(assignment.stages)
        for rank in members
    }


def _alike(one: Pace, other: Pace) -> bool:
    """True if two paces differ by less than is worth a change."""
    at = sorted({*one.starts, *other.starts})
    return all(abs(one.at(n) - other.at(n)) < _LEAST_CHANGE for n in at)


def _slowed_or_raised(paces: Mapping[int, Pace]) -> list[int]:
    return [rank for rank, pace in paces.items() if pace != Pace()]


def _message(epoch: int, hint: Hint, hold_s: float) -> PaceMessage:
    order = tuple((_KINDS[action.kind], action.microbatch) for action in hint.order)
    return PaceMessage(epoch, hint.pace.starts, hint.pace.frequencies, order, hold_s)


def _event(plan: FrequencyPlan, paces: Mapping[int, Pace], step: int, epoch: int) -> Record:
    """The event that names the paces, and the modelled figures."""
    lowered = sum(min(pace.frequencies) < 1 for pace in paces.values())
    raised = sum(max(pace.frequencies) > 1 for pace in paces.values())
    why = f"{lowered} of {len(paces)} workers would wait" + (f", {raised} are raised" if raised else "")
    seen = (
        f"a step {1e3 * plan.makespan_before_s:.0f} to {1e3 * plan.makespan_s:.0f} ms, "
        f"modelled energy {plan.energy_before:.3g} to {plan.energy:.3g}"
    )
    every = [f for pace in paces.values() for f in pace.frequencies]
    fields = {
        "ranks": _slowed_or_raised(paces),
        "paces": {rank: [list(run) for run in zip(p.starts, p.frequencies, strict=True)] for rank, p in paces.items()},
        "step": step,
        "mesh_epoch": epoch,
        "why": why,
        "modelled_seconds_before": plan.makespan_before_s,
        "modelled_seconds": plan.makespan_s,
        "modelled_energy_before": plan.energy_before,
        "modelled_energy": plan.energy,
        "message": f"{min(every):.2f} to {max(every):.2f} of normal: {why}; {seen}",
    }
    return Record("frequency", fields)


def _allowed_cpus(pid: int | None) -> set[int] | None:
    """The processors that a process may run on; None: unknown."""
    try:
        return set(os.sched_getaffinity(pid)) if pid is not None else None
    except OSError:
        return None
