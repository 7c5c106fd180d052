"""Frozen parameters: they keep their initial bits, and all others have those of the one-process reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elaswave_spmd.models import LayeredModel, freeze_parameters
from elaswave_spmd.sharding.layout import STATE
from elaswave_spmd.sharding.replicas import all_replica_sets
from tests.cluster.faults import SENDER, Fault, MessageFault
from tests.reference import Settings, train
from tests.simulated import bits_cases
from tests.simulated.bits_cases import (
    MODELS,
    TRAIN,
    MirroredCluster,
    Run,
    assert_as_reference,
    description_of,
    expected,
    mirrored_placement,
    one_thread,
    outcome,
    placement_of,
)


def frozen(name: str, *patterns: str) -> Callable[[], LayeredModel]:
    def make() -> LayeredModel:
        model = MODELS[name]()
        freeze_parameters(model, patterns)
        return model

    return make


CASES = {
    "first layers": frozen("gpt", "embed.*", "block0.*"),
    "all but the first layer": frozen("gpt", "block*", "head.*"),
    "mixed pages of each layer": frozen("gpt", "*.bias", "*.qkv.weight"),
    "a tie and the rest": frozen("gpt_tied", "embed.weight", "head.weight"),
    "the rest, a tie is trained": frozen("gpt_tied", "block0.*", "head.norm.*", "embed.positions"),
    "norms of llama": frozen("llama", "*norm*"),
    "the last layer of mlp": frozen("mlp", "head.*"),
    "steps without an update": frozen("inf", "embed.*", "block0.attn.*"),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mesh", ["single", "dp3", "pp3", "dp2_pp2", "stages1-3"])
@pytest.mark.parametrize("case", CASES)
def test_frozen_parameters_on_meshes(case: str, mesh: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bits_cases.MODELS, case, CASES[case])
    run = Run(model=case, dtype=dtype, microbatches=4, steps=4, page_size=64)
    for zero in (1, 3) if dtype == "bf16" else (0, 2, 3):
        assert_as_reference(run, placement_of(run, mesh, zero), order=zero)


@pytest.mark.parametrize("case", CASES)
def test_activation_checkpointing_and_sgd(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bits_cases.MODELS, case, CASES[case])
    run = Run(model=case, microbatches=3, steps=4, checkpointing=True, optimizer="sgd", page_size=128)
    assert_as_reference(run, placement_of(run, "dp2_pp2", 2))


def test_frozen_parameters_keep_their_bits_and_the_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bits_cases.MODELS, "mixed", CASES["mixed pages of each layer"])
    run = Run(model="mixed", microbatches=3, steps=2)
    with one_thread():
        start = train(MODELS["mixed"](), TRAIN, Settings(run.learning_rate.at, seed=run.seed, steps=0)).weights
    frozen_names = {name for name, p in MODELS["mixed"]().named_parameters() if not p.requires_grad}
    same = {name for name, _, values in expected(run).weights if values == start[name].numpy().tobytes()}
    assert same == frozen_names and len(frozen_names) > 5


def test_frozen_pages_have_no_update_that_may_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would be compared that finds it in time, as nothing is computed."""
    monkeypatch.setitem(bits_cases.MODELS, "mixed", CASES["mixed pages of each layer"])
    run, rank = Run(model="mixed", microbatches=3, steps=3, page_size=64), 1
    layout = description_of(run).layout
    held = [it for it in all_replica_sets(mirrored_placement(run, "dp3", 1).replica_map(layout)) if it.reaches(rank)]
    trained = [it for it in held if layout.layers[it.layer].block_of(it.first).kind == STATE]
    trained = [it for it in trained if not layout.layers[it.layer].is_frozen(it.first)]
    assert 0 < len(trained) < len(held)
    for count, injected in ((len(trained), 1), (len(trained) + 1, 0)):
        cluster = MirroredCluster(run, "dp3", 1, faults=[Fault(2, "miscompute", rank, "apply", count)])
        cluster.run()
        assert cluster.plan.num_injected == injected


@pytest.mark.parametrize("zero", range(4))
def test_a_worker_is_lost_and_another_joins(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bits_cases.MODELS, "lossy", CASES["first layers"])
    run = Run(model="lossy", microbatches=4, steps=4, page_size=64)
    faults = (
        MessageFault("kill", "Vote", SENDER, False, 3),
        MessageFault("join", "Applied", SENDER, True, 5),
    )
    with one_thread():
        cluster = MirroredCluster(run, "dp2_pp2", zero, faults=faults, seed=zero, verify_every=1)
        trained = cluster.run()
    assert outcome(trained) == expected(run)
    assert len(trained.epochs) >= 3, "a loss, and a newcomer that has learned its pages"
