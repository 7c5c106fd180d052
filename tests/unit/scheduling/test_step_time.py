"""Step times: the longest way through the action lists, parts that stand for all, and a bound below every order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.determinism.reduction_tree import max_open_nodes
from elaswave_spmd.scheduling.cost_model import REPLICATED, CostModel, LayerCost, MemoryRule
from elaswave_spmd.scheduling.microbatch_assignment import assign_microbatches
from elaswave_spmd.scheduling.pipeline import PipelineAction, Schedule, check
from elaswave_spmd.scheduling.step_time import (
    EXACT,
    PART,
    Assignment,
    _piece_s,
    executed_lists,
    memory_of,
    open_sums,
    reduction_tail_s,
    step_time,
    timed_graph,
)
from tests.unit.scheduling.planning_cases import (
    SPEEDS,
    assigned,
    costs_of,
    even_cuts,
    microbatch_s,
    rule_of,
    split_at_random,
    stages_of,
)

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)
DEALINGS = st.sampled_from(["contiguous", "time-major"])


@st.composite
def cases(draw) -> tuple[Assignment, CostModel]:
    sizes = draw(SIZES)
    seconds = draw(st.lists(st.floats(0.1, 5), min_size=len(sizes), max_size=len(sizes) + 3))
    latency = draw(st.sampled_from([0.0, 0.0, 0.3]))
    costs = costs_of(seconds, bandwidth=100.0, latency_s=latency, boundary_bytes=draw(st.integers(0, 50)))
    costs = costs.with_speeds({rank: draw(SPEEDS) for rank in range(sum(sizes))})
    return split_at_random(draw, assigned(sizes, draw(st.integers(1, 13)), costs, draw(DEALINGS)), costs)


def slowly(actions: Schedule, assignment: Assignment, costs: CostModel) -> float:
    """The same times, by recursion over the actions."""
    stage_of = {rank: s for s, members in enumerate(assignment.stages) for rank in members}
    home = {action: (rank, i) for rank, todo in actions.items() for i, action in enumerate(todo)}
    known: dict[PipelineAction, float] = {}

    def end(action: PipelineAction) -> float:
        if action not in known:
            rank, i = home[action]
            s, cuts = stage_of[rank], assignment.layer_cuts
            start = end(actions[rank][i - 1]) if i else 0.0
            for needed in action.needs(assignment.num_stages):
                crossed = 0.0 if needed.stage == s else costs.message_s(cuts[max(s, needed.stage)] - 1)
                start = max(start, end(needed) + crossed)
            forward, backward = costs.stage_s(cuts[s], cuts[s + 1])
            late = sum(layer.weights_s for layer in costs.layers[cuts[s] : cuts[s + 1]])
            backward -= late if assignment.put_off and assignment.put_off[s] else 0.0
            known[action] = start + {"F": forward, "B": backward, "W": late}[action.kind] / costs.speed(rank)
        return known[action]

    return max(end(action) for action in home)


@given(cases())
@settings(deadline=None)
def test_makespan_is_when_the_last_action_ends(case):
    assignment, costs = case
    graph = timed_graph(assignment, costs)
    wanted = slowly(executed_lists(assignment, costs), assignment, costs)
    assert graph.makespan() == pytest.approx(wanted)
    number = 2 * assignment.num_stages + sum(most > 0 for most in assignment.put_off)
    assert len(graph.order) == len(set(graph.order)) == number * assignment.num_microbatches
    check(executed_lists(assignment, costs), assignment.num_stages)


@given(cases())
@settings(deadline=None)
def test_parts_stand_for_all_and_nothing_is_below_the_bound(case):
    assignment, costs = case
    graph = timed_graph(assignment, costs)
    whole = graph.makespan()
    found = step_time(assignment, costs)
    assert found.how == EXACT
    if not costs.layers[0].boundary_bytes:  # else messages wait for each other, as test_sim_engine.py has it
        assert found.pipeline_s == pytest.approx(whole)
    assert found.bottleneck_s <= found.bound_s * (1 + 1e-9) and found.bound_s <= found.pipeline_s * (1 + 1e-9)
    assert found.seconds == found.pipeline_s + found.tail_s
    assert found.tail_s <= 3 * costs.latency_s + 1e-9, "only messages wait where gradients have no bytes"
    loads = {
        rank: count * microbatch_s(costs, assignment.layer_cuts[s], assignment.layer_cuts[s + 1], rank)
        for s, members in enumerate(assignment.stages)
        for rank, count in zip(members, assignment.microbatch_counts[s], strict=True)
    }
    assert found.bottleneck_s == pytest.approx(max(loads.values()))
    assert loads[found.worker] == pytest.approx(found.bottleneck_s)
    estimate = step_time(assignment, costs, most_actions=0)
    assert estimate.how == "lower bound" and estimate.seconds == estimate.bound_s + estimate.tail_s
    assert estimate.bound_s == found.bound_s
    work = graph.work()
    assert work.tolist() == pytest.approx([loads[rank] for rank in graph.ranks])


def test_an_even_pipeline_takes_what_1f1b_takes():
    """(micro-batches + stages - 1) x (forward + backward), Narayanan et al., 2019; and the bound is exact there."""
    for stages, microbatches in ((4, 8), (3, 3), (1, 5), (5, 2)):
        assignment = Assignment(stages_of([1] * stages), even_cuts(stages, stages), ((microbatches,),) * stages)
        found = step_time(assignment, costs_of([3.0] * stages))
        assert found.seconds == found.bound_s == pytest.approx(3.0 * (microbatches + stages - 1))
        assert found.bottleneck_s == pytest.approx(3.0 * microbatches)


def test_an_even_pipeline_that_puts_weight_gradients_off_takes_what_zb_h1_takes():
    """A forward, a first and a second part take as long; the first stage's backwards are whole (Qi et al., 2024)."""
    assignment = Assignment(stages_of([1] * 4), even_cuts(4, 4), ((8,),) * 4, put_off=(0, 1, 2, 3))
    costs = costs_of([3.0] * 4)
    split = replace(costs, layers=tuple(replace(layer, weight_share=0.5) for layer in costs.layers))
    assert step_time(assignment, split).seconds == 28.0
    assert step_time(replace(assignment, put_off=()), split).seconds == step_time(assignment, costs).seconds + 0 == 33.0


