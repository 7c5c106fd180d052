"""An encoder and a decoder with masks, on a toy translation: digits to letters, in reverse order.

    cd examples
    python ../train.py model.target=encoder_decoder.Translator data.target=encoder_decoder.Pairs mesh=pp3 \
        train.seq_len=32 train.global_batch=32 train.microbatch_size=8 model.layers=2 model.d_model=64 model.heads=4

A sample is one row of tokens: source, START, target. Layers hand on a named tuple: what the encoder has made of the
source, what the decoder has made of the target, and the mask of the source, which is computed once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd import LayeredModel, P, Shardings
from elaswave_spmd.models import Batch

PAD, START = 0, 1
DIGITS, LETTERS = range(2, 12), range(12, 22)


class Pairs:
    """Samples made of their index: up to `seq_len / 2` digits, and the letters they stand for, in reverse order."""

    vocab_size = 22

    def __init__(self, seq_len: int, split: str) -> None:
        self._longest, self._split = seq_len // 2, split

    def __len__(self) -> int:
        return 20_000 if self._split == "train" else 512

    def __getitem__(self, index: int) -> np.ndarray:
        draw = np.random.default_rng([index, self._split == "train"])
        length = draw.integers(2, self._longest, endpoint=True)
        source = np.full(self._longest, PAD)
        source[:length] = draw.choice(DIGITS, length)
        target = np.full(self._longest, PAD)
        target[:length] = source[:length][::-1] + len(DIGITS)
        return np.concatenate([source, [START], target])


class Sides(NamedTuple):
    """What layers hand on.

    Args:
        source: float [B, N, D].
        target: float [B, N, D].
        is_pad: bool [B, N], of the source.
    """

    source: Tensor
    target: Tensor
    is_pad: Tensor


class Begin(nn.Module):
    """Tokens [B, 2 N]: the source, START, and the target but for its last token."""

    def __init__(self, vocab_size: int, seq_len: int, d_model: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Parameter(0.02 * torch.randn(seq_len // 2, d_model))

    def forward(self, tokens: Tensor) -> Sides:
        source, target = tokens.chunk(2, dim=1)
        return Sides(self.embed(source) + self.positions, self.embed(target) + self.positions, source == PAD)


class Encoder(nn.TransformerEncoderLayer):
    def forward(self, given: Sides) -> Sides:  # pyright: ignore[reportIncompatibleMethodOverride]
        return given._replace(source=super().forward(given.source, src_key_padding_mask=given.is_pad))


class Decoder(nn.TransformerDecoderLayer):
    def forward(self, given: Sides) -> Sides:  # pyright: ignore[reportIncompatibleMethodOverride]
        size = given.target.shape[1]
        future = torch.ones(size, size, dtype=torch.bool, device=given.target.device).triu(1)
        target = super().forward(given.target, given.source, tgt_mask=future, memory_key_padding_mask=given.is_pad)
        return given._replace(target=target)


class Answer(nn.Linear):
    def forward(self, given: Sides) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(given.target)


class Translator(LayeredModel):
    """`layers` encoder layers, as many decoder layers."""

    shardings = Shardings(batch=P("dp"), layers=P("pp"), grads=P("dp"), optim=P("dp"))

    def __init__(self, vocab_size: int, seq_len: int, layers: int, d_model: int, heads: int) -> None:
        sizes = {"d_model": d_model, "nhead": heads, "dim_feedforward": 4 * d_model, "dropout": 0.0}
        options = {**sizes, "batch_first": True, "norm_first": True}
        stack: dict[str, nn.Module] = {"begin": Begin(vocab_size, seq_len, d_model)}
        stack |= {f"encoder{i}": Encoder(**options) for i in range(layers)}
        stack |= {f"decoder{i}": Decoder(**options) for i in range(layers)}
        super().__init__({**stack, "answer": Answer(d_model, vocab_size)})

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """The cross entropy of the target's tokens [B, N], without padding, summed."""
        wanted = batch.targets[:, output.shape[1] :]
        logits = output.float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, wanted.flatten(), ignore_index=PAD, reduction="sum")
