"""Workers that were let go: who has ended is not killed, and who has not is, once."""

from __future__ import annotations

from elaswave_spmd.controller.actions import Kill, Record
from elaswave_spmd.controller.released import KILLED, ReleasedWorkers


def test_who_ends_in_time_is_not_killed() -> None:
    released = ReleasedWorkers(30.0)
    released.let_go(3, 100.0, 8)
    assert released.overdue(130.0) == ([], 0)
    released.ended(3)
    released.ended(4)  # it was lost
    assert released.overdue(1000.0) == ([], 0)


def test_who_does_not_is_killed_once_and_told_of() -> None:
    released = ReleasedWorkers(30.0)
    for rank, at, step in ((5, 100.0, 8), (2, 100.0, 6), (7, 101.0, 9)):
        released.let_go(rank, at, step)
    (record, *kills), unwritten = released.overdue(130.5)
    assert unwritten == 8 and kills == [Kill(5), Kill(2)]
    assert isinstance(record, Record) and record.kind == KILLED and record.fields["ranks"] == [5, 2]
    assert record.fields["message"] == (
        "workers 5, 2 left, did not end within 30 s (timeouts.shutdown), and are killed"
    )
    assert released.overdue(130.6) == ([], 0)
    (_, kill), unwritten = released.overdue(140.0)
    assert kill == Kill(7) and unwritten == 9
