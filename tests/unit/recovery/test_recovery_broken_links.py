"""Links that are lost while both ends live: one more link, then one of the two goes; a death is no lost link."""

from __future__ import annotations

from typing import Any, NoReturn, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.recovery.failure_detector import BrokenLinks, Verdict


def beats(links: BrokenLinks, *ranks: int, now: float = 0.0) -> list[Verdict]:
    return [verdict for rank in ranks for verdict in links.heartbeat(rank, now)]


def test_a_pair_is_linked_again_once_and_then_the_higher_rank_goes() -> None:
    links = BrokenLinks()
    links.closed(2, 5)
    (verdict,) = beats(links, 2, 5, 2, 5)
    assert verdict == Verdict(frozenset((2, 5)), None)
    assert verdict.reason == "the link between workers 2 and 5 was lost"
    assert beats(links, 2, 5, 2, 5, 2, 5) == [], "said once"
    links.closed(2, 5)
    (verdict,) = beats(links, 2, 2, 5, 5)
    assert verdict == Verdict(frozenset((2, 5)), 5)
    assert verdict.reason == "the link between workers 2 and 5 was lost again"


def test_a_report_counts_when_both_ends_have_shown_that_they_live() -> None:
    links = BrokenLinks()
    links.closed(0, 1)
    assert beats(links, 0, 0, 0, 0, 0) == [] and beats(links, 1) == [], "one that its sender may not have survived"
    assert [v.ends for v in beats(links, 1)] == [frozenset((0, 1))]


def test_of_heartbeats_that_an_agent_sends_on_one_more_counts_and_the_same_on_two_ways_is_one() -> None:
    links = BrokenLinks()
    links.closed(0, 1)
    beats(links, 0, 0)
    relayed = [links.heartbeat(1, 0.0, is_relayed=True) for _ in range(2)]
    assert relayed == [[], []], "one was on its way, and one followed it"
    assert beats(links, 1) == [], "a copy of one of them, perhaps"
    assert [v.ends for v in links.heartbeat(1, 0.0, is_relayed=True)] == [frozenset((0, 1))]


def test_a_link_that_ends_with_a_process_is_none_that_was_lost() -> None:
    links = BrokenLinks()
    links.closed(0, 1)
    links.closed(2, 1)
    links.forget(1)
    assert beats(links, 0, 1, 2, 0, 1, 2, 0, 1, 2) == []


