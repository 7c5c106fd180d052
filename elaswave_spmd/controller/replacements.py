"""Workers that are started in place of lost ones, and spares, which wait beside the mesh to take such a place at once.

Everything here takes facts and returns actions or values, on the controller's thread. A place is left empty by a member
that is lost, or by a worker that is lost on its way into the mesh. It is filled by a spare, if one is ready, else by
the next worker that gets ready. What is started for a place and what is started as a spare are therefore the same kind
of worker: which of the two it becomes is decided when it is ready.

The number of starts in a minute is limited: a worker that dies in every start must not take the processors from those
that train. Starts on machines that come count as well (machines.py): one that is given up and comes back for ever must
not change the mesh for ever. `elastic.replace` and `elastic.spares` differ only in the number of workers that are
started ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from elaswave_spmd.conf.schema import ElasticSettings
from elaswave_spmd.controller.actions import Action, Record, Spawn
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.recovery.messages import Ready

_MINUTE_S = 60.0


@dataclass(frozen=True)
class ReplacementPolicy:
    """The settings of what is started when workers are lost.

    Args:
        replaces: places that are left empty are filled (elastic.replace, or spares).
        spares: workers that wait beside the mesh (elastic.spares).
        per_minute: workers that are started in place of others, and on machines that come, within a minute
            (elastic.replacements_per_minute).
    """

    replaces: bool = False
    spares: int = 0
    per_minute: int = 1

    @classmethod
    def from_settings(cls, elastic: ElasticSettings) -> ReplacementPolicy:
        return cls(elastic.replaces, elastic.spares, elastic.replacements_per_minute)


class Replacements:
    """The places that are empty, and the workers beside the mesh that are to fill them.

    Args:
        roster: gives new ranks.
    """

    def __init__(self, policy: ReplacementPolicy, roster: Roster) -> None:
        self._policy = policy
        self._roster = roster
        self._places = 0  # empty, and no spare was there for them
        self._starting: set[int] = set()  # workers that were started by this, and are not ready
        self._waiting: dict[int, Ready] = {}  # spares that are ready, in the order in which they came
        self._first_spares = policy.spares  # that have not been started yet: they replace nobody, and are not limited
        self._starts: deque[float] = deque()  # times of the starts within the last minute
        self._reported: set[str] = set()  # of whom it was told that the limit holds them back; until it does not

    @property
    def spares(self) -> Mapping[int, bool]:
        """Rank -> whether it is ready, of the workers that wait beside the mesh or are to. None has a place to fill."""
        # Of those that start, as many are to fill places as are empty: the oldest, as they are ready first, mostly.
        starting = sorted(self._starting)[self._places :] if self._policy.spares else []
        return MappingProxyType(dict.fromkeys(self._waiting, True) | dict.fromkeys(starting, False))

    @property
    def num_unfilled(self) -> int:
        """The places that are empty and for which no worker has been started yet."""
        return max(0, self._places - len(self._starting))

    def ready(self, message: Ready) -> bool:
        """A worker is ready. Returns True if it waits as a spare: the mesh does not hear of it."""
        if message.rank not in self._starting:
            return False
        self._starting.remove(message.rank)
        if self._places:
            self._places -= 1
            return False
        self._waiting[message.rank] = message
        return True

    def lost(self, rank: int) -> Ready | None:
        """A worker is lost. Returns the spare that takes its place; None if none does now, or it had no place."""
        if rank in self._starting or rank in self._waiting:
            self._starting.discard(rank)
            self._waiting.pop(rank, None)
            return None
        if self._waiting:
            return self._waiting.pop(next(iter(self._waiting)))
        self._places += self._policy.replaces
        return None

    def due(self, now: float, *, spares: bool) -> tuple[tuple[int, ...], list[Action]]:
        """Start what is missing, as far as the limit allows.

        Args:
            spares: spares are wanted by now: after the first workers have started.

        Returns:
            The ranks that are started, and the actions that start them and report what the limit holds back.
        """
        first, self._first_spares = (self._first_spares, 0) if spares else (0, self._first_spares)
        wanted = self._places + (self._policy.spares if spares else 0)
        missing = wanted - len(self._waiting) - len(self._starting) - first
        number = self._allow(missing, now)
        held_back = self._held_back(missing - number, "lost", "replaced", now)
        if not first + number:
            return (), held_back
        ranks = self._roster.allocate(first + number)
        self._starting.update(ranks)
        return ranks, [Spawn(ranks), *held_back]

    def allow(self, number: int, now: float) -> tuple[int, list[Action]]:
        """So many workers are to be started on machines that have come, now or as soon as the limit allows.

        Returns:
            The number of those that may be started now, and are counted; and the actions that report the others.
        """
        allowed = self._allow(number, now)
        return allowed, self._held_back(number - allowed, "further", "started", now)

    def _allow(self, number: int, now: float) -> int:
        while self._starts and now - self._starts[0] >= _MINUTE_S:
            self._starts.popleft()
        allowed = max(0, min(number, self._policy.per_minute - len(self._starts)))
        self._starts.extend([now] * allowed)
        return allowed

    def _held_back(self, number: int, which: str, done: str, now: float) -> list[Action]:
        """The event that workers are not replaced, or not started, for now: once until all are."""
        if number <= 0:
            self._reported.discard(which)
            return []
        if which in self._reported:
            return []
        self._reported.add(which)
        limit, seconds = self._policy.per_minute, _MINUTE_S - (now - self._starts[0])
        lost = f"{number} {which} worker{'s are' if number > 1 else ' is'} not {done} for now"
        started = f"{limit} {'has' if limit == 1 else 'have'} been started within a minute"
        message = f"{lost}: {started} (elastic.replacements_per_minute={limit}); the next one in {seconds:.0f} s"
        about = {"missing": number, "per_minute": limit, "seconds": round(seconds, 3), "message": message}
        return [Record("replacements", about)]
