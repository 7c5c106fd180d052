"""A worker alone applies a step and is lost: what it sent of that step arrives before its loss or after it (H4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.sharding.replicas import PageRange
from elaswave_spmd.worker.channel import Incoming
from elaswave_spmd.worker.state import BackgroundCopies
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.faults import AnyFault, Fault, Link, ThenFault
from tests.cluster.schedules import Schedule, cluster_of, judge, undisturbed
from tests.cluster.starting import StartFault
from tests.cluster.tiny import TinyRun
from tests.simulated.bits_cases import one_thread

STEP = 4


class Ahead(SimulatedCluster):
    """Before the worker that is `ahead` is lost, no votes for step 4 pass between the others: it alone applies it."""

    ahead = 0

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        is_held = isinstance(message, m.Vote) and message.step == STEP and self.ahead not in (sender, peer)
        if not (is_held and self.ahead not in self._lost):
            super().send(sender, peer, message, payload)


class Late(Ahead):
    """What the lost worker has sent of step 4 is on its way until its receiver has entered the next mesh epoch."""

    late: type[m.Publish] | type[m.PageState] = m.Publish

    def __init__(self, *args: Any, **options: Any) -> None:
        self._on_their_way: list[tuple[int, m.Publish | m.PageState, Tensor]] = []
        self.num_late = 0
        super().__init__(*args, **options)

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        is_late = sender == self.ahead and isinstance(message, self.late)
        if is_late and isinstance(message, m.Publish | m.PageState) and message.step == STEP and payload is not None:
            self._on_their_way.append((peer, message, payload.clone()))
        else:
            super().send(sender, peer, message, payload)

    def deliver_some(self, rank: int) -> None:
        """Overrides `SimulatedCluster`: after each action, so that it arrives before the step begins anew."""
        executor, inbox = self._workers[rank].executor, self._workers[rank].port.inbox
        if executor is not None and self.ahead not in executor.placement.mesh:
            late = [it for it in self._on_their_way if it[0] == rank]
            self._on_their_way = [it for it in self._on_their_way if it[0] != rank]
            inbox.extend(Incoming(self.ahead, message, payload) for _, message, payload in late)
            self.num_late += len(late)
        super().deliver_some(rank)


class LateState(Late):
    """So is the state that worker 4 has sent. When it is lost, results are known to differ: the step begins anew."""

    ahead, late = 4, m.PageState

    def inject(self, rank: int, fault: AnyFault | StartFault, out: Link | None = None) -> None:
        if rank == self.ahead:
            self.protocol.note_difference()
        super().inject(rank, fault, out)


def run_to_the_end(schedule: Schedule, kind: type[SimulatedCluster]) -> SimulatedCluster:
    wanted = undisturbed(schedule.run.key)
    cluster = cluster_of(schedule, kind=kind)
    how, failure, detail = judge(schedule, cluster, wanted)
    assert (how, failure) == ("bits", ""), detail
    assert cluster.plan.num_injected == 2 and not cluster.rejected
    return cluster


@pytest.mark.parametrize("kind", [Ahead, Late])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(2))
@one_thread()
def test_parameters_that_nobody_has_compared_are_not_computed_with(
    seed: int, dtype: str, kind: type[SimulatedCluster]
) -> None:
    """The update of worker 0 is wrong. What the others compare is the state that they have made themselves."""
    faults = Fault(STEP, "miscompute", 0, "apply", 3), ThenFault("kill", "ahead", 40)
    run = TinyRun(steps=6, dtype=dtype, microbatches=8)
    schedule = Schedule(seed, run, "dp5", 1, mirror_count=2, verify_every=1, faults=faults)
    cluster = run_to_the_end(schedule, kind)
    assert cluster.result.epochs[0].version == STEP - 1
    assert not isinstance(cluster, Late) or cluster.num_late


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(2))
@one_thread()
def test_state_of_a_step_that_begins_anew_is_not_learned(seed: int, dtype: str) -> None:
    """Worker 0 is lost first, so that others learn pages. Worker 4 sends their state after the step, and is lost.

    Copies are made at once, so that the layer would have these values when the step begins anew.
    """

    def at_once(self: BackgroundCopies, copy: Iterator[None], sent: PageRange | None = None) -> None:
        deque(copy, maxlen=0)

    faults = Fault(STEP, "kill", 0, "backward"), ThenFault("kill", "ahead", 200)
    run = TinyRun(steps=6, dtype=dtype, microbatches=8)
    schedule = Schedule(seed, run, "dp5", 1, mirror_count=2, verify_rate=0.4, faults=faults)
    with mock.patch.object(BackgroundCopies, "add", at_once):
        cluster = run_to_the_end(schedule, LateState)
    assert isinstance(cluster, LateState) and cluster.num_late
    assert [begun.version for begun in cluster.result.epochs[:2]] == [STEP - 1] * 2
