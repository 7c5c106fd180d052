"""Device frequencies (DVFS) of a run: when nothing else is left to change, devices that would wait are slowed down.

Hints come from scheduling.dvfs, and are set by a guard in another process, which puts them back even if this one dies.
Each worker has one frequency for all its actions; a device that several workers use has the largest of theirs. When the
mesh changes all are normal again. Measured times contain the frequency, so it is divided out before a worker is called
slow. Figures of energy are modelled, not measured.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from elaswave_spmd.conf.schema import ScheduleSettings
from elaswave_spmd.controller.events import Action, Record
from elaswave_spmd.runtime.devices.dvfs import Answer, DeviceRange, GuardedFrequencies
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.dvfs import FrequencyPlan, FrequencyRange, PowerModel
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.rebalance import frequency_hints
from elaswave_spmd.scheduling.step_time import Assignment, stage_seconds

Pids: TypeAlias = Mapping[int, int | None]
"""Rank -> process id of a worker; None, or missing: it runs on another machine."""

_POWER = PowerModel()
_GRAIN = 0.01  # frequencies are multiples of it, rounded up
_LEAST_CHANGE = 0.02  # hints that differ by less from what is set are left alone
_UNDER_WAY = 2  # steps after the last one that is known to be committed which a worker may have begun


class Guard(Protocol):
    """The process that sets frequencies by device; `GuardedFrequencies` is the real one."""

    devices: Mapping[str, DeviceRange]

    def set(self, frequencies: Mapping[str, float]) -> None: ...
    def reset(self) -> None: ...
    def poll(self) -> Answer | None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class _Clock:
    """A worker's frequency: `before` in steps below `since`, `now` from `until` on, and either in between."""

    before: float = 1.0
    since: float = 0
    until: float = 0
    now: float = 1.0


@dataclass(frozen=True)
class _Order:
    """An order to the guard, and the fields of the event that is written when the guard has answered."""

    before: Mapping[int, float]
    frequencies: Mapping[int, float]
    devices: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    fields: Mapping[str, object] = field(default_factory=dict)


