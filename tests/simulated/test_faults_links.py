"""A link is lost while both ends live: what was on it is sent again in the next mesh epoch, with the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.controller_protocol import Policy
from tests.cluster.faults import SENDER, AnyFault, Fault, MessageFault
from tests.cluster.wires import Lateness
from tests.simulated.bits_cases import (
    MirroredCluster,
    Run,
    expected,
    one_thread,
    outcome,
    placement_of,
)

TO_PRIMARY = "ReducedGradient to its new primary"


class Broken(MirroredCluster):
    """The first `count` messages of some kind go through; at the next one its link breaks.

    What is on the link is lost, and so is all that is sent on it until the sender has its place in the next epoch.
    """

    def __init__(
        self,
        kind: str,
        count: int,
        seed: int,
        run: Run,
        mesh: str,
        zero: int,
        faults: Sequence[AnyFault] = (),
        mirrors: int = 1,
    ) -> None:
        self._kind, self._left = kind, count
        self.members = placement_of(run, mesh, zero).mesh.num_workers
        super().__init__(run, mesh, zero, seed=seed, faults=faults, policy=Policy(mirror_count=mirrors))

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        if peer >= 0 and self._kind in (type(message).__name__, self._special(sender, peer, message)):
            self._left -= 1
            if self._left == 0:
                self.break_link((sender, peer))
        super().send(sender, peer, message, payload)

    def _special(self, sender: int, peer: int, message: m.Message) -> str:
        """A mirror gives a primary what it has from the one before, which is lost, and the new one has not."""
        here, there = self._workers[sender].executor, self._workers.get(peer)
        if not isinstance(message, m.ReducedGradient) or here is None or there is None or there.executor is None:
            return ""
        key, protocol = (message.layer, message.first, message.stop), there.executor.replica.protocol
        runs = {run.key: run for run in here.placement.replica_map(self._description.layout)[message.layer]}
        lacks = message.step > protocol.version and not protocol.has_gradient(message.step, key)
        return TO_PRIMARY if key in runs and runs[key].primary == peer and lacks else ""


@pytest.mark.parametrize(
    ("kind", "mesh", "zero"),
    [
        ("Activation", "dp2_pp2", 2),
        ("Activation", "pp3", 1),
        ("ActivationGradient", "dp3_pp2", 1),
        ("ActivationGradient", "pp3", 2),
        ("PartialSum", "dp3", 0),
        ("PartialSum", "dp3", 1),
        ("PartialSum", "dp4", 3),
        ("ReducedGradient", "dp3", 1),
        ("ReducedGradient", "dp3_pp2", 2),
        ("Publish", "dp3", 1),
        ("Publish", "dp4", 3),
        ("Vote", "dp2_pp2", 2),
        ("Vote", "dp3", 0),
    ],
)
@one_thread()
def test_what_was_on_a_lost_link_comes_again(kind: str, mesh: str, zero: int) -> None:
    run = Run(microbatches=5, steps=4)
    for seed in range(3):
        cluster = Broken(kind, 1 + 7 * seed, seed, run, mesh, zero)
        assert outcome(cluster.run()) == expected(run), seed
        assert cluster.broken_links and cluster.lost_with_links[kind], "the link broke when there was something on it"
        again = [epoch for epoch in cluster.result.epochs if "link" in epoch.kinds.values()]
        assert len(again) == 1 and again[0].num_copies == 0 and again[0].placement.mesh.num_workers == cluster.members


@pytest.mark.parametrize(
    ("kind", "count", "mesh", "zero", "mirrors"),
    [
        ("PageState", 2, "dp3", 1, 1),
        ("PageState", 3, "dp4", 3, 1),
        ("Need", 2, "dp4", 3, 1),
        ("PartialSum", 20, "dp3", 0, 1),
        (TO_PRIMARY, 1, "dp3", 3, 2),
    ],
)
@one_thread()
def test_a_link_is_lost_after_a_worker(kind: str, count: int, mesh: str, zero: int, mirrors: int) -> None:
    """The link is lost while new mirrors are sent their state, and sums and gradients go to new primaries."""
    run, broke = Run(microbatches=5, steps=4), 0
    for seed in range(4):
        faults: list[AnyFault] = [Fault(2, "kill", 0, "backward")]
        if kind == TO_PRIMARY:  # one of the two mirrors has the gradient, and the other becomes the primary
            faults = [MessageFault("kill", "ReducedGradient", SENDER, True, 29 + 3 * seed)]
        cluster = Broken(kind, count, seed, run, mesh, zero, faults, mirrors)
        assert outcome(cluster.run()) == expected(run), (seed, cluster.broken_links)
        held = [run for runs in cluster.protocol.placement.replicas.values() for run in runs]  # pyright: ignore
        assert not any(run.learners for run in held), "the copies are complete all the same"
        broke += bool(cluster.broken_links)
    assert broke, f"no link broke at a message of this kind: {kind}"


class BrokenMeanwhile(MirroredCluster):
    """A worker gets a Reconfigure in the middle of an action, and makes its links for that. Then one of them breaks
    that has something on it of this kind, and the worker finds that before it enters the mesh epoch."""

    def __init__(self, kind: str, seed: int, run: Run, mesh: str, zero: int, fault: AnyFault) -> None:
        self._kind = kind
        super().__init__(run, mesh, zero, seed=seed, faults=[fault], late=Lateness("forward", looks=4, slow=0.7))

    def _note_peers(self, rank: int, message: m.Reconfigure) -> None:
        super()._note_peers(rank, message)
        if self.broken_links or self._workers[rank].executor is None:
            return
        for link, queue in self._wires.in_flight.items():
            kinds = {type(m.decode(passing.header)).__name__ for passing in queue}
            if link[0] == rank and link[1] in self.protocol.members and self._kind in kinds:
                self.break_link(link)
                self._closed_links[link] = self.turn
                return


@pytest.mark.parametrize("zero", [0, 1])
@one_thread()
def test_a_link_is_lost_after_it_was_made_for_a_mesh_epoch_and_before_that_is_entered(zero: int) -> None:
    """All that the sender sends for the new epoch is lost with the link, and is sent again in the epoch after that."""
    run, broke = Run(microbatches=8, steps=2), 0
    for seed in range(10):
        cluster = BrokenMeanwhile("PartialSum", seed, run, "dp3_pp2", zero, Fault(2, "kill", 0, "backward"))
        assert outcome(cluster.run()) == expected(run), (seed, cluster.broken_links)
        broke += bool(cluster.broken_links)
    assert broke, "no link broke with a sum on it"
