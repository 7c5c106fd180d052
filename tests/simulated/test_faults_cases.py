"""The cases of docs/protocol.md that break such systems, each in several orders of messages: the undisturbed bits.

Case 13, a crash that repeats, needs processes: it is the controller's, not the protocol's.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from elaswave_spmd.recovery import reconfiguration
from elaswave_spmd.sharding.replicas import ReplicaMap, ReplicaSet, all_replica_sets
from tests.cluster.faults import RECEIVER, SENDER, AnyFault, Fault, MessageFault, ThenFault
from tests.cluster.schedules import Schedule, run
from tests.cluster.tiny import TinyRun

ORDERS = 6
PAIRS = list(itertools.combinations(range(4), 2))
JOIN, KILL = ThenFault("join", delay=20), ThenFault("kill", settled=True)


def kill(message: str, side: str, count: int, *, after: bool) -> MessageFault:
    return MessageFault("kill", message, side, after, count)


CASES: dict[str, tuple[str, int, int, tuple[AnyFault, ...]]] = {  # name -> mesh, zero, mirrors, faults
    "1 waits for somebody who waits, forward": ("pp3", 1, 1, (Fault(2, "kill", 2, "forward"),)),
    "1 waits for somebody who waits, backward": ("pp3", 1, 1, (Fault(2, "kill", 2, "backward"),)),
    "1 the first of a line": ("pp3", 2, 1, (Fault(2, "kill", 0, "forward", 2),)),
    "2 dies when all votes are sent but to one": ("dp3", 1, 1, (kill("Vote", SENDER, 8, after=False),)),
    "2 dies before its vote arrives anywhere": ("dp3", 2, 1, (kill("Vote", SENDER, 7, after=False),)),
    "2 dies with a vote out": ("dp2_pp2", 1, 1, (kill("Vote", SENDER, 14, after=True),)),
    "3 publishes to one": ("dp3", 1, 1, (Fault(2, "kill", 1, "publish", 1),)),
    "3 dies with one page published": ("dp4", 3, 1, (kill("Publish", SENDER, 14, after=True),)),
    "3 dies before it reports that it has applied": ("dp4", 1, 1, (kill("Applied", SENDER, 5, after=False),)),
    "4 stands still before its vote": ("dp3", 1, 1, (MessageFault("stop", "Vote", SENDER, False, 4, turns=2),)),
    "4 taken for lost before its vote": ("dp3", 1, 1, (MessageFault("silent", "Vote", SENDER, False, 4, turns=2),)),
    "4 taken for lost after its vote": ("dp3", 2, 1, (MessageFault("silent", "Vote", SENDER, True, 5, turns=20),)),
    "4 taken for lost at its last vote": ("dp2_pp2", 2, 1, (MessageFault("silent", "Vote", SENDER, False, 16, 2),)),
    "4 wakes when the next epoch has committed": ("dp3", 2, 1, (MessageFault("stop", "Vote", SENDER, False, 4),)),
    "4 stands still before its last vote": ("dp2_pp2", 2, 1, (MessageFault("stop", "Vote", SENDER, False, 16, 40),)),
    "5 the mirror dies while it is promoted": ("dp4", 1, 2, (Fault(2, "kill", 0, "norm"), ThenFault("kill", "mirror"))),
    "5 the primary dies while re-mirroring": (
        "dp4",
        2,
        2,
        (Fault(2, "kill", 0, "backward"), kill("PageState", SENDER, 3, after=True)),
    ),
    # Each gets two or three of eight pages in a message each. (With stages, the newcomer's may have none to give.)
    "7 a joiner dies half caught up": ("dp2", 1, 1, (JOIN, kill("PageState", RECEIVER, 1, after=True))),
    "7 a joiner dies when it has caught up": ("dp2", 1, 1, (JOIN, kill("CaughtUp", SENDER, 1, after=True))),
    "7 a joiner dies before its configuration": ("dp3", 3, 1, (JOIN, ThenFault("kill", "newcomer", 1))),
    "7 a joiner in a step that is being recovered": ("dp3", 2, 1, (JOIN, ThenFault("kill", delay=60, settled=True))),
    "8 has a reduced gradient and forwards it to nobody": ("dp3", 1, 1, (Fault(2, "kill", 1, "norm"),)),
    "8 forwards the second reduced gradient to nobody": (
        "dp3",
        2,
        1,
        (kill("ReducedGradient", SENDER, 8, after=False),),
    ),
    "9 asked to leave and killed in one step": (
        "dp4",
        1,
        2,
        (Fault(2, "term", 0, "forward"), Fault(2, "kill", 1, "backward")),
    ),
    "10 a contribution twice": ("dp3", 2, 1, (MessageFault("silent", "PartialSum", SENDER, True, 10, turns=3),)),
    "11 the controller pauses": (
        "dp4",
        1,
        1,
        (Fault(2, "pause", 2, "forward", turns=300), Fault(2, "kill", 1, "backward")),
    ),
    "12 a loss while state moves": ("dp3", 1, 2, (JOIN, kill("CaughtUp", SENDER, 1, after=False))),
    "12 a join while state moves": ("dp3", 2, 1, (JOIN, ThenFault("join", delay=5), ThenFault("term", delay=5))),
    "two at once": ("dp4", 2, 2, (Fault(2, "kill", 0, "backward"), ThenFault("kill"))),
    "two at once in two stages": ("dp2_pp2", 1, 2, (Fault(2, "kill", 0, "norm"), ThenFault("kill"))),
    "two asked to leave at once": ("dp3", 1, 1, (Fault(2, "term", 0, "forward"), Fault(2, "term", 1, "forward"))),
    "one after the other down to one": ("dp4", 1, 1, (KILL, KILL, KILL)),
    "down to one and back, stages": ("dp2_pp2", 2, 1, (KILL, KILL, KILL, *[ThenFault("join", settled=True)] * 3)),
    "down to one and back": ("dp3", 3, 1, (KILL, KILL, *[ThenFault("join", settled=True)] * 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_case_changes_no_bit(name: str) -> None:
    mesh, zero, mirrors, faults = CASES[name]
    steps = 4 + 2 * sum(isinstance(f, ThenFault) and f.settled for f in faults)
    schedule = Schedule(0, TinyRun(steps=steps), mesh, zero, mirrors, faults=faults)
    all_injected = 0
    for order in range(5, 5 + ORDERS):  # in which most faults of each case meet their moment
        ended = run(replace(schedule, seed=order, uneven=order % 2 == 1))
        assert (ended.how, ended.failure) == ("bits", ""), (order, ended.detail)
        all_injected += ended.injected == len(faults)
    assert all_injected >= ORDERS // 2, f"all of it happened in {all_injected} orders only"


@pytest.mark.parametrize("scatter", [1, 2])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "{}-{}".format(*pair))
def test_6_a_pair_at_once_is_survived_unless_it_held_all_copies_of_a_page(pair: tuple[int, int], scatter: int) -> None:
    faults = tuple(Fault(2, "kill", rank, "backward") for rank in pair)
    schedule = Schedule(0, TinyRun(), "dp4", 1, 1, scatter=scatter, faults=faults)
    replicas = schedule.placement.replicas
    assert replicas is not None
    wanted = "lost" if any(run.replicas <= {*pair} for run in all_replica_sets(replicas)) else "bits"
    for order in range(ORDERS):
        ended = run(replace(schedule, seed=order))
        assert (ended.how, ended.injected) == (wanted, 2), (order, ended.failure, ended.detail)


def test_6_state_that_a_living_member_has_is_not_lost() -> None:
    """Also if more workers are lost than there are mirrors: here a replica is forgotten for each worker that is."""
    schedule = Schedule(0, TinyRun(), "dp4", 1, 1, scatter=2, faults=tuple(Fault(2, "kill", r, "norm") for r in (0, 1)))
    good_replicas = reconfiguration.good_replicas

    def forgets(replicas: ReplicaMap, *arguments: Any) -> tuple[ReplicaMap, tuple[ReplicaSet, ...]]:
        found, lost = good_replicas(replicas, *arguments)
        return found, (*lost, *(pages for pages in all_replica_sets(replicas) if 2 in pages.replicas))

    with mock.patch.object(reconfiguration, "good_replicas", forgets):
        ended = run(schedule)
    assert "state is given up that members have" in ended.failure


def test_6_some_pairs_are_survived_and_some_are_not() -> None:
    runs = list(all_replica_sets(Schedule(0, TinyRun(), "dp4", 1, 1, scatter=1).placement.replicas or {}))
    lost = {frozenset(pair) for pair in PAIRS if any(r.replicas <= {*pair} for r in runs)}
    assert 0 < len(lost) < 6


@pytest.mark.parametrize(("mesh", "zero"), [("dp4", 1), ("dp2_pp2", 2), ("dp4", 3)])
def test_thirty_random_events_in_sixty_steps(mesh: str, zero: int) -> None:
    schedule = Schedule(zero, TinyRun(steps=60), mesh, zero, 2, uneven=True, faults=random_events(30, zero))
    ended = run(schedule)
    assert (ended.how, ended.failure, ended.injected) == ("bits", "", 30), ended.detail


def random_events(count: int, seed: int) -> tuple[ThenFault, ...]:
    """Losses, leaves and joins for four workers with two mirrors: no third loss while copies of pages are
    missing.
    """
    draw, workers, losses, events = random.Random(seed), 4, 0, []
    for _ in range(count):
        kinds = ["kill", "stop", "term", "replace"] * (workers > 3) + ["join"] * (workers < 7)
        kind = draw.choice(kinds)
        settled = kind != "join" and (losses == 2 or workers == 4)
        losses = (0 if settled else losses) + (kind != "join")
        workers += {"join": 1, "replace": 0}.get(kind, -1)
        events.append(ThenFault(kind, delay=draw.randint(0, 40), settled=settled, turns=draw.choice((1, 20, 400))))
    return tuple(events)