def test_waiting_for_the_first_microbatch_counts_where_links_are_slow():
    """Both forwards are done long before the first micro-batch is back; then there are two backwards to do."""
    layers = (LayerCost("a", 1, 2), LayerCost("b", 0.1, 0.2))
    found = step_time(Assignment(((0,), (1,)), (0, 1, 2), ((2,), (2,))), CostModel(layers, 1.0, latency_s=10.0))
    assert (found.pipeline_s, found.bound_s) == pytest.approx((25.3, 25.3))  # 1 + 10 + 0.3 + 10, and two backwards
    assert found.seconds == found.pipeline_s + 10, "and a vote"


def test_the_slowest_part_counts():
    """Two groups that share no micro-batch; the slow worker is in the second, or in the first."""
    for slow in (4, 5):
        costs = costs_of([3.0, 3.0]).with_speeds({slow: 0.5})
        assignment = Assignment(((0, 1, 2, 3), (4, 5)), (0, 1, 2), ((1, 1, 1, 1), (2, 2)))
        graph = timed_graph(assignment, costs)
        found = step_time(assignment, costs)
        assert found.seconds == pytest.approx(graph.makespan()) == 3 + 2 * 6
        assert step_time(assignment, costs, most_actions=15).how == PART
        assert step_time(assignment, costs, most_actions=16).how == EXACT
        assert step_time(assignment, costs.without([slow]), most_actions=8).how == EXACT, "two are alike"


