"""Layers of many kinds for tests of backwards that are pairs of programs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Keys
from elaswave_spmd.models import LayeredModel


class Embed(nn.Embedding):
    def forward(self, x: Tensor, keys: Keys) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)


class Head(nn.Linear):
    def forward(self, x: Tensor, keys: Keys) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)


class Of(nn.Module):
    """A layer of one module, that takes keys."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return self.inner(x)


class ReadsItsWeight(nn.Module):
    """The gradient of one weight is that of a product with the other one, whose value must not be read later."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.one @ torch.tanh(self.other))


class Twice(nn.Module):
    """One linear twice, and its weight once more: one gradient, of three terms."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x))) * self.linear.weight.sum()


class Scaled(nn.Module):
    """The gradient of its weight is that of its input, as far as the last sum."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Unused(nn.Module):
    """One parameter has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.linear = nn.Parameter(torch.zeros(3)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


class Shifted(nn.Module):
    """The gradient of its input is what that of its weight is a sum of."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.shift)


class Added(nn.Module):
    """The gradient of its input is that of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Averaged(nn.Module):
    """A number without dims goes from the one part of its backward to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.mean() + self.shift.sum())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "feed forward": feed_forward,
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "reads its weight": ReadsItsWeight,
    "twice": Twice,
    "scaled": Scaled,
    "unused": Unused,
    "shifted": Shifted,
    "added": Added,
    "averaged": Averaged,
}
NOT_CUT: dict[str, Callable[[], nn.Module]] = {
    "without parameters": nn.Tanh,
    "one operator makes all": lambda: nn.LayerNorm(8),
}


def model_of(make: Callable[[], nn.Module]) -> LayeredModel:
    return LayeredModel({"embed": Embed(11, 8), "middle": Of(make()), "again": Of(make()), "head": Head(8, 11)})
