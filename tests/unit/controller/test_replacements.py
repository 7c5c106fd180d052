"""What is started in place of lost workers, and when: places, spares, and the limit within a minute."""

from __future__ import annotations

from elaswave_spmd.controller.actions import Record, Spawn
from elaswave_spmd.controller.replacements import ReplacementPolicy, Replacements
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.recovery.messages import Ready


def make(*, spares: int = 0, replaces: bool = True, per_minute: int = 100) -> Replacements:
    """Of a run of workers 0 to 3."""
    return Replacements(ReplacementPolicy(replaces, spares, per_minute), Roster(range(4)))


def started(replacements: Replacements, now: float = 0.0, *, spares: bool = True) -> tuple[int, ...]:
    ranks, actions = replacements.due(now, spares=spares)
    assert [action.ranks for action in actions if isinstance(action, Spawn)] == [ranks] * bool(ranks)
    return ranks


def test_nothing_is_started_where_nothing_is_asked_for() -> None:
    replacements = make(replaces=False)
    assert replacements.lost(1) is None and started(replacements) == ()
    assert not replacements.ready(Ready(1, "a")), "a worker of the first mesh"


def test_a_replacement_that_is_lost_is_replaced() -> None:
    replacements = make()
    assert replacements.lost(1) is None
    assert started(replacements) == (4,) and started(replacements) == ()
    assert replacements.lost(4) is None, "before it was ready"
    assert started(replacements) == (5,)
    assert not replacements.ready(Ready(5, "a")) and started(replacements) == ()
    assert replacements.lost(5) is None, "before it joined, or as a member"
    assert started(replacements) == (6,) and replacements.spares == {}


def test_spares_are_started_when_the_first_workers_have_and_wait_in_turn() -> None:
    replacements = make(spares=2)
    assert started(replacements, spares=False) == ()
    assert started(replacements) == (4, 5) and replacements.spares == {4: False, 5: False}
    assert replacements.ready(Ready(5, "b")) and replacements.ready(Ready(4, "a"))
    assert replacements.spares == {5: True, 4: True}
    assert replacements.lost(1) == Ready(5, "b"), "who came first"
    assert started(replacements) == (6,) and replacements.spares == {4: True, 6: False}
    assert replacements.lost(2) == Ready(4, "a") and started(replacements) == (7,)
    assert replacements.lost(3) is None and started(replacements) == (8,)
    assert replacements.spares == {7: False, 8: False}, "the oldest has a place to fill"
    assert not replacements.ready(Ready(7, "c")) and replacements.ready(Ready(6, "d"))


def test_a_loss_while_workers_start_is_replaced_where_spares_are_asked_for() -> None:
    replacements = make(spares=1)
    assert replacements.lost(2) is None and started(replacements, spares=False) == (4,)
    assert not replacements.ready(Ready(4, "a"))
    assert started(replacements) == (5,)


def test_the_limit_holds_back_what_is_more_and_says_so_once() -> None:
    replacements = make(per_minute=2)
    for rank in (0, 1, 2, 3):
        replacements.lost(rank)
    ranks, actions = replacements.due(10.0, spares=True)
    assert ranks == (4, 5)
    (record,) = [action for action in actions if isinstance(action, Record)]
    assert record.kind == "replacements" and (record.fields["missing"], record.fields["per_minute"]) == (2, 2)
    assert str(record.fields["message"]) == (
        "2 lost workers are not replaced for now: 2 have been started within a minute "
        "(elastic.replacements_per_minute=2); the next one in 60 s"
    )
    assert all(replacements.due(now, spares=True) == ((), []) for now in (10.1, 40.0, 69.9))
    assert replacements.due(70.0, spares=True) == ((6, 7), [Spawn((6, 7))]), "and goes on when the minute has passed"
    for rank in (4, 5, 6, 7):
        assert not replacements.ready(Ready(rank, "a"))
    replacements.lost(4)
    _, actions = replacements.due(80.0, spares=True)
    assert [type(action) for action in actions] == [Record], "the next episode"


def test_the_first_spares_are_not_limited_since_they_replace_nobody() -> None:
    replacements = make(spares=3, per_minute=1)
    assert replacements.due(0.0, spares=True) == ((4, 5, 6), [Spawn((4, 5, 6))])
    replacements.lost(5)
    assert started(replacements) == (7,)
    replacements.lost(7)
    assert started(replacements) == () and started(replacements, 60.0) == (8,)


def test_what_has_no_place_waits_and_does_not_count_as_a_start() -> None:
    replacements = make(per_minute=2)
    for rank in (0, 1):
        replacements.lost(rank)
    for now in (0.0, 1.0, 2.0):
        replacements.note_room(0)
        assert replacements.due(now, spares=True) == ((), [])
    assert replacements.num_unfilled == 2
    replacements.note_room(1)
    assert replacements.due(3.0, spares=True) == ((4,), [Spawn((4,))])
    assert replacements.due(3.0, spares=True) == ((), []), "the place is taken"
    replacements.note_room(3)
    assert replacements.due(4.0, spares=True) == ((5,), [Spawn((5,))]), "the second start within the minute"


def test_the_first_spares_wait_for_places_as_well_behind_those_who_replace_somebody() -> None:
    replacements = make(spares=2, per_minute=1)
    replacements.note_room(1)
    assert started(replacements) == (4,)
    replacements.lost(1)
    replacements.note_room(1)
    assert started(replacements) == (5,) and replacements.spares == {5: False}
    replacements.note_room(4)
    assert started(replacements) == (6,) and started(replacements) == ()
    assert replacements.spares == {5: False, 6: False}, "two, and worker 4 has a place to fill"


def test_that_a_place_lacks_is_said_once_for_each_that_waits_longer_than_a_process_takes_to_end() -> None:
    replacements = make()
    replacements.note_room(0)

    def said(now: float) -> list[object]:
        _, actions = replacements.due(now, spares=True)
        assert all(isinstance(action, Record) and action.kind == "no_place" for action in actions)
        return [action.fields["missing"] for action in actions if isinstance(action, Record)]

    replacements.lost(0)
    assert [said(now) for now in (0.0, 4.9, 5.0, 60.0)] == [[], [], [1], []]
    replacements.lost(1)
    _, (record,) = (replacements.due(61.0, spares=True), replacements.due(66.0, spares=True)[1])
    assert isinstance(record, Record) and record.fields["message"] == (
        "2 replacements or spares wait for a place: no agent has a free place, and runtime.local_workers=0 lets none "
        "start on the controller's machine"
    )
    replacements.note_room(2)
    assert started(replacements, 70.0) == (4, 5)
    replacements.lost(4)
    replacements.note_room(0)
    assert [said(now) for now in (71.0, 76.0)] == [[], [1]], "the next time"


def test_starts_on_machines_that_have_come_take_places_too() -> None:
    replacements = make()
    replacements.note_room(2)
    assert replacements.allow(1, 0.0) == (1, [])
    for rank in (0, 1):
        replacements.lost(rank)
    assert started(replacements) == (4,)
