"""A compiled backward is a pair of programs, with the same bits whatever runs between them.

The backend is aot_eager: the same cut as for inductor, without a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from elaswave_spmd.determinism import Keys
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.inputs import Example
from elaswave_spmd.worker.model_layout import describe
from elaswave_spmd.worker.programs.eager import StagePrograms
from elaswave_spmd.worker.programs.inductor import CompiledPrograms
from tests.paired_layers import LAYERS, NOT_CUT, feed_forward, model_of

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_compiler")]
CPU = torch.device("cpu")
SIZES = (2, 6)
KEYS = Keys.make(7, 3, [4, 5], 1)


class Worker:
    """The programs of a model's layers 1 and 2, with values, and the buffers of their gradients."""

    def __init__(
        self, make: Callable[[], nn.Module], *, compiled: bool, checkpointing: bool = False, dtype: torch.dtype
    ) -> None:
        model, layout = model_of(make), describe(model_of(make), page_size=64).layout
        options = {"loss": model.loss, "loss_scale": 0.1, "checkpointing": checkpointing}
        if compiled:
            self.programs = CompiledPrograms(4, **options, threads=1, place=CPU, backend="aot_eager")
            self.programs.compile(model_of(make).layers, layout, Example.of_tokens(SIZES), dtype)
        else:
            self.programs = StagePrograms(4, **options)
        self.num_compiled = self.programs.num_compiled
        self.values = {
            number: ValueBuffer(layout.layers[number], model.layers[number], dtype, CPU) for number in (1, 2)
        }
        for number, values in self.values.items():
            draw = torch.Generator().manual_seed(number)
            values.flat.copy_(torch.randn(values.flat.shape, generator=draw) * 0.3)
        self.programs.bind({number: values.module for number, values in self.values.items()}, self.values)
        self.buffers = {number: GradientBuffer(layout.layers[number], CPU) for number in self.values}
        self._dtype = dtype

    def _tensor(self, seed: int) -> Tensor:
        return torch.randn(*SIZES, 8, generator=torch.Generator().manual_seed(seed)).to(self._dtype)

    def forward(self, microbatch: int) -> Any:
        x: Any = self._tensor(microbatch)
        for number in (1, 2):
            x = self.programs.forward(number, microbatch, x, KEYS.at(number), None)
        return x

    def backward(self, microbatch: int, *, add: bool = False) -> Any:
        dy: Any = self._tensor(100 + microbatch)
        for number in (2, 1):
            dy = self.programs.backward(number, microbatch, dy, self.buffers[number], add=add, batch=None)
        return dy

    def input(self, microbatch: int) -> Any:
        dy: Any = self._tensor(100 + microbatch)
        for number in (2, 1):
            dy = self.programs.backward_input(number, microbatch, dy, batch=None)
        return dy

    def weights(self, microbatch: int, *, add: bool = False) -> None:
        for number in (2, 1):
            self.programs.backward_weights(number, microbatch, self.buffers[number], add=add)

    def gradients(self) -> list[Tensor]:
        return [buffer.flat.clone() for buffer in self.buffers.values()]


def assert_equal(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize(("checkpointing", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", [*LAYERS, *NOT_CUT])
def test_both_programs_have_the_same_bits_at_any_time(name: str, checkpointing: bool, dtype: torch.dtype) -> None:
    """Put off until another micro-batch has gone forward and backward; by then the parameters' values are lost."""
    worker = Worker((LAYERS | NOT_CUT)[name], compiled=True, checkpointing=checkpointing, dtype=dtype)
    y = worker.forward(0)
    at_once = [y, worker.backward(0), *worker.gradients()]
    found: list[Tensor | None] = [worker.forward(0)]
    worker.forward(1)
    found.append(worker.input(0))
    kept = [worker.programs.bytes_put_off(number, 0) for number in (1, 2)]
    assert (min(kept) > 0) == (name in LAYERS) and worker.programs.begun == {0}
    worker.backward(1)
    for values in worker.values.values():
        values.flat.fill_(torch.nan)
    worker.weights(0)
    assert_equal([*found, *worker.gradients()], at_once)
    assert worker.programs.num_compiled == worker.num_compiled and not worker.programs.begun


@pytest.mark.parametrize("name", [*LAYERS, *NOT_CUT])
def test_gradients_are_those_of_the_layer_as_it_is_written(name: str) -> None:
    """Each gradient belongs to its parameter, also where two of them have one shape, and in sums of micro-batches."""
    found = []
    for compiled in (True, False):
        worker = Worker((LAYERS | NOT_CUT)[name], compiled=compiled, dtype=torch.float32)
        results = []
        for microbatch in (0, 1):
            results += [worker.forward(microbatch), worker.backward(microbatch, add=microbatch == 1)]
        found.append([*results, *worker.gradients()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_forward_is_repeated_once_for_both_programs(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(feed_forward, compiled=True, checkpointing=checkpointing, dtype=torch.float32)
    repeated = []
    again = StagePrograms._output_again

    def noted(programs: StagePrograms, layer: int, *args: object) -> Any:
        repeated.append(layer)
        return again(programs, layer, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(StagePrograms, "_output_again", noted)
    worker.forward(0)
    worker.input(0)
    worker.weights(0)
    assert repeated == ([2, 1] if checkpointing else [])


def test_a_layer_has_one_program_more_if_its_input_has_a_gradient() -> None:
    """Of token ids there is none, so the embedding's backward is whole. Both layers in the middle share a pair."""
    cut = Worker(feed_forward, compiled=True, dtype=torch.float32).num_compiled
    torch._dynamo.reset()
    whole = Worker(nn.Tanh, compiled=True, dtype=torch.float32).num_compiled
    assert (cut, whole) == (3 + 4 + 4, 3 + 3 + 4)


def test_an_operand_that_is_changed_before_the_weight_gradients_is_refused() -> None:
    """Autograd would refuse it in the backward; it would be gone unseen otherwise."""
    worker = Worker(lambda: nn.Linear(8, 8), compiled=True, dtype=torch.float32)
    x = torch.ones(*SIZES, 8)
    y: Any = worker.programs.forward(1, 0, x, KEYS, None)
    worker.programs.backward_input(1, 0, torch.ones_like(y), batch=None)
    x.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        worker.programs.backward_weights(1, 0, worker.buffers[1], add=False)
    assert vars(caught.value)["__notes__"] == ["in layer 'middle' (weight gradients)"]


def test_what_is_discarded_is_not_kept() -> None:
    worker = Worker(feed_forward, compiled=True, dtype=torch.float32)
    for microbatch in (0, 1):
        worker.forward(microbatch)
        worker.input(microbatch)
    worker.programs.discard_begun(0)
    assert worker.programs.begun == {1}
    worker.programs.discard_all()
    assert not worker.programs.begun


def test_what_is_kept_until_the_weight_gradients_are_their_operands() -> None:
    """Of a linear its input and the gradient of its output, which are tensors that there are anyway."""
    worker = Worker(lambda: nn.Linear(8, 8), compiled=True, dtype=torch.float32)
    worker.forward(0)
    worker.input(0)
    one = 4 * 8 * SIZES[0] * SIZES[1]
    assert 2 * one <= worker.programs.bytes_put_off(1, 0) <= 2 * one + 64, "and the stand-ins, of an element each"