def test_equal_columns_are_timed_once():
    """4,000 workers: 2,000 columns of two stages, one of them slow. Far more actions than are timed in all."""
    costs = costs_of([3.0, 3.0]).with_speeds({2500: 0.5})
    stages = stages_of([2000, 2000])
    assignment = Assignment(stages, (0, 1, 2), ((8,) * 2000,) * 2)
    found = step_time(assignment, costs)
    column = Assignment(((500,), (2500,)), (0, 1, 2), ((8,), (8,)))
    assert found.how == EXACT and found.worker == 2500
    assert found.seconds == step_time(column, costs).seconds == pytest.approx(3 + 8 * 6.0)


def test_a_ragged_stage_is_timed_by_its_kinds_of_parts():
    """One of 1,000 is lost in one stage of three: its micro-batches fall on a few columns, the others are as before."""
    costs = costs_of([3.0, 3.0, 3.0])
    assignment = assigned([1000, 999, 1000], 4000, costs)
    found = step_time(assignment, costs)
    assert found.how == EXACT and found.seconds > found.bound_s >= 3 + 15 - 1e-9
    part = step_time(assignment, costs, most_actions=60)
    assert part.how == PART and part.seconds == pytest.approx(found.seconds, rel=0.06)


def test_reduction_counts_where_it_takes_longer():
    layer = LayerCost("a", 1, 2, gradient_bytes=100, value_bytes=60)
    costs = CostModel((layer,), 10.0)
    assignment = Assignment(((0, 1),), (0, 1), ((4, 4),))
    plain = step_time(
        assignment, costs
    )  # ZeRO-0: a partial sum of 100 B, half of which is the other's; half a reduced gradient
    assert plain.pipeline_s == 12 and plain.traffic_s == pytest.approx((100 / 2 + 100 / 2) / 10) and plain.seconds == 22
    sharded = step_time(assignment, costs, rule_of(1, 1))
    assert sharded.traffic_s == pytest.approx((100 / 2 + 100 / 2 + 60 / 2) / 10)
    leaves = Assignment(((0, 1),), (0, 1), ((4, 4),), "time-major")
    found = step_time(leaves, costs, rule_of(2, 1))
    assert found.traffic_s == pytest.approx((4 * 100 / 2 + 100 / 2 + 60 / 2) / 10) == found.seconds
    assert "links" in str(found) and "worker 0" in str(found)
    alone = step_time(Assignment(((0,),), (0, 1), ((8,),)), costs, rule_of(1, 0))
    assert alone.traffic_s == 0


def test_the_reduction_of_the_first_layer_ends_after_the_last_backward():
    """Two workers, 100 B of gradients a layer at 10 B/s: half of it as a partial sum, half of the sum to a mirror."""
    layers = tuple(LayerCost(name, 1, seconds, gradient_bytes=100) for name, seconds in (("a", 2), ("b", 3), ("c", 4)))
    costs = CostModel(layers, 10.0, latency_s=0.5)

    def tail_s(cuts: tuple[int, ...], sizes: tuple[int, ...], put_off: tuple[int, ...] = ()) -> float:
        return reduction_tail_s(cuts, sizes, put_off, costs, REPLICATED)

    # c's 10 s on the link begin 5 s before the end; b's and a's follow. Then three messages.
    assert tail_s((0, 3), (2,)) == pytest.approx(-5 + 30 + 1.5)
    assert tail_s((0, 1), (2,)) == pytest.approx(10 + 1.5) and tail_s((0, 3), (1,)) == 0
    # The last stage ends 5 s earlier, by what the others still take for the last gradient.
    assert tail_s((0, 2, 3), (2, 2)) == pytest.approx(max(-2 + 20, -5 + 10) + 1.5)
    assert tail_s((0, 2, 3), (1, 2)) == pytest.approx(-5 + 10 + 1.5)


