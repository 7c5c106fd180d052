"""The work that is left of an interrupted step for one worker, and which of it can run next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.recovery.messages import Recompute
from elaswave_spmd.recovery.partial_step import FULL, INPUT_GRADIENT
from elaswave_spmd.worker.partial_step import (
    RemainingWork,
    StepUnderWay,
    next_ready,
    remaining_of_begun_step,
    remaining_of_new_step,
)

ME = 1


def line(microbatch: int, *, forward: bool = True, backward: int = FULL) -> Recompute:
    return Recompute(0, microbatch, ME, forward, backward)


def under_way(assigned: set[int], computed: set[int] | None = None, reported: set[int] | None = None) -> StepUnderWay:
    """A step begun with these micro-batches; `computed`, and added up here, and `reported` in it."""
    done = set(computed or ())
    step = StepUnderWay(7, set(assigned), frozenset(assigned), computed=set(done), summed=done)
    step.reported = frozenset(reported or ())
    return step


# ---- what is left


def test_a_step_that_was_not_begun_is_the_plan() -> None:
    remaining = remaining_of_new_step([line(3), line(1, backward=0), line(2, forward=False, backward=INPUT_GRADIENT)])
    assert remaining == {
        3: RemainingWork(True, FULL, False),
        1: RemainingWork(True, 0, False),
        2: RemainingWork(False, INPUT_GRADIENT, False),
    }


def test_what_was_done_since_the_report_is_not_done_twice() -> None:
    step = under_way({1, 2}, computed={1, 2}, reported={1})
    assert remaining_of_begun_step([line(2)], step, ()) == {} and step.computed == {1, 2}


def test_a_microbatch_that_was_reported_and_stands_in_the_plan_is_computed_again_alone() -> None:
    """Its sum went with a primary; here it is in a sum already, to which it must not be added twice."""
    step = under_way({1, 2}, computed={1}, reported={1})
    assert remaining_of_begun_step([line(1), line(2)], step, ()) == {
        1: RemainingWork(True, FULL, True),
        2: RemainingWork(True, FULL, False),
    }
    assert step.computed == set()


def test_a_microbatch_of_another_worker_is_sent_by_itself() -> None:
    """The tree's nodes of a worker's own micro-batches were opened without it."""
    step = under_way({1, 2})
    assert remaining_of_begun_step([line(1), line(5)], step, ()) == {
        1: RemainingWork(True, FULL, False),
        5: RemainingWork(True, FULL, True),
    }
    assert step.assigned == {1, 2, 5}, "its own from now on: the next report says so"


def test_a_microbatch_taken_over_twice_is_still_alone() -> None:
    step = under_way({1})
    remaining_of_begun_step([line(5)], step, ())
    assert remaining_of_begun_step([line(5)], step, ())[5].alone, "assigned, but not from the beginning"


def test_where_sums_are_in_the_way_every_microbatch_is_alone() -> None:
    step = StepUnderWay(7, {1}, frozenset({1}), alone=True)
    assert remaining_of_begun_step([line(1)], step, ())[1].alone


def test_a_saved_forward_serves() -> None:
    step = under_way({1, 2})
    assert remaining_of_begun_step([line(1), line(2)], step, {1}) == {
        1: RemainingWork(False, FULL, False),
        2: RemainingWork(True, FULL, False),
    }


def test_a_microbatch_whose_output_is_all_that_is_wanted_and_is_there_is_nothing_to_do() -> None:
    step = under_way({1})
    assert remaining_of_begun_step([line(1, backward=0)], step, {1}) == {}
    assert remaining_of_begun_step([line(1, backward=0)], step, ()) == {1: RemainingWork(True, 0, False)}


def test_a_microbatch_for_the_gradient_of_its_input_is_nobodys_own() -> None:
    step = under_way({1}, computed={1}, reported={1})
    assert remaining_of_begun_step([line(1, backward=INPUT_GRADIENT)], step, ()) == {
        1: RemainingWork(True, INPUT_GRADIENT, True)
    }
    assert step.computed == {1}, "its weight gradients stay where they are"
    remaining_of_begun_step([line(4, backward=INPUT_GRADIENT)], step, ())
    assert step.assigned == {1}


@given(
    assigned=st.frozensets(st.integers(0, 9)),
    computed=st.frozensets(st.integers(0, 9)),
    reported=st.frozensets(st.integers(0, 9)),
    planned=st.frozensets(st.integers(0, 9)),
    forwarded=st.frozensets(st.integers(0, 9)),
)
def test_all_of_the_plan_is_done_or_to_do(assigned, computed, reported, planned, forwarded) -> None:
    computed &= assigned
    step = under_way(set(assigned), set(computed), set(reported))
    remaining = remaining_of_begun_step([line(microbatch) for microbatch in planned], step, forwarded)
    assert remaining.keys() | (computed - reported) >= planned and remaining.keys() <= planned
    assert step.computed.isdisjoint(remaining) and step.assigned >= planned - (computed - reported)
    for microbatch, left in remaining.items():
        assert left.forward == (microbatch not in forwarded) and left.backward == FULL
        assert left.alone or microbatch in assigned - step.summed, "in a sum here at most once"


def test_a_microbatch_that_has_to_be_computed_again_twice_is_alone_both_times() -> None:
    """Between the two it is not among those computed, but in the sum still."""
    step = under_way({1}, computed={1}, reported={1})
    assert remaining_of_begun_step([line(1)], step, ())[1].alone
    step.reported = frozenset(step.computed)
    assert remaining_of_begun_step([line(1)], step, ())[1].alone


# ---- what can go next


def has(*microbatches: int):
    return lambda microbatch: microbatch in microbatches


def test_a_backward_goes_before_any_forward() -> None:
    remaining = {1: RemainingWork(True, FULL, False), 2: RemainingWork(False, FULL, False)}
    assert next_ready(remaining, has(1, 2), has(2)) == 2


def test_the_lowest_microbatch_goes_first() -> None:
    assert next_ready({u: RemainingWork(True, FULL, False) for u in (5, 3, 4)}, has(3, 4, 5), has()) == 3
    assert next_ready({u: RemainingWork(False, FULL, False) for u in (5, 3, 4)}, has(), has(4, 5)) == 4


def test_nothing_goes_without_its_input() -> None:
    remaining = {1: RemainingWork(True, FULL, False), 2: RemainingWork(False, FULL, False)}
    assert next_ready(remaining, has(2), has(1)) is None, "a forward takes an activation, a backward a gradient"
    assert next_ready({}, has(1), has(1)) is None


def test_whatever_waits_does_not_keep_others_from_going() -> None:
    """No list has an order that two workers' lists could disagree about: some input that is there is always used."""
    remaining = {
        1: RemainingWork(False, FULL, False),
        2: RemainingWork(True, 0, False),
        3: RemainingWork(False, INPUT_GRADIENT, True),
    }
    assert next_ready(remaining, has(2), has()) == 2 and next_ready(remaining, has(), has(3)) == 3
