"""Plans of the faults that `soak` puts into a run, drawn from a seed. Nothing here starts, waits or reads anything.

A plan is a mesh, settings, and faults in order. When a fault comes is told by what the run does (a moment), so a plan
that is run again meets the same moments, in other microseconds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

MESHES = {"dp3": 3, "dp4": 4, "dp2_pp2": 4, "dp3_pp2": 6, "[3,2]": 5}
"""Mesh -> its workers."""
ZEROS = ("zero0", "zero1", "zero2", "zero3")
TRANSPORTS = ("shm", "tcp")

KILL, PAIR, PAUSE, LATE, HANG, TERM = "kill", "pair", "pause", "late", "hang", "term"
CONTROLLER_TERM, CONTROLLER_KILL, ROOTS_KILL = "controller term", "controller kill", "roots kill"
OF_CONTROLLER = (CONTROLLER_TERM, CONTROLLER_KILL, ROOTS_KILL)
KINDS = {
    KILL: "SIGKILL to a worker",
    PAIR: "SIGKILL to two workers within 50 ms",
    PAUSE: "SIGSTOP to a worker, SIGCONT before it counts as hanging",
    LATE: "SIGSTOP to a worker, SIGCONT when it has been given up",
    HANG: "SIGSTOP to a worker, for ever",
    TERM: "SIGTERM to a worker: it leaves",
    CONTROLLER_TERM: "SIGTERM to the controller, then the run is resumed",
    CONTROLLER_KILL: "SIGKILL to the controller, then the run is resumed",
    ROOTS_KILL: "SIGKILL to controller and fork server, then the run is resumed",
}
ANY, START, RESTART, JOIN, CHECKPOINT, VALIDATION = "any", "start", "restart", "join", "checkpoint", "validation"
MOMENTS = {
    ANY: "a random moment of a step",
    START: "workers start, at first or for a resumed run",
    RESTART: "workers start again, since state was lost for good",
    JOIN: "a newcomer starts or gets its copies",
    CHECKPOINT: "a checkpoint is being written",
    VALIDATION: "a validation is under way",
}
PAIR_S = 0.05
_PAUSE_S = 0.5
_WEIGHTS = {
    KILL: 10,
    PAIR: 3,
    PAUSE: 3,
    LATE: 1,
    HANG: 1,
    TERM: 3,
    CONTROLLER_TERM: 1,
    CONTROLLER_KILL: 1,
    ROOTS_KILL: 1,
}
_MOMENT_WEIGHTS = {ANY: 6, JOIN: 5, CHECKPOINT: 4, VALIDATION: 3, RESTART: 2}
_LONGEST_DELAY_S = {START: 0.4, RESTART: 0.4, JOIN: 0.08, ANY: 0.1}  # as long as these moments last, about
_OF_A_STEP = (ANY, CHECKPOINT, VALIDATION)


@dataclass(frozen=True)
class Fault:
    """One fault. Shares are in [0, 1): a share of a list names one entry of it.

    Args:
        after: committed steps to wait for since the fault before.
        victims: shares of the workers there are then; two for a pair.
        delay: seconds from the moment until the signal.
        gap: seconds between the two of a pair, or from SIGSTOP to SIGCONT of a pause.
        newcomer: at the moment `join`, the victim is the newcomer, and not another worker.
        at_once: the run is resumed while workers of the killed controller may still live.
    """

    kind: str
    moment: str
    after: int
    victims: tuple[float, ...]
    delay: float = 0.0
    gap: float = 0.0
    newcomer: bool = False
    at_once: bool = False

    def __str__(self) -> str:
        who = " (the newcomer)" if self.newcomer else ""
        return f"{self.kind} at {self.moment}{who} +{1e3 * self.delay:.0f} ms, {self.after} steps later"


@dataclass(frozen=True)
class Plan:
    """One run and its faults.

    Args:
        replace: lost workers are replaced; else the mesh shrinks, down to two workers.
        spares: workers beside the mesh, which take the places of lost ones (with `replace` only).
    """

    seed: int
    number: int
    mesh: str
    zero: str
    transport: str
    mirrors: int
    replace: bool
    spares: int
    checkpoint_every: int
    faults: tuple[Fault, ...]

    @property
    def workers(self) -> int:
        """The workers that it begins with."""
        return MESHES[self.mesh]

    @property
    def label(self) -> str:
        """The mesh and what it does about losses, for tables."""
        return f"{self.mesh}, {'replaced' if self.replace else 'fixed size'}"

    def words(self) -> list[str]:
        """Its words on the command line of train.py."""
        mesh = f"mesh.stages={self.mesh}" if self.mesh.startswith("[") else f"mesh={self.mesh}"
        return [
            mesh,
            f"sharding={self.zero}",
            f"runtime.transport={self.transport}",
            f"mirror.count={self.mirrors}",
            f"elastic.replace={str(self.replace).lower()}",
            f"elastic.spares={self.spares}",
            f"checkpoint.every={self.checkpoint_every}",
        ]

    def __str__(self) -> str:
        settings = f"{self.mesh} {self.zero} {self.transport} mirrors={self.mirrors} spares={self.spares}"
        settings += " replaced" if self.replace else " fixed size"
        return f"run {self.number} (--seed {self.seed} --run {self.number}): {settings}, {len(self.faults)} faults"


def draw(seed: int, number: int, faults: int) -> Plan:
    """The plan of run `number` of a soak. Meshes and settings take turns, so that a few runs have all of them."""
    draws = random.Random(f"{seed}/{number}")
    names = list(MESHES)
    return Plan(
        seed=seed,
        number=number,
        mesh=names[number % len(names)],
        zero=ZEROS[(number + seed) % len(ZEROS)],
        transport=TRANSPORTS[number % 2],
        mirrors=draws.choice((1, 1, 2)),
        replace=number % 3 != 2,
        spares=draws.choice((0, 0, 1, 2)) if number % 3 != 2 else 0,
        checkpoint_every=draws.choice((5, 10, 20)),
        faults=tuple(_faults(draws, faults)),
    )


def _faults(draws: random.Random, count: int) -> list[Fault]:
    """So many faults. Some runs begin with one while their workers start."""
    drawn = []
    if draws.random() < 0.5:
        drawn.append(_fault(draws, KILL, START))
    while len(drawn) < count:
        kind = draws.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        moment = draws.choices(list(_MOMENT_WEIGHTS), list(_MOMENT_WEIGHTS.values()))[0]
        if kind in (*OF_CONTROLLER, PAUSE) and moment in (JOIN, RESTART):
            moment = draws.choice(_OF_A_STEP)
        drawn.append(_fault(draws, kind, moment))
        if kind in OF_CONTROLLER and draws.random() < 0.5:
            drawn.append(_fault(draws, KILL, START))
    return drawn[:count]


def _fault(draws: random.Random, kind: str, moment: str) -> Fault:
    longest = _LONGEST_DELAY_S.get(moment, 0.0)
    return Fault(
        kind=kind,
        moment=moment,
        after=0 if moment == START else draws.randint(4, 25),
        victims=tuple(draws.random() for _ in range(2 if kind == PAIR else 1)),
        delay=draws.uniform(0, longest),
        gap=draws.uniform(0, _PAUSE_S if kind == PAUSE else PAIR_S),
        newcomer=moment == JOIN and draws.random() < 0.6,
        at_once=draws.random() < 0.5,
    )


def chosen(shares: Sequence[float], number: int) -> list[int]:
    """The entries of a list of this length that shares name, all different; fewer if the list is shorter."""
    left, found = list(range(number)), []
    for share in shares[:number]:
        found.append(left.pop(int(share * len(left))))
    return found
