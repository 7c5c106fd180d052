"""Random faults for a schedule: points, messages, and several that belong together."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from elaswave_spmd.recovery.reconfiguration import Goal
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.worker.fault_points import DRAWN
from tests.cluster.faults import RECEIVER, SENDER, AnyFault, Fault, MessageFault, ThenFault

# How often a message of each kind is sent in a typical schedule, without those that only faults bring.
USUAL = {
    "Activation": 20,
    "ActivationGradient": 15,
    "PartialSum": 40,
    "ReducedGradient": 20,
    "Publish": 30,
    "Need": 10,
    "Vote": 16,
    "Applied": 10,
    "ValidationLoss": 2,
    "FinalPages": 5,
    "Finished": 3,
    "Reconfigure": 4,
    "Validated": 4,
}
AFTER_A_LOSS = {
    "Prepare": 3,
    "StepReport": 3,
    "Reconfigure": 3,
    "PageState": 10,
    "CaughtUp": 2,
    "Ready": 1,
    "Need": 6,
    "Vote": 6,
}
TO_CONTROLLER = ("StepReport", "CaughtUp", "Applied", "ValidationLoss", "FinalPages", "Finished", "Ready")
FROM_CONTROLLER = ("Reconfigure", "Prepare", "Validated")
MESSAGES = tuple(dict.fromkeys((*USUAL, *AFTER_A_LOSS)))


def happens(message: str, side: str) -> bool:
    """Whether a worker can be on this side of a message of this kind."""
    return message not in (FROM_CONTROLLER if side == SENDER else TO_CONTROLLER)


def draw_goal(placement: Placement, r: random.Random) -> Goal:
    """Something else for the members to do: workers, layers and micro-batches anywhere."""
    layers, members = placement.layer_cuts[-1], list(placement.mesh.members)
    if r.random() < 0.5:
        stages = placement.mesh.stages
    else:
        r.shuffle(members)
        at = sorted(r.sample(range(1, len(members)), r.randint(1, min(layers, len(members))) - 1))
        stages = tuple(tuple(members[a:b]) for a, b in pairwise((0, *at, len(members))))
    cuts = (0, *sorted(r.sample(range(1, layers), len(stages) - 1)), layers)
    counts = tuple(draw_counts(r, placement.num_microbatches, len(ranks)) for ranks in stages)
    return Goal(stages, cuts, counts)


def draw_counts(r: random.Random, microbatches: int, workers: int) -> tuple[int, ...]:
    """So many micro-batches for each worker of a stage; some may have none."""
    at = sorted(r.randint(0, microbatches) for _ in range(workers - 1))
    return tuple(b - a for a, b in pairwise((0, *at, microbatches)))


def draw_moves(r: random.Random, faults: Sequence[AnyFault]) -> tuple[AnyFault, ...]:
    """The same faults with changes of the placement before, after and between them."""
    settled = r.random() < 0.5
    moves = [ThenFault("rebalance", delay=r.randint(0, 100), settled=settled) for _ in range(r.randint(1, 3))]
    found = list(faults)
    for move in moves:
        found.insert(r.randint(0, len(found)), move)
    return tuple(found)


def draw_faults(r: random.Random, workers: int, steps: int) -> tuple[tuple[AnyFault, ...], int]:
    """Faults for a mesh of so many workers, and by how many steps the run should be longer for them."""
    story = r.choices(("points", "messages", "both", "mirror", "joins", "down"), (3, 5, 3, 2, 3, 1))[0]
    if story == "points":
        return tuple(_at_point(r, workers, steps) for _ in range(r.randint(1, 4))), 0
    if story == "messages":
        return tuple(_at_message(r, i > 0) for i in range(r.randint(1, 3))), 0
    if story == "both":
        return (_at_point(r, workers, steps), *(_at_message(r, True) for _ in range(r.randint(1, 3)))), 0
    if story == "mirror":
        first = r.choice((_at_point(r, workers, steps, "kill"), _at_message(r, False, "kill")))
        then = ThenFault("kill", "mirror", r.choice((0, 5, 30, 100)), settled=r.random() < 0.5)
        return (first, then, *(_at_message(r, True) for _ in range(r.randint(0, 1)))), 1
    if story == "joins":
        join = ThenFault("join", delay=r.randint(0, 150))
        late = ThenFault(r.choice(("kill", "kill", "stop", "term")), "newcomer", r.randint(0, 150), turns=_turns(r))
        more = [_at_message(r, True, kind=r.choice(("kill", "kill", "stop"))) for _ in range(r.randint(0, 2))]
        return (join, r.choice((late, _at_message(r, True))), *more), 1
    down: list[AnyFault] = [ThenFault("kill", delay=r.randint(0, 60), settled=True) for _ in range(workers - 1)]
    up: list[AnyFault] = [ThenFault("join", delay=r.randint(0, 60), settled=True) for _ in range(workers - 1)]
    return (*down, *(up if r.random() < 0.5 else ())), 2 * workers


def draw_ahead(r: random.Random, faults: tuple[AnyFault, ...]) -> tuple[AnyFault, ...]:
    """Now and then, after the first of the faults, whoever is ahead of the others is lost as well."""
    if r.random() >= 0.15:
        return faults
    kind = r.choice(("kill", "kill", "stop"))
    return (*faults[:1], ThenFault(kind, "ahead", r.choice((0, 0, 10, 40, 80)), turns=_turns(r)), *faults[1:])


def silenced(fault: AnyFault) -> AnyFault:
    """The same fault; a worker that stops is taken for lost, however soon it goes on."""
    return replace(fault, kind="silent") if fault.kind == "stop" else fault


def _turns(r: random.Random) -> int:
    return r.choice((0, 1, 5, 20, 50, 400))


def _kind(r: random.Random) -> str:
    return r.choices(("kill", "stop", "term", "join", "replace", "pause"), (6, 3, 2, 2, 2, 1))[0]


def _at_point(r: random.Random, workers: int, steps: int, kind: str = "") -> Fault:
    point = r.choice(list(DRAWN)).value
    return Fault(r.randint(1, steps), kind or _kind(r), r.randrange(workers), point, r.randint(1, 3), _turns(r))


def _at_message(r: random.Random, disturbed: bool, kind: str = "") -> MessageFault:
    """At any message; `disturbed`: something else happens before, perhaps."""
    usual = AFTER_A_LOSS if disturbed and r.random() < 0.6 else USUAL
    message = r.choice(list(usual))
    sides = [side for side in (SENDER, RECEIVER) if happens(message, side)]
    kind = kind or r.choices(("kill", "stop", "replace", "term"), (7, 2, 2, 1))[0]
    return MessageFault(kind, message, r.choice(sides), r.random() < 0.5, r.randint(1, usual[message]), _turns(r))
