"""A model whose parameters and constants begin with what its constructors made, for a run's folder.

`wrong` names a mistake of the constructor; with `factories` the blocks are built only where they are needed.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd.models import LayeredModel
from elaswave_spmd.sharding import P, Shardings


class Embed(nn.Embedding):
    def forward(self, x: Tensor, keys: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)


class Block(nn.Module):
    """A layer scale of 1e-4, an identity, parameters drawn from three generators, and drawn constants."""

    features: Tensor
    shift: Tensor

    def __init__(self, d_model: int, wrong: str = "") -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((d_model,), 1e-4))
        self.mix = nn.Linear(d_model, d_model, bias=False)
        nn.init.eye_(self.mix.weight)
        self.up = nn.Linear(d_model, d_model)
        self.by_numpy = nn.Parameter(torch.tensor(np.random.rand(d_model), dtype=torch.float32))
        self.by_python = nn.Parameter(torch.tensor([random.random() for _ in range(d_model)]))
        self.register_buffer("features", torch.randn(d_model))
        self.register_buffer("shift", torch.rand(d_model), persistent=False)
        if wrong == "clock":
            self.up.bias = nn.Parameter(self.up.bias.detach() + time.time_ns() % 1_000_003 / 1e9)
        if wrong == "process":
            self.table = torch.tensor(float(os.getpid()))
        if wrong == "empty":
            self.up.weight = nn.Parameter(torch.empty(d_model, d_model))

    def forward(self, x: Tensor, keys: Any) -> Tensor:
        features, shift = self.features.to(x.dtype), self.shift.to(x.dtype)
        y = torch.tanh(self.up(self.mix(x) * features + shift) + self.by_numpy * self.by_python)
        return x + self.scale * y


class Head(nn.Linear):
    def forward(self, x: Tensor, keys: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)


def build(d_model: int, wrong: str, number: int, log: str) -> Block:
    """A block; `log` names a file that gets a line for each block with memory: process, number."""
    if log and torch.empty(1).device.type != "meta":
        with open(log, "a", encoding="utf-8") as file:
            print(os.getpid(), number, file=file)
    return Block(d_model, wrong)


class Own(LayeredModel):
    """Embedding, blocks and a head."""

    shardings = Shardings(batch=P("dp"), layers=P("pp"), grads=P("dp"), optim=P("dp"))

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        layers: int = 2,
        wrong: str = "",
        factories: bool = False,
        log: str = "",
        **others: object,
    ) -> None:
        made = {f"block{number}": partial(build, d_model, wrong, number, log) for number in range(layers)}
        blocks = made if factories else {name: make() for name, make in made.items()}
        super().__init__({"embed": Embed(vocab_size, d_model), **blocks, "head": Head(d_model, vocab_size)})


def write(folder: Path) -> str:
    """Puts the model into a run's folder; returns the override that chooses it."""
    shutil.copy(__file__, folder / "own_values_model.py")
    return "model.target=own_values_model.Own"
