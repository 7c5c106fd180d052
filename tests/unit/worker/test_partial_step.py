"""The work that is left of an interrupted step for one worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.recovery.messages import Recompute
from elaswave_spmd.recovery.partial_step import FULL, INPUT_GRADIENT, WEIGHTS_ONLY
from elaswave_spmd.worker.partial_step import (
    StepUnderWay,
    remaining_of_begun_step,
    remaining_of_new_step,
)
from elaswave_spmd.worker.ready_order import MicrobatchWork

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
        3: MicrobatchWork(True, FULL, False),
        1: MicrobatchWork(True, 0, False),
        2: MicrobatchWork(False, INPUT_GRADIENT, False),
    }


def test_what_was_done_since_the_report_is_not_done_twice() -> None:
    step = under_way({1, 2}, computed={1, 2}, reported={1})
    assert remaining_of_begun_step([line(2)], step, ()) == {} and step.computed == {1, 2}


def test_a_microbatch_that_was_reported_and_stands_in_the_plan_is_computed_again_alone() -> None:
    """Its sum went with a primary; here it is in a sum already, to which it must not be added twice."""
    step = under_way({1, 2}, computed={1}, reported={1})
    assert remaining_of_begun_step([line(1), line(2)], step, ()) == {
        1: MicrobatchWork(True, FULL, True),
        2: MicrobatchWork(True, FULL, False),
    }
    assert step.computed == set()


def test_of_what_is_put_off_nothing_but_the_weight_gradients_is_left() -> None:
    """A plan may say FULL, as the worker has put them off since its report."""
    for level in (FULL, WEIGHTS_ONLY):
        step = under_way({1, 2}, computed={1}, reported={1})
        lines = [line(2, forward=level == FULL, backward=level)]
        assert remaining_of_begun_step(lines, step, (), {2}) == {2: MicrobatchWork(False, WEIGHTS_ONLY, False)}
        assert step.assigned == {1, 2} and step.computed == {1}


def test_of_what_is_put_off_the_gradient_of_the_input_is_kept() -> None:
    step = under_way({1, 2}, computed={1}, reported={1})
    assert remaining_of_begun_step([line(2, backward=INPUT_GRADIENT)], step, (), {2}) == {}


def test_weight_gradients_that_were_made_since_the_report_are_not_made_twice() -> None:
    step = under_way({1, 2}, computed={1, 2}, reported={1})
    assert remaining_of_begun_step([line(2, forward=False, backward=WEIGHTS_ONLY)], step, ()) == {}


def test_a_microbatch_of_another_worker_is_sent_by_itself() -> None:
    """The tree's nodes of a worker's own micro-batches were opened without it."""
    step = under_way({1, 2})
    assert remaining_of_begun_step([line(1), line(5)], step, ()) == {
        1: MicrobatchWork(True, FULL, False),
        5: MicrobatchWork(True, FULL, True),
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
        1: MicrobatchWork(False, FULL, False),
        2: MicrobatchWork(True, FULL, False),
    }


def test_a_microbatch_whose_output_is_all_that_is_wanted_and_is_there_is_nothing_to_do() -> None:
    step = under_way({1})
    assert remaining_of_begun_step([line(1, backward=0)], step, {1}) == {}
    assert remaining_of_begun_step([line(1, backward=0)], step, ()) == {1: MicrobatchWork(True, 0, False)}


def test_a_microbatch_for_the_gradient_of_its_input_is_nobodys_own() -> None:
    step = under_way({1}, computed={1}, reported={1})
    assert remaining_of_begun_step([line(1, backward=INPUT_GRADIENT)], step, ()) == {
        1: MicrobatchWork(True, INPUT_GRADIENT, True)
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
