"""A backward in two parts has the bits of the whole one, for every operator that puts products off and for others."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elaswave_spmd.worker.programs.split_backward import SplitLayer, SplitParameter


class Transposed(nn.Module):
    """x @ W, as GPT-2's Conv1D has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Twice(nn.Module):
    """A linear that is called twice: its two gradients are added."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class Mixed(nn.Module):
    """A weight of a product that is used in another way as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.linear.weight.sum()


class InPlace(nn.Module):
    """The output of the product is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.linear(x))


class Constant(nn.Module):
    """One product has an input that needs no gradient: it cannot be put off."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.linear = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.position(torch.ones_like(x[0]).detach())


class Thrice(nn.Module):
    """A weight of two products that is used in another way in between: which gradients are added first matters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)) * self.linear.weight.norm())


class Added(nn.Module):
    """The bias of a product is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.parts = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.parts.sum(0))


class AddedToImages(nn.Module):
    """The bias of a convolution is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        assert self.conv.bias is not None
        return torch.conv2d(x, self.conv.weight, self.conv.bias.exp())


class Autocast(nn.Module):
    """A product with operands that autocast converts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        return y.to(x.dtype)


class Strides(nn.Module):
    """The rows of an input do not lie one behind the other, so torch copies them, or multiplies matrix by matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.view(3, 4, 2, 4).transpose(1, 2)).flatten(1)


class Keywords(nn.Module):
    """Operands are given by name, and the operators have other names for them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.mm(input=x.flatten(0, 1), mat2=self.weight)
        return torch.matmul(input=functional.linear(input=rows, weight=self.weight), other=self.weight)


class Converted(nn.Module):
    """A weight is converted to the dtype that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


class Hooked(nn.Module):
    """A hook changes the gradient of a weight. It is given with the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.is_hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            self.linear.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
            self.is_hooked = True
        return self.linear(x)


class AnExpert(nn.Module):
    """A product of no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.expert = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).flatten(0, 1)
        return torch.cat([y, self.expert(y[torch.zeros(len(y), dtype=torch.bool)])])


class Same(torch.autograd.Function):
    """A function of the user's, which nothing tells of the weight that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.t(), x.flatten(0, 1).t() @ grads[0].flatten(0, 1)


