"""Workers that were let go: who has ended is not killed, and who has not is, once."""

from __future__ import annotations

from elaswave_spmd.controller.actions import Kill, Record
from elaswave_spmd.controller.released import KILLED, ReleasedWorkers


def test_who_ends_in_time_is_not_killed() -> None:
    released = ReleasedWorkers(30.0)
    released.let_go(3, 100.0)
    assert released.overdue(130.0) == []
    released.ended(3)
    released.ended(4)  # it was lost
    assert released.overdue(1000.0) == []


def test_who_does_not_is_killed_once_and_told_of() -> None:
    released = ReleasedWorkers(30.0)
    for rank, at in ((5, 100.0), (2, 100.0), (7, 101.0)):
        released.let_go(rank, at)
    record, *kills = released.overdue(130.5)
    assert kills == [Kill(5), Kill(2)]
    assert isinstance(record, Record) and record.kind == KILLED and record.fields["ranks"] == [5, 2]
    assert record.fields["message"] == (
        "workers 5, 2 left, did not end within 30 s (timeouts.shutdown), and are killed"
    )
    assert released.overdue(130.6) == []
    assert released.overdue(140.0)[1:] == [Kill(7)]
