"""A causal language model of multi-layer perceptrons, in which a block sees a token and a few tokens before it.

Shape suffixes: B samples of a micro-batch, T tokens, D model width, W window, F hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Init, KeyedDropout, Keys
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models.base import LayeredModel
from elaswave_spmd.sharding import P, Shardings, shard


class Embed(nn.Module):
    """Token embedding."""

    def __init__(self, vocab_size: int, d_model: int, dropout: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.drop = KeyedDropout(dropout)

    def forward(self, x_BT: Tensor, keys: Keys) -> Tensor:
        return self.drop(nn.functional.embedding(x_BT, self.weight), keys)


class Block(nn.Module):
    """x + MLP(the normalized last `window` tokens, concatenated)."""

    def __init__(self, d_model: int, window: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.window = window
        self.norm = nn.LayerNorm(d_model)
        self.up = shard(nn.Linear(window * d_model, hidden), weight=P("tp", None), bias=P("tp"))
        self.down = shard(nn.Linear(hidden, d_model), weight=P(None, "tp"))
        self.drop = KeyedDropout(dropout)

    def forward(self, x_BTD: Tensor, keys: Keys) -> Tensor:
        # Zeros before the first token: position t sees the tokens t - window + 1 to t, and none after t.
        padded_BSD = nn.functional.pad(self.norm(x_BTD), (0, 0, self.window - 1, 0))
        num_tokens = x_BTD.shape[1]
        past_BTE = torch.cat([padded_BSD[:, i : i + num_tokens] for i in range(self.window)], dim=-1)
        return x_BTD + self.drop(self.down(nn.functional.gelu(self.up(past_BTE))), keys)


class Head(nn.Module):
    """Final norm and projection to the vocabulary."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.out = shard(nn.Linear(d_model, vocab_size), weight=P("tp", None), bias=P("tp"))

    def forward(self, x_BTD: Tensor, keys: Keys) -> Tensor:
        return self.out(self.norm(x_BTD))


class MLP(LayeredModel):
    """The smallest model here that learns. It has no attention and compiles quickly.

    Args:
        vocab_size, layers, d_model, dropout: the sizes of the model. Inputs may have any length.
        window: number of tokens that a block sees, the present one included.
        mlp_ratio: hidden width over `d_model`.

    Raises:
        ModelError: a window below 1, or a dropout outside [0, 1).
    """

    shardings = Shardings(batch=P("dp"), layers=P("pp"), params=P(None), grads=P("dp"), optim=P("dp"))

    def __init__(
        self,
        vocab_size: int,
        layers: int,
        d_model: int,
        dropout: float = 0.0,
        window: int = 4,
        mlp_ratio: int = 4,
    ) -> None:
        if window < 1:
            raise ModelError(
                f"window={window} is below 1", rule="a block sees at least its own token", fix="window=1 or more"
            )
        blocks = {f"block{i}": Block(d_model, window, mlp_ratio * d_model, dropout) for i in range(layers)}
        embed, head = Embed(vocab_size, d_model, dropout), Head(vocab_size, d_model)
        super().__init__({"embed": embed, **blocks, "head": head})

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        """The rules of the base class. The override asks for them, as constructors leave some parameters empty."""
        return super().init(name, shape)
