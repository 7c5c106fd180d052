"""The average of the weights: pages of state like the others, with the bits of the one-process reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from elaswave_spmd.conf.schema import OptimGroup
from elaswave_spmd.models import LayeredModel, freeze_parameters
from elaswave_spmd.recovery.controller_protocol import Policy
from tests.cluster.faults import SENDER, Fault, MessageFault, ThenFault
from tests.simulated import bits_cases
from tests.simulated.bits_cases import (
    MODELS,
    MirroredCluster,
    Run,
    assert_as_reference,
    expected,
    one_thread,
    outcome,
    placement_of,
)

RUN = Run(model="gpt", microbatches=5, steps=6, page_size=64, ema=0.7)
GROUPS = (OptimGroup("embed.* head.*", lr_scale=0.25), OptimGroup("*.bias", weight_decay=0.3))


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("mesh", ["single", "dp3", "dp2_pp2", "stages1-3", "stages3-2"])
def test_averages_on_meshes(mesh: str, zero: int) -> None:
    assert_as_reference(RUN, placement_of(RUN, mesh, zero), order=zero)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("model", ["gpt_tied", "inf"])
def test_tied_parameters_and_steps_without_an_update(model: str, optimizer: str) -> None:
    run = replace(RUN, model=model, dtype="bf16", optimizer=optimizer)
    if model == "inf":
        assert "nan" in expected(run).norms or "inf" in expected(run).norms, "some step has no finite gradient"
    assert_as_reference(run, placement_of(run, "stages1-3", 2))


def test_a_frozen_parameter_is_its_own_average(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> LayeredModel:
        model = MODELS["gpt"]()
        freeze_parameters(model, ["embed.*", "*.bias"])
        return model

    monkeypatch.setitem(bits_cases.MODELS, "frozen", make)
    run = replace(RUN, model="frozen", groups=(OptimGroup("head.*", lr_scale=0.25),))
    assert_as_reference(run, placement_of(run, "dp2_pp2", 3))
    weights, averages = {name: values for name, _, values in expected(run).weights}, dict(expected(run).averages)
    same = {name for name in weights if weights[name] == averages[name]}
    assert same == {name for name, p in make().named_parameters() if not p.requires_grad}


def test_without_an_average_nothing_else_changes() -> None:
    found, plain = expected(RUN), expected(replace(RUN, ema=None))
    assert plain.averages == () and replace(found, averages=()) == plain
    averages = {name: np.frombuffer(values, np.float32) for name, values in found.averages}
    assert len(averages) == len(found.weights) and all(np.isfinite(values).all() for values in averages.values())


@pytest.mark.parametrize("zero", range(4))
@one_thread()
def test_a_worker_is_lost_and_another_joins(zero: int) -> None:
    run = replace(RUN, groups=GROUPS)
    faults = (MessageFault("kill", "Vote", SENDER, False, 3), MessageFault("join", "Applied", SENDER, True, 5))
    cluster = MirroredCluster(run, "stages3-2", zero, faults=faults, seed=zero, verify_every=1, uneven=True)
    trained = cluster.run()
    assert outcome(trained) == expected(run)
    assert len(trained.epochs) >= 3, "a loss, and a newcomer that has learned its pages"


@pytest.mark.parametrize("zero", range(4))
@one_thread()
def test_layers_move_and_a_worker_is_lost(zero: int) -> None:
    move = ThenFault("rebalance", settled=True)
    cluster = MirroredCluster(RUN, "stages3-2", zero, faults=(move, move, ThenFault("kill")), seed=zero, uneven=True)
    trained = cluster.run()
    assert outcome(trained) == expected(RUN)
    assert len(trained.epochs) >= 2


@pytest.mark.parametrize("zero", [1, 3])
@one_thread()
def test_the_run_begins_again_from_a_checkpoint_on_a_smaller_mesh(zero: int) -> None:
    faults = [Fault(5, "kill", 1, "backward")]
    cluster = MirroredCluster(RUN, "dp2_pp2", zero, faults=faults, policy=Policy(0), checkpoint_every=2)
    trained = cluster.run()
    assert trained.restarts and trained.restarts[0] in (2, 4)
    assert outcome(trained) == expected(RUN)
