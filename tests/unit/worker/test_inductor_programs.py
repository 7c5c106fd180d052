"""Layer programs by torch.compile: equal layers share them, and no step or reconfiguration compiles another one.

The backend is aot_eager: the same tracing and guards as inductor's, without a C++ compiler.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from elaswave_spmd.determinism import KeyedDropout, Keys
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import Batch, LayeredModel, constructing, freeze_parameters
from elaswave_spmd.models.gpt import GPT
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.context import LocalModel
from elaswave_spmd.worker.initial_values import MadeValues
from elaswave_spmd.worker.inputs import Example
from elaswave_spmd.worker.learning_rate import LearningRate
from elaswave_spmd.worker.model_check import ModelCheck, check_model
from elaswave_spmd.worker.model_layout import ModelDescription, describe
from elaswave_spmd.worker.optimizers import make_optimizer
from elaswave_spmd.worker.programs.eager import StagePrograms
from elaswave_spmd.worker.programs.inductor import CompiledPrograms
from elaswave_spmd.worker.spec import Job

MICROBATCH = (2, 6)
VOCABULARY = 11
CPU = torch.device("cpu")


pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_compiler")]


class Numbered(nn.Module):
    """A layer that computes with a Python number of its own, so that each one is another program."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(8, 8), number

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return self.linear(x) * (1 + self.number)


class Branching(nn.Linear):
    """A layer that branches on the value of a tensor, which cannot be one graph."""

    def forward(self, x: Tensor, keys: Keys) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x) if float(x.sum()) > 0 else -super().forward(x)


class First(nn.Embedding):
    def forward(self, x: Tensor, keys: Keys) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)


class Affine(nn.Linear):
    def forward(self, x: Tensor, keys: Keys) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.tanh(super().forward(x))


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.linear = KeyedDropout(0.2), nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return self.linear(self.drop(x, keys))


def layered(*middle: nn.Module) -> LayeredModel:
    layers = {f"layer{number}": module for number, module in enumerate(middle)}
    return LayeredModel({"first": First(VOCABULARY, 8), **layers, "last": Last()})


def gpt(layers: int = 3, dropout: float = 0.0) -> LayeredModel:
    with torch.device("meta"):
        return GPT(VOCABULARY, MICROBATCH[1], layers, 8, 2, dropout=dropout)


