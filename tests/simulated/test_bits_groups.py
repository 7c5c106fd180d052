"""Groups of parameters: their updates have the bits of the one-process reference on every mesh and through faults."""

from __future__ import annotations

import pytest

from elaswave_spmd.conf.schema import OptimGroup
from tests.cluster.faults import SENDER, MessageFault
from tests.simulated.bits_cases import (
    MirroredCluster,
    Run,
    assert_as_reference,
    description_of,
    expected,
    one_thread,
    outcome,
    placement_of,
)

GROUPS = (
    OptimGroup("embed.* head.*", lr_scale=0.25),
    OptimGroup("*.bias block1.mlp*.weight", weight_decay=0.3),
    OptimGroup("block0.mlp*", lr_scale=3.0),
    OptimGroup("block1.attn*", lr_scale=0.5),
)
TIED = (OptimGroup("embed.weight", lr_scale=0.25, weight_decay=0.0), OptimGroup("block*.bias", weight_decay=0.3))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("mesh", ["single", "dp3", "dp2_pp2", "stages1-3", "stages3-2"])
def test_groups_on_meshes(mesh: str, optimizer: str) -> None:
    run = Run(model="gpt", optimizer=optimizer, microbatches=4, steps=4, page_size=64, groups=GROUPS)
    assert sum(len(layer.segments) for layer in description_of(run).layout.layers) > 8
    for zero in range(4):
        assert_as_reference(run, placement_of(run, mesh, zero), order=zero)


@pytest.mark.parametrize("mesh", ["dp2", "pp3"])
def test_a_group_of_a_tied_parameter_in_bf16(mesh: str) -> None:
    run = Run(model="gpt_tied", dtype="bf16", microbatches=4, steps=4, page_size=64, groups=TIED)
    assert_as_reference(run, placement_of(run, mesh, 2))


def test_groups_change_the_bits() -> None:
    run = Run(model="gpt", microbatches=4, steps=4, page_size=64)
    with_groups = Run(model="gpt", microbatches=4, steps=4, page_size=64, groups=GROUPS)
    assert expected(run).losses[0] == expected(with_groups).losses[0]
    assert expected(run).losses[-1] != expected(with_groups).losses[-1]


@pytest.mark.parametrize("zero", range(4))
def test_a_worker_is_lost_and_another_joins(zero: int) -> None:
    run = Run(model="gpt", microbatches=5, steps=4, page_size=64, groups=GROUPS)
    faults = (
        MessageFault("kill", "Vote", SENDER, False, 3),
        MessageFault("join", "Applied", SENDER, True, 5),
    )
    with one_thread():
        cluster = MirroredCluster(run, "stages3-2", zero, faults=faults, seed=zero, verify_every=1, uneven=True)
        trained = cluster.run()
    assert outcome(trained) == expected(run)
    assert len(trained.epochs) >= 3, "a loss, and a newcomer that has learned its pages"
