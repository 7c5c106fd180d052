"""The check of a model before the first step: mistakes are refused with the layer, and what is right passes."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elaswave_spmd.data.samples import GenericDataset
from elaswave_spmd.determinism import Keys, sample_ids
from elaswave_spmd.errors import DataError, ModelError
from elaswave_spmd.models import GPT, MLP, Batch, LayeredModel, Llama, Objective, build_model, constructing
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.context import LocalModel
from elaswave_spmd.worker.initial_values import MadeValues
from elaswave_spmd.worker.layer_kinds import kind_of
from elaswave_spmd.worker.learning_rate import LearningRate
from elaswave_spmd.worker.loss_check import check_loss, refuse_detached
from elaswave_spmd.worker.model_check import ModelCheck, check_model, fill_initial, mistake_in_model
from elaswave_spmd.worker.model_layout import describe
from elaswave_spmd.worker.optimizers import make_optimizer
from elaswave_spmd.worker.programs.eager import StagePrograms, program_args
from elaswave_spmd.worker.programs.split_backward import WeightProducts
from elaswave_spmd.worker.spec import Job
from tests import mistaken_model
from tests.mistaken_model import BLOCKS, BUILT, REFUSED, RIGHT, Mistaken
from tests.tuple_models import Experts, FeaturesFirst, Mixture, Packed, Routed, Skips

VOCABULARY, TIME, WIDTH = 11, 6, 8
CPU = torch.device("cpu")


class Numbers:
    """Samples whose tokens are a function of their ids."""

    def __len__(self) -> int:
        return 100

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = (ids[:, None] * 7 + np.arange(TIME + 1) * 3) % VOCABULARY
        return tokens[:, :-1], tokens[:, 1:]


def a_job(**changes: Any) -> Job:
    sizes = {"steps": 10, "global_batch": 8, "microbatch_size": 2, "seq_len": TIME, "dtype": "fp32"} | changes
    rate = LearningRate(1e-3, "constant", 0, 10, 0.1)
    adamw = make_optimizer("adamw", weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, momentum=0.0)
    given: dict[str, Any] = {"validate_every": 5, "num_validation_microbatches": 2} | sizes
    return Job(seed=3, optimizer=adamw, learning_rate=rate, **given)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The number of threads is as it was: one of the mistakes changes it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def local(model: LayeredModel, job: Job) -> LocalModel:
    """A model as a worker has it; each call makes new layers, as deepcopy does."""
    import copy

    description = describe(model, page_size=64)
    programs = StagePrograms(**program_args(job, description.layout, Objective.of(model)))

    def make(layers: Any) -> Mapping[int, nn.Module]:
        return {number: copy.deepcopy(model.layers[number]) for number in layers}

    made = MadeValues(lambda layers: model) if description.has_own_values else None
    return LocalModel(description.layout, description.inits, make, model.layers.__getitem__, programs, made)


def check(model: LayeredModel, *, rank: int = 0, alone: bool = False, **changes: Any) -> ModelCheck:
    job = a_job(**changes)
    return check_model(local(model, job), job, Numbers(), CPU, rank=rank, alone=alone)


def mistaken(mistake: str) -> Mistaken:
    with constructing(3):
        return Mistaken(VOCABULARY, WIDTH, mistake)


def refusal(model: LayeredModel, **changes: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        check(model, **changes)
    return caught.value


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mistake", [name for name in REFUSED if name not in BUILT])
def test_a_mistake_is_refused_with_the_layer_and_the_fix(mistake: str, checkpointing: bool) -> None:
    mistaken_model._calls.clear()
    error = refusal(mistaken(mistake), activation_checkpointing=checkpointing)
    words = REFUSED[mistake]
    if checkpointing and mistake == "in_place":  # without a graph torch lets the first forward do it
        assert "layer block0 changes" in error.what and "in place" in error.what, error
    else:
        assert error.what.startswith(words), error
    assert error.rule and error.fix and len(str(error)) < 1200


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mistake", [name for name, (kind, _) in BLOCKS.items() if name not in BUILT])
def test_a_mistake_is_refused_on_workers_of_either_order(mistake: str, rank: int) -> None:
    mistaken_model._calls.clear()
    assert "block0" in refusal(mistaken(mistake), rank=rank).what


@pytest.mark.parametrize("mistake", BUILT)
def test_parameters_that_would_be_lost_are_refused_when_the_model_is_made(mistake: str) -> None:
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH}
    with pytest.raises(ModelError) as caught, torch.device("meta"):
        build_model(Mistaken, sizes, {"mistake": mistake})
    assert caught.value.what.startswith(REFUSED[mistake])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("right", RIGHT)
def test_what_only_looks_like_a_mistake_passes(right: str, dtype: str) -> None:
    if right == "keyed_noise" and dtype == "bf16":
        pytest.skip("its noise is fp32")
    found = [check(mistaken(right), rank=rank, alone=rank == 0, dtype=dtype) for rank in (0, 1)]
    assert found[0].layers == found[1].layers  # digests too, in whichever order a worker began


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("microbatch_size", [1, 2, 4])
@pytest.mark.parametrize("kind", [GPT, Llama, MLP])
def test_the_models_of_this_package_pass(kind: type[LayeredModel], microbatch_size: int, dtype: str) -> None:
    sizes = {"vocab_size": VOCABULARY, "seq_len": TIME, "layers": 3, "d_model": WIDTH, "heads": 2, "dropout": 0.1}
    model = build_model(kind, sizes)
    found = check(model, microbatch_size=microbatch_size, dtype=dtype)
    counts = {model.layer_names[one.layer]: one.count for one in found.layers}
    assert sum(counts.values()) == len(model.layers) and max(counts.values()) == 3
    kept = {one.layer: (one.kept_bytes, one.output_bytes) for one in found.layers}
    assert all(number > 0 for pair in kept.values() for number in pair)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [GPT, Llama, MLP])
def test_layers_with_weight_products_may_have_their_backward_in_two_parts(
    kind: type[LayeredModel], dtype: str, checkpointing: bool
) -> None:
    sizes = {"vocab_size": VOCABULARY, "seq_len": TIME, "layers": 3, "d_model": WIDTH, "heads": 2, "dropout": 0.1}
    model = build_model(kind, sizes)
    found = check(model, dtype=dtype, activation_checkpointing=checkpointing)
    put_off = {one.layer: one.put_off_bytes for one in found.layers}
    assert found.kinds == (0, 1, 1, 1, *range(4, len(model.layers))) and len(found.kinds) == len(model.layers)
    assert put_off[0] == 0, "token ids have no gradient, for which a part would have to come first"
    assert put_off[1] > 0 and put_off[len(model.layers) - 1] > 0


def test_a_layer_whose_parts_have_other_bits_keeps_its_backward_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    right = check(mistaken("none"))
    assert {one.layer for one in right.layers if one.put_off_bytes} == {1, 3}
    gradients = WeightProducts.gradients

    def wrong(products: WeightProducts, *args: Any) -> list[Any]:
        is_block = products.brought[0].product.parameters[0].shape == (WIDTH, WIDTH)
        return [made if made is None or not is_block else -made for made in gradients(products, *args)]

    monkeypatch.setattr(WeightProducts, "gradients", wrong)
    found = check(mistaken("none"))
    assert {one.layer for one in found.layers if one.put_off_bytes} == {3}
    digests = zip(right.layers, found.layers, strict=True)
    assert [one.digest == other.digest for one, other in digests] == [True, False, True], "others must find the same"


class Gated(nn.Module):
    """x + gate * tanh(linear(x)), whose gate begins at zero (ReZero, LoRA): so does every gradient of the linear."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, keys: Any) -> Tensor:
        return x + self.gate * torch.tanh(self.linear(x))