def compiled(model: LayeredModel, *, checkpointing: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """Compiles a model. Returns its programs, and the names of the layers in the order in which they were ready."""
    description, names = describe(model, page_size=64), []
    torch._dynamo.reset()  # the programs of another one are not shared, but count towards torch's limit
    programs = CompiledPrograms(
        len(model.layers),
        loss=model.loss,
        loss_scale=0.1,
        checkpointing=checkpointing,
        threads=1,
        place=CPU,
        backend="aot_eager",
        first_trained=description.layout.first_trained,
    )
    programs.compile(model.layers, description.layout, Example.of_tokens(MICROBATCH), dtype, names.append)
    return programs, names


def bound(
    programs: StagePrograms,
    model: LayeredModel,
    description: ModelDescription,
    layers: Sequence[int],
    dtype: torch.dtype,
) -> Mapping[int, GradientBuffer]:
    values = {}
    for number in layers:
        layout = description.layout.layers[number]
        values[number] = ValueBuffer(layout, model.layers[number], dtype, CPU)
        draw = torch.Generator().manual_seed(number)
        values[number].flat.copy_(torch.randn(values[number].flat.shape, generator=draw) * 0.3)
    programs.bind({number: value.module for number, value in values.items()}, values)
    return {number: GradientBuffer(description.layout.layers[number], CPU) for number in layers}


def run(programs: StagePrograms, buffers: Mapping[int, GradientBuffer], step: int, *, add: bool) -> list[Tensor]:
    """Runs micro-batches 0 and 1 of a step, and each one for validation. Returns losses and gradients."""
    found: list[Any] = []
    for microbatch in (0, 1):
        tokens = torch.randint(VOCABULARY, MICROBATCH, generator=torch.Generator().manual_seed(100 * step + microbatch))
        batch, keys, x = Batch(tokens, tokens), Keys.make(7, step, [2 * microbatch, 2 * microbatch + 1], 0), tokens
        for number in buffers:
            x = programs.forward(number, microbatch, x, keys.at(number), batch)
        found.append(x)
        dy: Any = None
        for number in reversed(list(buffers)):
            dy = programs.backward(number, microbatch, dy, buffers[number], add=add and microbatch == 1, batch=batch)
        found += [buffer.flat.clone() for buffer in buffers.values()]
        programs.set_training(False)
        for number in buffers:
            x = programs.evaluate(number, tokens if number == 0 else x, keys.at(number), batch)
        programs.set_training(True)
        found.append(x)
    return found


@pytest.mark.parametrize(("checkpointing", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=str)
def test_equal_layers_share_programs_and_steps_compile_none(checkpointing: bool, dtype: torch.dtype) -> None:
    model = gpt()
    programs, names = compiled(model, checkpointing=checkpointing, dtype=dtype)
    assert names == list(model.layer_names)
    # Embedding, block and head: forward, backward and evaluation of each; when checkpointing a forward without a graph.
    # The backward of the block and the head is a pair.
    number = programs.num_compiled
    assert number == (11, 14)[checkpointing]
    description = describe(gpt(), page_size=64)
    buffers = bound(programs, gpt(), description, range(5), dtype)
    plain = StagePrograms(5, loss=model.loss, loss_scale=0.1, checkpointing=checkpointing)
    wanted = bound(plain, gpt(), description, range(5), dtype)
    for step in (1, 2, 2**40):
        ours, theirs = (run(p, b, step, add=dtype == torch.float32) for p, b in ((programs, buffers), (plain, wanted)))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    assert programs.num_compiled == number
    assert [row[0] for row in programs.memory.pop_rows()] == [0, 1, 2, 3, 4]


def test_a_worker_that_is_bound_to_other_layers_compiles_nothing() -> None:
    programs, _ = compiled(gpt())
    number, description = programs.num_compiled, describe(gpt(), page_size=64)
    x = torch.randn(*MICROBATCH, 8)
    for layers in ([1, 2], [2, 3], [3]):
        buffers = bound(programs, gpt(), description, layers, torch.float32)
        keys, y = Keys.make(7, 3, [4, 5], 0), x
        for layer in layers:
            y = programs.forward(layer, 9, y, keys.at(layer), None)
        dy: Tensor | None = torch.ones_like(y)
        for layer in reversed(layers):
            dy = programs.backward(layer, 9, dy, buffers[layer], add=False, batch=None)
        assert dy is not None and dy.shape == x.shape
    assert programs.num_compiled == number


class Samples:
    """Samples whose tokens are a function of their ids."""

    def __len__(self) -> int:
        return 100

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = (ids[:, None] * 7 + np.arange(MICROBATCH[1] + 1) * 3) % VOCABULARY
        return tokens[:, :-1], tokens[:, 1:]


def check(make: Callable[[], LayeredModel], *, checkpointing: bool = False) -> tuple[StagePrograms, ModelCheck]:
    """Compiles a model and checks it, as a worker does before it is ready."""
    model = make()
    programs, _ = compiled(make(), checkpointing=checkpointing)
    number, description = programs.num_compiled, describe(model, page_size=64)
    job = Job(
        *(7, 10, 8, MICROBATCH[0], MICROBATCH[1], "fp32"),
        make_optimizer("sgd", weight_decay=0.0, betas=(0.9, 0.99), eps=1e-8, momentum=0.0),
        LearningRate(1e-3),
        activation_checkpointing=checkpointing,
        validate_every=5,
        num_validation_microbatches=2,
    )

    def modules(layers: Iterable[int]) -> Mapping[int, nn.Module]:
        return {layer: copy.deepcopy(model.layers[layer]) for layer in layers}

    made = MadeValues(lambda layers: model) if description.has_own_values else None
    prototype = model.layers.__getitem__
    local = LocalModel(description.layout, description.inits, modules, prototype, programs, made)
    found = check_model(local, job, Samples(), CPU, alone=True)
    assert programs.num_compiled == number
    return programs, found


def unlike() -> LayeredModel:
    return layered(*[Numbered(number) for number in range(2)])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("make", [gpt, unlike])
def test_the_check_of_a_model_compiles_nothing(make: Callable[[], LayeredModel], checkpointing: bool) -> None:
    programs, found = check(make, checkpointing=checkpointing)
    assert not programs.forwarded and not programs.memory.pop_rows()
    assert [one.layer for one in found.layers if one.put_off_bytes] == [one.layer for one in found.layers][1:]


class Noisy(Numbered):
    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return super().forward(x, keys) + torch.rand_like(x)


class Counting(Numbered):
    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        self.number += 1
        return super().forward(x, keys)


@pytest.mark.parametrize(
    ("layer", "telling"),
    [(Noisy, "layer layer0 draws from torch's generator"), (Counting, "layer layer0 changes layer0.number")],
)
def test_mistakes_are_found_in_compiled_layers(layer: type[Numbered], telling: str) -> None:
    with pytest.raises(ModelError) as caught:
        check(lambda: layered(layer(0)))
    assert caught.value.what.startswith(telling)


def test_unlike_layers_have_programs_of_their_own_and_all_are_compiled() -> None:
    def make() -> LayeredModel:
        return layered(*[Numbered(number) for number in range(9)])

    programs, _ = compiled(make())
    number = programs.num_compiled
    assert number >= 2 * 11
    buffers = bound(programs, make(), describe(make(), page_size=64), range(11), torch.float32)
    run(programs, buffers, 1, add=True)
    assert programs.num_compiled == number


def test_dropout_masks_are_those_of_the_eager_layer() -> None:
    """A dropped element is exactly zero, so the losses would be far apart if another element were dropped."""
    make = lambda: layered()  # noqa: E731
    programs, _ = compiled(make())
    description = describe(make(), page_size=64)
    plain = StagePrograms(2, loss=make().loss, loss_scale=0.1, checkpointing=False)
    ours, theirs = (
        run(p, bound(p, make(), description, range(2), torch.float32), 5, add=True) for p in (programs, plain)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_layer_that_is_no_graph_is_refused_with_its_name() -> None:
    with pytest.raises(ModelError) as caught:
        compiled(layered(Branching(8, 8)))
    assert caught.value.what.startswith("torch.compile refused layer layer0 (")
    assert caught.value.where == "layer layer0" and "runtime.compile=false" in caught.value.fix
    model = layered()
    model.loss = lambda output, batch: output.sum() if output.sum() > 0 else output.sum() * 2
    with pytest.raises(ModelError) as caught:
        compiled(model)
    assert caught.value.where == "layer last, loss() or metrics()"


class Mistyped(Affine):
    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return super().forward(getattr(x, "no_such_thing"), keys)  # noqa: B009  (for the type checker's sake)


def test_what_the_code_of_a_model_raises_by_itself_is_no_refusal_of_the_compiler() -> None:
    """The compiler says of both that it has observed an exception, and not which one."""
    with pytest.raises(AttributeError, match="no_such_thing") as caught:
        compiled(layered(Mistyped(8, 8)))
    assert vars(caught.value)["__notes__"] == ["in layer 'layer0' (compilation), input float32[2, 6, 8]"]

    model = layered()
    model.loss = lambda output, batch: output.sum() + batch.no_such_thing
    with pytest.raises(AttributeError, match="no_such_thing") as caught:
        compiled(model)
    assert vars(caught.value)["__notes__"][0].startswith("in loss(output, batch), of output float32[2, 6, ")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "patterns",
    [["first.*", "layer0.*"], ["*.bias"], ["layer1.*", "last.*"], ["layer0.*", "layer1.weight"]],
)
def test_frozen_parameters_have_programs_of_their_own_before_training(patterns: list[str], checkpointing: bool) -> None:
    """Layers without a backward, layers that are frozen in part, and frozen layers that pass a gradient on."""

    def make() -> LayeredModel:
        with constructing(3):
            model = layered(Affine(8, 8), Affine(8, 8), Affine(8, 8))
        freeze_parameters(model, patterns)
        return model

    check(make, checkpointing=checkpointing)
    model, description = make(), describe(make(), page_size=64)
    programs, _ = compiled(make(), checkpointing=checkpointing)
    plain = StagePrograms(
        len(model.layers),
        loss=model.loss,
        loss_scale=0.1,
        checkpointing=checkpointing,
        first_trained=description.layout.first_trained,
    )
    number, found = programs.num_compiled, []
    for kind in (programs, plain):
        buffers = bound(kind, make(), description, range(len(model.layers)), torch.float32)
        found.append([run(kind, buffers, step, add=False) for step in (1, 2)])
    assert programs.num_compiled == number
    for ours, theirs in zip(*found, strict=True):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))