class _NotScanned(dict[frozenset[int], object]):
    """All lost links of a run: of 10,000 workers there may be a million, and 5,000 heartbeats in a second."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("a heartbeat looks at the links of its sender alone")

    keys = values = items = __iter__  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


def test_a_heartbeat_looks_at_the_links_of_its_sender_alone() -> None:
    links = BrokenLinks()
    for a in range(10):
        for b in range(10, 20):
            links.closed(a, b)
    links._heard = cast(Any, _NotScanned(links._heard))
    assert beats(links, 30, 0, 0, 30) == []
    assert [verdict.ends for verdict in beats(links, 12, 12)] == [frozenset((0, 12))]
    links.forget(0)
    assert [verdict.ends for verdict in beats(links, 13, 13, 5, 5)] == [frozenset((5, 12)), frozenset((5, 13))]
    assert all(0 not in ends for of in links._of.values() for ends in of)


def test_both_directions_are_one_loss() -> None:
    links = BrokenLinks()
    links.closed(0, 1)
    links.heartbeat(0, 0.0)
    links.closed(1, 0)
    assert len(beats(links, 1, 0, 1, 0, 1)) == 1


def test_the_other_direction_may_be_noticed_later_and_is_made_again_as_well() -> None:
    """A cut between two machines takes both, and each is found silent when its sender has had something to send."""
    links = BrokenLinks()
    links.closed(2, 5)
    assert [verdict.lost for verdict in beats(links, 2, 5, 2, 5)] == [None]
    links.closed(5, 2)
    assert [verdict.lost for verdict in beats(links, 2, 5, 2, 5)] == [None]
    links.closed(2, 5)
    links.closed(5, 2)
    assert [verdict.lost for verdict in beats(links, 2, 5, 2, 5)] == [5]


def linked_again(*pairs: tuple[int, int], now: float) -> BrokenLinks:
    links = BrokenLinks()
    for ends in pairs:
        links.closed(*ends)
        assert [verdict.lost for verdict in beats(links, *ends, *ends, now=now)] == [None]
    return links


def test_a_failure_long_after_the_link_was_made_again_is_another_one() -> None:
    """A run of weeks does not lose a machine for two short cuts."""
    links = linked_again((2, 5), now=100.0)
    links.committed(100.0 + 600.0)
    links.closed(2, 5)
    assert [verdict.lost for verdict in beats(links, 2, 5, 2, 5, now=701.0)] == [None]
    links.committed(702.0)
    links.closed(2, 5)
    assert [verdict.lost for verdict in beats(links, 2, 5, 2, 5, now=703.0)] == [5], "counted anew"


def test_a_link_that_fails_again_soon_or_before_a_step_is_done_over_it_is_not_made_again() -> None:
    """With timeouts of hours a network that is down is noticed a second time after hours, in which no step is done."""
    links = linked_again((2, 5), now=100.0)
    links.committed(699.9)
    links.closed(2, 5)
    assert [verdict.lost for verdict in beats(links, 2, 5, 2, 5, now=90000.0)] == [5]


def test_each_link_is_forgotten_by_itself() -> None:
    links = linked_again((0, 1), now=0.0)
    links.closed(1, 2)
    assert [verdict.lost for verdict in beats(links, 1, 2, 1, 2, now=400.0)] == [None]
    links.committed(600.0)
    links.closed(0, 1)
    links.closed(1, 2)
    verdicts = beats(links, 0, 1, 2, 0, 1, 2, now=601.0)
    assert {verdict.ends: verdict.lost for verdict in verdicts} == {frozenset((0, 1)): None, frozenset((1, 2)): 2}


def test_a_link_that_there_was_not_is_made_as_often_as_it_is_missed() -> None:
    """No network has failed: nobody goes for it, nor for the first loss of the link that is made then."""
    links = BrokenLinks()
    for _ in range(3):
        links.closed(2, 5, was_linked=False)
        (verdict,) = beats(links, 2, 5, 2, 5)
        assert verdict == Verdict(frozenset((2, 5)), None, was_linked=False)
        assert verdict.reason == "there was no link between workers 2 and 5"
    links.closed(2, 5)
    assert beats(links, 2, 5, 2, 5) == [Verdict(frozenset((2, 5)), None)]
    links.closed(5, 2, was_linked=False)
    links.closed(2, 5)
    assert [verdict.lost for verdict in beats(links, 2, 5, 2, 5)] == [5], "the other direction was lost, and again"


def test_pairs_are_counted_apart() -> None:
    links = BrokenLinks()
    for ends in ((0, 1), (1, 2), (0, 2)):
        links.closed(*ends)
    verdicts = beats(links, 0, 1, 2, 0, 1, 2)
    assert [v.lost for v in verdicts] == [None] * 3 and len({v.ends for v in verdicts}) == 3


def test_who_has_lost_the_link_to_the_controller_goes_at_once() -> None:
    """A message between it and the controller may be lost, and cannot be asked for again."""
    links = BrokenLinks()
    links.closed(3)
    (verdict,) = beats(links, 0, 3, 3)
    assert verdict == Verdict(frozenset((3,)), 3) and verdict.reason == "its link to the controller was lost"


def test_a_link_has_two_ends() -> None:
    for ends in ((), (1, 1), (1, 2, 3)):
        with pytest.raises(AssertionError):
            BrokenLinks().closed(*ends)


def lives(rank: int, seen: list[tuple[str, int]]) -> bool:
    return seen.count(("beat", rank)) >= 2 or seen.count(("relayed", rank)) >= 3


@given(
    st.lists(st.tuples(st.sampled_from(["closed", "beat", "relayed", "forget"]), st.integers(0, 3), st.integers(0, 3)))
)
def test_nobody_is_judged_without_the_heartbeats_of_each_end(story: list[tuple[str, int, int]]) -> None:
    """Against the whole history."""
    links = BrokenLinks()
    reported: dict[frozenset[int], list[tuple[str, int]]] = {}
    directions: dict[frozenset[int], set[tuple[int, int]]] = {}
    judged: set[tuple[int, int]] = set()
    for what, a, b in story:
        if what == "closed" and a != b:
            links.closed(a, b)
            reported.setdefault(frozenset((a, b)), [])
            directions.setdefault(frozenset((a, b)), set()).add((a, b))
        elif what == "forget":
            links.forget(a)
            reported = {ends: seen for ends, seen in reported.items() if a not in ends}
            directions = {ends: found for ends, found in directions.items() if a not in ends}
        elif what in ("beat", "relayed"):
            for seen in reported.values():
                seen.append((what, a))
            for verdict in links.heartbeat(a, 0.0, is_relayed=what == "relayed"):
                seen = reported.pop(verdict.ends)
                assert all(lives(rank, seen) for rank in verdict.ends)
                found = directions.pop(verdict.ends)
                assert verdict.lost == (max(verdict.ends) if found & judged else None)
                judged |= found
            assert not any(all(lives(rank, seen) for rank in ends) for ends, seen in reported.items())
