"""Frozen parameters lie on pages of their own, without gradients, and are spread and moved like others."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.run_dir.manifest import layout_fingerprint
from elaswave_spmd.sharding import P, StateSharding, plan_reshard
from elaswave_spmd.sharding.layout import LOSS, LayerUse, ModelLayout, ParameterInfo, lay_out
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.sharding.replicas import ReplicaMap
from tests.unit.sharding.test_reshard import execute, held_in


@st.composite
def layouts(draw: st.DrawFn, *, may_freeze: bool = True) -> ModelLayout:
    """One to five layers of up to four parameters, any of them frozen; the last may read one of the first."""
    frozen = st.booleans() if may_freeze else st.just(False)
    sizes = st.lists(st.tuples(st.integers(1, 700), st.booleans(), frozen), max_size=4)
    uses = []
    for number, parameters in enumerate(draw(st.lists(sizes, min_size=1, max_size=5))):
        infos = (
            ParameterInfo(f"l{number}.p{i}", (size,), decay, frozen=frozen)
            for i, (size, decay, frozen) in enumerate(parameters)
        )
        uses.append(LayerUse(f"l{number}", tuple(infos)))
    if len(uses) > 1 and uses[0].parameters:
        owners = draw(st.lists(st.sampled_from([p.name for p in uses[0].parameters]), unique=True, max_size=3))
        reads = tuple((f"{uses[-1].name}.t{i}", owner) for i, owner in enumerate(owners))
        uses[-1] = LayerUse(uses[-1].name, uses[-1].parameters, reads)
    return lay_out(uses, page_size=128)


@given(layouts())
def test_a_page_is_frozen_as_a_whole_and_gradients_leave_it_out(layout: ModelLayout) -> None:
    for layer in layout.layers:
        assert [b.start for b in layer.blocks] == [0, *(b.stop for b in layer.blocks)][: len(layer.blocks)]
        assert all(slot.parameter.frozen == b.frozen for b in layer.blocks for slot in b.slots)
        pages = [page for b in layer.state_blocks for page in b.pages]
        assert [layer.is_frozen(page) for page in pages] == [page >= layer.num_trained_pages for page in pages]
        spans = [layer.gradient_span(b.first_page, b.pages.stop) for b in layer.blocks if not b.frozen]
        assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), layer.num_gradient_elements]
        used = [(s.start, s.stop) for s in layer.gradient_slots]
        assert sorted([*used, *layer.gradient_gaps]) == [*_tiling(used, layer.gradient_gaps)]
        trained = {s.parameter.name for s in layer.gradient_slots}
        assert trained == {s.parameter.name for s in layer.slots if not s.parameter.frozen}
        # Segments, which the optimizer works through, are the trained part of the state and nothing else.
        assert sum(s.stop - s.start for s in layer.segments) == layer.num_state_elements - layer.num_frozen_elements
        assert layer.state_elements(3) == 3 * layer.num_state_elements - 2 * layer.num_frozen_elements


def _tiling(used: list[tuple[int, int]], gaps: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    pieces = sorted([*used, *gaps])
    assert all(a[1] == b[0] for a, b in pairwise(pieces))
    return pieces


@given(layouts(may_freeze=False))
def test_a_model_without_frozen_parameters_is_laid_out_as_before(layout: ModelLayout) -> None:
    assert not layout.frozen
    assert "frozen" not in str(layout_fingerprint(layout))
    assert layout.first_trained == 0 and layout.work == tuple(
        max(1.0, float(layer.num_value_elements)) for layer in layout.layers
    )


def loads(layout: ModelLayout, replicas: ReplicaMap, sharding: StateSharding, stage: int) -> dict[bool, list[int]]:
    """Trained (False) and frozen (True) pages of each member of a stage as primary."""
    found = {frozen: Counter(dict.fromkeys(sharding.stages[stage], 0)) for frozen in (False, True)}
    for layer in sharding.layers_of_stage(stage):
        for pages in replicas[layer]:
            block = layout.layers[layer].block_of(pages.first)
            assert pages.stop <= block.pages.stop
            if block.kind != LOSS:
                found[block.frozen][pages.primary] += pages.num_pages
    return {frozen: list(count.values()) for frozen, count in found.items()}


@st.composite
def shardings(draw: st.DrawFn, layout: ModelLayout, first_rank: int = 0) -> StateSharding:
    """Ragged stages, any cuts, any spec."""
    num_layers = len(layout.layers)
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=min(3, num_layers)))
    inner = st.lists(st.integers(1, num_layers - 1), min_size=len(sizes) - 1, max_size=len(sizes) - 1, unique=True)
    cuts = (0, *sorted(draw(inner) if len(sizes) > 1 else []), num_layers)
    ranks = iter(range(first_rank, 100))
    mesh = Mesh(MeshShape.of_stages(sizes), tuple(tuple(next(ranks) for _ in range(size)) for size in sizes))
    return StateSharding(mesh, cuts, draw(st.sampled_from([P("dp"), P("dp"), P(None)])), draw(st.integers(0, 2)))


@given(layouts(), st.data())
@settings(deadline=None, max_examples=150)
def test_each_kind_is_even_on_a_new_mesh_and_after_any_change(layout: ModelLayout, data: st.DataObject) -> None:
    before, after = data.draw(shardings(layout)), data.draw(shardings(layout, data.draw(st.integers(0, 5))))
    replicas = place_replicas(layout, before)
    for stage in range(len(before.stages)):
        of_kinds = loads(layout, replicas, before, stage)
        assert all(max(pages) - min(pages) <= 1 for pages in of_kinds.values()), of_kinds
        total = [a + b for a, b in zip(*of_kinds.values(), strict=True)]
        assert max(total) - min(total) <= 1
    gone = [rank for rank in before.mesh.members if rank not in after.mesh]
    plan = plan_reshard(layout, replicas, lost=gone, to=after)
    if plan.lost:
        return
    assert execute(plan) == held_in(plan.after)
    for stage in range(len(after.stages)):
        of_kinds = loads(layout, plan.after, after, stage)
        assert all(max(pages) - min(pages) <= 1 for pages in of_kinds.values()), of_kinds
    assert plan.least_elements <= plan.moved_elements
    trained = sum(plan.elements(copy.pages) for copy in plan.copies if not plan.is_frozen(copy.pages))
    assert plan.moved_bytes(12) == 12 * trained + 4 * (plan.moved_elements - trained)
    assert plan.least_bytes(12) <= plan.moved_bytes(12) and plan.text(12).endswith("drops")


def test_layers_before_the_first_trained_one_cost_a_forward() -> None:
    def layer(name: str, frozen: bool) -> LayerUse:
        return LayerUse(name, (ParameterInfo(f"{name}.w", (300,), frozen=frozen),))

    layout = lay_out([layer("a", True), LayerUse("b", ()), layer("c", False), layer("d", True)], page_size=128)
    assert layout.first_trained == 2 and layout.frozen == ("a.w", "d.w")
    a, b, c, d = layout.work
    assert (b, c) == (1.0, 320.0) and abs(a - 320 / 3) < 1e-9 and abs(d - 2 * 320 / 3) < 1e-9
    assert "frozen state 3" in str(layout)


def test_a_fingerprint_tells_what_is_frozen() -> None:
    def fingerprint(frozen: bool) -> dict[str, object]:
        w, v = ParameterInfo("a.w", (64,), frozen=frozen), ParameterInfo("a.v", (64,))
        return layout_fingerprint(lay_out([LayerUse("a", (w, v))], page_size=64))

    assert fingerprint(True)["frozen"] == ["a.w"] and next(iter(fingerprint(True))) == "frozen"
    assert "frozen" not in fingerprint(False)
