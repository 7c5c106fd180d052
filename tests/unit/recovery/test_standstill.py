"""A run in which every worker waits and nothing comes, and all that must never count as that."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from elaswave_spmd.conf.schema import Timeouts
from elaswave_spmd.recovery.messages import Heartbeat
from elaswave_spmd.recovery.standstill import Standstill, StandstillDetector
from elaswave_spmd.recovery.tick_clock import TickClock

# The longest of what a standstill waits for without a mean is `start`, and with one `progress`: 4 periods to 1.
T = Timeouts(heartbeat=0.25, suspect=1.0, status=2.0, progress=4.0, start=16.0)
BEAT = 0.25  # a power of two: sums of it are exact
RANKS = (0, 1, 2)

Beats = Mapping[int, Heartbeat]


def waiting(rank: int, progress: int = 7, action: str = "votes of step 3", *, is_sending: bool = False) -> Heartbeat:
    return Heartbeat(rank, progress, True, action, is_sending=is_sending)


ALL_WAIT: Beats = {rank: waiting(rank) for rank in RANKS}


def tick(it: StandstillDetector, dt: float) -> Standstill | None:
    """So many seconds have passed."""
    it._clock.tick(it._clock._at + dt)
    return it.tick()


def detector(*, steps: int = 2, seconds: float = BEAT, timeouts: Timeouts = T) -> StandstillDetector:
    """Of a run in which so many steps were committed, one in each of so many seconds."""
    found = StandstillDetector(timeouts, TickClock(timeouts.heartbeat, 0.0))
    for rank in RANKS:
        found.watch(rank)
    for _ in range(steps):
        for _ in range(round(seconds / BEAT)):
            assert tick(found, BEAT) is None
        found.committed()
    return found


def ticks_until_found(
    it: StandstillDetector, beats: Beats = ALL_WAIT, meanwhile: Callable[[int], object] | None = None, limit: int = 400
) -> int | None:
    """Ticks of one period, with heartbeats before each, until nothing has moved for too long; None: that is never."""
    for count in range(1, limit):
        for beat in beats.values():
            it.heartbeat(beat)
        if meanwhile is not None:
            meanwhile(count)
        if tick(it, BEAT) is not None:
            return count
    return None


@pytest.mark.parametrize(
    ("steps", "seconds", "limit"),
    [(0, BEAT, T.start), (1, BEAT, T.start), (2, BEAT, T.progress), (5, BEAT, T.progress), (4, 2.0, 4 * 2.0)],
    ids=["before the first step", "before there is a mean", "progress", "progress again", "long steps"],
)
def test_nothing_moves_for_its_time(steps: int, seconds: float, limit: float) -> None:
    """The first heartbeat that says so comes with the first tick."""
    assert ticks_until_found(detector(steps=steps, seconds=seconds)) == limit / BEAT


def test_it_is_told_once_and_then_waited_for_as_long_again() -> None:
    found = detector()
    assert ticks_until_found(found) == ticks_until_found(found) == T.progress / BEAT


def test_what_each_waits_for_is_told() -> None:
    found = detector()
    beats = {rank: waiting(rank, action="" if rank == 2 else "votes of step 3") for rank in RANKS}
    told: list[Standstill | None] = []
    while not told or told[-1] is None:
        for beat in beats.values():
            found.heartbeat(beat)
        told.append(tick(found, BEAT))
    assert told[-1] == Standstill(T.progress, {0: "votes of step 3", 1: "votes of step 3", 2: ""})
    assert told[-1].told(RANKS) == "workers 0, 1 wait for votes of step 3; worker 2 waits for something"
    assert told[-1].told((1, 5)) == "worker 1 waits for votes of step 3; worker 5 waits for something"


def test_of_many_reasons_some_are_told() -> None:
    many = Standstill(1.0, {rank: f"micro-batch {rank}" for rank in range(20)})
    assert many.told(range(20)).endswith("worker 7 waits for micro-batch 7; and 12 more")


@pytest.mark.parametrize(
    "beat",
    [Heartbeat(1, 7, False, "forward"), waiting(1, is_sending=True)],
    ids=["it computes", "much of what it has sent is on its way"],
)
def test_one_worker_that_does_something_is_enough(beat: Heartbeat) -> None:
    assert ticks_until_found(detector(), {**ALL_WAIT, 1: beat}) is None


@pytest.mark.parametrize("every", [1, 15])
def test_one_that_goes_on_now_and_then_is_enough(every: int) -> None:
    """It waits each time that a heartbeat leaves."""
    for goes_on in (lambda n: waiting(1, 7 + n // every), lambda n: waiting(1, 7, f"micro-batch {n // every}")):
        found = detector()
        beats = {rank: beat for rank, beat in ALL_WAIT.items() if rank != 1}
        assert ticks_until_found(found, beats, lambda n, beat=goes_on, it=found: it.heartbeat(beat(n))) is None


@pytest.mark.parametrize("what", ["moved", "committed"])
def test_reports_and_commits_count(what: str) -> None:
    found = detector()
    assert ticks_until_found(found, meanwhile=lambda n: n % 15 or getattr(found, what)()) is None


def test_a_worker_that_is_not_watched_any_more_does_not_count() -> None:
    """It is fenced, and goes on all the same; or it has never been ready."""
    found = detector()
    found.forget(1)
    beats = {0: ALL_WAIT[0], 1: Heartbeat(1, 9, False, "forward"), 8: Heartbeat(8, 1, False, "compiling")}
    assert ticks_until_found(found, beats) == T.progress / BEAT


def test_a_pause_of_the_controller_is_no_standstill() -> None:
    """A tick counts as one period at most, however late it comes."""
    found = detector()
    for count in range(1, round(T.progress / BEAT)):
        for beat in ALL_WAIT.values():
            found.heartbeat(beat)
        assert tick(found, 1000.0) is None, count
    assert tick(found, 1000.0) is not None


def test_time_in_which_nothing_moved_is_no_time_of_a_step() -> None:
    found = detector(steps=3)
    assert ticks_until_found(found) is not None
    for _ in range(3):
        tick(found, BEAT)
        found.committed()
    assert found.limit == T.progress


def test_a_link_on_which_nothing_is_acknowledged_ends_first() -> None:
    slow = Timeouts(heartbeat=0.25, suspect=3.0, status=3.5, progress=4.0, start=16.0, leave=9.0)
    assert detector(timeouts=slow).limit == slow.silent_link + slow.suspect > slow.progress
