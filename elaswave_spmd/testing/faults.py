"""Faults for the simulated cluster: what happens to whom, at which point of which step."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("kill", "stop", "term", "join", "replace")


@dataclass(frozen=True)
class Fault:
    """Something that happens once, the first time that the worker passes the point.

    Args:
        step: the step that is under way.
        kind: kill (the process is gone), stop (it stands still and comes back much later), term (it asks to leave),
            join (one more worker comes), replace (kill, and a new worker comes).
        rank: whom; of a join: who is at the point when it happens.
        point: a runtime.points.Point by name.
        count: the how-manieth time that this worker passes this point in this step, from 1.
    """

    step: int
    kind: str
    rank: int
    point: str
    count: int = 1

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
