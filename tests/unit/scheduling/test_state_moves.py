"""The cost of a change in bytes of state: its reshard plan, and the closed form by which searches estimate it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling import state_moves
from elaswave_spmd.scheduling.cost_model import CostModel, LayerCost, MemoryRule
from elaswave_spmd.scheduling.rebalance import PlanSettings, plan_change
from elaswave_spmd.scheduling.stage_search import MoveEstimates, old_stages_of
from elaswave_spmd.scheduling.state_moves import NO_MOVE, StateMoves, layout_of_costs
from elaswave_spmd.sharding import P, Shardings, StateSharding
from tests.unit.scheduling.planning_cases import costs_of, even_cuts, placed

PAGE_BYTES = 64 * 12
"""Layouts here have pages of 64 elements."""


@st.composite
def cuts_of(draw, num_layers: int, num_stages: int) -> tuple[int, ...]:
    inner = st.sets(st.integers(1, num_layers - 1), min_size=num_stages - 1, max_size=num_stages - 1)
    return (0, *sorted(draw(inner) if num_stages > 1 else ()), num_layers)


@st.composite
def regroupings(draw) -> tuple[Mesh, tuple[int, ...], tuple[tuple[int, ...], ...], tuple[int, ...], CostModel]:
    """(mesh, cuts, new stages, new cuts, costs): any sizes of stages, any workers in them, some of them newcomers."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    num_layers = draw(st.integers(4, 7))
    order = draw(st.permutations(range(sum(sizes) + draw(st.integers(0, 3)))))
    num_stages = draw(st.integers(1, min(4, len(order))))
    stages = tuple(tuple(order[a:b]) for a, b in pairwise(draw(cuts_of(len(order), num_stages))))
    layers = tuple(LayerCost("l", 1, 1, state_bytes=PAGE_BYTES * draw(st.integers(0, 60))) for _ in range(num_layers))
    cuts, new_cuts = draw(cuts_of(num_layers, len(sizes))), draw(cuts_of(num_layers, num_stages))
    return Mesh.initial(MeshShape.of_stages(sizes)), cuts, stages, new_cuts, CostModel(layers, 1e6)


@given(regroupings(), st.booleans(), st.integers(0, 2))
@settings(deadline=None, max_examples=200)
def test_the_closed_form_of_the_search_counts_the_bytes_of_the_plan(case, is_sharded, mirrors):
    """Without mirrors, to a page for each worker. Mirrors that lie where layers go only make the plan cheaper."""
    mesh, cuts, stages, new_cuts, costs = case
    mirrors = min(mirrors, mesh.num_workers - 1)  # what newcomers make possible beyond that no estimate counts
    optim = P("dp") if is_sharded else P(None)
    before = StateSharding(mesh, cuts, optim, mirrors)
    plan = StateMoves(before, layout_of_costs(costs, 64), costs).at_once(stages, new_cuts)
    rule = MemoryRule(Shardings(optim=optim), mirrors)
    estimates = MoveEstimates(costs, cuts, old_stages_of(stages, mesh.stages))
    estimate = estimates.to(new_cuts, rule)
    table = estimates.table(rule)
    by_layer = sum(table[s, a:b].sum() for s, (a, b) in enumerate(pairwise(new_cuts)))
    rounding = PAGE_BYTES * sum(map(len, stages)) if is_sharded else 1e-6
    assert plan.bytes <= estimate.bytes + rounding <= by_layer + 2 * rounding
    if mirrors == 0:
        assert plan.bytes >= estimate.bytes - rounding
    assert plan.bound_bytes <= plan.bytes + 1e-6 and (plan.copies > 0) == (plan.bytes > 0)


