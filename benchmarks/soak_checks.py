"""Checks of a run after a soak's faults, by what was done and what the run wrote. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.soak_plans import OF_CONTROLLER, PAUSE

Event = Mapping[str, Any]
_TELLING = ("fail", "leave", "restart")
_MENDING = ("standstill", "rejected", "link", "mismatch", "corrupt", "corruption")
_LAST_STEPS = 3  # who dies in the last steps may be gone before anybody needs to know


@dataclass(frozen=True)
class Strike:
    """A fault that was carried out.

    Args:
        life: how many controllers had begun with the run then, restarts included.
        step: the last committed step then.
        rank: the worker; None: the controller, or a worker whose rank could not be asked for.
    """

    kind: str
    moment: str
    life: int
    step: int
    rank: int | None
    pid: int

    @property
    def is_loss(self) -> bool:
        """True if a worker does not outlive it."""
        return self.kind not in (PAUSE, *OF_CONTROLLER)

    def __str__(self) -> str:
        whom = f"worker {self.rank}" if self.rank is not None else "the process"
        return f"{self.kind} of {whom} (pid {self.pid}) at {self.moment}, after step {self.step}, life {self.life}"


def lives(events: Sequence[Event]) -> list[list[Event]]:
    """The events of each controller of a run, from its `start` on; what comes before the first one is the entry 0."""
    found: list[list[Event]] = [[]]
    for event in events:
        if event["event"] == "start":
            found.append([])
        found[-1].append(event)
    return found


def untold(events: Sequence[Event], strikes: Sequence[Strike], steps: int) -> list[str]:
    """The losses that events.jsonl does not tell, in words.

    A loss is told by a `fail`, `leave` or `restart` with its rank, or else its controller was struck as well. A worker
    that had not joined is no loss when the run begins again: then all newcomers end.
    """
    by_life, problems = lives(events), []
    struck = {strike.life for strike in strikes if strike.kind in OF_CONTROLLER}
    for strike in strikes:
        if not strike.is_loss or strike.step + _LAST_STEPS >= steps or strike.life in struck:
            continue
        own = by_life[strike.life] if strike.life < len(by_life) else []
        if strike.rank is None:
            told = any(event["event"] in _TELLING for event in own)
        else:
            restarted = any(event["event"] == "restart" for event in own)
            told = any(_tells(event, strike.rank) for event in own) or (restarted and not _joined(own, strike.rank))
        if not told:
            problems.append(f"events.jsonl does not tell: {strike}")
    return problems


def _joined(events: Sequence[Event], rank: int) -> bool:
    """True if the worker was a member in this life: of the first mesh, or a newcomer that has joined."""
    first = next((event.get("workers", 0) for event in events if event["event"] == "start"), 0)
    return rank < first or any(event["event"] == "join" and rank in event["ranks"] for event in events)


def _tells(event: Event, rank: int) -> bool:
    return event["event"] in _TELLING and rank in event.get("ranks", ())


def mended(events: Sequence[Event], expected: Collection[str] = ()) -> list[str]:
    """List in words the defects that a run has mended by itself though no fault asked for it.

    A message that is lost is sent again, and one that is wrong is refused: the bits stay the same, and these events are
    all that shows of a defect.

    Args:
        expected: kinds of events that the faults of this run lead to.
    """
    found = [event for event in events if event["event"] in _MENDING and event["event"] not in expected]
    return [f"no fault asked for the event {event['event']}: {event.get('message', '')}" for event in found]


def leaked(descriptors: Sequence[tuple[object, Mapping[str, int]]]) -> list[str]:
    """Descriptors that grew between the first and the last look at a run in the same state.

    Args:
        descriptors: looks in order: the state of the run, and descriptors by the kind of what they are open on.
    """
    problems = []
    for state in dict.fromkeys(state for state, _ in descriptors):
        looks = [look for other, look in descriptors if other == state]
        grown = {kind: n for kind in {*looks[0], *looks[-1]} if (n := looks[-1].get(kind, 0) - looks[0].get(kind, 0))}
        if sum(grown.values()) > 0:
            what = ", ".join(f"{kind} {number:+d}" for kind, number in sorted(grown.items()))
            problems.append(f"descriptors grew within {len(looks)} looks at {state}: {what}")
    return problems


def by_kind(targets: Collection[str]) -> Counter[str]:
    """Counts what descriptors are open on: sockets, pipes, or files by their names without numbers."""
    return Counter(re.sub(r"\d+", "N", target.partition(":[")[0]) for target in targets)
