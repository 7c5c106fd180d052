"""Placements and action lists: every micro-batch, layer and page somewhere exactly once; every list can be run."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.errors import PlanError, SpecError
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.scheduling import pipeline
from elaswave_spmd.scheduling.partition import balance_layers
from elaswave_spmd.scheduling.pipeline import Schedule, in_flight_limits, schedule
from elaswave_spmd.scheduling.placement import microbatches_of_workers, place, workers_of_microbatches
from elaswave_spmd.sharding import P, Shardings
from elaswave_spmd.sharding.layout import LayerUse, ModelLayout, ParameterInfo, lay_out
from tests.unit.scheduling.planning_cases import actions

STAGES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def lines_of(plan: Schedule) -> list[str]:
    """One line for each worker: "3: 1F0 1B0 1F2 1B2"."""
    return [f"{rank}: " + " ".join(map(str, todo)) for rank, todo in sorted(plan.items())]


def layout_of(sizes: list[int], page_size: int = 64) -> ModelLayout:
    uses = [LayerUse(f"l{i}", (ParameterInfo(f"l{i}.w", (size,)),)) for i, size in enumerate(sizes)]
    return lay_out(uses, page_size=page_size)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from(["contiguous", "time-major"]))
def test_microbatches_by_worker_and_workers_by_microbatch_are_the_same(counts: list[int], order: str) -> None:
    found = microbatches_of_workers(tuple(counts), order)
    assert [len(mine) for mine in found] == counts and all(list(mine) == sorted(mine) for mine in found)
    workers = {u: position for position, mine in enumerate(found) for u in mine}
    assert tuple(workers[u] for u in range(sum(counts))) == workers_of_microbatches(range(len(counts)), counts, order)


@given(STAGES, st.integers(1, 23), st.integers(0, 3), st.data())
@settings(deadline=None)
def test_every_microbatch_page_and_action_once(stages, num_microbatches, zero, data):
    sizes = data.draw(st.lists(st.integers(1, 900), min_size=len(stages), max_size=7))
    layout = layout_of(sizes)
    mesh = Mesh.initial(MeshShape.of_stages(stages))
    placement = place(mesh, layout, Shardings().with_zero(zero), num_microbatches)
    for stage, members in enumerate(mesh.stages):
        assigned = sorted(u for m in members for u in placement.microbatches_of(m))
        assert assigned == list(range(num_microbatches))
        counts = [len(placement.microbatches_of(m)) for m in members]
        assert max(counts) - min(counts) <= 1
        held = dict.fromkeys(members, 0)
        for layer in placement.layers_of_stage(stage):
            runs = placement.replica_map(layout)[layer]
            state = [r for r in runs if r.first < layout.layers[layer].num_state_pages]
            assert [p for r in state for p in range(r.first, r.stop)] == list(
                range(layout.layers[layer].num_state_pages)
            )
            for run in state:
                held[run.primary] += run.stop - run.first
                assert set(run.replicas) == ({run.primary} if zero else set(members))
        assert max(held.values()) - min(held.values()) <= 1, "load over a stage is even within one page"
    plan = schedule(placement)
    pipeline.check(plan, len(stages))
    everybodys = pipeline.turns(placement, range(num_microbatches))
    for rank, todo in plan.items():
        mine = placement.microbatches_of(rank)
        assert pipeline.turns(placement, mine) == {u: turn for u, turn in everybodys.items() if u in mine}
        stage = mesh.stage_of(rank)
        running = 0
        for action in todo:
            running += 1 if action.kind == "F" else -1
            assert 0 <= running <= in_flight_limits(stages, placement.microbatch_counts)[stage]
        assert sorted(a.microbatch for a in todo if a.kind == "B") == list(placement.microbatches_of(rank))


def test_even_mesh_is_1f1b():
    placement = place(Mesh.initial(MeshShape.parse("pp3")), layout_of([64, 64, 64]), Shardings(), 4)
    assert lines_of(schedule(placement)) == [
        "0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_check_names_a_circle():
    plan = {0: actions("0F0 0B0 0F1 0B1"), 1: actions("1F0 1F1 1B0 1B1")}
    with pytest.raises(PlanError, match="wait for ever"):
        pipeline.check(plan, 2)


def test_check_refuses_an_action_twice():
    with pytest.raises(PlanError, match="done once"):
        pipeline.check({0: actions("0F0 0F0")}, 1)


@st.composite
def on_hosts(draw: st.DrawFn) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """The micro-batches of each worker of a stage, and the positions of workers by host, in any order."""
    counts = draw(st.lists(st.integers(0, 9), min_size=2, max_size=12))
    host = [draw(st.integers(0, 3)) for _ in counts]
    order = dict.fromkeys(host)
    return counts, tuple(tuple(at for at, of in enumerate(host) if of == one) for one in order)


@given(on_hosts())
def test_hosts_are_dealt_blocks_that_are_tree_nodes(case: tuple[list[int], tuple[tuple[int, ...], ...]]) -> None:
    counts, hosts = case
    found = microbatches_of_workers(tuple(counts), "time-major", hosts)
    assert [len(mine) for mine in found] == counts and all(list(mine) == sorted(mine) for mine in found)
    positions = workers_of_microbatches(range(len(counts)), counts, "time-major", hosts)
    assert all(positions[u] == position for position, mine in enumerate(found) for u in mine)
    block = max(size for size in (1, 2, 4, 8, 16) if size <= max(map(len, hosts)))
    host_of = {position: number for number, host in enumerate(hosts) for position in host}
    whole = sum(sum(counts[position] for position in host) // block for host in hosts)
    for first in range(0, whole * block, block):
        assert len({host_of[positions[u]] for u in range(first, first + block)}) == 1
    assert len(positions) - whole * block < block * len(hosts)


@pytest.mark.parametrize("each", [1, 3])
def test_on_even_hosts_of_neighbours_blocks_are_what_turns_are(each: int) -> None:
    hosts = ((0, 1, 2, 3), (4, 5, 6, 7))
    dealt = workers_of_microbatches(range(8), [each] * 8, "time-major", hosts)
    assert dealt == workers_of_microbatches(range(8), [each] * 8, "time-major")


def test_one_host_with_a_worker_less_leaves_the_blocks_of_the_others() -> None:
    """Three workers have blocks of four in turn; the fourth of each block is the next one of the first of them."""
    dealt = workers_of_microbatches(range(7), [4, 4, 4, 3, 3, 3, 3], "time-major", ((0, 1, 2), (3, 4, 5, 6)))
    assert dealt == (0, 1, 2, 0, 3, 4, 5, 6, 1, 2, 0, 1, 3, 4, 5, 6, 2, 0, 1, 2, 3, 4, 5, 6)


def test_the_two_orders_of_microbatches():
    assert workers_of_microbatches([7, 8, 9], [2, 1, 1], "contiguous") == (7, 7, 8, 9)
    assert workers_of_microbatches([7, 8, 9], [2, 1, 1], "time-major") == (7, 8, 9, 7)
    assert even_counts(10, 4) == (3, 3, 2, 2)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_layers_over_stages_is_optimal(costs, workers):
    if len(workers) > len(costs):
        return

    def slowest(cuts):
        return max(sum(costs[a:b]) / w for a, b, w in zip(cuts, cuts[1:], workers, strict=False))

    best = min(
        slowest((0, *inner, len(costs))) for inner in itertools.combinations(range(1, len(costs)), len(workers) - 1)
    )
    assert slowest(balance_layers(costs, workers)) == pytest.approx(best)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 12))
def test_the_specs_of_batch_and_layers_are_read_by_tile_maps(sizes, num_microbatches):
    """Runs follow the tiles of P("dp"). P(None) is the same on an axis of size 1, and is refused on a longer one."""
    mesh, layout = Mesh.initial(MeshShape.of_stages(sizes)), layout_of([64] * 4)
    found = place(mesh, layout, Shardings(), num_microbatches)
    assert found.microbatch_counts == tuple(even_counts(num_microbatches, size) for size in sizes)
    if max(sizes) == 1:
        assert place(mesh, layout, Shardings(batch=P(None)), num_microbatches).microbatch_counts == (
            found.microbatch_counts
        )
    else:
        with pytest.raises(SpecError, match=r"batch=P\(None\) gives all .* workers of stage"):
            place(mesh, layout, Shardings(batch=P(None)), num_microbatches)
    if len(sizes) == 1:
        assert place(mesh, layout, Shardings(layers=P(None)), num_microbatches).layer_cuts == (0, 4)
    else:
        with pytest.raises(SpecError, match=r"layers=P\(None\) gives all 4 layers"):
            place(mesh, layout, Shardings(layers=P(None)), num_microbatches)


def test_more_stages_than_layers_is_refused():
    with pytest.raises(PlanError, match="at least one layer") as error:
        place(Mesh.initial(MeshShape.parse("pp4")), layout_of([10, 10, 10]), Shardings(), 4)
    assert "pp3" in str(error.value)
