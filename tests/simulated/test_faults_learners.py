"""Workers are lost, leave and come while state is half copied."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from elaswave_spmd.recovery import controller_protocol
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.controller_protocol import Policy
from elaswave_spmd.recovery.reconfiguration import Stages, next_stages
from elaswave_spmd.worker import state
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.faults import AnyFault, Fault, ThenFault
from tests.cluster.piecewise import PiecewiseCluster
from tests.cluster.processes import LostStateError
from tests.cluster.schedules import Schedule, cluster_of, judge, undisturbed
from tests.cluster.tiny import TinyRun
from tests.simulated.bits_cases import (
    MirroredCluster,
    Run,
    expected,
    one_thread,
    outcome,
)

MESHES = [("pp2", 1), ("stages1-3", 1), ("dp2_pp2", 1), ("pp3", 1), ("dp2_pp2", 3), ("dp2_pp2", 2)]
JOIN = Fault(2, "join", 0, "backward")


class Overtaken(PiecewiseCluster, MirroredCluster):
    """The workers of a run, others between any two pieces of a copy."""


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "COPY_ELEMENTS", 128)


def train(mesh: str, zero: int, seed: int, faults: tuple[AnyFault, ...]) -> str:
    """Trains, and returns how it ended: with the "bits" of the reference, or with all replicas of a page "lost"."""
    run = Run(microbatches=5, steps=6)
    made = Overtaken(run, mesh, zero, seed=seed, faults=faults, uneven=bool(seed % 2))
    try:
        found = outcome(made.run())
    except LostStateError:
        return "lost"
    assert found == expected(run)
    return "bits"


@pytest.mark.parametrize("point", ["forward", "backward"])
@pytest.mark.parametrize("seed", range(4))
@one_thread()
def test_a_learner_that_is_moved_to_another_stage(seed: int, point: str) -> None:
    """The newcomer has a part of a layer's state, and the buffer that it belongs to, when it gets other layers."""
    assert train("pp2", 1, seed, (JOIN, Fault(3, "kill", 1, point))) == "bits"


@pytest.mark.parametrize("block", range(3))
@one_thread()
def test_whatever_happens_meanwhile(block: int) -> None:
    ends: Counter[str] = Counter()
    for seed in range(12 * block, 12 * block + 12):
        draw = random.Random(seed)
        mesh, zero = draw.choice(MESHES)
        workers = 2 if mesh == "pp2" else 3 if mesh == "pp3" else 4
        kill = Fault(
            draw.choice((3, 4)), "kill", draw.randrange(1, workers), draw.choice(("forward", "backward", "apply"))
        )
        faults: list[AnyFault] = [JOIN, kill]
        if draw.random() < 0.4:
            kinds = "join", "rebalance", "rebalance", "term"
            faults.append(Fault(draw.choice((3, 4, 5)), draw.choice(kinds), 0, "forward"))
        ends[train(mesh, zero, seed, tuple(faults))] += 1
    assert ends["bits"] >= 9, ends


@pytest.mark.parametrize(("mesh", "step"), [("dp3", 3), ("dp2_pp2", 4), ("pp2", 2)])
@one_thread()
def test_who_is_to_leave_meanwhile_and_has_no_mirror_leaves_all_the_same(mesh: str, step: int) -> None:
    """The plan under way was made without mirrors: it would be the only replica of its pages for ever."""
    run, faults = Run(microbatches=5, steps=8), (JOIN, Fault(step, "term", 0, "forward"))
    for seed in range(2):
        policy = Policy(mirror_count=0)
        made = Overtaken(run, mesh, 1, seed=seed, faults=faults, policy=policy, uneven=bool(seed))
        assert outcome(made.run()) == expected(run)
        assert made.protocol.leaving == () and 0 not in made.protocol.members


class Watched(PiecewiseCluster):
    """A cluster that looks in which order primaries send state and reduced gradients."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: Counter[str] = Counter()
        self._gradients: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}  # link, step, layer -> pages

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        match message:
            case m.ReducedGradient(step=step, layer=layer, first=first, stop=stop):
                self._gradients.setdefault((sender, peer, step, layer), []).append((first, stop))
            case m.PageState(step=step, layer=layer, first=first, stop=stop):
                before = self._gradients.get((sender, peer, step + 1, layer), [])
                self.sent["after" if any(a < stop and first < b for a, b in before) else "before"] += 1
        super().send(sender, peer, message, payload)


@pytest.mark.parametrize("block", range(2))
@one_thread()
def test_state_goes_before_the_gradients_of_the_next_step(block: int) -> None:
    """Else a learner could apply that step without it, where votes are passed on, and would never have the state."""
    sent: Counter[str] = Counter()
    for seed in range(30 * block, 30 * block + 30):
        watched = cluster_of(Schedule.draw(seed, votes=True), kind=Watched)
        with suppress(LostStateError):
            watched.run()
        assert isinstance(watched, Watched)
        sent += watched.sent
    assert sent["before"] > 40 and not sent["after"], sent


class Behind(SimulatedCluster):
    """Until a second worker is lost, the votes of those left for step 4 do not arrive: one alone applies it."""

    survivors = frozenset({1, 2, 3})

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        is_held = isinstance(message, m.Vote) and message.step == 4 and {sender, peer} <= self.survivors
        if not (is_held and len(self._lost) < 2):
            super().send(sender, peer, message, payload)


@one_thread()
def test_state_that_is_a_step_ahead_of_its_worker_is_passed_on_as_what_it_is() -> None:
    """Worker 4 alone has applied step 4 when it has sent its state to worker 2, and is lost. Worker 2 is the primary of
    these pages then, which the others have not reached, and another worker learns them from it.

    Worker 2 takes the place of the lost one, so that it is between two steps.
    """

    def moved(stages: Stages, removed: Collection[int], *others: Any) -> Stages:
        found = next_stages(stages, removed, *others)
        swapped = {2: 3, 3: 2} if 4 in removed else {}
        return tuple(tuple(swapped.get(rank, rank) for rank in members) for members in found)

    faults = (Fault(4, "kill", 0, "backward", 1), ThenFault("kill", "ahead", 5000))
    schedule = Schedule(0, TinyRun(steps=6), "stages4-1", 1, mirror_count=1, scatter=1, faults=faults)
    wanted = undisturbed(schedule.run.key)
    with mock.patch.object(controller_protocol, "next_stages", moved):
        cluster = cluster_of(schedule, kind=Behind)
        how, failure, detail = judge(schedule, cluster, wanted)
    assert (how, failure) == ("bits", ""), detail
    assert cluster.protocol.settled and not cluster.rejected