class Frequencies:
    """The frequencies of the workers' devices. Without a guard they stay as they are.

    Args:
        cells: directory in which workers on the emulated accelerator find theirs; None elsewhere.
    """

    def __init__(
        self,
        settings: ScheduleSettings,
        guard: Guard | None = None,
        *,
        cells: str | None = None,
        power: PowerModel = _POWER,
    ) -> None:
        self._limits = FrequencyRange(settings.f_min, settings.f_max, settings.f_margin)
        self._guard = guard
        self._power = power
        self.cells = cells
        self._clocks: dict[int, _Clock] = {}
        self._orders: deque[_Order] = deque()
        self._hinted: object = None  # what the last hints were for

    @classmethod
    def open(cls, settings: ScheduleSettings, scratch: str) -> Frequencies:
        """Start the guard of a run, if its settings ask for one.

        Args:
            scratch: the run's directory of sockets, for cells of simulated frequencies.

        Raises:
            ConfigError: frequencies cannot be set in the way that the settings name.
        """
        if settings.frequency == "none":
            return cls(settings)
        cells = str(Path(scratch) / "frequencies") if settings.frequency == "simulated" else None
        return cls(settings, GuardedFrequencies.start(settings.frequency, cells or ""), cells=cells)

    @property
    def active(self) -> bool:
        """True if frequencies are set in this run."""
        return self._guard is not None

    def scale(self, rank: int, step: int) -> float | None:
        """The factor from times of a step to times at frequency 1; None if the frequency changed in that step."""
        clock = self._clocks.get(rank)
        if clock is None or step < clock.since:
            return clock.before if clock is not None else 1.0
        return clock.now if step >= clock.until else None

    def hint(self, placement: Placement, running: Assignment, costs: CostModel, step: int, pids: Pids) -> None:
        """Slows down workers that would wait and raises those that are waited for, as nothing else is to be changed.

        Nothing happens if this very placement had its hints.

        Args:
            running: the assignment of the placement with the limits that workers run with.
            step: the last one that is committed.
            pids: rank -> process id of a worker on this machine.
        """
        assignment = running
        key = assignment, costs.speeds
        if self._guard is None or self._orders or key == self._hinted:
            return
        self._hinted = key
        plan, wanted = worker_frequencies(assignment, costs, self._limits, self._power)
        if all(abs(f - self._now(rank)) < _LEAST_CHANGE for rank, f in wanted.items()):
            return
        energies = [
            modelled_energy(assignment, costs, frequencies, seconds, self._power)
            for frequencies, seconds in (({}, plan.makespan_before_s), (wanted, plan.makespan_s))
        ]
        lowered, raised = sum(f < 1 for f in wanted.values()), sum(f > 1 for f in wanted.values())
        why = f"{lowered} of {len(wanted)} workers would wait" + (f", {raised} are raised" if raised else "")
        seen = (
            f"a step {1e3 * plan.makespan_before_s:.0f} to {1e3 * plan.makespan_s:.0f} ms, "
            f"modelled energy {energies[0]:.3g} to {energies[1]:.3g}"
        )
        self._order(
            wanted,
            step,
            {
                "step": step,
                "mesh_epoch": placement.mesh.epoch,
                "why": why,
                "modelled_seconds_before": plan.makespan_before_s,
                "modelled_seconds": plan.makespan_s,
                "modelled_energy_before": energies[0],
                "modelled_energy": energies[1],
                "message": f"{min(wanted.values()):.2f} to {max(wanted.values()):.2f} of normal: {why}; {seen}",
            },
            pids,
        )

    def begun(self, placement: Placement, step: int, pids: Pids) -> None:
        """A mesh epoch begins after `step`: what was slow for the sake of another mesh is as fast as it can be."""
        self._hinted = None
        if self._guard is None or all(self._now(rank) == 1.0 for rank in self._clocks):
            return
        why = "the mesh has changed"
        fields = {"step": step, "mesh_epoch": placement.mesh.epoch, "why": why, "message": f"normal again: {why}"}
        self._order(dict.fromkeys(placement.mesh.members, 1.0), step, fields, pids)

    def committed(self, step: int) -> list[Action]:
        """A step is committed; what the guard has answered counts from the steps on that nobody can have begun."""
        actions: list[Action] = []
        while self._guard is not None and (answer := self._guard.poll()) is not None:
            if answer.error:
                return [*actions, self._give_up(answer.error, step)]
            order = self._orders.popleft()
            found = {rank: _of_devices(order, rank, answer) for rank in order.frequencies}
            for rank, frequency in found.items():
                if (clock := self._clocks.get(rank)) is not None and clock.until == math.inf and not self._orders:
                    self._clocks[rank] = _Clock(clock.before, clock.since, step + 1 + _UNDER_WAY, frequency)
            actions.append(_change(order.before, found, order.fields))
        return actions

    def close(self) -> None:
        """Puts all frequencies back."""
        if self._guard is not None:
            self._guard.close()

    def __enter__(self) -> Frequencies:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- orders

    def _now(self, rank: int) -> float:
        return self._clocks[rank].now if rank in self._clocks else 1.0

    def _order(self, wanted: Mapping[int, float], step: int, fields: Mapping[str, object], pids: Pids) -> None:
        assert self._guard is not None
        before = {rank: self._now(rank) for rank in wanted}
        devices = {rank: self._devices_of(rank, pids.get(rank)) for rank in wanted}
        for rank, frequency in wanted.items():
            self._expect(rank, frequency, step)
        self._orders.append(_Order(before, wanted, devices, fields))
        if all(frequency == 1.0 for frequency in wanted.values()):
            self._guard.reset()
        else:
            self._guard.set(shared(wanted, devices))

    def _expect(self, rank: int, frequency: float, step: int) -> None:
        """Note that a worker's frequency is unknown from the next step on, until the guard has answered."""
        clock = self._clocks.get(rank, _Clock())
        if frequency == clock.now and clock.until != math.inf:
            return
        clear = clock.until <= step + 1
        before, since = (clock.now, step + 1) if clear else (clock.before, clock.since)
        self._clocks[rank] = _Clock(before, since, math.inf, frequency)

    def _give_up(self, error: str, step: int) -> Action:
        """Frequencies cannot be set: those that were are put back, and the run goes on without."""
        assert self._guard is not None
        self._guard.close()
        self._guard = None
        self._orders.clear()
        before = {rank: clock.before if clock.until == math.inf else clock.now for rank, clock in self._clocks.items()}
        for rank in self._clocks:
            self._expect(rank, 1.0, step)
            clock = self._clocks[rank]
            self._clocks[rank] = _Clock(clock.before, clock.since, step + 1 + _UNDER_WAY, 1.0)
        normal = dict.fromkeys(before, 1.0)
        message = f"the run goes on at the normal ones: {error}"
        return _change(before, normal, {"refused": error, "step": step, "message": message})

    def _devices_of(self, rank: int, pid: int | None) -> tuple[str, ...]:
        """The devices that a worker runs on."""
        assert self._guard is not None
        devices = self._guard.devices
        if not devices:  # simulated: any name will do
            return (str(rank),)
        if all(not device.cpus for device in devices.values()):  # one device for each worker, in turn
            return (list(devices)[rank % len(devices)],)
        allowed = _allowed_cpus(pid)
        return tuple(name for name, device in devices.items() if allowed is None or allowed & set(device.cpus))


