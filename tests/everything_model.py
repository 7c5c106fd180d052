"""A model and a dataset that use all that a user's may, at once: tests/faults/test_everything.py.

A word is hidden in each of some sentences of different lengths, and is to be found: sentences have weights. The head is
tied to the embedding; layers hand on tuples with a mask that has no gradient; a mixture of experts adds a term to the
loss; and one layer is meant to be frozen.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Init, KeyedDropout, Keys
from elaswave_spmd.models import LayeredModel
from elaswave_spmd.sharding import tie

WORDS, MASK, PADDING = 12, 0, 1


class Batch(NamedTuple):
    """Sentences that were padded to the longest of a micro-batch.

    Args:
        words: int64 [B, T].
        hidden: the word that stands where `words` has MASK, int64 [B].
        weights: float64 [B], a multiple of 1/4.
    """

    words: Tensor
    hidden: Tensor
    weights: Tensor


class Sentences:
    """Each counts upwards in words, from somewhere, with one of them hidden."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, np.ndarray | float]:
        draw = np.random.Generator(np.random.Philox(index))
        words = 2 + (draw.integers(10) + np.arange(3 + index % 5)) % 10
        at = draw.integers(len(words))
        hidden, words[at] = words[at], MASK
        return {"words": words, "hidden": hidden, "weight": (1 + index % 4) / 4}

    def collate(self, samples: list[dict[str, np.ndarray]]) -> Batch:
        longest = max(len(sample["words"]) for sample in samples)
        words = torch.full((len(samples), longest), PADDING)
        for row, sample in zip(words, samples, strict=True):
            row[: len(sample["words"])] = torch.from_numpy(sample["words"])
        hidden = torch.tensor([int(sample["hidden"]) for sample in samples])
        return Batch(words, hidden, torch.tensor([sample["weight"] for sample in samples], dtype=torch.float64))


class State(NamedTuple):
    """What layers hand on.

    Args:
        x: float [B, T, D].
        hidden: where the hidden words are, bool [B, T].
        balance: the sum of the terms of the loss so far, float [].
    """

    x: Tensor
    hidden: Tensor
    balance: Tensor


class Embed(nn.Embedding):
    """Words, and where they stand."""

    def __init__(self, d_model: int) -> None:
        super().__init__(WORDS, d_model)
        self.places = nn.Parameter(torch.empty(8, d_model))

    def forward(self, words: Tensor) -> State:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = super().forward(words) + self.places[: words.shape[1]]
        return State(x, words == MASK, x.new_zeros(()))


class Mix(nn.Module):
    """Each word looks at its neighbours."""

    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv1d(d_model, d_model, 3, padding=1), KeyedDropout(dropout)

    def forward(self, given: State, keys: Keys) -> State:
        return given._replace(x=given.x + self.drop(torch.tanh(self.conv(given.x.mT).mT), keys))


class Experts(nn.Module):
    """Two experts, weighed by a gate, with a term that keeps their loads alike."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.gate, self.one, self.other = (nn.Linear(d_model, n) for n in (2, d_model, d_model))

    def forward(self, given: State) -> State:
        share = torch.softmax(self.gate(given.x), -1)
        y = share[..., :1] * torch.tanh(self.one(given.x)) + share[..., 1:] * torch.tanh(self.other(given.x))
        loads = (share.mean((0, 1)) - 0.5).square().sum()
        return given._replace(x=given.x + y, balance=given.balance + loads)


class Find(nn.Linear):
    """Logits of the hidden words [B, WORDS], and the terms of the loss."""

    def forward(self, given: State) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward((given.x * given.hidden[..., None]).sum(1)), given.balance


class Everything(LayeredModel):
    """See the module's text."""

    def __init__(self, d_model: int = 16, dropout: float = 0.1) -> None:
        layers = {
            "embed": Embed(d_model),
            "mix": Mix(d_model, dropout),
            "experts": Experts(d_model),
            "again": Mix(d_model, dropout),
            "find": Find(d_model, WORDS, bias=False),
        }
        super().__init__(layers, ties=[tie("find.weight", "embed.weight")])

    def inputs(self, batch: Batch) -> Tensor:
        return batch.words

    def loss(self, output: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        logits, balance = output
        each = nn.functional.cross_entropy(logits.float(), batch.hidden, reduction="none")
        weight = batch.weights.sum()
        return (each * batch.weights).sum() + 0.1 * balance * weight, weight

    def metrics(self, output: tuple[Tensor, Tensor], batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        right = (output[0].argmax(-1) == batch.hidden) * batch.weights
        return {"accuracy": (right.sum(), batch.weights.sum())}

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        return super().init(name, shape)
