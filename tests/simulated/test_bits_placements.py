"""Bits do not depend on who does what: random ragged meshes, layers, micro-batches, pages, and orders of messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.placement import Placement
from tests.simulated.bits_cases import Run, assert_as_reference, expected, meta_model, outcome, placement_of, simulate

MODELS = ("gpt_tied", "llama", "llama_tied", "mlp")

runs = st.builds(
    Run,
    model=st.sampled_from(MODELS),
    dtype=st.sampled_from(["fp32", "bf16"]),
    microbatches=st.integers(1, 7),
    microbatch_size=st.sampled_from([1, 2]),
    steps=st.just(4),
    optimizer=st.sampled_from(["adamw", "sgd"]),
    clip=st.sampled_from([0.0, 0.5]),
    checkpointing=st.booleans(),
    page_size=st.sampled_from([64, 192, 256, 4096]),
    seed=st.sampled_from([0, 7]),
)


@st.composite
def placements(draw: st.DrawFn, run: Run) -> Placement:
    """Any placement of the run: stages of any size, any cut of the layers, any count of micro-batches."""
    num_layers = len(meta_model(run.model).layers)
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=num_layers).filter(lambda s: sum(s) <= 8))
    inner = st.sets(st.integers(1, num_layers - 1), min_size=len(sizes) - 1, max_size=len(sizes) - 1)
    cuts = (0, *sorted(draw(inner)), num_layers)
    counts = tuple(_cut_at(draw(_cut_points(run.microbatches, size)), run.microbatches) for size in sizes)
    mesh = Mesh.initial(MeshShape.of_stages(sizes))
    zero = draw(st.integers(0, 3))
    shardings = meta_model(run.model).shardings.with_zero(zero)
    return Placement(mesh, run.microbatches, cuts, counts, shardings)


def _cut_points(total: int, parts: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1).map(sorted)


def _cut_at(points: list[int], total: int) -> tuple[int, ...]:
    """`total` in len(points) + 1 parts, some of them perhaps zero."""
    return tuple(b - a for a, b in zip([0, *points], [*points, total], strict=True))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), run=runs, order=st.integers(0, 2**32))
def test_any_placement_and_any_order_of_messages_has_the_bits_of_the_reference(
    data: st.DataObject, run: Run, order: int
) -> None:
    assert_as_reference(run, data.draw(placements(run)), order=order)


@settings(max_examples=15, deadline=None)
@given(order=st.integers(0, 2**32), zero=st.integers(0, 3), mesh=st.sampled_from(["dp4", "dp3_pp2", "stages3-2"]))
@example(order=0, zero=0, mesh="dp4")
def test_workers_without_microbatches_hold_pages_and_vote(order: int, zero: int, mesh: str) -> None:
    run = Run(model="gpt_tied", microbatches=2, steps=4)
    assert_as_reference(run, placement_of(run, mesh, zero), order=order)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("mesh", ["single", "dp3", "pp3", "stages3-2"])
def test_a_step_without_a_finite_gradient_counts_and_changes_nothing(mesh: str, zero: int) -> None:
    run = Run(model="inf", microbatches=5, steps=6, page_size=64)
    wanted = expected(run)
    skipped = [norm == "nan" for norm in wanted.norms]
    assert True in skipped and False in skipped
    assert_as_reference(run, placement_of(run, mesh, zero), order=zero)


def test_a_run_whose_gradients_are_never_finite_ends_with_its_initial_weights() -> None:
    run = replace(Run(model="inf", microbatches=60, steps=2), microbatch_size=1)  # every sample in every step
    result = outcome(simulate(run, placement_of(run, "dp2_pp2", 2)))
    assert result.norms == ("nan", "nan") and result == expected(run)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_checkpointing_does_not_change_a_bit(dtype: str) -> None:
    run = Run(model="gpt", dtype=dtype, microbatches=3, steps=6)
    kept = outcome(simulate(run, placement_of(run, "pp2", 1)))
    again = outcome(simulate(replace(run, checkpointing=True), placement_of(run, "dp2_pp2", 3)))
    assert kept == again == expected(run)
