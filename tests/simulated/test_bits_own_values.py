"""A model that begins with its constructors' values has the bits of the reference on meshes and through a loss."""

from __future__ import annotations

import pytest

from elaswave_spmd.models import LayeredModel, constructing, freeze_parameters
from tests.cluster.faults import SENDER, MessageFault
from tests.cluster.processes import Trained
from tests.own_values_model import Own
from tests.simulated import bits_cases
from tests.simulated.bits_cases import (
    TRAIN,
    VALIDATION,
    VOCAB,
    Run,
    SimulatedCluster,
    assert_as_reference,
    description_of,
    expected,
    mirrored_placement,
    one_thread,
    outcome,
    placement_of,
)

NAME = "own values"


def make() -> LayeredModel:
    with constructing(5):
        model = Own(VOCAB, 8)
    freeze_parameters(model, ["block0.mix.*", "*.by_numpy"])
    return model


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bits_cases.MODELS, NAME, make)


@pytest.mark.parametrize("mesh", ["single", "dp3", "dp2_pp2", "stages1-2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_meshes(mesh: str, dtype: str) -> None:
    run = Run(model=NAME, dtype=dtype, microbatches=4, steps=4, page_size=64)
    for zero in (0, 3):
        assert_as_reference(run, placement_of(run, mesh, zero), order=zero)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_loss_in_the_first_step(zero: int) -> None:
    run = Run(model=NAME, microbatches=4, steps=4, page_size=64)

    @one_thread()
    def lossy() -> Trained:
        faults = (MessageFault("kill", "Vote", SENDER, False, 1),)
        placement = mirrored_placement(run, "dp2_pp2", zero)
        cluster = SimulatedCluster(run.job(), placement, description_of(run), make, TRAIN, VALIDATION, faults=faults)
        return cluster.run()

    trained = lossy()
    assert outcome(trained) == expected(run) and len(trained.epochs) >= 2