class OfTorch(nn.TransformerEncoderLayer):
    """A layer of torch, which has kernels of its own for a validation."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, keys: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)


class Around(LayeredModel):
    """An embedding, one layer and a head."""

    shardings = Mistaken.shardings

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        embed, head = mistaken_model.Embed(VOCABULARY, WIDTH), mistaken_model.Head(WIDTH, VOCABULARY)
        super().__init__({"embed": embed, "block0": layer(), "head": head})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_layer_behind_a_gate_that_begins_at_zero_is_compared(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with constructing(3):
        model = Around(Gated)
    assert {one.layer for one in check(model, rank=rank).layers if one.put_off_bytes} == {1, 2}
    gradients = WeightProducts.gradients

    def wrong(products: WeightProducts, *args: Any) -> list[Any]:
        right = gradients(products, *args)
        return [2 * made if made is not None and made.shape == (WIDTH, WIDTH) else made for made in right]

    monkeypatch.setattr(WeightProducts, "gradients", wrong)
    assert {one.layer for one in check(model, rank=rank).layers if one.put_off_bytes} == {2}


def test_parameters_have_their_initial_values_after_both_parts_were_compared() -> None:
    """The loss is checked with them, and what is refused there must not depend on whether a backward was split."""
    seen: list[Tensor] = []

    class Seen(Around):
        def loss(self, output: Tensor, batch: Batch) -> Tensor:
            if not torch.is_grad_enabled():
                seen.append(output.detach().clone())
            return super().loss(output, batch)

    for changes in ({}, {"dtype": "bf16"}):
        with constructing(3):
            model = Seen(Gated)
        job, made = a_job(**changes), local(model, a_job(**changes))
        seen.clear()
        splits = any(layer.put_off_bytes for layer in check_model(made, job, Numbers(), CPU).layers)
        with_parts = list(seen)
        made.programs.set_split_layers = lambda layers: None
        seen.clear()
        check_model(made, job, Numbers(), CPU)
        assert splits and seen and all(torch.equal(one, two) for one, two in zip(seen, with_parts, strict=True))


def test_a_validation_has_the_bits_of_plain_parameters_where_products_are_put_off() -> None:
    """Torch has other kernels for attention if parameters have a class of their own. Stages that put nothing off, and
    meshes of one stage, would validate with other bits."""
    with constructing(3):
        made = local(Around(OfTorch), a_job())
    module = made.make_modules([1])[1]
    value = ValueBuffer(made.layout.layers[1], module, torch.float32, CPU)
    value.flat.zero_()
    fill_initial(value, made, 3)
    programs = made.programs
    programs.bind({1: module}, {1: value})
    x, keys, found = torch.randn(2, TIME, WIDTH), Keys.make(3, 1, [0, 1], 1), []
    for layers in ([], [1]):
        programs.set_split_layers(layers)
        assert programs.has_split_layers == bool(layers)
        programs.forward(1, 0, x, keys, None)
        programs.forward(1, 1, x, keys, None)  # in a layer's first forward nothing is put off
        programs.set_training(False)
        found.append(programs.evaluate(1, x, keys, None))
        programs.set_training(True)
    assert torch.equal(*found)


def test_a_layer_that_cannot_be_run_in_parts_keeps_its_backward_whole() -> None:
    found = check(mistaken("plain_parameters"))
    assert {one.layer: one.put_off_bytes > 0 for one in found.layers} == {0: False, 1: False, 3: True}


def test_one_micro_batch_in_a_step_is_compared_with_that_of_the_next() -> None:
    found = check(mistaken("none"), global_batch=2)
    assert [one.count for one in found.layers] == [1, 2, 1]
    assert "block0" in refusal(mistaken("first_input"), global_batch=2).what


@pytest.mark.parametrize("mistake", ["of_the_process", "first_of_all"])
def test_what_one_worker_cannot_see_shows_in_the_digests(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for rank in (0, 1):
        mistaken_model._first.clear()  # each worker is a process of its own
        monkeypatch.setattr("os.getpid", lambda rank=rank: 7 + rank)
        found = check(mistaken(mistake), rank=rank)
        digests.append({one.layer: one.digest for one in found.layers})
    first, second = digests
    assert first[0] == second[0] and first[1] != second[1]


def test_a_loss_is_the_sum_of_its_halves() -> None:
    output, targets = (
        torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)),
        torch.ones(4, 3, dtype=torch.int64),
    )
    batch = Batch(targets, targets)

    def summed(y: Tensor, given: Batch) -> Tensor:
        return functional.cross_entropy(y.flatten(0, 1), given.targets.flatten(), reduction="sum")

    def slightly_off(y: Tensor, given: Batch) -> Tensor:
        return summed(y, given) * (1.003 if len(y) == 4 else 1.0)

    for cut in (1, 2, 3):
        check_loss(summed, output, batch, cut)
        check_loss(lambda y, given: 0.0 * summed(y, given), output, batch, cut)
        for wrong in (slightly_off, lambda y, given: summed(y, given) / len(y)):
            with pytest.raises(ModelError, match=r"loss\(\) of 4 samples is .* of their two halves"):
                check_loss(wrong, output, batch, cut)


@pytest.mark.parametrize("microbatch_size", [1, 3, 4])
@pytest.mark.parametrize("mistake", ["mean_loss", "loss_over_samples", "weighted_loss"])
def test_a_loss_is_refused_for_micro_batches_of_any_size(mistake: str, microbatch_size: int) -> None:
    error = refusal(mistaken(mistake), microbatch_size=microbatch_size, global_batch=12)
    assert error.what.startswith("loss() of ") and "halves" in error.what


@pytest.mark.parametrize("microbatch_size", [1, 3, 4])
@pytest.mark.parametrize("mistake", ["mean_metric", "largest_metric", "metric_of_two_means"])
def test_a_metric_that_is_no_sum_is_refused(mistake: str, microbatch_size: int) -> None:
    error = refusal(mistaken(mistake), microbatch_size=microbatch_size, global_batch=12)
    assert error.what.startswith("metric ") and "halves" in error.what and error.where == "metrics(output, batch)"


@pytest.mark.parametrize("microbatch_size", [1, 3, 4])
def test_metrics_that_are_sums_pass(microbatch_size: int) -> None:
    check(mistaken("sums"), microbatch_size=microbatch_size, global_batch=12)


_shared: dict[str, Tensor] = {}


class Writes(mistaken_model.Block):
    def change(self, x: Tensor, keys: Any) -> Tensor:
        _shared["gate"] = x.detach().sigmoid()
        return x


class Reads(mistaken_model.Block):
    def change(self, x: Tensor, keys: Any) -> Tensor:
        return x * _shared["gate"] if "gate" in _shared else x


class Between(LayeredModel):
    """Two layers that share a variable, with one between them."""

    shardings = Mistaken.shardings

    def __init__(self, first: type[nn.Module], last: type[nn.Module]) -> None:
        embed, head = mistaken_model.Embed(VOCABULARY, WIDTH), mistaken_model.Head(WIDTH, VOCABULARY)
        layers = {"first": first(WIDTH), "mid": nn.Linear(WIDTH, WIDTH), "last": last(WIDTH)}
        super().__init__({"embed": embed, **layers, "head": head})


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("layers", "told"), [((Writes, Reads), "last"), ((Reads, Writes), "first")])
def test_what_layers_share_is_seen_by_one_worker_alone(
    layers: tuple[type[nn.Module], type[nn.Module]], told: str, checkpointing: bool
) -> None:
    with constructing(3):
        model = Between(*layers)
    for alone in (False, True):
        _shared.clear()
        if not alone:  # workers of either order find other bits; here nobody compares them
            check(model, activation_checkpointing=checkpointing)
            continue
        error = refusal(model, alone=True, activation_checkpointing=checkpointing)
        assert error.what.startswith(f"layer {told} computes other bits for the same micro-batch when the other layers")
    with constructing(3):
        check(Between(Writes, mistaken_model.Block), alone=True)


class InPlaceLoss(Around):
    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return super().loss(output.mul_(2), batch)


class Exponential(mistaken_model.Head):
    """Its backward needs its output."""

    def forward(self, x: Tensor, keys: Any) -> Tensor:
        return super().forward(x, keys).exp()


class NoisyHead(mistaken_model.Head):
    def forward(self, x: Tensor, keys: Any) -> Tensor:
        return super().forward(x, keys) + torch.rand(())


def with_head(model: type[Around], head: type[nn.Module]) -> Around:
    with constructing(3):
        made = model(lambda: mistaken_model.Block(WIDTH))
    made.get_submodule("head").__class__ = head
    return made


@pytest.mark.parametrize("head", [mistaken_model.Head, Exponential])
def test_a_loss_that_changes_the_output_in_place_is_told_of_the_loss(head: type[nn.Module]) -> None:
    assert refusal(with_head(InPlaceLoss, head)).what == "loss(output, batch) changes output in place"


def test_a_last_layer_that_draws_is_not_taken_for_its_loss() -> None:
    assert refusal(with_head(Around, NoisyHead)).what == "layer head draws from torch's generator"


def test_metrics_that_raise_do_so_in_the_check_and_not_in_the_first_validation() -> None:
    with pytest.raises(TypeError) as caught:
        check(mistaken("raising_metric"))
    assert any("evaluation, with the loss" in note for note in getattr(caught.value, "__notes__", ()))
    told = mistake_in_model(caught.value, CPU)
    assert told is not None and told.fix == "correct metrics()" and "metrics(output, batch) after the last" in told.rule
    assert ", in metrics(output, batch), of output float32[2, 6, 11], batch.tokens int64[2, 6], " in told.what
    assert told.where.endswith('in raising_metric: return {"first": batch[0]}  # pyright: ignore[reportIndexIssue]')


@pytest.mark.parametrize(
    ("loss", "raised"),
    [
        (lambda output, batch: batch["targets"], "TypeError: 'Batch' object is not subscriptable"),
        (lambda output: output.sum(), "TypeError: "),
        (lambda output, batch: output @ output.new_ones(3), "RuntimeError: size mismatch"),
        (lambda output, batch: sys.exit(3), "RuntimeError: sys.exit(3) was called"),
    ],
    ids=["batch", "arguments", "shapes", "exit"],
)
def test_what_the_loss_raises_is_told_of_the_loss_and_not_of_a_layer(loss: Callable[..., Any], raised: str) -> None:
    class Wrong(Mistaken):
        def __getattribute__(self, name: str) -> Any:
            return loss if name == "loss" else super().__getattribute__(name)

    with constructing(3), pytest.raises((TypeError, RuntimeError)) as caught:
        check(Wrong(VOCABULARY, WIDTH, "nothing"))
    told = mistake_in_model(caught.value, CPU)
    assert told is not None and told.what.startswith(f"the model raised {raised}")
    assert ", in loss(output, batch), of output float32[2, 6, 11], batch.tokens int64[2, 6]" in told.what
    assert told.fix == "correct loss()" and "loss(output, batch) after the last layer" in told.rule


class Regression(LayeredModel):
    """Of samples (features, label)."""

    def __init__(self) -> None:
        super().__init__({"head": nn.Linear(3, 1)})

    def inputs(self, batch: Any) -> Tensor:
        return batch[0]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return functional.huber_loss(output[:, 0], batch[1], reduction="sum")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("dtype", "label", "told"),
    [
        ("fp32", 0.5, "batch[0] float32[2, 3], batch[1] float64[2]"),  # as default_collate makes it of Python's float
        ("bf16", np.float32(0.5), "batch[0] bfloat16[2, 3], batch[1] float32[2]"),
    ],
)
def test_labels_of_another_dtype_than_the_output_are_told_of_the_loss_and_not_of_a_layer(
    dtype: str, label: Any, told: str, checkpointing: bool
) -> None:
    features = torch.ones(3, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    data = GenericDataset([(features, label)] * 20, 0, 20, "data")
    job = a_job(is_tokens=False, seq_len=1, dtype=dtype, activation_checkpointing=checkpointing)
    with constructing(3):
        model = local(Regression(), job)
    with pytest.raises(RuntimeError, match="Found dtype") as caught:
        check_model(model, job, data, CPU)
    refused = mistake_in_model(caught.value, CPU)
    assert refused is not None and "in layer 'head' (backward, with the loss), input" in refused.what
    assert refused.what.endswith(told) and "loss(output, batch) computes in one dtype" in refused.rule
    assert refused.fix == "in loss(): batch[1].to(output.dtype)"


class Ends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        sys.exit("no such case")


def test_a_layer_that_calls_exit_is_told_of_as_one_that_fails() -> None:
    """Else the worker would end with its state, and a run would be lost that had an exception's way out."""
    embed, head = mistaken_model.Embed(VOCABULARY, WIDTH), mistaken_model.Head(WIDTH, VOCABULARY)
    with pytest.raises(RuntimeError) as caught:
        check(LayeredModel({"embed": embed, "ends": Ends(), "head": head}))
    told = mistake_in_model(caught.value, CPU)
    assert told is not None and told.where.endswith('in forward: sys.exit("no such case")')
    assert told.what.startswith("the model raised RuntimeError: sys.exit('no such case') was called, in layer 'ends'")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_that_takes_whole_micro_batches_alone_passes_and_it_is_said(rank: int) -> None:
    assert check(mistaken("loss_of_whole_microbatches"), rank=rank).loss_unchecked.startswith("ValueError: ")
    assert check(mistaken("none"), rank=rank).loss_unchecked == ""


