"""Replacements for lost workers, and spares: workers that are ready, and wait outside of the mesh to replace one.

Everything here takes facts and returns actions or values, on the controller's thread. A place becomes empty when a
member is lost, or a worker that was about to join. It is filled by a spare if one is ready, else by the next worker
that becomes ready. So workers that are started for a place and workers that are started as spares are of the same kind:
which of the two a worker becomes is decided when it is ready.

Where no worker may be started on the controller's machine (runtime.local_workers=0), starts wait for a free place of an
agent (`note_room`).

The number of starts in a minute is limited, so that workers that die at every start do not take processor time from
those that train. Starts on machines that join count as well (machines.py), so that a machine that is given up and comes
back again and again does not change the mesh all the time. `elastic.replace` and `elastic.spares` differ only in the
number of workers that are started in advance.
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
from elaswave_spmd.runtime.processes.launcher import NO_PLACE

_MINUTE_S = 60.0
_PLACE_S = 5.0  # seconds for which starts lack a place before it is said: the process of a lost worker may still end


@dataclass(frozen=True)
class ReplacementPolicy:
    """The settings of what is started when workers are lost.

    Args:
        replaces: True if empty places are filled (elastic.replace, or elastic.spares).
        spares: the number of workers that wait outside of the mesh (elastic.spares).
        per_minute: how many workers may be started within a minute, as replacements or on machines that join
            (elastic.replacements_per_minute).
    """

    replaces: bool = False
    spares: int = 0
    per_minute: int = 1

    @classmethod
    def from_settings(cls, elastic: ElasticSettings) -> ReplacementPolicy:
        return cls(elastic.replaces, elastic.spares, elastic.replacements_per_minute)


class Replacements:
    """The empty places of the mesh, and the workers outside of the mesh that will fill them.

    Args:
        roster: gives new ranks.
    """

    def __init__(self, policy: ReplacementPolicy, roster: Roster) -> None:
        self._policy = policy
        self._roster = roster
        self._places = 0  # the number of empty places for which no spare was ready
        self._starting: set[int] = set()  # workers that were started by this object and are not ready yet
        self._waiting: dict[int, Ready] = {}  # spares that are ready, in the order in which they became ready
        # The number of first spares that are still to be started. They replace nobody, so they are not limited.
        self._first_spares = policy.spares
        self._starts: deque[float] = deque()  # times of the starts within the last minute
        self._reported: set[str] = set()  # the kinds of starts for which it was reported that the limit delays some
        self._room: int | None = None  # the number of free places; None: no limit
        self._no_place_told = 0  # the number of starts for which it was reported that they lack a place
        self._no_place_since: float | None = None  # the time since when there are more

    @property
    def spares(self) -> Mapping[int, bool]:
        """Rank -> whether it is ready, of the spares: workers outside of the mesh that have no empty place to fill."""
        # Of the workers that start, as many as there are empty places will fill these: the oldest, which are usually
        # ready first. The others are spares.
        starting = sorted(self._starting)[self._places :] if self._policy.spares else []
        return MappingProxyType(dict.fromkeys(self._waiting, True) | dict.fromkeys(starting, False))

    @property
    def num_unfilled(self) -> int:
        """The places that are empty and for which no worker has been started yet."""
        return max(0, self._places - len(self._starting))

    def ready(self, message: Ready) -> bool:
        """A worker is ready. Returns True if it waits as a spare, so that the protocol must not add it to the mesh."""
        if message.rank not in self._starting:
            return False
        self._starting.remove(message.rank)
        if self._places:
            self._places -= 1
            return False
        self._waiting[message.rank] = message
        return True

    def lost(self, rank: int) -> Ready | None:
        """A worker is lost. Returns the spare that takes its place; None if none is ready, or it had no place."""
        if rank in self._starting or rank in self._waiting:
            self._starting.discard(rank)
            self._waiting.pop(rank, None)
            return None
        if self._waiting:
            return self._waiting.pop(next(iter(self._waiting)))
        self._places += self._policy.replaces
        return None

    def note_room(self, places: int | None) -> None:
        """Note how many workers can be started, before a decision that may start some; None if there is no limit."""
        self._room = places

    def due(self, now: float, *, spares: bool) -> tuple[tuple[int, ...], list[Action]]:
        """Start the replacements and spares that are missing, as far as there is room and the limit allows.

        Args:
            now: the time in seconds, by the controller's clock.
            spares: True if spares are started as well, which is so once the first mesh is formed.

        Returns:
            The ranks that are started, and the actions that start them and report what the limit holds back.
        """
        wanted = self._places + (self._policy.spares if spares else 0)
        first = self._first_spares if spares else 0
        missing = wanted - len(self._waiting) - len(self._starting) - first
        # A start that has no place is no start: it does not count towards the limit.
        possible = self._within_room(missing)
        number = self._allow(possible, now)
        first_now = self._within_room(first)
        self._first_spares -= first_now
        self._use_room(first_now)
        # If nothing had a place, it is not known whether the limit would hold anything back.
        held_back = self._held_back(possible - number, "lost", "replaced", now) if possible or not missing else []
        held_back += self._without_place(missing - possible + first - first_now, now)
        if not first_now + number:
            return (), held_back
        ranks = self._roster.allocate(first_now + number)
        self._starting.update(ranks)
        return ranks, [Spawn(ranks), *held_back]

    def allow(self, number: int, now: float) -> tuple[int, list[Action]]:
        """Ask to start `number` workers on machines that have joined.

        Returns:
            The number of workers that may be started now, which are counted; and the actions that report that the
            others have to wait.
        """
        allowed = self._allow(number, now)
        return allowed, self._held_back(number - allowed, "further", "started", now)

    def _allow(self, number: int, now: float) -> int:
        while self._starts and now - self._starts[0] >= _MINUTE_S:
            self._starts.popleft()
        allowed = max(0, min(number, self._policy.per_minute - len(self._starts)))
        self._starts.extend([now] * allowed)
        self._use_room(allowed)
        return allowed

    def _within_room(self, number: int) -> int:
        return number if self._room is None else min(number, self._room)

    def _use_room(self, number: int) -> None:
        if self._room is not None:
            self._room = max(0, self._room - number)

    def _without_place(self, number: int, now: float) -> list[Action]:
        """The event that starts lack a place, once for each that is one more, when they have lacked it for a while."""
        self._no_place_told = min(self._no_place_told, number)
        if number <= self._no_place_told:
            self._no_place_since = None
            return []
        if self._no_place_since is None:
            self._no_place_since = now
        if now - self._no_place_since < _PLACE_S:
            return []
        self._no_place_told, self._no_place_since = number, None
        who = "1 replacement or spare waits" if number == 1 else f"{number} replacements or spares wait"
        return [Record("no_place", {"missing": number, "message": f"{who} for a place: {NO_PLACE}"})]

    def _held_back(self, number: int, which: str, done: str, now: float) -> list[Action]:
        """The event that the limit delays starts of one kind. It is written once, until none is delayed any more."""
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