@given(st.lists(st.integers(5, 14), min_size=1, max_size=3), st.integers(0, 2), st.booleans(), st.data())
@settings(deadline=None, max_examples=150)
def test_the_figures_of_large_meshes_are_those_of_the_plan(sizes, mirrors, newcomers, data):
    """Lost pages and bytes exactly; with newcomers at least the bytes of the plan. Seconds of links nearly."""
    mesh, cuts = Mesh.initial(MeshShape.of_stages(sizes)), even_cuts(6, len(sizes))
    state = data.draw(st.lists(st.integers(0, 300), min_size=6, max_size=6))
    costs = CostModel(tuple(LayerCost("l", 1, 1, state_bytes=PAGE_BYTES * pages) for pages in state), 1e6)
    lost = data.draw(st.sets(st.sampled_from(mesh.members), max_size=4))
    stages = [tuple(rank for rank in members if rank not in lost) for members in mesh.stages]
    if newcomers:
        stages = [(*members, mesh.num_workers + s) for s, members in enumerate(stages)]
    assume(all(len(members) > mirrors for members in stages))
    moves = StateMoves(StateSharding(mesh, cuts, P("dp"), mirrors), layout_of_costs(costs, 64), costs)
    plan, estimate = moves._figures(*moves._plan_at_once(stages, cuts)), moves._estimated_at_once(stages, cuts)
    assert (estimate.from_checkpoint, estimate.is_estimate, estimate.plan) == (plan.from_checkpoint, True, None)
    if not newcomers or plan.from_checkpoint:
        assert estimate.bytes == pytest.approx(plan.bytes)
    else:
        rounding = PAGE_BYTES * sum(map(len, stages))
        assert plan.bytes - rounding <= estimate.bytes <= 1.1 * plan.bytes + rounding
    page_s = PAGE_BYTES / 1e6
    assert plan.seconds / 2 - 2 * page_s <= estimate.seconds <= 2 * plan.seconds + 2 * page_s


@given(regroupings(), st.integers(0, 2), st.data())
@settings(deadline=None, max_examples=100)
def test_lost_pages_are_known_on_large_meshes_wherever_workers_and_layers_go(case, mirrors, data):
    mesh, cuts, stages, new_cuts, costs = case
    lost = data.draw(st.sets(st.sampled_from(mesh.members)))
    stages = tuple(tuple(rank for rank in members if rank not in lost) for members in stages)
    assume(all(stages))
    moves = StateMoves(StateSharding(mesh, cuts, P("dp"), mirrors), layout_of_costs(costs, 64), costs)
    _, from_checkpoint = moves._plan_at_once(stages, new_cuts)
    assert moves._estimated_at_once(stages, new_cuts).from_checkpoint == from_checkpoint


def test_lost_replicas_are_made_again_and_nothing_else_moves():
    """Of 4 workers with one mirror each had a quarter of the pages as primary, and another quarter as mirror."""
    mesh = Mesh.initial(MeshShape.of(dp=4, pp=2))
    costs = costs_of([1.0, 1.0], bandwidth=1e6, latency_s=0.5, state_bytes=PAGE_BYTES * 400)
    moves = StateMoves(StateSharding(mesh, (0, 1, 2), P("dp"), 1), layout_of_costs(costs, 64), costs)
    found = moves.at_once(((0, 2, 3), (4, 5, 6, 7)), (0, 1, 2))
    assert found.bytes == found.bound_bytes == PAGE_BYTES * 200 and found.promotions and not found.from_checkpoint
    assert found.bytes / 3 / 1e6 <= found.seconds - 0.5 <= found.bytes / 1e6, "three links carry it"
    assert f"{found.bytes:,.0f} B move (at least" in str(found)
    assert "promote" in found.text() and "copy 0 -> 2" in found.text() and NO_MOVE.text() == ""
    assert moves.at_once(mesh.stages, (0, 1, 2)) == NO_MOVE


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("by_groups", [False, True])
def test_a_plan_without_replicas_counts_what_moves_in_a_run_that_has_begun_so(by_groups, is_large, monkeypatch):
    """Neighbouring layers that are too small for each worker of the stage are cut together, without groups."""
    if is_large:
        monkeypatch.setattr(state_moves, "_MOST_PLANNED", 0)
    costs = costs_of([1.0] * 6, state_bytes=12 * 4096 * 20)
    for mirrors in (0, 1):
        placement = replace(placed((3, 3), 6, 6), by_groups=by_groups)
        begun = placement.with_new_replicas(layout_of_costs(costs), mirrors, 0)
        for stages in (((0, 1), (3, 4, 5)), ((0, 1, 2, 6), (3, 4, 5)), ((0, 1, 2), (3, 4, 5, 6))):
            settings_ = PlanSettings(mirror_count=mirrors)
            alone, in_run = (plan_change(it, costs, 0, settings_, stages=stages).now for it in (placement, begun))
            assert alone.move == in_run.move and alone.move.bytes, (mirrors, stages)


