"""The product on every mesh and sharding has the bits of the one-process reference, for twenty steps."""

from __future__ import annotations

import pytest
import torch

from tests.simulated.bits_cases import MESHES, MODELS, Run, assert_as_reference, expected, placement_of

UNEVEN = 5
EVEN = {
    "dp3": 3,
    "stages1-3": 3,
    "dp3_pp2": 6,
    "stages3-2": 6,
}  # micro-batches that every stage deals evenly; 4 elsewhere


@pytest.mark.parametrize("batch", ["even", "uneven"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["gpt", "llama_tied"])
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_has_the_bits_of_the_reference(mesh: str, zero: int, model: str, dtype: str, batch: str) -> None:
    run = Run(model=model, dtype=dtype, microbatches=EVEN.get(mesh, 4) if batch == "even" else UNEVEN)
    assert_as_reference(run, placement_of(run, mesh, zero), order=zero)


def test_the_models_are_small_and_the_runs_have_what_they_are_to_show() -> None:
    for name in ("gpt", "llama_tied"):
        assert sum(p.numel() for p in MODELS[name]().parameters()) < 50_000
        losses = [float.fromhex(loss) for loss in expected(Run(model=name, microbatches=UNEVEN)).losses]
        norms = [float.fromhex(norm) for norm in expected(Run(model=name, microbatches=UNEVEN)).norms]
        assert losses[-1] < losses[0] and torch.tensor(losses + norms).isfinite().all()
        assert min(norms) < Run().clip < max(norms), "some steps are clipped and some are not"
