"""Detection of workers that hang, and of links that were lost while both ends live. No clock of its own, no I/O.

The death of a process is noticed at once by other means (runtime/processes/death_watch.py). `Liveness` finds workers
that have not died, or whose death cannot be seen: a stopped process, a machine that is gone, a training thread in an
endless loop, a newcomer that never gets ready. A suspicion may be wrong. So the worker is fenced (its messages are void
and its process is killed) before anything else is done about it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from dataclasses import dataclass

from elaswave_spmd.conf.schema import Timeouts
from elaswave_spmd.recovery.tick_clock import TickClock


@dataclass(frozen=True)
class Suspect:
    """Worker `rank` is taken to hang, for a `reason` in words.

    Args:
        is_silent: True if nothing is heard of it: no heartbeats, or from a starting worker no Ready.
    """

    rank: int
    reason: str
    is_silent: bool = False


@dataclass
class _Watched:
    """State of a worker that is watched. Times are in seconds of the detector's clock."""

    heard: float  # when the last heartbeat came, or when it was first watched
    progress: int | None = None  # the number of actions by its last heartbeat; None before the first one
    finished: bool = False  # True once it has finished an action while it was watched
    action: str = ""
    busy_since: float | None = None  # when its present action began, as far as heartbeats show; None while it waits
    unanswered_since: float | None = None  # since when it could have answered a Prepare; None if no answer is due
    leaving_since: float | None = None  # when it asked to leave; None if it has not
    suspected: bool = False


@dataclass
class _Starting:
    """A worker that is not ready yet.

    Args:
        since: when it was started, or when its last sign of progress came.
        seconds: how long after that it may take.
    """

    since: float
    seconds: float