def test_a_check_keeps_one_copy_of_a_layer_at_a_time() -> None:
    job, model = a_job(), mistaken("none")
    kept, alive, most = local(model, job), [], 0

    def make(layers: Any) -> Mapping[int, nn.Module]:
        nonlocal most
        made = kept.make_modules(layers)
        gc.collect()
        alive.extend(weakref.ref(one) for one in made.values())
        most = max(most, sum(one() is not None for one in alive))
        return made

    check_model(replace(kept, make_modules=make), job, Numbers(), CPU)
    assert len(alive) == 6 and most == 1, "two copies of each of three kinds"
    alive.clear()
    check_model(replace(kept, make_modules=make), job, Numbers(), CPU, alone=True)
    assert len(alive) == 9 and most == 1, "and one more, where no other worker is there to compare with"


def drawn_by_numpy() -> bytes:
    state: Any = np.random.get_state()
    return state[1].tobytes()


def test_nothing_is_left_behind() -> None:
    """No state of a generator, no tensor, no saved forward, no measurement; the model's layers are as they were."""
    job, model = a_job(), mistaken("mixed_types")
    made = local(model, job)
    check_model(made, job, Numbers(), CPU)
    before = [value.clone() for value in (*model.parameters(), *model.buffers())]
    generators = torch.get_rng_state(), random.getstate(), drawn_by_numpy()
    gc.collect()
    tensors = sum(issubclass(type(one), Tensor) for one in gc.get_objects())
    check_model(made, job, Numbers(), CPU)
    gc.collect()
    assert sum(issubclass(type(one), Tensor) for one in gc.get_objects()) <= tensors  # others may go: of tests before
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert drawn_by_numpy() == generators[2]
    now = [*model.parameters(), *model.buffers()]
    assert all(torch.equal(one, other) for one, other in zip(now, before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not made.programs.forwarded and not made.programs.memory.pop_rows() and 0 not in made.programs.memory.known


def test_a_refusal_leaves_the_programs_without_layers() -> None:
    job = a_job()
    made = local(mistaken("torch_noise"), job)
    with pytest.raises(ModelError):
        check_model(made, job, Numbers(), CPU)
    assert not made.programs._modules and not made.programs._saved


@pytest.mark.parametrize(
    "changed",
    [
        lambda y: y.detach(),
        lambda y: torch.from_numpy(y.detach().numpy()),
        lambda y: functional.one_hot(y.argmax(-1), VOCABULARY).float(),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_without_a_gradient_is_refused(changed: Callable[[Tensor], Tensor], weighted: bool) -> None:
    class Detached(Mistaken):
        def loss(self, output: Tensor, batch: Batch) -> Any:
            total = super().loss(changed(output), batch)
            return (total, batch.targets.numel()) if weighted else total

    with constructing(3):
        model = Detached(VOCABULARY, WIDTH, "nothing")
    error = refusal(model)
    assert "has no gradient" in error.what and error.where == "loss(output, batch)" and "detach()" in error.fix


def test_a_loss_of_a_micro_batch_in_which_nothing_counts_may_have_no_gradient() -> None:
    output = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    refuse_detached(lambda y, given: (torch.zeros(()), 0), output, None)
    with pytest.raises(ModelError, match="is 1, and has no gradient"):
        refuse_detached(lambda y, given: (torch.ones(()), 1), output, None)


def test_what_inputs_raises_is_a_mistake_of_the_model() -> None:
    class Wrong(Mistaken):
        def inputs(self, batch: Any) -> Any:
            return batch["image"]

    with constructing(3):
        model = Wrong(VOCABULARY, WIDTH, "nothing")
    job = a_job()
    made = replace(local(model, job), inputs=model.inputs)
    with pytest.raises(TypeError) as caught:
        check_model(made, job, Numbers(), CPU)
    told = mistake_in_model(caught.value, CPU)
    assert told is not None and "in inputs(batch), of batch.tokens a tensor int64[2, 6]" in told.what
    assert told.where.endswith('in inputs: return batch["image"]') and told.fix == "correct it, or the data"


_OWN = torch.Generator()
_times: list[int] = []
_buffer = torch.zeros(2, TIME, dtype=torch.int64)


def _counted(batch: Batch) -> Tensor:
    _times.append(0)
    return batch.tokens.roll(len(_times), -1)


@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        (lambda batch: (batch.tokens + torch.randint(2, (2, 1))) % 9, "draws from torch's generator"),
        (lambda batch: batch.tokens * random.randint(0, 1), "draws from Python's random"),
        (
            lambda batch: (batch.tokens + torch.randint(9, (2, 6), generator=_OWN)) % 9,
            "gave other results for the same",
        ),
        (_counted, "gave other results for the same micro-batch: "),
        (lambda batch: batch.tokens.clamp_(0, 3), "changes batch.tokens in place"),
        (lambda batch: (batch.targets.clamp_(0, 3), batch.tokens)[1], "changes batch.targets in place"),
        (lambda batch: _buffer.copy_(batch.tokens), "changes in place what it has returned for another micro-batch"),
    ],
    ids=["torch", "python", "generator", "counter", "in place", "targets", "buffer"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_inputs_does_is_held_to_what_layers_are_held_to(
    inputs: Callable[[Batch], Tensor], what: str, rank: int
) -> None:
    job = a_job()
    made = replace(local(mistaken("none"), job), inputs=inputs)
    with pytest.raises(ModelError) as caught:
        check_model(made, job, Numbers(), CPU, rank=rank)
    assert caught.value.what.startswith(f"inputs(batch) {what}") and caught.value.where == "inputs(batch)"
    assert "layer" not in caught.value.what and caught.value.fix


def test_an_exception_of_the_model_goes_on_unchanged() -> None:
    class Failing(mistaken_model.Block):
        def change(self, x: Tensor, keys: Any) -> Tensor:
            raise IndexError("no such row")

    embed, head = mistaken_model.Embed(VOCABULARY, WIDTH), mistaken_model.Head(WIDTH, VOCABULARY)
    with pytest.raises(IndexError, match="no such row") as caught:
        check(LayeredModel({"embed": embed, "block0": Failing(WIDTH), "head": head}))
    assert vars(caught.value)["__notes__"] == ["in layer 'block0' (forward), input float32[2, 6, 8]"]
    told = mistake_in_model(caught.value, CPU)
    assert told is not None and told.what == (
        "the model raised IndexError: no such row, in layer 'block0' (forward), input float32[2, 6, 8]"
    )
    assert told.where.endswith('in change: raise IndexError("no such row")')


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (ValueError("made in another thread"), True),
        (OSError("the file system does not answer"), False),
        (MemoryError(), False),
        (DataError("it", rule="is", where="bad", fix="input"), False),
    ],
)
def test_what_a_dataset_raises_is_bad_input_unless_the_machine_may_be_the_cause(
    error: Exception, refused: bool
) -> None:
    class Failing(Numbers):
        def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            vars(error)["__notes__"] = [f"in sample {ids[0]} of Failing"]
            raise error

    job = a_job()
    with pytest.raises(DataError if refused else type(error)) as raised:
        check_model(local(mistaken("torch_noise"), job), job, Failing(), CPU)
    assert (raised.value is error) != refused
    if refused:
        assert "the dataset raised ValueError: made in another thread, in sample" in str(raised.value)


def test_what_a_machine_may_have_raised_is_no_mistake_of_the_model() -> None:
    noted = {"__notes__": ["in layer 'block0' (forward)"]}

    def told(error: Exception, notes: dict[str, Any], device: str = "cpu") -> bool:
        vars(error).update(notes)
        return mistake_in_model(error, torch.device(device)) is not None

    assert told(RuntimeError("shapes cannot be multiplied"), noted) and told(TypeError("no tensor"), noted, "meta")
    assert not told(RuntimeError("shapes cannot be multiplied"), {}), "it did not come out of a layer"
    assert not told(RuntimeError("device-side assert"), noted, "meta"), "an accelerator may have failed"
    assert not told(RuntimeError("DefaultCPUAllocator: can't allocate memory"), noted)
    assert not told(MemoryError(), noted) and not told(OSError("no space left"), noted)


class WithNumber(mistaken_model.Block):
    def __init__(self, number: Any) -> None:
        super().__init__(WIDTH)
        self.number = number


def test_layers_are_of_a_kind_if_one_stands_for_all() -> None:
    alike: list[Callable[[], nn.Module]] = [
        lambda: mistaken_model.Block(WIDTH),
        lambda: WithNumber(3),
        lambda: WithNumber((1, "a", None)),
        lambda: WithNumber([1, {"a": 2}]),
        lambda: WithNumber({1, 2}),
        lambda: WithNumber(functional.relu),
        lambda: WithNumber(torch.zeros(3)),
        lambda: mistaken_model.MixedTypes(WIDTH),
    ]
    kinds = [kind_of(make()) for make in alike]
    assert kinds == [kind_of(make()) for make in alike]
    assert len(set(kinds)) == len(kinds)
    assert kind_of(WithNumber(3)) != kind_of(WithNumber(4)) != kind_of(WithNumber(4.0))
    assert kind_of(WithNumber(bytearray(b"a"))) != kind_of(WithNumber(bytearray(b"a")))  # it cannot be told
    frozen = mistaken_model.Block(WIDTH)
    frozen.eval()
    assert kind_of(frozen) != kinds[0]
    hooked = mistaken_model.BackwardHook(WIDTH)
    assert kind_of(hooked) != kind_of(mistaken_model.BackwardHook(WIDTH))  # hooks have numbers of their own


def test_a_mistake_in_a_later_layer_of_its_own_kind_is_found() -> None:
    layers = {
        "embed": mistaken_model.Embed(VOCABULARY, WIDTH),
        "block0": mistaken_model.Block(WIDTH),
        "block1": mistaken_model.Block(WIDTH),
        "odd": mistaken_model.TorchNoise(WIDTH),
        "head": mistaken_model.Head(WIDTH, VOCABULARY),
    }
    assert refusal(LayeredModel(layers)).what.startswith("layer odd draws from torch's generator")


def test_the_names_of_who_reads_samples_are_the_runs_own() -> None:
    """The micro-batches are those of the run: of its first step, by the keys of its seed."""
    seen: list[np.ndarray] = []

    class Seeing(Numbers):
        def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            seen.append(ids)
            return super().batch(ids)

    job = a_job()
    check_model(local(mistaken("none"), job), job, Seeing(), CPU)
    wanted = [sample_ids(job.seed, 1, 8, 100, np.array(slots)) for slots in ((0, 1), (6, 7))]
    assert [ids.tolist() for ids in seen] == [ids.tolist() for ids in wanted]


class MeanMixture(Mixture):
    """Its terms are right, and the rest of its loss is a mean."""

    def loss(self, output: Routed, batch: Batch) -> Tensor:
        return super().loss(output, batch) / batch.targets.numel()


@pytest.mark.parametrize("microbatch_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Skips(VOCABULARY, 2, WIDTH, 0.1),
        lambda: FeaturesFirst(VOCABULARY, WIDTH),
        lambda: Mixture(VOCABULARY, 2, WIDTH),
        lambda: Packed(VOCABULARY, 2, WIDTH),
    ],
    ids=["skips", "features", "terms", "packed"],
)
def test_layers_that_hand_on_tuples_pass(make: Callable[[], LayeredModel], dtype: str, microbatch_size: int) -> None:
    sizes = {"dtype": dtype, "microbatch_size": microbatch_size}
    found = [check(make(), rank=rank, **sizes, activation_checkpointing=bool(rank)) for rank in (0, 1)]
    assert found[0].loss_unchecked == "" and found[0].kinds == found[1].kinds
    assert [row.digest for row in found[0].layers] == [row.digest for row in found[1].layers]


def test_terms_of_a_micro_batch_are_left_out_of_the_check_of_the_loss_and_the_rest_is_not() -> None:
    assert "loss() of 2 samples" in refusal(MeanMixture(VOCABULARY, 1, WIDTH)).what


class ChangesItsTuple(Experts):
    def forward(self, given: Routed) -> Routed:
        given.x.add_(1.0)
        return super().forward(given)


def test_a_tensor_of_a_tuple_that_is_changed_in_place_is_refused() -> None:
    model = Mixture(VOCABULARY, 1, WIDTH)
    model.get_submodule("experts0").__class__ = ChangesItsTuple
    assert "experts0" in refusal(model).what and "in place" in refusal(model).what


class OtherWithoutGraph(nn.Module):
    """As an operator with another kernel where autograd keeps nothing, such as torch's LSTM on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, keys: Any) -> Tensor:
        y = self.linear(x)
        return y if torch.is_grad_enabled() else y * (1 + 2**-20)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_layer_with_other_bits_without_a_graph_is_refused_with_activation_checkpointing(rank: int) -> None:
    check(Around(OtherWithoutGraph), rank=rank)
    error = refusal(Around(OtherWithoutGraph), rank=rank, activation_checkpointing=True)
    assert error.what.startswith("layer block0 computes other bits where nothing is kept for its backward"), error
    assert error.fix.startswith("runtime.activation_checkpointing=false")


def test_programs_have_activation_checkpointing_again_after_a_check() -> None:
    job = a_job(activation_checkpointing=True)
    model = local(Around(OfTorch), job)
    check_model(model, job, Numbers(), CPU)
    keys = Keys.make(job.seed, 1, np.arange(2), 1, CPU)
    layer = model.layout.layers[1]
    values = ValueBuffer(layer, model.make_modules([1])[1], torch.float32, CPU)
    values.flat.zero_()
    model.programs.bind({1: values.module}, {1: values})
    model.programs.forward(1, 0, torch.ones(2, TIME, WIDTH), keys, None)
    assert model.programs._saved[1, 0].y is None


class DictHead(mistaken_model.Head):
    def forward(self, x: Tensor, keys: Any) -> Any:
        return {"logits": super().forward(x, keys)}


class LossOfDict(Around):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return super().loss(output["logits"], batch)


def test_a_last_layer_that_returns_a_dict_is_refused_as_any_other_layer_is() -> None:
    error = refusal(with_head(LossOfDict, DictHead))
    assert error.what.startswith("layer head returned an object of type dict"), error
    assert "flat tuple" in error.rule


def count_in_dtype_of_output(output: Tensor) -> Tensor:
    return torch.ones_like(output[..., 0]).sum()


def count_exactly(output: Tensor) -> Tensor:
    return torch.ones_like(output[..., 0], dtype=torch.bool).sum()


@pytest.mark.parametrize(("count", "is_refused"), [(count_in_dtype_of_output, True), (count_exactly, False)])
@pytest.mark.parametrize("function", ["loss", "metrics"])
def test_a_weight_that_bf16_has_rounded_is_refused(
    function: str, count: Callable[[Tensor], Tensor], is_refused: bool
) -> None:
    """The loss is checked on outputs in fp32, where such a weight is exact: the forward tells."""

    class Counted(Mistaken):
        def loss(self, output: Tensor, batch: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            total = super().loss(output, batch)
            return (total, count(output)) if function == "loss" else total

        def metrics(self, output: Tensor, batch: Any) -> dict[str, Any]:
            right = (output.argmax(-1) == batch.targets).sum()
            return {"accuracy": (right, count(output))} if function == "metrics" else {}

    with constructing(3):
        model = Counted(VOCABULARY, WIDTH, "none")
    check(model)
    if not is_refused:
        check(model, dtype="bf16")
        return
    error = refusal(model, dtype="bf16")
    assert error.what == f"the weight that {function}(output, batch) returned is bfloat16"
    assert "up to 256" in error.rule and "mask.float().sum()" in error.fix
