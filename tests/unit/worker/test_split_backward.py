"""A backward in two parts has the bits of the whole one, for every operator that puts products off and for others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from elaswave_spmd.worker.programs.split_backward import SplitLayer, SplitParameter, WeightProducts


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
    "mixed": (Mixed, 1),
    "in place": (InPlace, 1),
    "an input without gradient": (Constant, 1),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2),
    "recurrent": (lambda: FirstOf(nn.GRU(8, 8, batch_first=True)), 0),
    "norm": (lambda: nn.LayerNorm(8), 0),
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

    layer = SplitLayer(parameters)
    products = layer.products = WeightProducts()
    again = given.clone().requires_grad_()
    output = module(again)
    layer.products = None
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
    layer = SplitLayer(parameters)
    products = layer.products = WeightProducts()
    torch.autograd.backward(module(x), dy)
    for parameter in parameters:
        parameter.untyped_storage().resize_(0)
    for one, other in zip(products.gradients(parameters, [p.grad for p in parameters]), whole, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_a_frozen_weight_is_no_product() -> None:
    linear = nn.Linear(8, 8)
    linear.weight.requires_grad_(False)
    layer = SplitLayer(list(linear.parameters())[:1])
    products = layer.products = WeightProducts()
    linear(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert not products.brought and linear.bias.grad is not None


def test_without_products_a_layer_is_as_it_was() -> None:
    linear = nn.Linear(8, 8)
    layer = SplitLayer(list(linear.parameters()))
    assert isinstance(linear.weight, SplitParameter) and type(linear.bias) is nn.Parameter
    linear(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert linear.weight.grad is not None
    layer.unbind()
    assert type(linear.weight) is nn.Parameter and not vars(linear.weight)


def test_no_product_is_put_off_without_grad() -> None:
    linear = nn.Linear(8, 8)
    layer = SplitLayer(list(linear.parameters()))
    products = layer.products = WeightProducts()
    with torch.no_grad():
        linear(torch.randn(2, 8, requires_grad=True))
    assert not products.brought


class Wrapped(Tensor):
    """A tensor of a class of its own."""


def test_parameters_of_a_class_of_their_own_keep_it() -> None:
    weight = nn.Parameter(torch.randn(3, 3).as_subclass(Wrapped))
    assert type(weight) is Wrapped and isinstance(weight, nn.Parameter)
    split = SplitLayer([weight, nn.Parameter(torch.randn(3, 3))])
    assert type(weight) is Wrapped
    split.unbind()
    assert type(weight) is Wrapped
