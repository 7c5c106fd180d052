"""Events of workers, as text and as a value. Texts are `fail 6`, `fail 3 6`, `slow 2 0.5`, `join 1`, joined by `;`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from elaswave_spmd.errors import PlanError
from elaswave_spmd.mesh import Mesh
from elaswave_spmd.mesh.mesh import format_ints
from elaswave_spmd.recovery.reconfiguration import Stages, next_stages
from elaswave_spmd.scheduling.cost_model import CostModel

_MOST_JOINED = 100_000  # a mistyped number would be planned for hours, or take all memory
FORMS = "fail RANK ..., slow RANK SPEED, join COUNT; several with ;"


@dataclass(frozen=True)
class Change:
    """Workers that are lost, slow down or join, all at once.

    Args:
        gone: the ranks of workers that are lost.
        slow: (rank, speed) of workers that are slower now; 1 is a healthy worker's speed.
        joined: the number of workers that join. Their ranks are the next free ones.

    Raises:
        PlanError: a rank is named twice, a speed is not between 0 and 1, or the number of workers that join is negative
            or too large.
    """

    gone: tuple[int, ...] = ()
    slow: tuple[tuple[int, float], ...] = ()
    joined: int = 0

    def __post_init__(self) -> None:
        named = [*self.gone, *(rank for rank, _ in self.slow)]
        if twice := sorted({rank for rank in named if named.count(rank) > 1}):
            raise PlanError(
                f"rank {format_ints(twice)} is named twice in {str(self)!r}",
                rule="one thing happens to a worker at a time",
                fix="name each rank once: a worker that fails is not slow",
            )
        for rank, speed in self.slow:
            if not (math.isfinite(speed) and 0 < speed < 1):
                raise PlanError(
                    f"slow {rank} {speed:g} is not between 0 and 1",
                    rule="a slow worker has a speed between 0 and 1",
                    fix=f"slow {rank} 0.5",
                )
        if not 0 <= self.joined <= _MOST_JOINED:
            limits = f"from 0 to {_MOST_JOINED:,} workers join at once"
            raise PlanError(f"join {self.joined} is out of range", rule=limits, fix="join 1")

    @classmethod
    def parse(cls, text: str) -> Change:
        """Reads a text in one of the forms of `FORMS`.

        Raises:
            PlanError: a word is unknown, a number is malformed, or the events contradict each other.
        """
        gone: list[int] = []
        slow: list[tuple[int, float]] = []
        joined = 0
        for part in text.split(";"):
            word, *numbers = part.split() or [""]
            if word == "fail" and numbers:
                gone += [_whole(number, text) for number in numbers]
            elif word == "slow" and len(numbers) == 2:
                slow.append((_whole(numbers[0], text), _speed(numbers[1], text)))
            elif word == "join" and len(numbers) == 1:
                joined += _whole(numbers[0], text)
            else:
                known = word in ("fail", "slow", "join")
                wrong = "lacks what it needs" if known else "is no event"
                raise PlanError(
                    f"{part.strip() or 'nothing'!r} {wrong}",
                    rule=f"{word} is followed by what it needs" if known else "an event is known",
                    where=f"event={text!r}",
                    exists=FORMS,
                    fix="fail 6",
                )
        return cls(tuple(gone), tuple(slow), joined)

    def check(self, mesh: Mesh) -> Change:
        """This change, after a check that it can happen to this mesh.

        Raises:
            PlanError: a rank is not in the mesh, or no worker is left.
        """
        if unknown := [rank for rank in (*self.gone, *(rank for rank, _ in self.slow)) if rank not in mesh]:
            raise PlanError(
                f"rank {format_ints(unknown)} is no worker of the mesh",
                rule="an event names workers of the mesh",
                where=f"event={str(self)!r}",
                exists=f"ranks {format_ints(sorted(mesh.members))} of mesh {mesh.shape}",
                fix="name a rank that exists",
            )
        if len(self.gone) == mesh.num_workers and not self.joined:
            raise PlanError(
                f"all {mesh.num_workers} workers fail",
                rule="somebody is left, or joins",
                where=f"event={str(self)!r}",
                fix="leave a worker, or let one join",
            )
        return self

    def stages(self, mesh: Mesh) -> Stages:
        """The ranks of each stage after the change, by the controller's own rule (`reconfiguration.next_stages`)."""
        first = max(mesh.members) + 1
        return next_stages(mesh.stages, self.gone, range(first, first + self.joined), mesh.num_stages)

    def costs(self, costs: CostModel) -> CostModel:
        """The cost model after the change."""
        return costs.without(self.gone).with_speeds(dict(self.slow)) if self.gone or self.slow else costs

    def __str__(self) -> str:
        words = ["fail " + " ".join(map(str, self.gone))] if self.gone else []
        words += [f"slow {rank} {speed:g}" for rank, speed in self.slow]
        return "; ".join(words + ([f"join {self.joined}"] if self.joined else [])) or "nothing"


def remaining_share(mesh: Mesh, costs: CostModel, change: Change) -> float:
    """The aggregate speed of all workers after a change, divided by that before. A worker that joins has speed 1."""
    now = change.costs(costs)
    gone = frozenset(change.gone)
    left = [rank for rank in mesh.members if rank not in gone]
    return (float(now.speeds_of(left).sum()) + change.joined) / float(costs.speeds_of(mesh.members).sum())


def _whole(text: str, event: str) -> int:
    if not text.isdecimal():
        raise PlanError(
            f"{text!r} is not a whole number",
            rule="ranks and counts are whole numbers",
            where=f"event={event!r}",
            exists=FORMS,
            fix="fail 3 6",
        )
    return int(text)


def _speed(text: str, event: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise PlanError(
            f"{text!r} is not a number",
            rule="a speed is a number",
            where=f"event={event!r}",
            exists=FORMS,
            fix="slow 2 0.5",
        ) from None