def _change(before: Mapping[int, float], now: Mapping[int, float], fields: Mapping[str, object]) -> Action:
    """The event that names the frequencies which have changed."""
    ranks = [rank for rank in now if now[rank] != before[rank]]
    return Record("frequency", {"ranks": ranks, "before": before, "frequencies": now, **fields})


def worker_frequencies(
    assignment: Assignment, costs: CostModel, limits: FrequencyRange, power: PowerModel = _POWER
) -> tuple[FrequencyPlan, dict[int, float]]:
    """Choose one frequency for each worker, with which a step takes no longer than the plan's makespan.

    Returns: the plan, and rank -> frequency, rounded up.
    """
    plan, hints = frequency_hints(assignment, costs, replace(limits, most_changes=0), power)
    found = {rank: max(hint.pace.frequencies) for hint in hints for rank in hint.ranks}
    return plan, {rank: _rounded(f, limits.highest) for rank, f in found.items()}


def _rounded(frequency: float, highest: float) -> float:
    return min(round(math.ceil(frequency / _GRAIN - 1e-6) * _GRAIN, 6), highest)


def shared(wanted: Mapping[int, float], devices: Mapping[int, tuple[str, ...]]) -> dict[str, float]:
    """device -> the largest frequency that one of its workers wants."""
    found: dict[str, float] = {}
    for rank, frequency in wanted.items():
        for device in devices[rank]:
            found[device] = max(frequency, found.get(device, 0.0))
    return found


def modelled_energy(
    assignment: Assignment,
    costs: CostModel,
    frequencies: Mapping[int, float],
    seconds: float,
    power: PowerModel = _POWER,
) -> float:
    """The energy of a step, modelled (PowerModel).

    Args:
        frequencies: rank -> frequency; 1 where none is named.
        seconds: that the step takes.
    """
    forward, backward, _ = stage_seconds(assignment.layer_cuts, costs)
    ranks = [rank for members in assignment.stages for rank in members]
    microbatches = np.concatenate([np.array(counts, np.float64) for counts in assignment.microbatch_counts])
    stage = np.repeat(np.arange(assignment.num_stages), [len(members) for members in assignment.stages])
    work = microbatches * (forward + backward)[stage] / costs.speeds_of(ranks)
    by_worker = np.array([frequencies.get(rank, 1.0) for rank in ranks])
    return power.energy(work, by_worker, len(ranks), seconds)


def _of_devices(order: _Order, rank: int, answer: Answer) -> float:
    """The frequency of a worker after the guard's answer: the lowest of its devices.

    A device that the answer does not name has the frequency that was ordered.
    """
    set_to = [answer.frequencies[device] for device in order.devices[rank] if device in answer.frequencies]
    return min(set_to, default=order.frequencies[rank])


def _allowed_cpus(pid: int | None) -> set[int] | None:
    """The processors that a process may run on; None: unknown."""
    try:
        return set(os.sched_getaffinity(pid)) if pid is not None else None
    except OSError:
        return None
