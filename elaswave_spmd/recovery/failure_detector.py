"""Detection of workers that hang, and of links that were lost while both ends live. No clock of its own, no I/O.

A death is noticed by other means, at once. `Liveness` is for what does not die: a stopped process, a machine that is
gone, a training thread in an endless loop, a newcomer that never gets ready. A suspect may be wrong, so it is fenced
(its messages are void and its process is killed) before anybody acts on it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from dataclasses import dataclass

from elaswave_spmd.conf.schema import Timeouts


@dataclass(frozen=True)
class Suspect:
    """Worker `rank` is taken to hang, for a `reason` in words.

    Args:
        is_silent: since nothing is heard of it: no heartbeats, or of a worker that starts, not that it is ready.
    """

    rank: int
    reason: str
    is_silent: bool = False


@dataclass
class _Watched:
    """State of a worker that is watched. All times are those of the detector's own clock; None: not running."""

    heard: float  # of the last heartbeat, or when it was first watched
    progress: int | None = None  # None until the first heartbeat
    finished: bool = False  # it has finished an action since it is watched
    action: str = ""
    busy_since: float | None = None  # its present action, or the last sign of progress in it; None: it waits
    unanswered_since: float | None = None  # its answer to Prepare could have come since then
    leaving_since: float | None = None  # it asked to leave
    suspected: bool = False


@dataclass
class _Starting:
    """A worker that is not ready yet: since when that is waited for, or since its last sign of progress; how long."""

    since: float
    seconds: float


