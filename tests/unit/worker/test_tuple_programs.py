"""Layers that hand on tuples: the same bits whole, in two parts and with activation checkpointing; and compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from elaswave_spmd.determinism import Keys
from elaswave_spmd.models import Batch, LayeredModel
from elaswave_spmd.worker.activations import Activation, marks_of, tensors_of
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.inputs import Example
from elaswave_spmd.worker.model_layout import describe
from elaswave_spmd.worker.programs.eager import StagePrograms
from elaswave_spmd.worker.programs.emulated import EmulatedDevice, EmulatedPrograms
from elaswave_spmd.worker.programs.inductor import CompiledPrograms
from tests.tuple_models import FeaturesFirst, Mixture, Skips

CPU = torch.device("cpu")
VOCABULARY, SIZES = 11, (2, 6)
MODELS: dict[str, Callable[[], LayeredModel]] = {
    "skips": lambda: Skips(VOCABULARY, 2, 8, dropout=0.2),
    "features": lambda: FeaturesFirst(VOCABULARY, 8),
    "terms": lambda: Mixture(VOCABULARY, 2, 8),
}


class Stack:
    """All layers of a model on one worker, with values, and the buffers of their gradients."""

    def __init__(self, name: str, programs: StagePrograms) -> None:
        model = MODELS[name]()
        self.layout, self.programs = describe(model, page_size=64).layout, programs
        if isinstance(programs, CompiledPrograms):
            with torch.device("meta"):
                prototype = MODELS[name]()
            programs.compile(prototype.layers, self.layout, Example.of_tokens(SIZES), torch.float32)
        values = {}
        for number, layer in enumerate(model.layers):
            values[number] = ValueBuffer(self.layout.layers[number], layer, torch.float32, CPU)
            draw = torch.Generator().manual_seed(number)
            values[number].flat.copy_(torch.randn(values[number].flat.shape, generator=draw) * 0.3)
            values[number].mark(0, values[number].layout.num_value_pages, 0)
        programs.bind({number: value.module for number, value in values.items()}, values)
        self.buffers = [GradientBuffer(layer, CPU) for layer in self.layout.layers]

    def run(self, microbatch: int = 0, *, parts: bool = False) -> list[Tensor]:
        """Returns the loss, all gradients, and the loss of a validation."""
        draw = torch.Generator().manual_seed(microbatch)
        tokens = torch.randint(VOCABULARY, SIZES, generator=draw)
        batch, keys = Batch(tokens, tokens), Keys.make(7, 3, [4, 5], 0)
        numbers = range(len(self.buffers))
        x: Activation = tokens
        for number in numbers:
            x = self.programs.forward(number, microbatch, x, keys.at(number), batch)
        found = [*tensors_of(x)]
        dy: Activation | None = None
        for number in reversed(numbers):
            if parts:
                dy = self.programs.backward_input(number, microbatch, dy, batch=batch)
            else:
                dy = self.programs.backward(number, microbatch, dy, self.buffers[number], add=False, batch=batch)
        for number in numbers if parts else ():
            self.programs.backward_weights(number, microbatch, self.buffers[number], add=False)
        self.programs.set_training(False)
        x = tokens
        for number in numbers:
            x = self.programs.evaluate(number, x, keys.at(number), batch)
        self.programs.set_training(True)
        return [*found, *(buffer.flat.clone() for buffer in self.buffers), *tensors_of(x)]


def eager(name: str, *, checkpointing: bool = False) -> Stack:
    model = MODELS[name]()
    made = StagePrograms(len(model.layers), loss=model.loss, loss_scale=0.1, checkpointing=checkpointing)
    return Stack(name, made)


@pytest.mark.parametrize("name", MODELS)
def test_parts_and_checkpointing_have_the_bits_of_the_whole(name: str) -> None:
    whole = eager(name)
    whole.run(1)  # layers are measured
    wanted = whole.run()
    assert all(value.isfinite().all() for value in wanted) and any(value.any() for value in wanted[1:])
    parts, again = eager(name), eager(name, checkpointing=True)
    parts.run(1)
    parts.programs.set_split_layers(range(len(parts.buffers)))
    in_parts = parts.run(parts=True)
    for found in (in_parts, again.run(), again.run()):
        assert all(map(torch.equal, found, wanted))


def test_what_has_a_gradient_is_known_with_checkpointing_too() -> None:
    tokens = torch.randint(VOCABULARY, SIZES, generator=torch.Generator().manual_seed(0))
    keys = Keys.make(7, 3, [4, 5], 0)
    marks = []
    for checkpointing in (False, True):
        stack = eager("skips", checkpointing=checkpointing)
        x: Activation = tokens
        for number in (0, 1, 2):
            x = stack.programs.forward(number, 0, x, keys.at(number), None)
            marks.append(marks_of(x))
    assert marks == [(True, True, False, False, False)] * 6


@pytest.mark.compiler
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_layers_are_right_and_their_parts_have_the_bits_of_the_whole(name: str, checkpointing: bool) -> None:
    model = MODELS[name]()
    options = {"loss": model.loss, "loss_scale": 0.1, "checkpointing": checkpointing}
    programs = CompiledPrograms(len(model.layers), **options, threads=1, place=CPU, backend="aot_eager")
    stack = Stack(name, programs)
    number = programs.num_compiled
    whole = stack.run()
    for one, other in zip(whole, eager(name).run(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    programs.set_split_layers(range(len(stack.buffers)))
    assert all(map(torch.equal, stack.run(parts=True), whole))
    assert programs.num_compiled == number, "nothing is compiled late"


@pytest.mark.parametrize("name", MODELS)
def test_an_emulated_device_hands_on_the_same_forms(name: str) -> None:
    model = MODELS[name]()
    options = {"loss": model.loss, "loss_scale": 0.1, "checkpointing": False}
    stack = Stack(name, EmulatedPrograms(len(model.layers), **options, device=EmulatedDevice(0.0, 0.0)))
    one, other = stack.run(), stack.run(parts=True)
    assert all(map(torch.equal, one, other)) and any(value.any() for value in one[1:])