class Function(nn.Module):
    """A weight of two products, and of a function of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return Same.apply(x @ self.weight, self.weight) @ self.weight  # pyright: ignore[reportOptionalOperand]


def images(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(-1, (2, 2, 2)), nn.Flatten(0, 1), module, nn.Flatten(1))


LAYERS = {
    "linear": (lambda: nn.Linear(8, 5), 1),
    "linear without bias": (lambda: nn.Linear(8, 5, bias=False), 1),
    "block": (lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), 2),
    "matmul": (Transposed, 1),
    "convolution": (lambda: images(nn.Conv2d(2, 3, 2, padding=1)), 1),
    "grouped convolution": (lambda: images(nn.Conv2d(2, 4, 2, groups=2, bias=False)), 1),
    "twice": (Twice, 2),
    "mixed": (Mixed, 0),
    "in place": (InPlace, 1),
    "an input without gradient": (Constant, 1),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2),
    "recurrent": (lambda: FirstOf(nn.GRU(8, 8, batch_first=True)), 0),
    "norm": (lambda: nn.LayerNorm(8), 0),
    "thrice": (Thrice, 0),
    "function": (Function, 0),
    "a computed bias": (Added, 1),
    "a computed bias of a convolution": (lambda: images(AddedToImages()), 0),
    "autocast": (Autocast, 0),
    "strides": (Strides, 0),
    "keywords": (Keywords, 3),
    "converted": (Converted, 1),
    "hooked": (Hooked, 0),
    "no rows": (AnExpert, 2),
}


class FirstOf(nn.Module):
    """The first output of a module that has several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_both_parts_have_the_bits_of_the_whole(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, num_products = LAYERS[name]
    module = make().to(dtype)
    parameters = list(module.parameters())
    given = torch.randn(3, 4, 8, dtype=dtype)
    x = given.clone().requires_grad_()
    y = module(x)
    dy = torch.randn_like(y)
    torch.autograd.backward(y, dy)
    whole = [x.grad, *(parameter.grad for parameter in parameters)]
    module.zero_grad()

    again = given.clone().requires_grad_()
    with SplitLayer(parameters).putting_off() as products:
        output = module(again)
    torch.autograd.backward(output, dy)
    assert len(products.brought) == num_products
    gradients = products.gradients(parameters, [parameter.grad for parameter in parameters])
    assert torch.equal(output, y)
    for one, other in zip([again.grad, *gradients], whole, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
    assert not products.brought, "a product is made once"


@pytest.mark.parametrize("name", ["linear", "matmul", "convolution", "grouped convolution"])
def test_the_products_need_no_values_of_weights(name: str) -> None:
    """With ZeRO-3 these are given back before the weight gradients are made."""
    torch.manual_seed(0)
    module = LAYERS[name][0]()
    parameters = list(module.parameters())
    x = torch.randn(3, 4, 8)
    y = module(x.requires_grad_())
    dy = torch.randn_like(y)
    torch.autograd.backward(y, dy)
    whole = [parameter.grad for parameter in parameters]
    module.zero_grad()
    with SplitLayer(parameters).putting_off() as products:
        y = module(x)
    torch.autograd.backward(y, dy)
    for parameter in parameters:
        parameter.untyped_storage().resize_(0)
    for one, other in zip(products.gradients(parameters, [p.grad for p in parameters]), whole, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


OPERATORS: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
    functional.linear,
    lambda h, w, b: functional.linear(h, w),
    lambda h, w, b: h @ w,
    lambda h, w, b: h @ w.t(),
    lambda h, w, b: torch.mm(h.reshape(-1, len(w)), w).view(h.shape),
    lambda h, w, b: h + functional.linear(torch.tanh(h), w, b),
    lambda h, w, b: functional.linear(h, w, b).relu_(),
    lambda h, w, b: functional.linear(h, w, b) * torch.sigmoid(functional.linear(h, w)),
    lambda h, w, b: functional.linear(h.transpose(0, 1), w, b).transpose(0, 1),
    lambda h, w, b: functional.linear(h[:, :1].expand(h.shape), w),
    lambda h, w, b: torch.cat([functional.linear(h[:, :1], w, b), h[:, 1:]], 1),
    lambda h, w, b: h + functional.embedding(torch.arange(h.shape[1]) % len(w), w),
    lambda h, w, b: h @ torch.cat([w[:1], w[1:]]),
    lambda h, w, b: h * w.square().mean() + b,
)
"""Ways to use weights: those that are put off, and others."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_layers_of_random_operators_have_the_bits_of_the_whole(first: int, dtype: torch.dtype) -> None:
    num_products = 0
    for seed in range(first, first + 50):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        width, shape = draw.choice([2, 3, 16, 33]), (draw.choice([1, 2, 5]), draw.choice([1, 2, 9]))
        weights = [nn.Parameter((torch.randn(width, width) / width**0.5).to(dtype)) for _ in range(2)]
        biases = [nn.Parameter(torch.randn(width).to(dtype)) for _ in range(2)]
        uses = [(draw.choice(OPERATORS), draw.choice(weights), draw.choice(biases)) for _ in range(draw.randint(1, 6))]
        given, parameters, found = torch.randn(*shape, width).to(dtype), [*weights, *biases], []
        for in_parts in (False, True):
            for parameter in parameters:
                parameter.grad = None
            x, split = given.clone().requires_grad_(), SplitLayer(parameters)
            with split.putting_off() if in_parts else nullcontext() as products:
                y = x
                for operator, weight, bias in uses:
                    y = operator(y, weight, bias)
            torch.autograd.backward(y, torch.linspace(-1, 1, y.numel()).cos().view(y.shape).to(dtype))
            gradients = [parameter.grad for parameter in parameters]
            if products is not None:
                num_products += len(products.brought)
                gradients = products.gradients(parameters, gradients)
            found.append([y, x.grad, *gradients])
        for one, other in zip(*found, strict=True):
            assert (one is None) == (other is None), seed
            assert one is None or (torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())), seed
    assert num_products > 20


def test_a_frozen_weight_is_no_product() -> None:
    linear = nn.Linear(8, 8)
    linear.weight.requires_grad_(False)
    with SplitLayer(list(linear.parameters())[:1]).putting_off() as products:
        y = linear(torch.randn(2, 8, requires_grad=True))
    y.sum().backward()
    assert not products.brought and linear.bias.grad is not None


def test_parameters_are_plain_but_in_a_forward_that_puts_off() -> None:
    linear = nn.Linear(8, 8)
    layer = SplitLayer(list(linear.parameters()))
    with pytest.raises(ZeroDivisionError), layer.putting_off():
        assert isinstance(linear.weight, SplitParameter) and type(linear.bias) is nn.Parameter
        raise ZeroDivisionError
    assert type(linear.weight) is nn.Parameter and not vars(linear.weight)
    linear(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert linear.weight.grad is not None


def test_no_product_is_put_off_without_grad() -> None:
    linear = nn.Linear(8, 8)
    with SplitLayer(list(linear.parameters())).putting_off() as products, torch.no_grad():
        linear(torch.randn(2, 8, requires_grad=True))
    assert not products.brought


@pytest.mark.parametrize("changed", ["operand", "gradient"])
def test_what_is_changed_in_place_before_its_product_is_made_is_refused(changed: str) -> None:
    """Such as in a scratch buffer that the next micro-batch writes to. Torch refuses it in a whole backward."""
    linear = nn.Linear(8, 8)
    x = torch.randn(2, 8, requires_grad=True)
    operand, dy = torch.tanh(x), torch.ones(2, 8)
    with SplitLayer(list(linear.parameters())).putting_off() as products:
        y = linear(operand)
    torch.autograd.backward(y, dy)
    (operand if changed == "operand" else dy).detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        products.gradients(list(linear.parameters()), [None, linear.bias.grad])


def test_an_operand_that_is_changed_in_place_before_the_backward_is_refused() -> None:
    linear = nn.Linear(8, 8)
    operand = torch.tanh(torch.randn(2, 8, requires_grad=True))
    with SplitLayer(list(linear.parameters())).putting_off():
        y = linear(operand).sum()
        operand.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_within_a_forward_is_refused(create_graph: bool) -> None:
    """As of a gradient penalty: its product would count twice, and those of second order not at all."""
    linear = nn.Linear(8, 8)
    x = torch.randn(2, 8, requires_grad=True)
    with SplitLayer(list(linear.parameters())).putting_off(), pytest.raises(RuntimeError, match="put off"):
        torch.autograd.grad(linear(x).square().sum(), x, create_graph=create_graph)


def test_an_output_without_a_gradient_gives_none() -> None:
    """Not zeros, of which products with infinities would be NaN."""
    linear = nn.Linear(8, 8)
    x = torch.randn(2, 8, requires_grad=True)
    with SplitLayer(list(linear.parameters())).putting_off() as products:
        y = linear(x)
    Cut.apply(y, x).sum().backward()  # pyright: ignore[reportOptionalMemberAccess]
    assert not products.brought and linear.bias.grad is None and x.grad is not None


class Cut(torch.autograd.Function):
    """Adds two tensors, of which the first one gets no gradient."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return one + other

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, grads[0]


class Wrapped(Tensor):
    """A tensor of a class of its own."""


def test_parameters_of_a_class_of_their_own_keep_it() -> None:
    weight = nn.Parameter(torch.randn(3, 3).as_subclass(Wrapped))
    assert type(weight) is Wrapped and isinstance(weight, nn.Parameter)
    with SplitLayer([weight, nn.Parameter(torch.randn(3, 3))]).putting_off():
        assert type(weight) is Wrapped
    assert type(weight) is Wrapped
