"""Detection of a run that stands still: every worker lives and waits, and nothing comes. No clock of its own, no I/O.

No rule of the protocol leads to this. A message that is lost without a trace does, and so does a bug. The failure
detector does not see it, since a worker that waits for others is never asked for progress (failure_detector.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from elaswave_spmd.conf.schema import Timeouts
from elaswave_spmd.mesh.mesh import shortened_workers
from elaswave_spmd.recovery.messages import Heartbeat

_MOST_TOLD = 8  # different things that are waited for
_STEPS = 4  # no step has a part in which nothing moves that is so many times as long as whole steps are


@dataclass(frozen=True)
class Standstill:
    """Nothing has moved for so many seconds.

    Args:
        waits: rank -> what the worker waits for, in words; empty: it has not said it.
    """

    seconds: float
    waits: Mapping[int, str]

    def by_reason(self, members: Collection[int]) -> dict[str, list[int]]:
        """What is waited for, in words -> those of these workers that wait for it."""
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
    """Watches whether anything moves: a worker that computes or sends, finishes an action or begins to wait for
    something else; a message to the controller that is no heartbeat, or one of the controller to members; a step that
    is committed.

    Time is the sum of the ticks, each counted as one heartbeat period at most, as in `failure_detector.Liveness`: a
    pause of the controller's machine is no standstill.

    The limit is `timeouts.progress`, or `_STEPS` times the mean time from one commit to the next, or, before there is
    such a mean, `timeouts.start`: whatever is longest. Everything that finds a loss is faster: silence, an
    unanswered Prepare, and a link on which nothing is acknowledged, which has some time more here.

    A heartbeat costs the same however many workers there are.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._least = max(timeouts.progress, timeouts.silent_link + timeouts.suspect)
        self._clock = 0.0
        self._moved_at = 0.0
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
        """A heartbeat has come; of a worker that is not watched it is ignored."""
        if (before := self._said.get(beat.rank)) is None:
            return
        if not beat.waiting or beat.is_sending or before.progress != beat.progress or before.action != beat.action:
            self._moved_at = self._clock
            self._said[beat.rank] = _Said(beat.progress, beat.action)

    def moved(self) -> None:
        """Something else shows that the run does not stand still."""
        self._moved_at = self._clock

    def committed(self) -> None:
        """A step is committed."""
        if self._committed_at is not None:
            self._step_seconds += self._clock - self._committed_at
            self._num_steps += 1
        self._committed_at = self._moved_at = self._clock

    def tick(self, dt: float) -> Standstill | None:
        """`dt` seconds have passed since the last tick, and all heartbeats that came before now were handed in.

        Returns: that nothing has moved for too long. It is told once: then as much time begins again.
        """
        assert dt >= 0, dt
        self._clock += min(dt, self._timeouts.heartbeat)
        seconds = self._clock - self._moved_at
        if seconds < self.limit:
            return None
        self._moved_at, self._committed_at = self._clock, None
        return Standstill(seconds, {rank: said.action for rank, said in self._said.items()})

    @property
    def limit(self) -> float:
        """Seconds after which a run in which nothing moves stands still."""
        if not self._num_steps:
            return max(self._least, self._timeouts.start)
        return max(self._least, _STEPS * self._step_seconds / self._num_steps)
