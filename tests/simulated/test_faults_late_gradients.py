"""A reduced gradient of a lost primary comes to one mirror when another one is the primary (docs/protocol.md, C8)."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.worker.channel import Incoming
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.faults import Fault
from tests.cluster.processes import Killed, Worker
from tests.cluster.schedules import Schedule, cluster_of, judge, undisturbed
from tests.cluster.tiny import TinyRun
from tests.simulated.bits_cases import one_thread

STEP = 3
PRIMARY, MIRROR, PROMOTED, LOST_NEXT = 0, 1, 2, 3


class OneMirrorHasIt(SimulatedCluster):
    """Worker 0 is lost while it sends the last reduced gradient of step 3: worker 1 alone gets it, in mesh epoch 1.

    Worker 3 is lost then, before worker 2, the primary now, has computed anything in that epoch.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._on_its_way: list[Incoming] = []
        self.num_late = 0
        super().__init__(*args, **options)

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        if not (isinstance(message, m.ReducedGradient) and (sender, message.step, message.layer) == (PRIMARY, STEP, 0)):
            super().send(sender, peer, message, payload)
            return
        assert payload is not None
        if peer == MIRROR:
            self._on_its_way.append(Incoming(sender, message, payload.clone()))
        if peer == LOST_NEXT:
            self.inject(PRIMARY, Fault(STEP, "kill", PRIMARY, "norm"))

    def deliver_some(self, rank: int) -> None:
        if rank == MIRROR and self._is_without(rank, PRIMARY):
            late, self._on_its_way = self._on_its_way, []
            self._workers[rank].port.inbox.extend(late)
            self.num_late += len(late)
        super().deliver_some(rank)

    def _is_without(self, rank: int, lost: int) -> bool:
        executor = self._workers[rank].executor
        return executor is not None and lost not in executor.placement.mesh

    def take_turn(self) -> None:
        if self.num_late and LOST_NEXT not in self._lost:
            try:
                self.inject(LOST_NEXT, Fault(STEP, "kill", LOST_NEXT, "norm"))
            except Killed as killed:
                self._kill(LOST_NEXT, *killed.args)
        super().take_turn()

    def _can_go(self, worker: Worker) -> bool:
        """Overrides `SimulatedCluster`: worker 2 is slow, once it has answered the Prepare of mesh epoch 1."""
        protocol = worker.executor.commit.protocol if worker.executor is not None else None
        is_slow = worker.rank == PROMOTED and protocol is not None and (protocol.epoch, protocol.promised) == (0, 1)
        return super()._can_go(worker) and not (is_slow and len(self.epochs_prepared) < 2)

    @property
    def epochs_prepared(self) -> set[int]:
        """Those for which the controller has sent a Prepare."""
        return {prepare.epoch for prepare, _ in self.journal}


@pytest.mark.parametrize("seed", [3, 6, 7, 8])
@one_thread()
def test_a_mirror_passes_on_a_reduced_gradient_that_the_primary_may_lack(seed: int) -> None:
    """Else the next recovery plan counts on it, and the new primary waits for it for ever."""
    schedule = Schedule(seed, TinyRun(), "dp4", 0)
    wanted = undisturbed(schedule.run.key)
    cluster = cluster_of(schedule, kind=OneMirrorHasIt)
    how, failure, detail = judge(schedule, cluster, wanted)
    assert (how, failure) == ("bits", ""), detail
    assert isinstance(cluster, OneMirrorHasIt) and cluster.num_late == 1 and len(cluster.epochs_prepared) >= 2
