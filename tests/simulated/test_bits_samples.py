"""Samples that are no tokens: any mesh, loss or join gives the bits of one worker, and the numbers of plain PyTorch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from elaswave_spmd.data.samples import GenericDataset
from elaswave_spmd.determinism import materialize, sample_ids
from elaswave_spmd.models import GPT, LayeredModel
from elaswave_spmd.recovery.early_stop import EarlyStop
from elaswave_spmd.worker.spec import Job
from tests.cluster import SimulatedCluster
from tests.cluster.faults import SENDER, AnyFault, Fault, MessageFault
from tests.cluster.processes import Trained
from tests.sample_models import (
    Augmented,
    Balanced,
    Classifier,
    Images,
    Sentences,
    Sharded,
    Tagger,
    Weighed,
    Weightless,
)
from tests.simulated import bits_cases
from tests.simulated.bits_cases import (
    TOKENS,
    VALIDATION_MICROBATCHES,
    VOCAB,
    MirroredCluster,
    Outcome,
    Run,
    description_of,
    meta_model,
    mirrored_placement,
    one_thread,
    outcome,
)


def split(dataset: Any, count: int) -> GenericDataset:
    return GenericDataset(dataset, 0, count, type(dataset).__name__)


@dataclass(frozen=True)
class Early(Run):
    """A run that ends early: an improvement of its validation loss has to be a large one."""

    def job(self) -> Job:
        return replace(super().job(), validate_every=2, early_stop=EarlyStop(patience=2, min_delta=0.1))


@dataclass(frozen=True)
class Case:
    """A model with its data."""

    make: Callable[[], LayeredModel]
    train: GenericDataset
    validation: GenericDataset


IMAGES, HELD_OUT = split(Images(48), 48), split(Images(split="validation"), 12)
SENTENCES, OTHERS = split(Sentences(40), 40), split(Sentences(6, shift=500), 6)
CASES = {
    "images": Case(lambda: Classifier(3), IMAGES, HELD_OUT),
    "augmented": Case(lambda: Classifier(3), split(Augmented(48), 48), HELD_OUT),
    "weighed": Case(lambda: Weighed(3), IMAGES, HELD_OUT),
    "weightless": Case(lambda: Weightless(3), IMAGES, HELD_OUT),
    "sentences": Case(Tagger, SENTENCES, OTHERS),
    "sharded": Case(Tagger, split(Sharded(), 40), OTHERS),
    "balanced": Case(Balanced, SENTENCES, OTHERS),
    "plain": Case(lambda: Tagger(dropout=0.0), SENTENCES, OTHERS),
}
SENTENCE_RUN = Run(model="sentences", microbatches=5, microbatch_size=2, steps=4, page_size=64)
IMAGE_RUN = replace(SENTENCE_RUN, model="images")


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, case in CASES.items():
        monkeypatch.setitem(bits_cases.MODELS, name, case.make)


def job_of(run: Run, rate: float = 0.0) -> Job:
    return replace(run.job(), seq_len=1, is_tokens=False, verify_rate=rate)


@one_thread()
def trained(
    run: Run, mesh: str, zero: int = 1, faults: Sequence[AnyFault] = (), *, rate: float = 0.0, seed: int = 0
) -> Trained:
    case = CASES[run.model]
    cluster = SimulatedCluster(
        job_of(run, rate),
        mirrored_placement(run, mesh, zero),
        description_of(run),
        lambda: meta_model(run.model),
        case.train,
        case.validation,
        seed=seed,
        faults=faults,
    )
    return cluster.run()


def results(found: Trained) -> tuple[Outcome, dict[int, dict[str, float]]]:
    return outcome(found), found.metrics


@cache
def alone(run: Run) -> tuple[Outcome, dict[int, dict[str, float]]]:
    return results(trained(run, "single"))


@pytest.mark.parametrize("mesh", ["dp3", "pp3", "dp2_pp2", "stages3-2", "stages1-3"])
@pytest.mark.parametrize("model", ["images", "augmented", "sentences"])
def test_meshes_have_the_bits_of_one_worker(model: str, mesh: str) -> None:
    run = replace(SENTENCE_RUN, model=model)
    for zero in (0, 2) if mesh == "dp2_pp2" else (1,):
        assert results(trained(run, mesh, zero, seed=zero)) == alone(run)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_checkpointing_changes_no_bit(dtype: str) -> None:
    run = replace(SENTENCE_RUN, dtype=dtype)
    assert results(trained(replace(run, checkpointing=True), "dp2_pp2", 3)) == alone(run)


@pytest.mark.parametrize("point", ["forward", "backward", "input", "weights", "reduce", "norm", "apply"])
@pytest.mark.parametrize(("mesh", "zero"), [("dp2_pp2", 1), ("pp3", 3)])
def test_a_worker_is_lost_anywhere_in_a_step(mesh: str, zero: int, point: str) -> None:
    for rank in (0, 1, 2):
        fault = Fault(2, "kill", rank, point, 1 + rank % 2)
        assert results(trained(SENTENCE_RUN, mesh, zero, [fault])) == alone(SENTENCE_RUN)


@pytest.mark.parametrize("seed", range(8))
def test_random_losses_and_joins_with_checks(seed: int) -> None:
    draw = random.Random(seed)
    run = replace(SENTENCE_RUN, model=draw.choice(["sentences", "augmented"]))
    kind = draw.choice(["Activation", "ActivationGradient", "Vote", "ReducedGradient"])
    faults: list[AnyFault] = [
        MessageFault("kill", kind, SENDER, False, draw.randint(1, 9)),
        MessageFault("join", "Applied", SENDER, True, draw.randint(1, 5)),
    ]
    found = trained(run, draw.choice(["dp2_pp2", "dp3_pp2", "pp3"]), seed % 4, faults, rate=0.5, seed=seed)
    assert results(found) == alone(run)
    assert len(found.epochs) > 1


def test_a_wrong_result_is_found() -> None:
    found = trained(SENTENCE_RUN, "dp3_pp2", 1, [Fault(2, "miscompute", 1, "backward")], rate=1.0)
    assert results(found) == alone(SENTENCE_RUN)
    assert len(found.epochs) > 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_weights_with_all_else(checkpointing: bool) -> None:
    """A term of the loss, a frozen layer, the average of the weights, checks, checkpointing and an early end."""
    run = Early(model="balanced", steps=9, ema=0.7, microbatches=5, microbatch_size=2, page_size=64)
    assert len(alone(run)[0].losses) < run.steps, "it ends early by the mean of its validation"
    for seed, (mesh, kind) in enumerate([("dp2_pp2", "Vote"), ("pp3", "ActivationGradient"), ("dp3_pp2", "PageState")]):
        faults: list[AnyFault] = [
            MessageFault("kill", kind, SENDER, False, 3 + seed),
            MessageFault("join", "Applied", SENDER, True, 2),
        ]
        found = trained(replace(run, checkpointing=checkpointing), mesh, seed, faults, rate=0.5, seed=seed)
        assert results(found) == alone(run)


def test_samples_of_shards_are_the_same() -> None:
    assert results(trained(replace(SENTENCE_RUN, model="sharded"), "dp2_pp2")) == alone(SENTENCE_RUN)


def test_a_weight_of_one_each_has_the_bits_of_no_weight() -> None:
    without, weighed = (alone(replace(IMAGE_RUN, model=name)) for name in ("images", "weighed"))
    assert weighed == without
    assert without[1][4].keys() == {"accuracy", "recall of 2"}


class MaskedGPT(GPT):
    """Tokens of which some do not count."""

    def loss(self, output: Any, batch: Any) -> Any:
        counts = (batch.targets % 3 > 0).flatten()
        each = torch.nn.functional.cross_entropy(
            output.float().flatten(0, 1), batch.targets.flatten(), reduction="none"
        )
        return (each * counts).sum(), counts.sum()


def test_tokens_may_have_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> LayeredModel:
        return MaskedGPT(vocab_size=VOCAB, seq_len=TOKENS, layers=2, d_model=8, heads=2, dropout=0.1)

    monkeypatch.setitem(bits_cases.MODELS, "masked", make)
    run = Run(model="masked", microbatches=5, steps=4, page_size=64)
    with one_thread():
        found = [outcome(MirroredCluster(run, "single", 0).run())]
        for mesh, fault in (("dp2_pp2", Fault(2, "kill", 1, "backward")), ("pp3", Fault(3, "kill", 2, "norm"))):
            found.append(outcome(MirroredCluster(run, mesh, 2, faults=[fault]).run()))
    assert found[0] == found[1] == found[2]
    assert 1.0 < float.fromhex(found[0].losses[0]) < 2 * math.log(VOCAB), "a mean over what counts"


def test_a_step_without_weight_is_skipped() -> None:
    losses, norms = alone(replace(IMAGE_RUN, model="weightless"))[0], {"nan"}
    assert set(losses.losses) == set(losses.norms) == norms
    begun = {name: np.frombuffer(data, np.float32) for name, _, data in losses.weights}
    inits, layout = description_of(IMAGE_RUN).inits, description_of(IMAGE_RUN).layout
    assert layout.num_parameters == sum(map(len, begun.values()))
    for name, values in begun.items():
        assert (values == materialize(inits[name], IMAGE_RUN.seed, name, 0, len(values))).all(), name


def test_losses_are_those_of_plain_pytorch() -> None:
    """The mean over all that counts in a global batch, though micro-batches are padded and weigh otherwise."""
    run = replace(SENTENCE_RUN, model="plain")
    model, inits = CASES["plain"].make(), description_of(run).inits
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = materialize(inits[name], run.seed, name, 0, parameter.numel())
            parameter.copy_(torch.from_numpy(values).view(parameter.shape))
    decayed = [p for n, p in model.named_parameters() if model.decays(n, tuple(p.shape))]
    others = [p for n, p in model.named_parameters() if not model.decays(n, tuple(p.shape))]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    found, batch_size = alone(run)[0], run.microbatches * run.microbatch_size
    for step in range(1, run.steps + 1):
        ids = sample_ids(run.seed, step, batch_size, len(SENTENCES), np.arange(batch_size))
        batch = SENTENCES.batch(ids)
        total, weight = model.loss(model(tuple(t.float() for t in model.inputs(batch))), batch)
        optimizer.zero_grad()
        (total / weight).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        for group in optimizer.param_groups:
            group["lr"] = run.learning_rate.at(step)
        optimizer.step()
        assert float.fromhex(found.losses[step - 1]) == pytest.approx(float(total.detach() / weight), rel=1e-5)
        assert float.fromhex(found.norms[step - 1]) == pytest.approx(float(norm), rel=1e-5)


def test_metrics_are_means_over_the_held_out_samples() -> None:
    run = replace(SENTENCE_RUN, model="plain")
    found, metrics = alone(run)
    model: Any = CASES["plain"].make()
    with torch.no_grad():
        for name, shape, data in found.weights:
            model.get_parameter(name).copy_(torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape))
    batch = OTHERS.batch(np.arange(VALIDATION_MICROBATCHES * run.microbatch_size))
    scores = model.metrics(model(tuple(t.float() for t in model.inputs(batch))), batch)
    right, counted = scores["accuracy"]
    assert metrics[run.steps] == {"accuracy": float(right) / float(counted), "length": float(counted) / len(batch.x)}
    assert not math.isnan(metrics[run.steps]["accuracy"])