def test_a_layer_moves_from_where_the_plan_before_it_ends():
    costs = costs_of([1, 1, 1, 1], state_bytes=120 * PAGE_BYTES, bandwidth=10.0 * PAGE_BYTES, latency_s=0.5)
    mesh = Mesh.initial(MeshShape.of_stages([2, 3]))
    moves = StateMoves(StateSharding(mesh, (0, 2, 4), P("dp")), layout_of_costs(costs, 64), costs)
    here, there = (mesh.stages, (0, 2, 4)), (mesh.stages, (0, 1, 4))
    found = moves.afterwards(here, there)
    assert found == moves.at_once(*there), "nothing happened before it"
    assert found.bytes == 120 * PAGE_BYTES and found.seconds == pytest.approx(6.5), "two workers give 60 pages each"
    assert moves.afterwards(there, there).bytes == 0
    replicated = replace(moves, before=replace(moves.before, spec=P(None)))
    assert replicated.at_once(*there).bytes == 360 * PAGE_BYTES, "replicated state goes to each of the three"


def test_without_a_replica_state_is_read_from_the_checkpoint():
    mesh = Mesh.initial(MeshShape.of(dp=2, pp=2))
    costs = costs_of([1.0, 1.0], bandwidth=1e6, state_bytes=PAGE_BYTES * 40)
    moves = StateMoves(StateSharding(mesh, (0, 1, 2), P("dp"), 1), layout_of_costs(costs, 64), costs)
    found = moves.at_once(((0,), (1,)), (0, 1, 2))
    assert found.from_checkpoint and "are read from the checkpoint" in str(found)
    assert found.bytes == 2 * 2 * PAGE_BYTES * 40, "each page and its mirror"


def test_layouts_of_costs_have_the_state_of_each_layer():
    costs = CostModel((LayerCost("a", 1, 1, state_bytes=1200), LayerCost("b", 1, 1), LayerCost("c", 1, 1)), 1.0)
    layers = layout_of_costs(costs, 64).layers
    assert [layer.num_state_pages for layer in layers] == [2, 0, 0] and layers[0].num_state_elements == 128


def test_no_plan_is_made_of_a_large_mesh(monkeypatch):
    mesh = Mesh.initial(MeshShape.of(dp=4, pp=2))
    costs = costs_of([1.0, 1.0], bandwidth=1e6, state_bytes=PAGE_BYTES * 40)
    moves = StateMoves(StateSharding(mesh, (0, 1, 2), P("dp"), 1), layout_of_costs(costs, 64), costs)
    one, many = ((0, 1, 2), (4, 5, 6, 7)), ((0, 3), (4, 5, 6, 7))
    whole = [moves.at_once(stages, (0, 1, 2)) for stages in (one, many)]
    monkeypatch.setattr(state_moves, "_MOST_PLANNED", 0)
    monkeypatch.delattr(state_moves, "place_replicas")
    found = [moves.at_once(stages, (0, 1, 2)) for stages in (one, many)]
    assert [move.bytes for move in found] == [move.bytes for move in whole]
    assert [move.from_checkpoint for move in found] == [False, True] and not any(move.plan for move in found)
    assert "by estimate" in str(found[0]) and "are read from the checkpoint" in str(found[1])
    assert moves.at_once(mesh.stages, (0, 1, 2)) == NO_MOVE
    # 3 of 4 workers keep what they have of the layer that moves; one copy of it goes to the other stage.
    there = moves.afterwards((mesh.stages, (0, 1, 2)), (((0, 1, 2), (3, 4, 5, 6, 7)), (0, 1, 2)))
    assert there.is_estimate and there.bytes == pytest.approx(PAGE_BYTES * 40 * (1 / 3 * 1 / 4 * 3 + 1 / 5), rel=0.1)
