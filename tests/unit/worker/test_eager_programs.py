"""Eager layer programs: the contract of layers and losses, and exceptions that name the layer they came out of."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Keys
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import Batch
from elaswave_spmd.sharding.layout import LayerUse, ParameterInfo, lay_out
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.programs.eager import Loss, StagePrograms

NAMES = ("embed", "block0", "head")
LAYOUT = lay_out([LayerUse(name, (ParameterInfo(f"{name}.weight", (4, 4)),)) for name in NAMES], page_size=64)
KEYS = Keys.make(1, 1, [0, 1], 0)
CPU = torch.device("cpu")
TOKENS = torch.ones(2, 3, dtype=torch.int64)
BATCH = Batch(TOKENS, TOKENS)
NOTE = "in layer 'block0' ({}), input float32[2, 3, 4]"


class Layer(nn.Module):
    """Multiplies by its weight; then a test's own code may change the result."""

    def __init__(self, then: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.then = then

    def forward(self, x: Tensor, keys: Keys) -> Any:
        x = x if x.is_floating_point() else x[..., None] * torch.ones(4)
        return self.then(x @ self.weight)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Tensor:
        raise ValueError("no gradient")


def programs(
    then: Callable[[Tensor], Any] = lambda y: y, loss: Loss = lambda y, _: y.sum(), *, checkpointing: bool = False
) -> StagePrograms:
    """Three layers; `then` is applied to the output of the middle one."""
    made = StagePrograms(3, loss=loss, loss_scale=0.5, checkpointing=checkpointing)
    layers = [Layer(lambda y: y), Layer(then), Layer(lambda y: y)]
    values = {i: ValueBuffer(LAYOUT.layers[i], layer, torch.float32, CPU) for i, layer in enumerate(layers)}
    for value in values.values():
        value.flat.fill_(1.0)
    made.bind({i: value.module for i, value in values.items()}, values)
    return made


def forward(made: StagePrograms) -> Any:
    """One micro-batch through all layers. Returns the scaled loss."""
    x: Any = TOKENS
    for layer in range(3):
        x = made.forward(layer, 0, x, KEYS, BATCH)
    return x


def backward(made: StagePrograms) -> list[Tensor]:
    """The backward of the micro-batch of `forward`. Returns the gradients, first layer first."""
    buffers = [GradientBuffer(layer, CPU) for layer in LAYOUT.layers]
    dy: Any = None
    for layer in (2, 1, 0):
        dy = made.backward(layer, 0, dy, buffers[layer], add=False, batch=BATCH)
    return [buffer.flat for buffer in buffers]


def fail(y: Tensor) -> Tensor:
    raise IndexError("no such row")


def notes_of(error: BaseException) -> list[str]:
    return error.__dict__["__notes__"]


def test_the_loss_is_scaled_and_checkpointing_changes_no_bit() -> None:
    plain, checkpointed = programs(), programs(checkpointing=True)
    # 6 tokens with 4 features each, through three layers with 4x4 weights of ones.
    assert float(forward(plain)) == 0.5 * 6 * 4 * 4**3
    assert torch.equal(forward(checkpointed), forward(programs()))
    for one, other in zip(backward(plain), backward(checkpointed), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_both_parts_of_a_backward_have_the_bits_of_the_whole(add: bool, checkpointing: bool) -> None:
    """Of the first forward of a layer nothing is put off: what autograd keeps is measured in it."""
    ran: list[bool] = []

    def then(y: Tensor) -> Tensor:
        ran.append(torch.is_grad_enabled())
        return torch.tanh(y)

    results = []
    for parts in (False, True, True):
        made = programs(then, checkpointing=checkpointing)
        x = torch.linspace(-1, 1, 24).view(2, 3, 4)
        if len(results) == 2:  # no first forward any more
            made.forward(1, 5, x, KEYS, BATCH)
            made.discard(5)
        made.set_split_layers([1] if parts else [])
        y = made.forward(1, 0, x, KEYS, BATCH)
        into = GradientBuffer(LAYOUT.layers[1], CPU)
        into.flat.fill_(0.25)
        dy = torch.linspace(1, 2, 24).view(2, 3, 4)
        ran.clear()
        if parts:
            dx = made.backward_input(1, 0, dy, batch=BATCH)
            # Activation checkpointing puts off in the forward that is repeated, whose memory nobody measures.
            assert (made.bytes_put_off(1, 0) > 0) == (checkpointing or len(results) == 2) and made.begun == {0}
            made.backward_weights(1, 0, into, add=add)
            assert not made.begun
        else:
            dx = made.backward(1, 0, dy, into, add=add, batch=BATCH)
        assert ran == [True] * checkpointing, "the forward is repeated once for both parts"
        assert dx is not None
        results.append((y, dx, into.flat))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


class LowRank(nn.Module):
    """x @ (a @ b): the operand of the product with b is a parameter, or a part of one."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.part = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4, 4)), part

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return x @ (self.part(self.a) @ self.b)


@pytest.mark.parametrize("part", [lambda a: a, lambda a: a.t(), lambda a: a.view(4, 4), lambda a: a[:]])
def test_parameters_that_are_dropped_before_the_second_part_are_no_operands(part: Callable[[Tensor], Tensor]) -> None:
    """With ZeRO-3 their memory is given back after the first."""
    both = (ParameterInfo("block0.a", (4, 4)), ParameterInfo("block0.b", (4, 4)))
    layout, made, found = lay_out([LayerUse("embed", ()), LayerUse("block0", both)]).layers[1], programs(), []
    for layers in ([], [1]):
        value = ValueBuffer(layout, LowRank(part), torch.float32, CPU)
        value.flat.copy_(torch.linspace(-1, 1, len(value.flat)))
        made.bind({1: value.module}, {1: value})
        made.set_split_layers(layers)
        x, into = torch.linspace(-1, 1, 24).view(2, 3, 4), GradientBuffer(layout, CPU)
        for microbatch in (5, 0):  # nothing is put off in the first forward of a layer
            made.forward(1, microbatch, x, KEYS, BATCH)
        made.backward_input(1, 0, torch.linspace(1, 2, 24).view(2, 3, 4), batch=BATCH)
        value.drop()
        made.backward_weights(1, 0, into, add=False)
        found.append(into.flat)
    assert torch.equal(*found) and found[0].any()


def test_a_backward_whose_forward_put_products_off_is_whole_all_the_same() -> None:
    """A recovery plan may want the input's gradient alone of a micro-batch, and a check runs backwards whole."""
    whole, other = programs(), programs()
    for made in (whole, other):
        forward(made)
        backward(made)
    other.set_split_layers([1, 2])
    assert torch.equal(forward(whole), forward(other))
    for one, two in zip(backward(whole), backward(other), strict=True):
        assert torch.equal(one, two)
    assert not other.begun


def test_an_exception_out_of_a_layer_is_unchanged_and_names_the_layer_in_a_note() -> None:
    with pytest.raises(IndexError) as caught:
        forward(programs(fail))
    assert str(caught.value) == "no such row"
    assert notes_of(caught.value) == [NOTE.format("forward")]
    # The user's own frame is the last one, as without us.
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fail"


def test_the_note_names_the_phase() -> None:
    with pytest.raises(IndexError) as caught:
        programs(fail).evaluate(1, torch.ones(2, 3, 4), KEYS, None)
    assert notes_of(caught.value) == [NOTE.format("evaluation")]

    failing_backward = programs(FailingBackward.apply)
    forward(failing_backward)
    with pytest.raises(ValueError, match="no gradient") as caught:
        backward(failing_backward)
    assert notes_of(caught.value) == [NOTE.format("backward")]


def test_with_checkpointing_the_repeated_forward_is_named_as_such() -> None:
    calls: list[int] = []

    def fail_the_second_time(y: Tensor) -> Tensor:
        calls.append(1)
        return y if len(calls) == 1 else fail(y)

    made = programs(fail_the_second_time, checkpointing=True)
    forward(made)
    with pytest.raises(IndexError) as caught:
        backward(made)
    assert notes_of(caught.value) == [NOTE.format("forward, repeated for backward")]


def test_an_exception_of_the_loss_names_it_and_then_the_last_layer() -> None:
    with pytest.raises(IndexError) as caught:
        forward(programs(loss=lambda y, _: fail(y)))
    assert notes_of(caught.value) == [
        "in loss(output, batch), of output float32[2, 3, 4], batch.tokens int64[2, 3], batch.targets int64[2, 3]",
        "in layer 'head' (forward, with the loss), input float32[2, 3, 4]",
    ]


@pytest.mark.parametrize(
    ("then", "returned"),
    [
        (lambda y: (y, 3), "a tuple of Tensor, int"),
        (lambda y: y.long(), "a tensor int64[2, 3, 4]"),
    ],
    ids=["tuple", "integers"],
)
def test_a_layer_that_returns_no_float_tensor_is_refused(then: Callable[[Tensor], Any], returned: str) -> None:
    with pytest.raises(ModelError) as caught:
        forward(programs(then))
    assert caught.value.what == f"layer block0 returned {returned}, which the next layer cannot be given"
    assert caught.value.where == "layer block0"


ADD_UP = "add the losses up and return their sum; single ones go into metrics(output, batch), for validations"


@pytest.mark.parametrize(
    ("loss", "returned", "fix"),
    [
        (lambda y, _: y, "a tensor float32[2, 3, 4]", "end it with .sum()"),
        (lambda y, _: 1.5, "an object of type float", "return the tensor, without float() and item()"),
        (lambda y, _: {"a": y.sum()}, "an object of type dict", ADD_UP),
        (lambda y, _: [y.sum(), y.sum()], "an object of type list", ADD_UP),
        (lambda y, _: (y.sum(),) * 3, "a tuple (float32[], float32[], float32[])", ADD_UP),
        (lambda y, _: None, "an object of type NoneType", "return the loss"),
    ],
    ids=["tensor", "float", "dict", "list", "tuple", "nothing"],
)
def test_a_loss_that_is_no_scalar_tensor_is_refused(loss: Loss, returned: str, fix: str) -> None:
    with pytest.raises(ModelError) as caught:
        forward(programs(loss=loss))
    assert caught.value.what == f"loss(output, batch) returned {returned}, not one number"
    assert caught.value.fix == fix