class Liveness:
    """Watches the heartbeats of workers.

    Time is the sum of the ticks, each counted as one heartbeat period at most: after a pause of the controller's
    machine, heartbeats that wait in its mailbox are read before anybody is silent for long. So a worker is never
    suspected too early, however late the ticks come.

    A worker that waits for a message is not asked for progress. How long an action may take is `timeouts.progress`, or
    `progress_factor` times the mean of all that the watched workers finished, or, before a worker has finished one,
    `timeouts.start`: whatever is longest. The answer to Prepare may take `timeouts.status`; that of a worker in the
    middle of an action as many times the mean, or a first action's time, if that is longer.

    A heartbeat costs the same however many workers there are: it only writes down the time. A tick looks at the workers
    whose next deadline is due. A heap has that deadline for each worker; as heartbeats only move deadlines later, an
    entry that has come too early is computed anew and put back. No deadline is further away than `timeouts.suspect`,
    the shortest of all, so what begins to count in between (an answer that is owed) is seen in time.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._clock = 0.0
        self._workers: dict[int, _Watched] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap of (time, rank); ranks that are gone are skipped
        self._leavers = set[int]()
        self._starting: dict[int, _Starting] = {}
        self._prepare_epoch = -1
        self._unanswered = frozenset[int]()
        self._busy_seconds = 0.0
        self._num_actions = 0

    @property
    def has_overdue_leavers(self) -> bool:
        """True if `timeouts.leave` is over at the next tick for a worker that has asked to leave."""
        soon = self._clock + self._timeouts.heartbeat  # no tick counts for more
        return any(self._is_overdue_leaver(self._workers[rank], soon) for rank in self._leavers)

    def expect(self, rank: int, seconds: float) -> None:
        """A worker has been started: it is to be ready, and watched, within so many seconds."""
        assert rank not in self._workers, rank
        self._starting[rank] = _Starting(self._clock, seconds)

    def watch(self, rank: int) -> None:
        """Expect heartbeats of `rank` from now on."""
        assert rank not in self._workers, rank
        self._starting.pop(rank, None)
        self._workers[rank] = _Watched(heard=self._clock)
        heapq.heappush(self._deadlines, (self._clock + self._timeouts.suspect, rank))

    def forget(self, rank: int) -> None:
        """Expect nothing of `rank` any more: it has ended, or is fenced. Unknown ranks are ignored."""
        self._starting.pop(rank, None)
        self._workers.pop(rank, None)
        self._leavers.discard(rank)

    def expect_answers(self, epoch: int, ranks: Collection[int]) -> None:
        """Note the members that could answer the Prepare of `epoch` by now and have not.

        `timeouts.status` runs for each of them from the first call that names it.

        A Prepare of another epoch is another question: the time of each begins again.
        """
        if epoch == self._prepare_epoch and len(ranks) == len(self._unanswered) and self._unanswered.issuperset(ranks):
            return
        unanswered = frozenset(ranks)
        stopped = self._unanswered if epoch != self._prepare_epoch else self._unanswered - unanswered
        for rank in stopped:
            if (worker := self._workers.get(rank)) is not None:
                worker.unanswered_since = None
        for rank in unanswered:
            worker = self._workers.get(rank)
            if worker is not None and worker.unanswered_since is None:
                worker.unanswered_since = self._clock
        self._prepare_epoch = epoch
        self._unanswered = unanswered

    def wants_to_leave(self, rank: int) -> None:
        """A worker has asked to leave: `timeouts.leave` runs from now on. Unknown ranks are ignored."""
        worker = self._workers.get(rank)
        if worker is not None and worker.leaving_since is None:
            worker.leaving_since = self._clock
            self._leavers.add(rank)

    def heartbeat(self, rank: int, progress: int, waiting: bool, action: str = "") -> None:
        """A heartbeat has come. A worker that starts gets as much time again; of others that are not watched it is
        ignored.

        A suspect stays one.

        Args:
            progress: number of actions that the worker has finished.
            waiting: it waits for a message.
            action: what it does now, in words.
        """
        worker = self._workers.get(rank)
        if worker is None:
            if (starting := self._starting.get(rank)) is not None and not waiting:  # it has compiled something
                starting.since = self._clock
            return
        worker.heard = self._clock
        if worker.progress is not None and progress < worker.progress:
            return  # sent on by an agent, later than a newer one came
        if worker.progress is not None and progress > worker.progress:
            self._num_actions += progress - worker.progress
            if worker.busy_since is not None:
                self._busy_seconds += self._clock - worker.busy_since
            worker.finished = True
            worker.busy_since = None
        if waiting:
            worker.busy_since = None
        elif worker.busy_since is None:
            worker.busy_since = self._clock
        worker.progress = progress
        worker.action = action

    def tick(self, dt: float, free_to_leave: Collection[int] | None = None) -> list[Suspect]:
        """`dt` seconds have passed since the last tick, and all heartbeats that came before now were handed in.

        Args:
            free_to_leave: workers that have nothing that nobody else has; None: all. A worker that has asked to leave
                and is not free at the end of `timeouts.leave` gets as much time again.

        Returns: those that became suspect, by rank; each is returned once.
        """
        assert dt >= 0, dt
        self._clock += min(dt, self._timeouts.heartbeat)
        usual = self._usual_limit()
        suspects = self._late_starters()
        while self._deadlines and self._deadlines[0][0] <= self._clock:
            _, rank = heapq.heappop(self._deadlines)
            worker = self._workers.get(rank)
            if worker is None or worker.suspected:
                continue
            if free_to_leave is not None and rank not in free_to_leave and self._is_overdue_leaver(worker, self._clock):
                worker.leaving_since = self._clock
            deadline, reason = self._next_deadline(worker, usual)
            if deadline <= self._clock:
                worker.suspected = True
                is_silent = self._clock - worker.heard >= self._timeouts.suspect
                suspects.append(Suspect(rank, reason, is_silent))
            else:
                heapq.heappush(self._deadlines, (deadline, rank))
        return sorted(suspects, key=lambda suspect: suspect.rank)

    def _late_starters(self) -> list[Suspect]:
        """Workers that are given up before they are ready; nothing is expected of them any more."""
        late = [rank for rank, starting in self._starting.items() if self._clock - starting.since >= starting.seconds]
        seconds = {rank: self._clock - self._starting.pop(rank).since for rank in late}
        return [Suspect(rank, f"not ready after {late_s:.1f} s", is_silent=True) for rank, late_s in seconds.items()]

    def _usual_limit(self) -> float:
        """Seconds that an action may take, by the mean of those that the watched workers have finished."""
        usual = self._busy_seconds / self._num_actions if self._num_actions else 0.0
        return self._timeouts.progress_factor * usual

    def _is_overdue_leaver(self, worker: _Watched, at: float) -> bool:
        return worker.leaving_since is not None and at - worker.leaving_since >= self._timeouts.leave

    def _next_deadline(self, worker: _Watched, usual: float) -> tuple[float, str]:
        """The time at which the worker becomes suspect if nothing is heard of it, and the reason if that is now."""
        timeouts, now = self._timeouts, self._clock
        longest_action = usual if worker.finished else max(usual, timeouts.start)
        deadline, reason = math.inf, ""
        # Where several limits are over at once, the first of these reasons tells a reader most.
        for since, limit, what in (
            (worker.heard, timeouts.suspect, "no heartbeat for {:.1f} s, timeouts.suspect"),
            (
                worker.busy_since,
                max(longest_action, timeouts.progress),
                "no progress for {:.1f} s in " + (worker.action or "an action") + ", and it waits for nobody",
            ),
            (
                worker.unanswered_since,
                timeouts.status if worker.busy_since is None else max(longest_action, timeouts.status),
                "no answer to Prepare for {:.1f} s, timeouts.status",
            ),
            (worker.leaving_since, timeouts.leave, "it asked to leave {:.1f} s ago and was not let go, timeouts.leave"),
        ):
            if since is None:
                continue
            if now - since >= limit:
                return now, what.format(now - since)
            if since + limit < deadline:
                deadline, reason = since + limit, ""
        # Rounding may put `since + limit` at or before a clock at which `now - since` is still below the limit.
        return max(deadline, math.nextafter(now, math.inf)), reason


_FORGOTTEN_S = 600.0  # after which a link that was made again, and is in use, is like any other
# Heartbeats that show that a worker lives, by the way on which they come. The first may have been sent just before its
# death; so may be the second one that an agent sends on, which has one on its way and one to follow.
_PROOF, _RELAYED_PROOF = 2, 3


@dataclass
class _Heard:
    """The heartbeats of an end of a lost link since then."""

    direct: int = 0
    relayed: int = 0

    @property
    def lives(self) -> bool:
        # Not added up: a worker whose agent does not answer sends the same heartbeat on both ways.
        return self.direct >= _PROOF or self.relayed >= _RELAYED_PROOF


@dataclass(frozen=True)
class Verdict:
    """Both ends of a lost link live.

    Args:
        ends: the two workers; one worker alone: the link was the controller's.
        lost: the worker to be treated as lost; None if the link is made again.
        was_linked: False if there was no link, and one is made now.
    """

    ends: frozenset[int]
    lost: int | None
    was_linked: bool = True

    @property
    def reason(self) -> str:
        """In words."""
        if len(self.ends) == 1:
            return "its link to the controller was lost"
        first, second = sorted(self.ends)
        if not self.was_linked:
            return f"there was no link between workers {first} and {second}"
        again = " again" if self.lost is not None else ""
        return f"the link between workers {first} and {second} was lost{again}"


class BrokenLinks:
    """The links of a run that were reported lost.

    Both directions of a pair may be reported; until the verdict that is one loss. Each of them is made again once: a
    network that has failed takes both along, and they are noticed one after the other. That is forgotten with the first
    step that is committed `_FORGOTTEN_S` later or more: what fails then is another failure. Time alone forgets nothing,
    as a run may stand still for a network that is still down. Where there was no link no network has failed: one is
    made as often as that is reported.
    """

    def __init__(self) -> None:
        self._heard: dict[frozenset[int], dict[int, _Heard]] = {}  # by ends of a lost link, and end
        # End -> the ends of its lost links, in the order of their reports. A network that fails between two parts of a
        # large mesh loses very many links, and each heartbeat looks for those of its sender.
        self._of: dict[int, dict[frozenset[int], None]] = {}
        self._reported: dict[frozenset[int], set[tuple[int, ...]]] = {}  # and its directions that were reported
        self._linked_again: dict[tuple[int, ...], float] = {}  # direction -> when it was made again

    def closed(self, *ends: int, was_linked: bool = True) -> None:
        """A link of one worker to another, or between the controller and one worker, is reported lost.

        Args:
            was_linked: False if there was none, and what was to be sent on it is lost.
        """
        assert ends and len(set(ends)) == len(ends) <= 2, ends
        self._heard.setdefault(frozenset(ends), {rank: _Heard() for rank in ends})
        for rank in ends:
            self._of.setdefault(rank, {}).setdefault(frozenset(ends))
        self._reported.setdefault(frozenset(ends), set()).update([ends] if was_linked else [])

    def forget(self, rank: int) -> None:
        """A worker is lost, or was let go: its links end with it."""
        for ends in tuple(self._of.get(rank, ())):
            self._drop(ends)
            del self._reported[ends]

    def _drop(self, ends: frozenset[int]) -> None:
        """Nobody waits for the heartbeats of these two any more."""
        del self._heard[ends]
        for rank in ends:
            del self._of[rank][ends]
            if not self._of[rank]:
                del self._of[rank]

    def committed(self, now: float) -> None:
        """A step was committed, over links that were made again too."""
        if self._linked_again:
            self._linked_again = {way: at for way, at in self._linked_again.items() if now - at < _FORGOTTEN_S}

    def heartbeat(self, rank: int, now: float, *, is_relayed: bool = False) -> list[Verdict]:
        """A heartbeat has come. Returns the verdicts on lost links of which both ends are known to live by now.

        Args:
            is_relayed: its agent has sent it on.
        """
        if rank not in self._of:
            return []
        found = []
        for ends in tuple(self._of[rank]):
            heard = self._heard[ends]
            heard[rank].direct += not is_relayed
            heard[rank].relayed += is_relayed
            if all(end.lives for end in heard.values()):
                self._drop(ends)
                found.append(self._judge(ends, now))
        return found

    def _judge(self, ends: frozenset[int], now: float) -> Verdict:
        directions = self._reported.pop(ends)
        if len(ends) == 1 or not directions.isdisjoint(self._linked_again):
            return Verdict(ends, max(ends))
        self._linked_again |= dict.fromkeys(directions, now)
        return Verdict(ends, None, was_linked=bool(directions))
