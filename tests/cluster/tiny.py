"""The smallest runs with everything that can go wrong: dropout, ties, uneven pages, validation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Init, KeyedDropout, Keys
from elaswave_spmd.models import Batch, LayeredModel, freeze_parameters
from elaswave_spmd.sharding import P, Shardings, Tie
from elaswave_spmd.worker.learning_rate import LearningRate
from elaswave_spmd.worker.model_layout import ModelDescription, describe
from elaswave_spmd.worker.optimizers import AdamW
from elaswave_spmd.worker.spec import Job

VOCAB, TOKENS, WIDTH = 13, 3, 8
PAGE = 64
VALIDATION_MICROBATCHES = 3


@dataclass(frozen=True)
class Counting:
    """`count` samples of TOKENS + 1 tokens; every sample is another one."""

    count: int
    shift: int = 0

    def __len__(self) -> int:
        return self.count

    def batch(self, ids: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = np.asarray(ids, np.int64)[:, None] + self.shift
        rows = (np.arange(TOKENS + 1) * (ids % 5 + 1) + ids * ids) % VOCAB
        return rows[:, :-1], rows[:, 1:]


TRAIN, VALIDATION = Counting(40), Counting(VALIDATION_MICROBATCHES, shift=1000)


class _Embed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCAB, width))

    def forward(self, x_BT: Tensor, keys: Keys) -> Tensor:
        return nn.functional.embedding(x_BT, self.weight)


class _Block(nn.Module):
    def __init__(self, dropout: float, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width, width)), nn.Parameter(torch.empty(width))
        self.drop = KeyedDropout(dropout)

    def forward(self, x_BTD: Tensor, keys: Keys) -> Tensor:
        return x_BTD + self.drop(torch.tanh(nn.functional.linear(x_BTD, self.weight, self.bias)), keys)


class _Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCAB, width))

    def forward(self, x_BTD: Tensor, keys: Keys) -> Tensor:
        return nn.functional.linear(x_BTD, self.weight)


class Tiny(LayeredModel):
    """Embedding, blocks and head, 100 parameters or so each. `tied`: the head reads the embedding."""

    shardings = Shardings(batch=P("dp"), layers=P("pp"), params=P(None), grads=P("dp"), optim=P("dp"))

    def __init__(self, blocks: int, dropout: float, tied: bool, width: int = WIDTH) -> None:
        layers = {f"block{i}": _Block(dropout if i == 0 else 0.0, width) for i in range(blocks)}
        ties = (Tie("head.weight", "embed.weight"),) if tied else ()
        super().__init__({"embed": _Embed(width), **layers, "head": _Head(width)}, ties)

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        return super().init(name, shape)


class Overflowing(Tiny):
    """A tiny model whose loss is infinite for samples that begin with token 0, one in ten of them."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return super().loss(output, batch) / (batch.tokens[0, 0] != 0).float()


@dataclass(frozen=True)
class TinyRun:
    """All that the bits of a tiny run may depend on.

    Args:
        overflows: the loss of some samples is infinite, so that some steps have no finite gradient.
        frozen: names of parameters that are not trained.
        width: of the layers; wide ones have more pages.
    """

    blocks: int = 1
    tied: bool = False
    dtype: str = "fp32"
    microbatches: int = 5
    steps: int = 4
    checkpointing: bool = False
    overflows: bool = False
    frozen: tuple[str, ...] = ()
    width: int = WIDTH

    def job(self) -> Job:
        """A validation in the middle and one at the end."""
        return Job(
            seed=3,
            steps=self.steps,
            global_batch=self.microbatches,
            microbatch_size=1,
            seq_len=TOKENS,
            dtype=self.dtype,
            optimizer=AdamW(),
            learning_rate=LearningRate(2e-2, "cosine", warmup_steps=1, num_steps=20),
            clip=1.0,
            activation_checkpointing=self.checkpointing,
            validate_every=max(2, self.steps // 2),
            num_validation_microbatches=VALIDATION_MICROBATCHES,
        )

    @property
    def description(self) -> ModelDescription:
        return _described(self.blocks, self.tied, self.overflows, self.frozen, self.width)

    @property
    def shardings(self) -> Shardings:
        return Tiny.shardings

    def make_model(self) -> LayeredModel:
        """A new model on the meta device."""
        return copy.deepcopy(_template(self.blocks, self.tied, self.overflows, self.frozen, self.width))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters."""
        return tuple(name for name, _ in self.make_model().named_parameters())

    @property
    def key(self) -> TinyRun:
        """The runs with the same key end with the same bits: checkpointing changes none."""
        return replace(self, checkpointing=False)


@cache
def _template(blocks: int, tied: bool, overflows: bool, frozen: tuple[str, ...], width: int) -> LayeredModel:
    with torch.device("meta"):
        model = (Overflowing if overflows else Tiny)(blocks, 0.2, tied, width)
    freeze_parameters(model, frozen)
    return model


@cache
def _described(blocks: int, tied: bool, overflows: bool, frozen: tuple[str, ...], width: int) -> ModelDescription:
    return describe(_template(blocks, tied, overflows, frozen, width), page_size=PAGE)