def test_memory_of_an_assignment_is_that_of_the_fullest_worker():
    costs = costs_of([1, 1, 1], state_bytes=100, activation_bytes=7, boundary_bytes=3)
    assignment = Assignment(((0, 1), (2,)), (0, 2, 3), ((1, 3), (4,)))
    assert assignment.limits == (4, 3)
    assert memory_of(assignment, costs, MemoryRule()) == [200 + 3 * 14 + 3 * 3, 100 + 3 * 7 + 4 * 3]


@pytest.mark.parametrize(
    ("counts", "zero", "sums"),
    [
        ((1, 1), 0, 1),
        ((8, 8), 0, 3),
        ((16, 16), 1, 4),
        ((9, 8, 9), 1, 4),
        ((10, 11, 11), 1, 5),
        ((8, 8), 2, 4),
        ((16,), 2, 4),
        ((0, 4), 0, 2),
    ],
)
def test_memory_counts_the_gradient_sums_that_a_worker_holds_at_once(counts, zero, sums):
    """After a loss in (8, 8, ...), micro-batches begin anywhere in the tree."""
    costs, rule = costs_of([1, 1], gradient_bytes=100), rule_of(zero)
    assignment = Assignment((tuple(range(len(counts))),), (0, 2), (counts,))
    assert open_sums(assignment.counts, rule) == [sums]
    assert memory_of(assignment, costs, rule) == [sums * 200 * (1 if zero < 2 else 1 / len(counts))]


@given(cases().filter(lambda case: case[0].microbatch_order == "contiguous"))
@settings(deadline=None)
def test_no_worker_holds_more_gradient_sums_than_memory_counts(case):
    """In the order in which it executes its backwards, or the weight gradients that it has put off."""
    assignment, costs = case
    lists, number = executed_lists(assignment, costs), assignment.num_microbatches
    for members, most in zip(assignment.stages, open_sums(assignment.counts, REPLICATED), strict=True):
        for rank in members:
            done = {action.microbatch: at for at, action in enumerate(lists.get(rank, ()))}  # by its last action
            assert max_open_nodes(sorted(done, key=done.__getitem__), number) <= most


def test_assignments_print():
    text = str(assigned([2, 20], 20, costs_of([1, 1, 1])))
    assert "stage 0: layers 0..0, workers [0, 1], micro-batches [10, 10]" in text and "20 of them" in text


@pytest.mark.parametrize("microbatch_order", ["contiguous", "time-major"])
@pytest.mark.parametrize(
    ("sizes", "slow"), [([4, 3], -1), ([7, 8], -1), ([4, 3, 4, 4], -1), ([3, 3, 4, 4], -1), ([4] * 4, 6)]
)
def test_lists_of_ragged_meshes_come_near_the_bound(sizes, slow, microbatch_order):
    """Stages whose layers take as long as they have workers for: then all could be busy all the time."""
    ranks = iter(range(sum(sizes)))
    stages = tuple(tuple(next(ranks) for _ in range(size)) for size in sizes)
    costs = costs_of([sum(0.5 if r == slow else 1.0 for r in members) for members in stages]).with_speeds(
        {slow: 0.5} if slow >= 0 else {}
    )
    speeds = [costs.speeds_of(members) for members in stages]
    counts = assign_microbatches(16 * max(sizes), speeds, microbatch_order=microbatch_order).counts
    found = step_time(Assignment(stages, tuple(range(len(sizes) + 1)), counts, microbatch_order), costs)
    assert found.how == EXACT and found.pipeline_s < 1.17 * found.bound_s


def test_a_simulated_step_that_is_kept_takes_eight_bytes_for_each_gradient() -> None:
    """A thousand of them are kept; as objects of Python they took four times as many, up to a gigabyte."""
    costs = costs_of([1.0, 2.0, 3.0])
    assignment = assigned([2, 1, 3], 24, costs)
    whole = [slice(0, len(members)) for members in assignment.stages]
    seconds, made_s = _piece_s(assignment, costs, whole)
    for times in made_s:
        assert isinstance(times, memoryview) and times.readonly and times.nbytes == 8 * 24
    assert max(map(max, made_s)) == seconds
