"""The controller dies right after a Reconfigure, while some members are a step behind: all end at one version (S9)."""

from __future__ import annotations

import pytest
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.worker.channel import WorkerStopped
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.faults import SENDER, MessageFault
from tests.cluster.paired import PairedCluster
from tests.cluster.schedules import Schedule, cluster_of
from tests.cluster.tiny import TinyRun


class _ControllerKilled(Exception):  # noqa: N818  (the end of a simulated process)
    pass


class OrphanedCluster(SimulatedCluster):
    """A cluster whose controller is killed when it has sent the second Reconfigure to all members."""

    num_told = 0

    def from_controller(self, rank: int, header: bytes) -> None:
        super().from_controller(rank, header)
        mesh = self.protocol.placement.mesh
        if mesh.epoch and isinstance(m.decode(header), m.PackedReconfigure):
            self.num_told += 1
            if self.num_told == mesh.num_workers:
                raise _ControllerKilled

    def versions(self) -> dict[int, int]:
        """Rank -> the step that it has applied last, of workers that live."""
        return {rank: w.executor.version for rank, w in self._workers.items() if w.executor is not None}

    def end_without_controller(self) -> dict[int, int]:
        """Lets the workers find that the controller is gone, each at its own time. Returns the versions they end at.

        Who waits for the controller, or for a step that others have not begun, ends by a deadline of its process.
        """
        for rank in sorted(self._workers):
            self._wires.put(CONTROLLER, rank, m.LinkClosed(rank, CONTROLLER), None)
        ended: dict[int, int] = {}
        while able := [rank for rank in sorted(self._workers) if self._can_go(self._workers[rank])]:
            rank = self._random.choice(able)
            worker = self._workers[rank]
            assert worker.running is not None and worker.executor is not None
            try:
                worker.waiting = next(worker.running)
            except WorkerStopped:
                ended[rank] = worker.executor.version
                del self._workers[rank]
                self._absent.append(rank)
        return ended | self.versions()


class OrphanedPairs(OrphanedCluster, PairedCluster):
    """A cluster with pairs, whose controller is killed while state is on its way to a new mirror."""

    def from_controller(self, rank: int, header: bytes) -> None:
        PairedCluster.from_controller(self, rank, header)

    def take_turn(self) -> None:
        if self.num_told < 0 and not self.protocol.unanswered[1] and self._random.random() < 0.05:
            raise _ControllerKilled
        super().take_turn()

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        if isinstance(message, m.PairSent) and message.message and isinstance(m.decode(message.message), m.PageState):
            self.num_told, self.pair_hub.meets = -1, 0.01  # receivers meet senders late
        super().send(sender, peer, message, payload)


def orphaned(
    seed: int, widest: int, kind: type[OrphanedCluster] = OrphanedCluster
) -> tuple[dict[int, int], dict[int, int]] | None:
    """The versions when the controller died, and in the end; None if it has not, as the run ended before."""
    fault = MessageFault("kill", "Applied", SENDER, False, 2 + seed % 6)
    schedule = Schedule(
        seed, TinyRun(microbatches=8), mesh="dp8", zero=2, mirror_count=2, widest=widest, faults=(fault,)
    )
    cluster = cluster_of(schedule, kind=kind)
    assert isinstance(cluster, OrphanedCluster)
    try:
        cluster.run()
    except _ControllerKilled:
        return cluster.versions(), cluster.end_without_controller()
    return None


# Seeds in which a member is behind and one of those that are not could have ended before it had passed votes on.
@pytest.mark.parametrize(("widest", "known"), [(32, range(0)), (2, [102]), (3, [18])])
def test_all_end_at_one_version(widest: int, known: list[int]) -> None:
    num_behind = 0
    for seed in (*range(20), *known):
        if (found := orphaned(seed, widest)) is not None:
            before, ended = found
            num_behind += len(set(before.values())) > 1
            assert ended.keys() == before.keys() and len(set(ended.values())) == 1, (seed, found)
            assert min(ended.values()) >= max(before.values()), "a step that one has applied is completed by all"
    assert num_behind > 3


def test_all_end_at_one_version_with_pairs() -> None:
    """The controller dies while state is on its way through pairs that are made late."""
    ends = [found for seed in range(8) if (found := orphaned(seed, 32, OrphanedPairs)) is not None]
    assert len(ends) > 3
    for before, ended in ends:
        assert ended.keys() == before.keys() and len(set(ended.values())) == 1, (before, ended)
