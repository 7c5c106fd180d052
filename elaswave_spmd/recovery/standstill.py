"""Detection of a run that stands still: all workers live and wait, and no message comes. No clock of its own, no I/O.

By the rules of the protocol this cannot happen. It happens if a message is lost without a trace, or by a bug. The
failure detector does not notice it, as a worker that waits need not make progress (failure_detector.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from elaswave_spmd.conf.schema import Timeouts
from elaswave_spmd.mesh.mesh import shortened_workers
from elaswave_spmd.recovery.messages import Heartbeat
from elaswave_spmd.recovery.tick_clock import TickClock

_MOST_TOLD = 8  # different reasons for waiting that a sentence lists
_STEPS = 4  # nothing moves for this many mean step times: longer than any part of a normal step takes


@dataclass(frozen=True)
class Standstill:
    """Nothing has moved for too long.

    Args:
        seconds: for how many seconds nothing has moved.
        waits: rank -> what the worker waits for, in words; empty if its heartbeats do not say.
    """

    seconds: float
    waits: Mapping[int, str]

    def by_reason(self, members: Collection[int]) -> dict[str, list[int]]:
        """Reason for waiting, in words -> those of `members` that wait for it."""
        found: dict[str, list[int]] = {}
        for rank in sorted(members):
            found.setdefault(self.waits.get(rank) or "something", []).append(rank)
        return found

    def told(self, members: Collection[int]) -> str:
        """What each of these workers waits for, in a sentence."""
        parts = [
            f"{shortened_workers(ranks)} {'wait' if len(ranks) > 1 else 'waits'} for {reason}"
            for reason, ranks in self.by_reason(members).items()
        ]
        more = f"; and {len(parts) - _MOST_TOLD} more" if len(parts) > _MOST_TOLD else ""
        return "; ".join(parts[:_MOST_TOLD]) + more


@dataclass(frozen=True)
class _Said:
    """The newest heartbeat of a worker, as far as it shows whether something moves."""

    progress: int = -1
    action: str = ""


class StandstillDetector:
    """Watches whether anything moves in a run.

    These count as movement: a worker computes or sends, finishes an action, or begins to wait for something else; the
    controller gets a message other than a heartbeat, or sends one to members; a step is committed.

    Its clock is that of the failure detector, which counts each tick as one heartbeat period at most: so a pause of the
    controller's machine is no standstill.

    The limit is the longest of these: `timeouts.progress`; `_STEPS` times the mean time from one commit to the next, or
    `timeouts.start` while there is no such mean; and the time after which a silent link is noticed
    (`timeouts.silent_link` and `timeouts.suspect`). So all ways to find a loss are faster.

    Handling a heartbeat takes the same time however many workers there are.
    """

    def __init__(self, timeouts: Timeouts, clock: TickClock) -> None:
        self._timeouts = timeouts
        self._least = max(timeouts.progress, timeouts.silent_link + timeouts.suspect)
        self._clock = clock
        self._moved_at = clock.now
        self._said: dict[int, _Said] = {}
        self._committed_at: float | None = None  # None: not since the begin, or not since a standstill
        self._step_seconds = 0.0
        self._num_steps = 0

    def watch(self, rank: int) -> None:
        """A worker is ready: its heartbeats count from now on."""
        self._said[rank] = _Said()
        self.moved()

    def forget(self, rank: int) -> None:
        """A worker has ended, or is fenced: its heartbeats do not count any more. Unknown ranks are ignored."""
        self._said.pop(rank, None)

    def heartbeat(self, beat: Heartbeat) -> None:
        """A heartbeat has come. It is ignored if the worker is not watched."""
        if (before := self._said.get(beat.rank)) is None:
            return
        if not beat.waiting or beat.is_sending or before.progress != beat.progress or before.action != beat.action:
            self._moved_at = self._clock.now
            self._said[beat.rank] = _Said(beat.progress, beat.action)

    def moved(self) -> None:
        """Note any other sign that the run does not stand still."""
        self._moved_at = self._clock.now

    def committed(self) -> None:
        """A step is committed."""
        if self._committed_at is not None:
            self._step_seconds += self._clock.now - self._committed_at
            self._num_steps += 1
        self._committed_at = self._moved_at = self._clock.now

    def tick(self) -> Standstill | None:
        """The clock has ticked, and all messages that came before the time that it shows now were handed in.

        Returns:
            A Standstill if nothing has moved for too long, else None. Then the time begins again, so that it is not
            reported at every tick.
        """
        seconds = self._clock.now - self._moved_at
        if seconds < self.limit:
            return None
        self._moved_at, self._committed_at = self._clock.now, None
        return Standstill(seconds, {rank: said.action for rank, said in self._said.items()})

    @property
    def limit(self) -> float:
        """Seconds after which a run in which nothing moves stands still."""
        if not self._num_steps:
            return max(self._least, self._timeouts.start)
        return max(self._least, _STEPS * self._step_seconds / self._num_steps)
