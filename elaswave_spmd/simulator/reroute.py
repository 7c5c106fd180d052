"""The policy of ReCycle (Gandhi et al., SOSP 2024): micro-batches of a lost worker are rerouted to its peers."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.step_time import Assignment, open_sums, reduction_tail_s, traffic_bytes
from elaswave_spmd.simulator.engine import SHARED, execute
from elaswave_spmd.simulator.policies import Case, Outcome
from elaswave_spmd.simulator.work import Work, owners_of


@dataclass(frozen=True)
class Reroute:
    """Micro-batches of a lost worker go to its data-parallel peers, and layers stay.

    Modelled, in virtual time:

    - Micro-batches are rerouted to the least loaded peers. A worker runs whatever is ready, backwards first.
    - Backwards are split in two halves, for the gradients of inputs and of weights. The second half is put off into
      bubbles, as far as there is memory for its activations. There are no mirrors, which would need memory.
    - The optimizer is staggered by stages, so that the second halves may reach into the next step.
    - Or backwards are whole, if that is faster.
    - A step is never faster than before the change, since without losses the policy runs plain 1F1B.
    - A slow worker is waited for, or treated as lost, whichever is faster.

    Not modelled: its search for the best order, and stages that have lost all workers.

    Args:
        split: True if backwards may be split. False if micro-batches are rerouted, and nothing else changes.
        name: the name in tables.
    """

    split: bool = True
    name: str = "reroute"

    def answer(self, case: Case) -> Outcome:
        gone = set(case.change.gone)
        slow = {rank for rank, _ in case.change.slow}
        found = [self._without(case, lost) for lost in ([gone, gone | slow] if slow else [gone])]
        return min(found, key=lambda outcome: outcome.step_s)

    def _without(self, case: Case, lost: Collection[int]) -> Outcome:
        recovery_s = case.constants.detect_s + case.before_s / 2 if case.change.gone else 0.0
        if not lost:
            return Outcome(self.name, case.seconds(case.healthy, case.after), case.healthy.num_microbatches, recovery_s)
        work = rerouted(case.healthy, case.after, lost)
        if work is None:
            return Outcome(self.name, math.inf, 0, recovery_s, "a stage has lost all its workers")
        sizes = [len(members) for members in work.stages]
        tail_s = reduction_tail_s(work.layer_cuts, sizes, (), case.after, replace(case.rule, mirror_count=0))
        orders = [execute(work, case.after, wires=SHARED).step_s + tail_s]  # without a staggered optimizer
        if self.split:
            halves = replace(work, limits=_room(case, work), weight_share=0.5)
            orders.append(execute(halves, case.after, wires=SHARED, steps=2, by_stage=True).step_s)
        # Without losses it runs plain 1F1B, so its decoupled step must not count as faster than before the change.
        seconds = max(case.before_s, min(orders), _traffic_s(case, work))
        more = sum(rank in lost for of_stage in owners_of(case.healthy) for rank in of_stage)
        return Outcome(self.name, seconds, case.healthy.num_microbatches, recovery_s, f"{more} micro-batches rerouted")


def rerouted(healthy: Assignment, costs: CostModel, lost: Collection[int]) -> Work | None:
    """The healthy step, with the micro-batches of lost workers assigned to the other workers of their stages.

    One more micro-batch may be in flight than in 1F1B, since a worker then gets micro-batches from several workers.

    Returns:
        The work. None if a stage has lost all its workers.
    """
    owners, stages = [], []
    for members, of_stage in zip(healthy.stages, owners_of(healthy), strict=True):
        left = [rank for rank in members if rank not in lost]
        if not left:
            return None
        count = {rank: of_stage.count(rank) for rank in left}
        found = list(of_stage)
        for microbatch, rank in enumerate(of_stage):
            if rank not in count:
                found[microbatch] = min(left, key=lambda r: ((count[r] + 1) / costs.speed(r), r))
                count[found[microbatch]] += 1
        owners.append(tuple(found))
        stages.append(tuple(left))
    limits = tuple(limit + 1 for limit in healthy.limits)
    return Work(tuple(stages), healthy.layer_cuts, tuple(owners), limits, _turns(healthy))


def _room(case: Case, work: Work) -> tuple[int, ...]:
    """For each stage, the number of micro-batches whose activations fit in a worker's memory.

    It is at least the number that are in flight in a healthy step.
    """
    rule, found = replace(case.rule, mirror_count=0), []
    kept = case.costs.prefix("activation_bytes")
    for stage, members in enumerate(work.stages):
        first, stop = work.layer_cuts[stage : stage + 2]
        microbatches = -(-work.num_microbatches // len(members))
        (sums,) = open_sums([np.array(even_counts(work.num_microbatches, len(members)))], rule)
        counted = {"size": len(members), "microbatches": microbatches, "in_flight": 0, "sums": sums}
        fixed = rule.stage_bytes(case.costs, **counted)[first, stop]
        room = (case.memory_limit - fixed) / max(1, int(kept[stop] - kept[first]))
        found.append(int(min(max(room, case.healthy.limits[stage]), work.num_microbatches)))
    return tuple(found)


def _turns(assignment: Assignment) -> tuple[int, ...]:
    """The priority of each micro-batch: its position among those of its first-stage worker. So workers take turns."""
    seen: dict[int, int] = {}
    found = []
    for rank in owners_of(assignment)[0]:
        found.append(seen.get(rank, 0))
        seen[rank] = found[-1] + 1
    return tuple(found)


def _traffic_s(case: Case, work: Work) -> float:
    rule, cuts = replace(case.rule, mirror_count=0), work.layer_cuts
    sent = (traffic_bytes(case.costs, rule, cuts[s], cuts[s + 1], len(m), 1) for s, m in enumerate(work.stages))
    return max(sent) / case.costs.bandwidth
