"""The virtual-time engine: equal to timing's longest way where that is exact, by hand and by brute force beyond it."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.scheduling.cost_model import CostModel, LayerCost
from elaswave_spmd.scheduling.dvfs import FrequencyRange, Hint, Pace
from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, WEIGHTS, PipelineAction
from elaswave_spmd.scheduling.rebalance import frequency_hints
from elaswave_spmd.scheduling.step_time import Assignment, bound, stage_seconds, step_time, timed_graph
from elaswave_spmd.simulator.engine import FREE, Wires, execute
from elaswave_spmd.simulator.links import Clock, Link
from elaswave_spmd.simulator.recompute import recompute_step
from elaswave_spmd.simulator.work import Work
from tests.unit.scheduling.planning_cases import assigned, costs_of, rule_of
from tests.unit.simulator.sim_cases import assignments


@given(assignments())
@settings(max_examples=80)
def test_with_free_wires_a_step_takes_the_longest_way_through_its_lists(case):
    assignment, costs = case
    graph = timed_graph(assignment, costs)
    run = execute(Work.from_assignment(assignment), costs, wires=FREE)
    ends = dict(zip(graph.order, graph.ends(), strict=True))
    assert run.step_s == pytest.approx(max(ends.values()))
    assert {span.action: span.stop for span in run.spans} == pytest.approx(ends)
    twice = execute(Work.from_assignment(assignment), costs, wires=FREE, steps=2)
    assert twice.seconds == pytest.approx((run.step_s, run.step_s))


@given(assignments())
@settings(max_examples=60)
def test_spans_are_what_workers_do(case):
    """Each action once, by its owner, one at a time, after all that it needs.

    Shared wires may make a step shorter (Graham, 1969), as workers then choose otherwise, but not than any order of its
    actions takes.
    """
    assignment, costs = case
    work = Work.from_assignment(assignment)
    free, shared = execute(work, costs, wires=FREE), execute(work, costs)
    for run in (free, shared):
        assert run.step_s >= step_time(assignment, costs).bound_s * (1 - 1e-9)
        stop = {span.action: span.stop for span in run.spans}
        number = sum(len(work.kinds(stage)) for stage in range(work.num_stages)) * work.num_microbatches
        assert len(stop) == len(run.spans) == number
        by_worker: dict[int, list[tuple[float, float]]] = {}
        for span in run.spans:
            assert work.owners[span.action.stage][span.action.microbatch] == span.worker
            by_worker.setdefault(span.worker, []).append((span.start, span.stop))
            assert all(stop[needed] <= span.start + 1e-9 for needed in span.action.needs(work.num_stages))
        for mine in by_worker.values():
            mine.sort()
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(mine))


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5), st.booleans()), max_size=8), st.integers(0, 3))
def test_a_wire_sends_urgent_messages_first_and_goes_on_with_the_others(messages, latency):
    """Against a wire that is simulated byte by byte."""
    clock, arrived = Clock(), {}
    link = Link(clock, CostModel((LayerCost("a", 1, 1),), 1.0, float(latency)), shared=True)

    def arrive(number: int) -> None:
        arrived[number] = clock.now

    def send(number: int) -> None:
        link.send(messages[number][1], arrive, number, urgent=messages[number][2])

    for number, (time, _, _) in enumerate(messages):
        clock.at(float(time), send, number)
    while clock.advance():
        pass
    assert arrived == {number: time + latency for number, time in byte_by_byte(messages).items()}
    assert link.busy_s == sum(size for _, size, _ in messages)


def byte_by_byte(messages) -> dict[int, int]:
    """When the last byte of each message leaves, at a byte a second."""
    urgent, bulk, left, found = deque(), deque(), {}, {}
    for now in range(100):
        for number, (time, size, is_urgent) in enumerate(messages):
            if time == now:
                (urgent if is_urgent else bulk).append(number)
                left[number] = size
        queue = urgent or bulk
        if queue:
            left[queue[0]] -= 1
            if not left[queue[0]]:
                found[queue.popleft()] = now + 1
    return found


def one_stage(gradient: int, value: int, latency: float = 0.0) -> tuple[Work, CostModel]:
    """Two workers with a micro-batch each of one layer of 1 + 2 s, at a byte a second."""
    costs = CostModel((LayerCost("a", 1, 2, gradient_bytes=gradient, value_bytes=value),), 1.0, latency)
    return Work.from_assignment(Assignment(((0, 1),), (0, 1), ((1, 1),))), costs


@pytest.mark.parametrize(
    "zero, mirrors, latency, first, second",
    [
        (1, 0, 0.0, 3 + 2, 1 + 3 + 2),  # half of the sum to the other one; half of the parameters before the next step
        (
            1,
            1,
            0.0,
            3 + 2 + 2,
            3 + 2 + 2,
        ),  # the reduced gradient to the mirror, which applies the step itself and needs no parameters
        (0, 0, 0.0, 3 + 2 + 2, 3 + 2 + 2),  # replicated: everybody is a mirror
        (1, 1, 1.0, 3 + 2 + 1 + 2 + 1 + 1, 10),  # and each of the three messages takes a second more
    ],
)
def test_sums_entries_votes_and_parameters_by_hand(zero, mirrors, latency, first, second):
    work, costs = one_stage(4, 2, latency)
    run = execute(work, costs, rule=rule_of(zero, mirrors), steps=3)
    assert run.seconds == pytest.approx((first, second, second))


def test_sums_leave_while_the_backward_goes_on():
    """The last layer's sum has left when the first layer's backward ends."""
    layers = tuple(LayerCost(name, 1, 2, gradient_bytes=4) for name in "ab")
    work = Work.from_assignment(Assignment(((0, 1),), (0, 2), ((1, 1),)))
    run = execute(work, CostModel(layers, 2.0), rule=rule_of(1, 0))
    assert run.step_s == pytest.approx(6 + 1) and run.link_s == {0: 2.0, 1: 2.0}


def test_activations_do_not_wait_for_sums():
    """Worker 0 sums nothing up before the end; worker 1 sends its gradient to stage 0 beside a long sum."""
    layers = (LayerCost("a", 1, 2, boundary_bytes=1), LayerCost("b", 1, 2, gradient_bytes=200))
    assignment = Assignment(((0,), (1, 2)), (0, 1, 2), ((2,), (1, 1)))
    costs = CostModel(layers, 1.0)
    shared = execute(Work.from_assignment(assignment), costs, rule=rule_of(1, 0))
    bare = execute(Work.from_assignment(assignment), costs)
    assert [s for s in shared.spans if s.worker == 0] == [s for s in bare.spans if s.worker == 0]
    assert shared.step_s == pytest.approx(6 + 101), (
        "100 bytes of the second micro-batch's sum, and one of its gradient first"
    )


@given(assignments(), st.sampled_from([0, 1, 2]), st.integers(0, 2))
@settings(max_examples=60)
def test_a_step_takes_as_long_as_its_busiest_wire_and_as_its_actions(case, zero, mirrors):
    assignment, costs = case
    rule = rule_of(zero, mirrors)
    run = execute(
        Work.from_assignment(assignment), costs, rule=rule, microbatch_order=assignment.microbatch_order, steps=2
    )
    plain = execute(Work.from_assignment(assignment), costs)
    assert min(run.seconds) >= plain.step_s * (1 - 1e-9)
    assert sum(run.seconds) >= max(run.link_s.values()) * (1 - 1e-9)
    nothing = costs_of([layer.seconds for layer in costs.layers]).with_speeds(dict(costs.speeds))
    idle = execute(Work.from_assignment(assignment), nothing, rule=rule, microbatch_order=assignment.microbatch_order)
    assert idle.step_s == pytest.approx(step_time(assignment, nothing).pipeline_s)


@given(assignments(), st.sampled_from([0, 1, 2]), st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_a_plan_takes_what_is_executed(case, zero, mirrors):
    """The pipeline with links that boundary tensors share; and the reduction, where no boundary tensor delays a sum."""
    assignment, costs = case
    work, rule, order = Work.from_assignment(assignment), rule_of(zero, mirrors), assignment.microbatch_order
    assert step_time(assignment, costs, rule).pipeline_s == pytest.approx(execute(work, costs).step_s)
    light = replace(costs, layers=tuple(replace(layer, boundary_bytes=0) for layer in costs.layers))
    found = step_time(assignment, light, rule)
    # The first step waits for no parameters of a step before it.
    first_s = execute(work, light, rule=rule, microbatch_order=order).seconds[0]
    assert found.pipeline_s + found.tail_s == pytest.approx(first_s)


def test_hints_change_seconds_and_keep_to_an_order():
    assignment = assigned([1, 1], 4, costs_of([3.0, 3.0]))
    work, costs = Work.from_assignment(assignment), costs_of([3.0, 3.0])
    plain = execute(work, costs)
    slow = execute(work, costs, hints=[Hint(0, (0,), Pace((0,), (0.5,))), Hint(1, (1,), Pace((0,), (0.5,)))])
    assert slow.step_s == pytest.approx(2 * plain.step_s)
    last_two = Hint(0, (0,), Pace((0, 6), (1.0, 0.5)))
    drain = execute(work, costs, hints=[last_two])
    assert (plain.step_s, drain.step_s) == (15, 18), "two backwards from second 10 on, of 4 s each"
    assert execute(work, costs, hints=[last_two], change_s=1.5).step_s == 19.5
    assert execute(work, costs, hints=[last_two], change_s=1.5, steps=2).seconds == (19.5, 19.5)
    forwards_first = sorted((span.action for span in plain.spans if span.worker == 0), key=lambda a: a.kind != "F")
    ordered = execute(work, costs, hints=[Hint(0, (0,), Pace(), tuple(forwards_first))])
    assert [span.action for span in ordered.spans if span.worker == 0] == forwards_first


@given(assignments(), st.floats(0.3, 1.0), st.integers(0, 8), st.sampled_from([0.0, 0.05]))
@settings(max_examples=60, deadline=None)
def test_a_step_with_paces_takes_what_was_planned(case, lowest, changes, change_s):
    assignment, costs = case
    limits = FrequencyRange(lowest, 1.0, 0.0, changes, change_s)
    plan, hints = frequency_hints(assignment, costs, limits)
    order = assignment.microbatch_order
    work = Work.from_assignment(assignment)
    run = execute(work, costs, wires=FREE, microbatch_order=order, hints=hints, change_s=change_s)
    assert run.step_s == pytest.approx(plan.makespan_s, rel=1e-9)
    plain = execute(work, costs, wires=FREE, microbatch_order=order)
    assert run.step_s <= plain.step_s * (1 + 1e-9)


def test_each_action_may_take_a_little_more():
    assignment = assigned([1], 3, costs_of([3.0]))
    wires = Wires(action_s=0.25, apply_s=0.5)
    assert execute(Work.from_assignment(assignment), costs_of([3.0]), wires=wires, steps=2).seconds == pytest.approx(
        (10.5, 11.0)
    )


@given(assignments(), st.booleans())
@settings(max_examples=60)
def test_without_lists_workers_take_what_is_ready(case, split):
    assignment, costs = case
    work = replace(Work.from_assignment(assignment), weight_share=0.5 if split else 0.0, put_off=())
    run = execute(work, costs, wires=FREE)
    kinds = Counter(span.action.kind for span in run.spans)
    every = work.num_stages * work.num_microbatches
    assert kinds == {FORWARD: every, BACKWARD: every} | ({WEIGHTS: every} if split else {})
    forward, backward, delays = stage_seconds(assignment.layer_cuts, costs)
    speeds = [costs.speeds_of(members) for members in assignment.stages]
    forward_s, backward_s = (
        [seconds / v for seconds, v in zip(kind, speeds, strict=True)] for kind in (forward, backward)
    )
    counts = [np.array([of.count(rank) for rank in m]) for of, m in zip(work.owners, work.stages, strict=True)]
    if not split:
        assert run.step_s >= bound(forward_s, backward_s, counts, delays, work.limits) * (1 - 1e-9)
    for stage, members in enumerate(work.stages):
        for rank in members:
            last = WEIGHTS if split else BACKWARD
            mine = [span for span in run.spans if span.worker == rank and span.action.kind in (FORWARD, last)]
            flights = [1 if s.action.kind == FORWARD else -1 for s in sorted(mine, key=lambda s: s.start)]
            assert max((sum(flights[: i + 1]) for i in range(len(flights))), default=0) <= work.limits[stage]


@given(assignments())
@settings(max_examples=40)
def test_steps_that_overlap_by_stages_are_never_slower(case):
    assignment, costs = case
    work = Work.from_assignment(assignment)
    after = execute(work, costs, wires=FREE, steps=3)
    overlapping = execute(work, costs, wires=FREE, steps=3, by_stage=True)
    assert sum(overlapping.seconds) <= sum(after.seconds) * (1 + 1e-9)
    computed: defaultdict[int, float] = defaultdict(float)
    for span in overlapping.spans:
        computed[span.worker] += span.stop - span.start
    busiest = max(computed.values())
    assert sum(overlapping.seconds) >= busiest * (1 - 1e-9)


# ---- recomputation


@given(assignments(), st.floats(0, 1.1), st.data())
@settings(max_examples=60)
def test_salvage_does_what_is_missing_and_only_that(case, moment, data):
    assignment, costs = case
    able = [rank for members in assignment.stages if len(members) > 1 for rank in members]
    gone = [data.draw(st.sampled_from(able))] if able else [assignment.stages[0][0]]
    whole_s = execute(Work.from_assignment(assignment), costs, wires=FREE).step_s
    found = recompute_step(assignment, costs, gone, moment * whole_s)
    if not able:
        assert found is None
        return
    assert found is not None and found.whole_s == pytest.approx(whole_s)
    kept = {span.action for span in found.kept if span.worker not in gone}
    again = [span.action for span in found.rest]
    everything = {
        PipelineAction(stage, kind, microbatch)
        for stage in range(assignment.num_stages)
        for microbatch in range(assignment.num_microbatches)
        for kind in Work.from_assignment(assignment).kinds(stage)
    }
    assert len(again) == len(set(again)) and kept.isdisjoint(again) and kept | set(again) == everything
    assert all(span.worker not in gone and span.start >= moment * whole_s - 1e-9 for span in found.rest)


def test_what_a_worker_has_put_off_is_done_once_and_that_of_a_lost_one_again():
    """Two stages of two workers, backwards of the second in two parts; both of its workers put off their only one."""
    layers = tuple(LayerCost(f"l{i}", 1.0, 2.0, weight_share=0.5) for i in range(2))
    assignment = Assignment(((0, 1), (2, 3)), (0, 1, 2), ((1, 1), (1, 1)), put_off=(0, 1))
    found = recompute_step(assignment, CostModel(layers, 1.0), [3], 3.0)
    assert found is not None
    assert {str(span.action) for span in found.kept} == {"0F0", "0F1", "1F0", "1F1", "1B0", "1B1"}
    done = {(span.worker, str(span.action)): (span.start, span.stop) for span in found.rest}
    assert done.keys() == {(0, "0B0"), (1, "0B1"), (2, "1W0"), (2, "1F1"), (2, "1B1"), (2, "1W1")}
    # No backward is ready, so the lost worker's forward goes first. One micro-batch may be put off: its own comes next.
    assert [done[2, name] for name in ("1F1", "1W0", "1B1", "1W1")] == [(3.0, 4.0), (4.0, 5.0), (5.0, 6.0), (6.0, 7.0)]
    assert done[1, "0B1"] == (6.0, 8.0) and found.seconds == 8.0


def test_a_loss_at_the_end_costs_the_lost_microbatches_again():
    """Two workers, two micro-batches each of 3 s: one is lost when all is done; the other one does its micro-batches
    again.
    """
    costs = costs_of([3.0])
    found = recompute_step(assigned([2], 4, costs), costs, [1], 6.0)
    assert found is not None and found.seconds - found.whole_s == pytest.approx(6.0)
    start = recompute_step(assigned([2], 4, costs), costs, [1], 0.0)
    assert start is not None and start.seconds == pytest.approx(12.0)
