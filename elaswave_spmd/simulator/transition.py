"""A change of the mesh over time, in phases.

First comes the interrupted step. Then micro-batches are assigned anew at once, layers move in the background, and
frequency hints are set last.

Modelled: the steps before and after on the engine, with wires, sums, mirrors and votes; the detection of a loss; the
recomputation of the lost part of the step; and state that moves in the background, with the bandwidth that steps leave
unused. Not modelled: that the background transfer slows down messages, and the updates of learners.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.rebalance import Decision, Hint
from elaswave_spmd.scheduling.step_time import Assignment
from elaswave_spmd.simulator.engine import SHARED, Run, execute
from elaswave_spmd.simulator.policies import Case
from elaswave_spmd.simulator.recompute import recompute_step
from elaswave_spmd.simulator.trace import Timeline
from elaswave_spmd.simulator.work import Work

HEALTHY, RECOMPUTED, MICROBATCHES, LAYERS, HINTS = (
    "healthy",
    "recomputed",
    "micro-batches assigned anew",
    "layers moved",
    "hints set",
)

_LOSS_AT = 0.5  # the moment of the loss, as a fraction of its step; the mean of all moments
_SHOWN = 2  # the most steps of each phase that the timeline shows, and the number of steps of each that are executed


@dataclass(frozen=True)
class Phase:
    """A series of equal steps.

    Args:
        name: HEALTHY, RECOMPUTED, MICROBATCHES, LAYERS or HINTS.
        steps: the number of steps; 0 if they go on until the run ends.
        step_s: the seconds of each step.
        start: the time at which the first step begins, in seconds.
    """

    name: str
    steps: int
    step_s: float
    start: float


@dataclass(frozen=True)
class Transition:
    """A simulated change.

    Args:
        phases: the phases, one after another.
        migration_s: the seconds from the first step after the loss until layers are in their new places; 0 if none
            move.
        blocking_s: the seconds that the same move would take if all workers waited for it.
        timeline: the timeline, with a few steps of each phase.
    """

    phases: tuple[Phase, ...]
    migration_s: float
    blocking_s: float
    timeline: Timeline


def simulate_transition(case: Case, decision: Decision) -> Transition:
    """Simulate a decision from the event on. Workers are lost in the middle of a step."""
    return _Simulation(case, decision).run()


class _Simulation:
    """One simulation of a transition. `_now` is the virtual time, and `_step` the next step number in the timeline."""

    def __init__(self, case: Case, decision: Decision) -> None:
        self._case = case
        self._decision = decision
        self._timeline = Timeline(f"{case.placement.mesh.shape}: {case.change} (virtual time)")
        self._phases: list[Phase] = []
        self._now = 0.0
        self._step = 0

    def run(self) -> Transition:
        case, decision = self._case, self._decision
        self._timeline.name_rows(case.healthy.stages)
        self._timeline.name_rows(decision.last.assignment.stages)
        self._steps(HEALTHY, case.healthy_split, case.costs, _SHOWN)
        if case.change.gone:
            self._loss()
        for rank, speed in case.change.slow:
            self._timeline.event(self._now, f"worker {rank} slows down to {speed:g} of its speed")
        now, later = decision.now.assignment, decision.later
        migration_s = blocking_s = 0.0
        if later is None:
            self._steps(MICROBATCHES, now, case.after, 0 if not decision.hints else _SHOWN)
        else:
            run = self._run(now, case.after)
            # State moves with the bandwidth that steps leave unused, and with at least 5 % of it.
            idle = max(0.05, 1.0 - max(run.link_s.values(), default=0.0) / sum(run.seconds))
            blocking_s = later.move.seconds
            steps = max(1, math.ceil(blocking_s / idle / run.step_s))
            self._timeline.event(self._now, f"{later.move.bytes:,.0f} B of state begin to move, in the background")
            start = self._now
            self._steps(MICROBATCHES, now, case.after, steps)
            migration_s = self._now - start
            self._timeline.event(self._now, "all state is there: layers change their stage")
            self._steps(LAYERS, later.assignment, case.after, 0 if not decision.hints else _SHOWN)
        if decision.hints:
            self._set(decision.hints)
            self._steps(HINTS, decision.last.assignment, case.after, 0, decision.hints)
        return Transition(tuple(self._phases), migration_s, blocking_s, self._timeline)

    def _run(self, assignment: Assignment, costs: CostModel, hints: tuple[Hint, ...] = ()) -> Run:
        return execute(
            Work.from_assignment(assignment),
            costs,
            wires=SHARED,
            rule=self._case.rule,
            microbatch_order=assignment.microbatch_order,
            steps=_SHOWN,  # two, so that the last one has the publication of a step before it
            hints=hints,
        )

    def _steps(
        self,
        name: str,
        assignment: Assignment,
        costs: CostModel,
        steps: int,
        hints: tuple[Hint, ...] = (),
    ) -> None:
        """Simulates a phase. Steps that are not shown only add their time.

        Args:
            steps: the number of steps; 0 if they go on until the run ends.
        """
        shown = min(steps or _SHOWN, _SHOWN)
        run = self._run(assignment, costs, hints)
        # The last ones of the executed steps are shown, moved to the present time.
        begins = sum(run.seconds[:-shown])
        some = [
            span._replace(start=span.start - begins, stop=span.stop - begins, step=self._step + span.step)
            for span in run.spans
            if span.step >= len(run.seconds) - shown
        ]
        self._timeline.event(self._now, name if steps <= shown else f"{name}: {steps} steps, {shown} are shown")
        self._timeline.actions(some, offset=self._now)
        self._phases.append(Phase(name, steps, run.step_s, self._now))
        self._now += sum(run.seconds[-shown:])
        if steps > shown:
            self._now += (steps - shown) * run.step_s
        self._step += len(run.seconds)

    def _loss(self) -> None:
        case = self._case
        at = _LOSS_AT * case.seconds(case.healthy_split, case.costs)
        found = recompute_step(case.healthy_split, case.costs, case.change.gone, at)
        for rank in case.change.gone:
            self._timeline.event(self._now + at, f"worker {rank} is lost")
        detect_s, start = case.constants.detect_s, self._now
        if found is None:
            self._timeline.event(start + at, "a stage is lost: the step begins again")
            self._now += at + detect_s
            return
        before = [span._replace(step=self._step) for span in found.kept]
        after = [span._replace(step=self._step + 1) for span in found.rest]
        self._timeline.actions(before, offset=start)
        self._timeline.actions(after, offset=start + detect_s)
        self._phases.append(Phase(RECOMPUTED, 1, found.seconds + detect_s, start))
        self._now = start + found.seconds + detect_s
        self._step += 2

    def _set(self, hints: tuple[Hint, ...]) -> None:
        for hint in hints:
            for rank in hint.ranks:
                self._timeline.frequency(self._now, rank, max(hint.pace.frequencies))
