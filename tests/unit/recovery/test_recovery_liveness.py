"""Workers that are taken to hang: silence, no progress, and what must never count as either."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.conf.schema import Timeouts
from elaswave_spmd.recovery.failure_detector import Liveness, Suspect
from elaswave_spmd.recovery.tick_clock import TickClock

T = Timeouts(heartbeat=0.25, suspect=1.0, status=2.0, progress=4.0, progress_factor=8.0, start=16.0)
BEAT = 0.25  # a power of two: sums of it are exact


def detector(timeouts: Timeouts = T) -> Liveness:
    return Liveness(timeouts, TickClock(timeouts.heartbeat, 0.0))


def tick(liveness: Liveness, dt: float, free_to_leave: Collection[int] | None = None) -> list[Suspect]:
    """So many seconds have passed."""
    clock = liveness._clock
    clock._at = 0.0  # a difference of large times would be rounded
    clock.tick(dt)
    return liveness.tick(free_to_leave)


def watching(*ranks: int, timeouts: Timeouts = T) -> Liveness:
    liveness = detector(timeouts)
    for rank in ranks:
        liveness.watch(rank)
    return liveness


def ticks_until_suspect(liveness: Liveness, limit: int = 1000, **beat: object) -> tuple[int, Suspect]:
    """Ticks of one period, a heartbeat `beat` (if any) before each, until somebody is suspect."""
    for count in range(1, limit):
        if beat:
            liveness.heartbeat(**beat)  # type: ignore[arg-type]
        if suspects := tick(liveness, BEAT):
            return count, suspects[0]
    raise AssertionError("nobody became suspect")


def test_silence_is_suspect_after_its_time_and_said_once() -> None:
    liveness = watching(3)
    count, suspect = ticks_until_suspect(liveness)
    assert count * BEAT == T.suspect and suspect == Suspect(3, "no heartbeat for 1.0 s, timeouts.suspect", True)
    assert all(tick(liveness, BEAT) == [] for _ in range(50))


def test_a_heartbeat_does_not_clear_a_suspect() -> None:
    liveness = watching(3)
    ticks_until_suspect(liveness)
    liveness.heartbeat(3, 1, True)
    assert set(liveness._workers) == {3} and all(tick(liveness, BEAT) == [] for _ in range(50))


def test_a_heartbeat_that_comes_after_a_newer_one_shows_life_and_no_progress() -> None:
    """An agent that was slow sends it on, after its worker has sent the newer one itself."""
    liveness, in_order = watching(3), watching(3)
    for count in range(1, 40):
        for each in (liveness, in_order):
            each.heartbeat(3, count, False, "forward")
        liveness.heartbeat(3, count - 1, True, "forward of before")
        assert not tick(liveness, BEAT) and not tick(in_order, BEAT)
        assert liveness._workers == in_order._workers
    assert liveness._usual_limit() == in_order._usual_limit() > 0
    assert ticks_until_suspect(liveness, rank=3, progress=0, waiting=True)[1].reason.startswith("no progress")


def test_the_forgotten_and_the_unknown_are_never_suspect() -> None:
    liveness = watching(1, 2)
    liveness.forget(1)
    liveness.forget(7)
    liveness.heartbeat(7, 0, False)
    assert ticks_until_suspect(liveness)[1].rank == 2
    assert set(liveness._workers) == {2}


def test_a_newcomer_that_still_compiles_gets_its_time_again() -> None:
    liveness = detector()
    liveness.expect(5, T.join)
    assert all(tick(liveness, BEAT) == [] for _ in range(int(T.join / BEAT) - 1))
    liveness.heartbeat(5, 1, False, "compiling")
    count, suspect = ticks_until_suspect(liveness, limit=10_000)
    assert count * BEAT == T.join and suspect.rank == 5


def test_a_rank_that_is_watched_again_starts_anew() -> None:
    liveness = watching(1)
    ticks_until_suspect(liveness)
    liveness.forget(1)
    liveness.watch(1)
    silent = Suspect(1, "no heartbeat for 1.0 s, timeouts.suspect", True)
    assert ticks_until_suspect(liveness) == (T.suspect / BEAT, silent)


def test_no_progress_is_suspect_and_says_where() -> None:
    liveness = watching(2)
    liveness.heartbeat(2, 0, False, "forward of micro-batch 0")
    liveness.heartbeat(2, 1, False, "forward of micro-batch 1")
    count, suspect = ticks_until_suspect(
        liveness, rank=2, progress=1, waiting=False, action="backward of micro-batch 4"
    )
    assert count * BEAT == T.progress
    assert suspect.reason == "no progress for 4.0 s in backward of micro-batch 4, and it waits for nobody"


def test_the_first_action_may_take_as_long_as_a_start() -> None:
    count, suspect = ticks_until_suspect(watching(2), rank=2, progress=5, waiting=False)
    assert (count - 1) * BEAT <= T.start <= count * BEAT and "in an action" in suspect.reason


def test_a_waiting_worker_needs_no_progress_and_its_wait_does_not_count_later() -> None:
    liveness = watching(0)
    liveness.heartbeat(0, 0, False)
    liveness.heartbeat(0, 1, True)
    for _ in range(200):
        liveness.heartbeat(0, 1, True)
        assert tick(liveness, BEAT) == []
    count, _ = ticks_until_suspect(liveness, rank=0, progress=1, waiting=False)
    assert count * BEAT == T.progress


def test_a_wait_within_an_action_starts_its_time_anew() -> None:
    liveness = watching(0)
    liveness.heartbeat(0, 0, False)
    for _ in range(3):
        for _ in range(15):  # 3.75 s, just below T.progress
            liveness.heartbeat(0, 1, False)
            assert tick(liveness, BEAT) == []
        liveness.heartbeat(0, 1, True)
    count, _ = ticks_until_suspect(liveness, rank=0, progress=1, waiting=False)
    assert count * BEAT == T.progress


def test_a_pause_of_the_controller_declares_nobody_dead() -> None:
    liveness = watching(0, 1)
    assert [tick(liveness, 3600.0) for _ in range(3)] == [[], [], []]  # no heartbeat read yet: three periods
    assert {suspect.rank for suspect in tick(liveness, 3600.0)} == {0, 1}


def test_slow_actions_stretch_the_limit() -> None:
    liveness = watching(0, 1)
    for step in range(9):
        for _ in range(8):  # an action takes 2 s, half of T.progress
            for rank in (0, 1):
                liveness.heartbeat(rank, step, False)
            assert tick(liveness, BEAT) == []
    for rank in (0, 1):
        liveness.heartbeat(rank, 9, False)
    count, _ = ticks_until_suspect(liveness, rank=0, progress=9, waiting=False)
    # Rank 1 falls silent, so only it may be suspect that early.
    assert count * BEAT == T.suspect
    liveness.forget(1)
    more, suspect = ticks_until_suspect(liveness, rank=0, progress=9, waiting=False)
    assert (count + more) * BEAT == 2.0 * T.progress_factor and suspect.rank == 0


def test_a_hanging_worker_does_not_stretch_its_own_limit() -> None:
    liveness = watching(0)
    liveness.heartbeat(0, 0, False)
    tick(liveness, BEAT)
    liveness.heartbeat(0, 1, False)
    count, _ = ticks_until_suspect(liveness, rank=0, progress=1, waiting=False)
    assert count * BEAT == T.progress


def test_watching_twice_is_a_mistake() -> None:
    liveness = watching(0)
    with pytest.raises(AssertionError):
        liveness.watch(0)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 100, allow_nan=False),
            st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=4),
        ),
        max_size=60,
    )
)
def test_nobody_is_suspect_too_early_and_the_silent_are_in_time(
    turns: list[tuple[float, list[tuple[int, int, bool]]]],
) -> None:
    """Against a plain model: seconds (capped) since the last heartbeat, and since the last sign of progress."""
    liveness = watching(*range(4))
    silent, stalled, last = dict.fromkeys(range(4), 0.0), dict.fromkeys(range(4), 0.0), dict.fromkeys(range(4), -1)
    living = set(range(4))
    for dt, beats in turns:
        for rank, progress, waiting in beats:
            liveness.heartbeat(rank, progress, waiting)
            silent[rank] = 0.0
            if waiting or progress != last[rank]:
                stalled[rank] = 0.0
            last[rank] = progress
        suspects = tick(liveness, dt)
        for rank in living:
            silent[rank] += min(dt, T.heartbeat)
            stalled[rank] += min(dt, T.heartbeat)
        assert [suspect.rank for suspect in suspects] == sorted({suspect.rank for suspect in suspects})
        for suspect in suspects:
            limits = (silent, T.suspect) if "heartbeat" in suspect.reason else (stalled, T.progress)
            assert suspect.rank in living and limits[0][suspect.rank] >= limits[1]
        living -= {suspect.rank for suspect in suspects}
        assert all(silent[rank] < T.suspect for rank in living)


@given(periods=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=200), busy=st.booleans())
def test_a_worker_that_beats_and_works_is_never_suspect(periods: list[float], busy: bool) -> None:
    liveness = watching(0)
    for progress, seconds in enumerate(periods):
        liveness.heartbeat(0, progress, not busy)
        assert tick(liveness, seconds) == []


# ---- an answer to Prepare, a newcomer, a leaver

W = dataclasses.replace(T, join=3.0, leave=5.0)


def all_beating_until_suspect(liveness: Liveness, *ranks: int) -> tuple[float, list[Suspect]]:
    """Seconds until somebody is suspect though these wait and say so."""
    for count in range(1, 1000):
        for rank in ranks:
            liveness.heartbeat(rank, 1, True)
        if suspects := tick(liveness, BEAT):
            return count * BEAT, suspects
    raise AssertionError("nobody became suspect")


def test_who_waits_and_does_not_answer_is_suspect_however_its_heart_beats() -> None:
    liveness = watching(0, 1, timeouts=W)
    liveness.heartbeat(0, 1, True)
    for _ in range(20):
        liveness.heartbeat(1, 1, True)
        liveness.heartbeat(0, 1, True)
        assert tick(liveness, BEAT) == []
    liveness.expect_answers(7, (1,))
    wanted = W.status, [Suspect(1, "no answer to Prepare for 2.0 s, timeouts.status")]
    assert all_beating_until_suspect(liveness, 0, 1) == wanted


def test_another_prepare_is_another_question_and_an_answer_ends_the_wait() -> None:
    liveness = watching(0, timeouts=W)
    for epoch in (3, 4, 5):
        for _ in range(7):
            liveness.expect_answers(epoch, (0,))
            liveness.heartbeat(0, 1, True)
            assert tick(liveness, BEAT) == []
    liveness.expect_answers(5, ())
    liveness.heartbeat(0, 1, True)
    assert tick(liveness, BEAT) == []
    liveness.expect_answers(5, (0,))
    assert ticks_until_suspect(liveness, rank=0, progress=1, waiting=True)[0] * BEAT == W.status


@pytest.mark.parametrize(("seconds", "limit"), [(0.25, 2.0), (0.5, 4.0)])
def test_an_answer_may_take_many_usual_actions_of_one_that_computes(seconds: float, limit: float) -> None:
    liveness = watching(0, timeouts=dataclasses.replace(W, progress=8.0))
    liveness.heartbeat(0, 0, False)
    for progress in range(1, 9):
        for _ in range(int(seconds / BEAT)):
            assert tick(liveness, BEAT) == []
        liveness.heartbeat(0, progress, False)
    liveness.expect_answers(1, (0,))
    count, suspect = ticks_until_suspect(liveness, rank=0, progress=8, waiting=False)
    assert count * BEAT == limit == max(W.status, W.progress_factor * seconds) and "Prepare" in suspect.reason


def test_an_answer_may_take_as_long_as_a_first_action() -> None:
    liveness = watching(0, timeouts=W)
    liveness.heartbeat(0, 0, False, "start")
    liveness.expect_answers(1, (0,))
    count, _ = ticks_until_suspect(liveness, rank=0, progress=0, waiting=False)
    assert count * BEAT >= W.start - BEAT


def test_a_newcomer_that_is_not_ready_is_given_up_and_said_once() -> None:
    liveness = detector(W)
    liveness.expect(5, W.join)
    liveness.expect(4, W.join)
    for _ in range(11):
        assert tick(liveness, BEAT) == []
    assert tick(liveness, BEAT) == [Suspect(rank, "not ready after 3.0 s", True) for rank in (4, 5)]
    assert all(tick(liveness, BEAT) == [] for _ in range(20))


def test_a_newcomer_that_is_ready_or_gone_is_waited_for_no_longer() -> None:
    liveness = detector(W)
    for rank in (4, 5):
        liveness.expect(rank, W.join)
    liveness.watch(4)
    liveness.forget(5)
    for _ in range(40):
        liveness.heartbeat(4, 0, True)
        assert tick(liveness, BEAT) == []


def test_a_long_pause_gives_no_newcomer_up() -> None:
    liveness = detector(W)
    liveness.expect(4, W.join)
    assert tick(liveness, 3600.0) == []


def test_who_asked_to_leave_and_is_not_let_go_has_failed() -> None:
    liveness = watching(0, 1, timeouts=W)
    liveness.wants_to_leave(1)
    liveness.wants_to_leave(1)
    liveness.wants_to_leave(9)
    wanted = W.leave, [Suspect(1, "it asked to leave 5.0 s ago and was not let go, timeouts.leave")]
    assert all_beating_until_suspect(liveness, 0, 1) == wanted


def test_a_leaver_that_has_what_nobody_else_has_gets_as_much_time_again() -> None:
    free: set[int] = set()
    liveness = detector(W)
    liveness.watch(1)
    liveness.wants_to_leave(1)
    ticks = int(W.leave / BEAT)
    asked = 0  # how often somebody has to find out whether it is free
    for _ in range(3 * ticks):
        liveness.heartbeat(1, 1, True)
        asked += liveness.has_overdue_leavers
        assert tick(liveness, BEAT, free if liveness.has_overdue_leavers else ()) == []
    assert 1 <= asked <= 9
    free.add(1)
    assert all_beating_until_suspect(liveness, 1)[0] == W.leave


def test_who_has_not_asked_to_leave_has_time() -> None:
    """Drained by somebody else's wish, perhaps."""
    liveness = watching(1, timeouts=W)
    for _ in range(100):
        liveness.heartbeat(1, 1, True)
        assert tick(liveness, BEAT) == []