class Liveness:
    """Watches the heartbeats of workers.

    Its clock (`TickClock`) counts each tick as one heartbeat period at most. So if the controller's machine pauses, the
    heartbeats that wait in its mailbox are read before any worker counts as silent for long: no worker is suspected too
    early, however late the ticks come.

    A worker that waits for a message need not make progress. An action may take the longest of these: the time
    `timeouts.progress`; `progress_factor` times the mean of all actions that watched workers have finished; and, before
    the worker has finished its first action, `timeouts.start`. An answer to Prepare may take `timeouts.status`, or from
    a worker in the middle of an action, as long as that action may take, if this is longer.

    Handling a heartbeat takes the same time however many workers there are: it only notes the time. A tick looks only
    at the workers whose next deadline is due, which are in a heap. Heartbeats move deadlines only to later times. So if
    the entry of a worker is due but its deadline is not any more, the deadline is computed anew and put back. No entry
    is further away than `timeouts.suspect`, the shortest of all limits. So other limits that begin to count in between,
    such as that of an answer to Prepare, are noticed in time.
    """

    def __init__(self, timeouts: Timeouts, clock: TickClock) -> None:
        self._timeouts = timeouts
        self._clock = clock
        self._workers: dict[int, _Watched] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap of (time, rank); ranks that are not watched are skipped
        self._leavers = set[int]()
        self._starting: dict[int, _Starting] = {}
        self._prepare_epoch = -1
        self._unanswered = frozenset[int]()
        self._busy_seconds = 0.0
        self._num_actions = 0

    @property
    def has_overdue_leavers(self) -> bool:
        """True if `timeouts.leave` is over at the next tick for a worker that has asked to leave."""
        soon = self._clock.now + self._timeouts.heartbeat  # no tick counts for more
        return any(self._is_overdue_leaver(self._workers[rank], soon) for rank in self._leavers)

    def expect(self, rank: int, seconds: float) -> None:
        """A worker has been started. It becomes suspect if `watch` is not called for it within `seconds`."""
        assert rank not in self._workers, rank
        self._starting[rank] = _Starting(self._clock.now, seconds)

    def watch(self, rank: int) -> None:
        """Expect heartbeats of `rank` from now on."""
        assert rank not in self._workers, rank
        self._starting.pop(rank, None)
        self._workers[rank] = _Watched(heard=self._clock.now)
        heapq.heappush(self._deadlines, (self._clock.now + self._timeouts.suspect, rank))

    def forget(self, rank: int) -> None:
        """Expect nothing of `rank` any more: it has ended, or is fenced. Unknown ranks are ignored."""
        self._starting.pop(rank, None)
        self._workers.pop(rank, None)
        self._leavers.discard(rank)

    def expect_answers(self, epoch: int, ranks: Collection[int]) -> None:
        """Note the members that could have answered the Prepare of `epoch` by now and have not.

        For each of them `timeouts.status` runs from the first call with this epoch that has it. With the Prepare of
        another epoch, all times begin again.
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
                worker.unanswered_since = self._clock.now
        self._prepare_epoch = epoch
        self._unanswered = unanswered

    def wants_to_leave(self, rank: int) -> None:
        """A worker has asked to leave: `timeouts.leave` runs from now on. Unknown ranks are ignored."""
        worker = self._workers.get(rank)
        if worker is not None and worker.leaving_since is None:
            worker.leaving_since = self._clock.now
            self._leavers.add(rank)

    def heartbeat(self, rank: int, progress: int, waiting: bool, action: str = "") -> None:
        """A heartbeat has come.

        By a heartbeat that shows progress, a starting worker gets its whole time again. Heartbeats of other workers
        that are not watched are ignored. A worker that became suspect stays suspect.

        Args:
            rank: the worker.
            progress: the number of actions that the worker has finished.
            waiting: True if it waits for a message.
            action: what it does now, in words.
        """
        worker = self._workers.get(rank)
        if worker is None:
            if (starting := self._starting.get(rank)) is not None and not waiting:  # it has compiled a program
                starting.since = self._clock.now
            return
        worker.heard = self._clock.now
        if worker.progress is not None and progress < worker.progress:
            return  # an older heartbeat, which an agent has sent on after a newer one had come directly
        if worker.progress is not None and progress > worker.progress:
            self._num_actions += progress - worker.progress
            if worker.busy_since is not None:
                self._busy_seconds += self._clock.now - worker.busy_since
            worker.finished = True
            worker.busy_since = None
        if waiting:
            worker.busy_since = None
        elif worker.busy_since is None:
            worker.busy_since = self._clock.now
        worker.progress = progress
        worker.action = action

    def tick(self, free_to_leave: Collection[int] | None = None) -> list[Suspect]:
        """The clock has ticked, and all messages that came before the time that it shows now were handed in.

        Args:
            free_to_leave: the workers whose pages all have another replica; None for all workers. A worker that has
                asked to leave and is not among them at the end of `timeouts.leave` gets as much time again.

        Returns:
            The workers that became suspect by this tick, in the order of ranks. Each is returned only once.
        """
        now, usual = self._clock.now, self._usual_limit()
        suspects = self._late_starters()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, rank = heapq.heappop(self._deadlines)
            worker = self._workers.get(rank)
            if worker is None or worker.suspected:
                continue
            if free_to_leave is not None and rank not in free_to_leave and self._is_overdue_leaver(worker, now):
                worker.leaving_since = now
            deadline, reason = self._next_deadline(worker, usual)
            if deadline <= now:
                worker.suspected = True
                is_silent = now - worker.heard >= self._timeouts.suspect
                suspects.append(Suspect(rank, reason, is_silent))
            else:
                heapq.heappush(self._deadlines, (deadline, rank))
        return sorted(suspects, key=lambda suspect: suspect.rank)

    def _late_starters(self) -> list[Suspect]:
        """The workers that were not ready in time. They are not waited for any more."""
        late = [
            rank for rank, starting in self._starting.items() if self._clock.now - starting.since >= starting.seconds
        ]
        seconds = {rank: self._clock.now - self._starting.pop(rank).since for rank in late}
        return [Suspect(rank, f"not ready after {late_s:.1f} s", is_silent=True) for rank, late_s in seconds.items()]

    def _usual_limit(self) -> float:
        """The seconds that an action may take by the mean of the actions that watched workers have finished."""
        usual = self._busy_seconds / self._num_actions if self._num_actions else 0.0
        return self._timeouts.progress_factor * usual

    def _is_overdue_leaver(self, worker: _Watched, at: float) -> bool:
        return worker.leaving_since is not None and at - worker.leaving_since >= self._timeouts.leave

    def _next_deadline(self, worker: _Watched, usual: float) -> tuple[float, str]:
        """(when the worker becomes suspect if nothing is heard of it, the reason if that is now and else "")."""
        timeouts, now = self._timeouts, self._clock.now
        longest_action = usual if worker.finished else max(usual, timeouts.start)
        deadline, reason = math.inf, ""
        # The order matters: if several limits are over at once, the first of these reasons is the most helpful one.
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


_FORGOTTEN_S = 600.0  # seconds after which a link that was opened again, and is in use, counts as a new one
# After these numbers of heartbeats a worker is known to live: of heartbeats that come directly, and of those that an
# agent has sent on. The first one may have been sent just before its death. Of those from an agent this may be true of
# the second one as well, as an agent may have one message on its way and one waiting.
_PROOF, _RELAYED_PROOF = 2, 3


@dataclass
class _Heard:
    """The number of heartbeats of one end of a lost link, since the link was lost."""

    direct: int = 0
    relayed: int = 0

    @property
    def lives(self) -> bool:
        # The two are not added up: a worker whose agent does not answer sends the same heartbeat both ways.
        return self.direct >= _PROOF or self.relayed >= _RELAYED_PROOF


@dataclass(frozen=True)
class Verdict:
    """What to do about a lost link whose two ends live.

    Args:
        ends: the two workers; a single worker if the other end was the controller.
        lost: the worker to be treated as lost; None if the link is opened again.
        was_linked: False if there had been no link, and one is opened now.
    """

    ends: frozenset[int]
    lost: int | None
    was_linked: bool = True

    @property
    def reason(self) -> str:
        """The reason of the verdict, in words."""
        if len(self.ends) == 1:
            return "its link to the controller was lost"
        first, second = sorted(self.ends)
        if not self.was_linked:
            return f"there was no link between workers {first} and {second}"
        again = " again" if self.lost is not None else ""
        return f"the link between workers {first} and {second} was lost{again}"


class BrokenLinks:
    """The links of a run that were reported lost.

    Both directions of a pair may be reported. Until the verdict they count as one loss. Each direction is opened again
    once: a network failure breaks both of them, and they are noticed one after the other. If a direction breaks a
    second time, one of the two workers is treated as lost.

    The first failure is forgotten by the first step that is committed `_FORGOTTEN_S` seconds later or more. Time alone
    is not enough, as the run may be standing still while the network is still down. If there had been no link, no
    network has failed, so a link is opened as often as this is reported.
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
            ends: the worker that reports the loss and the other one; or the worker whose link to the controller it is.
            was_linked: False if there was no link, so that a message that should have gone over it is lost.
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
        """A step was committed, so links that were opened again are in use. Forget those of long ago."""
        if self._linked_again:
            self._linked_again = {way: at for way, at in self._linked_again.items() if now - at < _FORGOTTEN_S}

    def heartbeat(self, rank: int, now: float, *, is_relayed: bool = False) -> list[Verdict]:
        """A heartbeat has come. Returns the verdicts on lost links of which both ends are known to live by now.

        Args:
            rank: the worker.
            now: the time in seconds, by the controller's clock.
            is_relayed: True if its agent has sent the heartbeat on.
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
