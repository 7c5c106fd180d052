"""A mixture of experts with a balance term: a loss term of a layer, which is a function of the whole micro-batch.

    cd examples
    python ../train.py model.target=mixture_of_experts.Mixture mesh=dp2_pp2 model.layers=3 +model.args.experts=4

Layers hand on `Routed`: the hidden state, and a tensor without dims, to which each layer adds its own term. `loss` adds
it to the sum over tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from elaswave_spmd import KeyedDropout, LayeredModel, P, Shardings
from elaswave_spmd.models import Batch


class Routed(NamedTuple):
    """What layers hand on: float [B, T, D], and the sum of the balance terms so far, without dims."""

    x: Tensor
    balance: Tensor


class Begin(nn.Module):
    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)

    def forward(self, tokens: Tensor) -> Routed:
        return Routed(self.embed(tokens), torch.zeros((), device=tokens.device))


class Experts(nn.Module):
    """A causal convolution, and an expert for each token: the one that its router prefers (Switch Transformer)."""

    def __init__(self, d_model: int, experts: int, dropout: float, window: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.mix = nn.Sequential(nn.ConstantPad1d((window - 1, 0), 0.0), nn.Conv1d(d_model, d_model, window))
        self.router = nn.Linear(d_model, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.GELU(), nn.Linear(2 * d_model, d_model))
            for _ in range(experts)
        )
        self.drop = KeyedDropout(dropout)

    def forward(self, given: Routed, keys) -> Routed:
        x = given.x + self.mix(self.norm(given.x).mT).mT
        odds = self.router(x).softmax(-1)
        taken = nn.functional.one_hot(odds.argmax(-1), len(self.experts)).to(odds.dtype)
        # Every expert sees every token here, which is simple; the router's gradient comes through `odds`.
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        y = (outputs * (taken * odds)[..., None, :]).sum(-1)
        balance = len(self.experts) * (taken.mean((0, 1)) * odds.mean((0, 1))).sum()
        return Routed(x + self.drop(y, keys), given.balance + balance)


class Answer(nn.Linear):
    def forward(self, given: Routed) -> Routed:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Routed(super().forward(given.x), given.balance)


class Mixture(LayeredModel):
    """An embedding, `layers` layers of experts, and a head."""

    shardings = Shardings(batch=P("dp"), layers=P("pp"), grads=P("dp"), optim=P("dp"))

    def __init__(
        self, vocab_size: int, layers: int, d_model: int, dropout: float, experts: int = 4, weight: float = 0.01
    ) -> None:
        self.weight = weight
        middle = {f"experts{i}": Experts(d_model, experts, dropout) for i in range(layers)}
        super().__init__({"begin": Begin(vocab_size, d_model), **middle, "answer": Answer(d_model, vocab_size)})

    def loss(self, output: Routed, batch: Batch) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().loss(output.x, batch) + self.weight * batch.targets.numel() * output.balance
