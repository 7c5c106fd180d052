"""Who hangs: heartbeats and ticks in, suspects out. No clock of its own, no I/O.

A death is seen by other means, at once; this is for what does not die: a stopped process, a machine that is gone, a
training thread in an endless loop, a newcomer that never gets ready. A suspect may be wrong, so it is fenced before
anybody acts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from elaswave_spmd.conf.schema import Timeouts


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
    owing: float = 0.0  # its answer to PREPARE
    leaving: float | None = None  # since it asked to; None: it has not
    suspected: bool = False


class Liveness:
    """Watches the heartbeats of workers.

    Time is that of the ticks, each counted as one heartbeat period at most: after a pause of the controller's machine,
    heartbeats that wait in its mailbox are read before anybody is silent for long. So a worker is never suspected too
    early, however late the ticks come.

    A worker that waits for a message is not asked for progress. How long an action may take is `timeouts.progress`, or
    `progress_factor` times the mean of all that the watched workers finished, or, before a worker has finished one,
    `timeouts.start`: whatever is longest. The answer to PREPARE may take `timeouts.status`; that of a worker in the
    middle of an action as many times the mean, or a first action's time, if that is longer.

    Args:
        is_free: whether a worker that has asked to leave may go. Asked at the end of `timeouts.leave`; else it gets as
            much time again.
    """

    def __init__(self, timeouts: Timeouts, is_free: Callable[[int], bool] = lambda _: True) -> None:
        self._timeouts, self._is_free = timeouts, is_free
        self._workers: dict[int, _Watched] = {}
        self._starting: dict[int, float] = {}  # newcomers -> seconds
        self._asked, self._owing = -1, frozenset[int]()
        self._busy_seconds = 0.0
        self._num_actions = 0

    @property
    def watched(self) -> frozenset[int]:
        """The ranks that are watched, suspects included."""
        return frozenset(self._workers)

    def expect(self, rank: int) -> None:
        """A newcomer has been started: it is to be ready, and watched, within `timeouts.join`."""
        assert rank not in self._workers, rank
        self._starting[rank] = 0.0

    def watch(self, rank: int) -> None:
        """Expect heartbeats of `rank` from now on."""
        assert rank not in self._workers, rank
        self._starting.pop(rank, None)
        self._workers[rank] = _Watched()

    def forget(self, rank: int) -> None:
        """Expect nothing of `rank` any more: it has ended, or is fenced. Unknown ranks are ignored."""
        self._starting.pop(rank, None)
        self._workers.pop(rank, None)

    def owe(self, epoch: int, ranks: Collection[int]) -> None:
        """Who could answer the PREPARE of `epoch` by now and has not. Another epoch is another question."""
        for rank, worker in self._workers.items():
            if epoch != self._asked or rank not in ranks:
                worker.owing = 0.0
        self._asked, self._owing = epoch, frozenset(ranks)

    def wants_to_leave(self, rank: int) -> None:
        """A worker has asked to leave: `timeouts.leave` runs from now on. Unknown ranks are ignored."""
        worker = self._workers.get(rank)
        if worker is not None and worker.leaving is None:
            worker.leaving = 0.0

    def heartbeat(self, rank: int, progress: int, waiting: bool, action: str = "") -> None:
        """A heartbeat has come. A newcomer gets as much time again; of others that are not watched it is ignored.

        A suspect stays one.

        Args:
            progress: number of actions that the worker has finished.
            waiting: it waits for a message.
            action: what it does now, in words.
        """
        worker = self._workers.get(rank)
        if worker is None:
            if rank in self._starting and not waiting:  # it has compiled something
                self._starting[rank] = 0.0
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
        suspects = self._late_newcomers(dt)
        for rank in sorted(self._workers):
            worker = self._workers[rank]
            if worker.suspected:
                continue
            worker.silent += dt
            if not worker.waiting:
                worker.stalled += dt
            if rank in self._owing:
                worker.owing += dt
            if worker.leaving is not None:
                worker.leaving += dt
                if worker.leaving >= self._timeouts.leave and not self._is_free(rank):
                    worker.leaving = 0.0
            if reason := self._reason(worker, usual):
                worker.suspected = True
                suspects.append(Suspect(rank, reason))
        return sorted(suspects, key=lambda suspect: suspect.rank)

    def _late_newcomers(self, dt: float) -> list[Suspect]:
        """Those that are given up; nothing is expected of them any more."""
        for rank in self._starting:
            self._starting[rank] += dt
        late = [(rank, seconds) for rank, seconds in self._starting.items() if seconds >= self._timeouts.join]
        for rank, _ in late:
            del self._starting[rank]
        return [Suspect(rank, f"not ready after {seconds:.1f} s") for rank, seconds in late]

    def _usual_limit(self) -> float:
        """How long an action may take by what actions have taken."""
        usual = self._busy_seconds / self._num_actions if self._num_actions else 0.0
        return self._timeouts.progress_factor * usual

    def _reason(self, worker: _Watched, usual: float) -> str:
        timeouts = self._timeouts
        limit = usual if worker.finished else max(usual, timeouts.start)
        if worker.silent >= timeouts.suspect:
            return f"no heartbeat for {worker.silent:.1f} s"
        if worker.stalled >= max(limit, timeouts.progress):
            return f"no progress for {worker.stalled:.1f} s in {worker.action or 'an action'}, and it waits for nobody"
        if worker.owing >= (timeouts.status if worker.waiting else max(limit, timeouts.status)):
            return f"no answer to PREPARE for {worker.owing:.1f} s"
        if worker.leaving is not None and worker.leaving >= timeouts.leave:
            return f"it asked to leave {worker.leaving:.1f} s ago and was not let go"
        return ""


# Links that are lost while both their ends live: reports and heartbeats in, verdicts out. No clock, no I/O.
_PROOF = 2  # heartbeats: the first may have been on its way already when its sender died


@dataclass(frozen=True)
class Verdict:
    """Both ends of a lost link live.

    Args:
        ends: the two workers; one worker alone: the link was the controller's.
        evicted: who has to go; None: they are linked again.
    """

    ends: frozenset[int]
    evicted: int | None

    @property
    def reason(self) -> str:
        """In words."""
        if len(self.ends) == 1:
            return "its link to the controller was lost"
        first, second = sorted(self.ends)
        again = " again" if self.evicted is not None else ""
        return f"the link between workers {first} and {second} was lost{again}"


class BrokenLinks:
    """The links of a run that were reported lost.

    Both directions of a pair may be reported; until the verdict that is one loss.
    """

    def __init__(self) -> None:
        self._beats: dict[frozenset[int], dict[int, int]] = {}  # ends of a lost link -> heartbeats since, by end
        self._linked_again: set[frozenset[int]] = set()

    def closed(self, *ends: int) -> None:
        """A link between two workers, or between the controller and one worker, is reported lost."""
        assert ends and len(set(ends)) == len(ends) <= 2, ends
        self._beats.setdefault(frozenset(ends), dict.fromkeys(ends, 0))

    def forget(self, rank: int) -> None:
        """A worker is lost, or was let go: its links end with it."""
        for ends in [ends for ends in self._beats if rank in ends]:
            del self._beats[ends]

    def heartbeat(self, rank: int) -> list[Verdict]:
        """A worker lives. What that proves."""
        found = []
        for ends, beats in list(self._beats.items()):
            if rank in beats:
                beats[rank] += 1
                if min(beats.values()) >= _PROOF:
                    del self._beats[ends]
                    found.append(self._judge(ends))
        return found

    def _judge(self, ends: frozenset[int]) -> Verdict:
        if len(ends) == 1 or ends in self._linked_again:
            return Verdict(ends, max(ends))
        self._linked_again.add(ends)
        return Verdict(ends, None)
