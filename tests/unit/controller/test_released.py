"""Workers that were let go: who has ended is not killed, and who has not is, once."""

from __future__ import annotations

from elaswave_spmd.controller.actions import Kill, Record
from elaswave_spmd.controller.released import KILLED, ReleasedWorkers
from elaswave_spmd.recovery.tick_clock import TickClock


def test_who_ends_in_time_is_not_killed() -> None:
    clock = TickClock(1000.0, 0.0)
    released = ReleasedWorkers(clock, 30.0)
    released.let_go(3, 8)
    clock.tick(30.0)
    assert released.overdue() == ([], 0)
    released.ended(3)
    released.ended(4)  # it was lost
    clock.tick(1000.0)
    assert released.overdue() == ([], 0)


def test_who_does_not_is_killed_once_and_told_of() -> None:
    clock = TickClock(1000.0, 100.0)
    released = ReleasedWorkers(clock, 30.0)
    for rank, at, step in ((5, 100.0, 8), (2, 100.0, 6), (7, 101.0, 9)):
        clock.tick(at)
        released.let_go(rank, step)
    clock.tick(130.5)
    (record, *kills), unwritten = released.overdue()
    assert unwritten == 8 and kills == [Kill(5), Kill(2)]
    assert isinstance(record, Record) and record.kind == KILLED and record.fields["ranks"] == [5, 2]
    assert record.fields["message"] == (
        "workers 5, 2 are no members any more, did not end within 30 s (timeouts.shutdown), and are killed"
    )
    clock.tick(130.6)
    assert released.overdue() == ([], 0)
    clock.tick(140.0)
    (_, kill), unwritten = released.overdue()
    assert kill == Kill(7) and unwritten == 9


def test_a_pause_is_no_time_in_which_it_could_have_ended() -> None:
    """The machine was suspended, and the worker with it: the controller hears of its end a moment later."""
    clock = TickClock(0.1, 0.0)
    released = ReleasedWorkers(clock, 30.0)
    released.let_go(3, 8)
    clock.tick(3600.0)
    assert released.overdue() == ([], 0)
