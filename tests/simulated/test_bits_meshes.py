"""The product on every mesh and ZeRO level has the bits of the one-process reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.simulated.bits_cases import MESHES, MODELS, Run, assert_as_reference, expected, placement_of

# Steps with rising and with falling learning rate, gradients above and below the clipping norm, and two validations.
STEPS = 8
UNEVEN = 5  # micro-batches: no mesh of more than one worker gives each the same number
EVEN = {"dp3": 3, "stages1-3": 3, "dp3_pp2": 6, "stages3-2": 6}
"""Mesh -> a number of micro-batches that every stage deals evenly; 4 for the others."""
ARITHMETIC = list(itertools.product(("gpt", "llama_tied"), ("fp32", "bf16"), ("even", "uneven")))
# Each mesh and ZeRO level runs half of the eight combinations. Any two values of a combination still meet on every mesh
# at every level, and all three on every mesh.
CASES = [
    (mesh, zero, *ARITHMETIC[number])
    for mesh, zero in itertools.product(MESHES, range(4))
    for number in range(8)
    if (number.bit_count() + zero) % 2 == 0
]


def run_of(mesh: str, model: str, dtype: str, batch: str, steps: int) -> Run:
    microbatches = EVEN.get(mesh, 4) if batch == "even" else UNEVEN
    return Run(model=model, dtype=dtype, microbatches=microbatches, steps=steps)


@pytest.mark.parametrize(("mesh", "zero", "model", "dtype", "batch"), CASES)
def test_every_mesh_has_the_bits_of_the_reference(mesh: str, zero: int, model: str, dtype: str, batch: str) -> None:
    run = run_of(mesh, model, dtype, batch, STEPS)
    assert_as_reference(run, placement_of(run, mesh, zero), order=zero)


@pytest.mark.parametrize(("zero", "mesh"), [(number % 4, mesh) for number, mesh in enumerate(MESHES)])
def test_twenty_steps_have_the_bits_of_the_reference(mesh: str, zero: int) -> None:
    run = run_of(mesh, "gpt", "bf16", "uneven", 20)
    assert_as_reference(run, placement_of(run, mesh, zero), order=zero)


def test_the_cases_cover_what_they_say() -> None:
    for mesh, zero in itertools.product(MESHES, range(4)):
        chosen = [arithmetic for m, z, *arithmetic in CASES if (m, z) == (mesh, zero)]
        for first, second in itertools.combinations(range(3), 2):
            assert len({(case[first], case[second]) for case in chosen}) == 4
    for mesh in MESHES:
        assert len({tuple(arithmetic) for m, _, *arithmetic in CASES if m == mesh}) == 8


@pytest.mark.parametrize("steps", [STEPS, 20])
def test_the_models_are_small_and_the_runs_have_what_they_are_to_show(steps: int) -> None:
    for name in ("gpt", "llama_tied"):
        assert sum(p.numel() for p in MODELS[name]().parameters()) < 50_000
        run = Run(model=name, microbatches=UNEVEN, steps=steps)
        losses = [float.fromhex(loss) for loss in expected(run).losses]
        norms = [float.fromhex(norm) for norm in expected(run).norms]
        assert losses[-1] < losses[0] and torch.tensor(losses + norms).isfinite().all()
        assert min(norms) < run.clip < max(norms), "some steps are clipped and some are not"
        rates = [run.learning_rate.at(step) for step in range(1, steps + 1)]
        assert rates[0] < max(rates) > rates[-1], "it warms up and decays"
