"""Who hangs: heartbeats and ticks in, suspects out. No clock of its own, no I/O.

A death is seen by other means, at once; this is for what does not die: a stopped process, a machine that is gone, a
training thread in an endless loop. A suspect may be wrong, so it is fenced before anybody acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_spmd.recovery.timeouts import Timeouts


@dataclass(frozen=True)
class Suspect:
    """Worker `rank` is taken to hang; `reason` says why, in words."""

    rank: int
    reason: str


@dataclass
class _Watched:
    """What is known of a worker. Seconds are of ticks: `silent` since a heartbeat, `stalled` in its present action."""

    progress: int | None = None  # None until the first heartbeat
    finished: bool = False  # an action, since it is watched
    waiting: bool = True
    action: str = ""
    silent: float = 0.0
    stalled: float = 0.0
    suspected: bool = False


class Liveness:
    """Watches the heartbeats of workers.

    Time is that of the ticks, each counted as one heartbeat period at most: after a pause of the controller's machine,
    heartbeats that wait in its mailbox are read before anybody is silent for long. So a worker is never suspected too
    early, however late the ticks come.

    A worker that waits for a message is not asked for progress. How long an action may take is `timeouts.progress`, or
    `progress_factor` times the mean of all that the watched workers finished, or, before a worker has finished one,
    `timeouts.start`: whatever is longest.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._workers: dict[int, _Watched] = {}
        self._busy_seconds = 0.0
        self._num_actions = 0

    @property
    def watched(self) -> frozenset[int]:
        """The ranks that are watched, suspects included."""
        return frozenset(self._workers)

    def watch(self, rank: int) -> None:
        """Expect heartbeats of `rank` from now on."""
        assert rank not in self._workers, rank
        self._workers[rank] = _Watched()

    def forget(self, rank: int) -> None:
        """Expect nothing of `rank` any more: it has ended, or is fenced. Unknown ranks are ignored."""
        self._workers.pop(rank, None)

    def heartbeat(self, rank: int, progress: int, waiting: bool, action: str = "") -> None:
        """A heartbeat has come. Of ranks that are not watched it is ignored; a suspect stays one.

        Args:
            progress: number of actions that the worker has finished.
            waiting: it waits for a message.
            action: what it does now, in words.
        """
        worker = self._workers.get(rank)
        if worker is None:
            return
        if worker.progress is not None and progress != worker.progress:
            if progress > worker.progress:
                self._busy_seconds += worker.stalled
                self._num_actions += progress - worker.progress
            worker.finished = True
            worker.stalled = 0.0
        if waiting:
            worker.stalled = 0.0
        worker.progress, worker.waiting, worker.action, worker.silent = progress, waiting, action, 0.0

    def tick(self, dt: float) -> list[Suspect]:
        """`dt` seconds have passed since the last tick, and all heartbeats that came before now were handed in.

        Returns: those who became suspect, by rank; each is said once.
        """
        assert dt >= 0, dt
        dt = min(dt, self._timeouts.heartbeat)
        usual = self._usual_limit()
        suspects = []
        for rank in sorted(self._workers):
            worker = self._workers[rank]
            if worker.suspected:
                continue
            worker.silent += dt
            if not worker.waiting:
                worker.stalled += dt
            if reason := self._reason(worker, usual):
                worker.suspected = True
                suspects.append(Suspect(rank, reason))
        return suspects

    def _usual_limit(self) -> float:
        """How long an action may take."""
        usual = self._busy_seconds / self._num_actions if self._num_actions else 0.0
        return max(self._timeouts.progress, self._timeouts.progress_factor * usual)

    def _reason(self, worker: _Watched, limit: float) -> str:
        if worker.silent >= self._timeouts.suspect:
            return f"no heartbeat for {worker.silent:.1f} s"
        if worker.stalled >= (limit if worker.finished else max(limit, self._timeouts.start)):
            return f"no progress for {worker.stalled:.1f} s in {worker.action or 'an action'}, and it waits for nobody"
        return ""
