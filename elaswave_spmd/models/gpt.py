"""GPT: learned positions, pre-norm blocks, GELU, dropout.

Shape suffixes: B samples of a micro-batch, T tokens, D model width, H heads, K width of a head, F hidden width, V
vocabulary.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor, nn

from elaswave_spmd.determinism import Init, KeyedDropout, Keys, Normal
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models.base import LayeredModel
from elaswave_spmd.sharding import P, Shardings, shard, tie


class Embed(nn.Module):
    """Token plus position embedding."""

    def __init__(self, vocab_size: int, seq_len: int, d_model: int, dropout: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.positions = nn.Parameter(torch.empty(seq_len, d_model))
        self.drop = KeyedDropout(dropout)
        shard(self, weight=P("tp", "fsdp"))

    def forward(self, x_BT: Tensor, keys: Keys) -> Tensor:
        x_BTD = nn.functional.embedding(x_BT, self.weight) + self.positions[: x_BT.shape[1]]
        return self.drop(x_BTD, keys)


class Attention(nn.Module):
    """Causal self-attention. The fused kernel runs without dropout, because it would draw its own random numbers."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        check_heads(d_model, heads)
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        # Rows of qkv are ordered by head, so that splitting them over tp gives each device whole heads.
        shard(self.qkv, weight=P("tp", "fsdp"), bias=P("tp"))
        shard(self.out, weight=P("fsdp", "tp"))

    def forward(self, x_BTD: Tensor) -> Tensor:
        # Heads come before samples, so that XLA keeps the batched products split by head where heads are split over tp.
        q_HBTK, k_HBTK, v_HBTK = rearrange(self.qkv(x_BTD), "b t (h n k) -> n h b t k", h=self.heads, n=3)
        o_HBTK = nn.functional.scaled_dot_product_attention(q_HBTK, k_HBTK, v_HBTK, is_causal=True)
        return self.out(rearrange(o_HBTK, "h b t k -> b t (h k)"))


class Mlp(nn.Module):
    """Up, GELU, down."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, hidden)
        self.down = nn.Linear(hidden, d_model)
        shard(self.up, weight=P("tp", "fsdp"), bias=P("tp"))
        shard(self.down, weight=P("fsdp", "tp"))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x_BTD), approximate="tanh"))


class Block(nn.Module):
    """One pre-norm transformer layer, with dropout on both residual branches."""

    def __init__(self, d_model: int, heads: int, hidden: int, dropout: float, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(d_model, norm_eps)
        self.attn = Attention(d_model, heads)
        self.attn_drop = KeyedDropout(dropout)
        self.mlp_norm = nn.LayerNorm(d_model, norm_eps)
        self.mlp = Mlp(d_model, hidden)
        self.mlp_drop = KeyedDropout(dropout)

    def forward(self, x_BTD: Tensor, keys: Keys) -> Tensor:
        x_BTD = x_BTD + self.attn_drop(self.attn(self.attn_norm(x_BTD)), keys)
        return x_BTD + self.mlp_drop(self.mlp(self.mlp_norm(x_BTD)), keys)


class Head(nn.Module):
    """Final norm and projection to the vocabulary."""

    def __init__(self, vocab_size: int, d_model: int, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model, norm_eps)
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        shard(self, weight=P("tp", "fsdp"))

    def forward(self, x_BTD: Tensor, keys: Keys) -> Tensor:
        return nn.functional.linear(self.norm(x_BTD), self.weight)


class GPT(LayeredModel):
    """A decoder with `layers` blocks between embedding and head.

    Args:
        vocab_size, seq_len, layers, d_model, heads, dropout: the sizes of the model. Inputs have at most as many tokens
            as there are positions.
        mlp_ratio: hidden width of the MLP over `d_model`.
        tied: the head reads the embedding's weight.
        norm_eps: number that every norm adds to the variance.
        positions: number of learned positions, `seq_len` or more; 0 means `seq_len`.

    Raises:
        ModelError: `heads` does not divide `d_model`, a dropout outside [0, 1), fewer positions than `seq_len`, or a
            `norm_eps` that is not above 0.
    """

    shardings = Shardings(batch=P("dp"), layers=P("pp"), params=P(None), grads=P("dp"), optim=P("dp"))

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        layers: int,
        d_model: int,
        heads: int,
        dropout: float = 0.0,
        mlp_ratio: int = 4,
        tied: bool = False,
        norm_eps: float = 1e-5,
        positions: int = 0,
    ) -> None:
        check_norm_eps(norm_eps)
        if positions and positions < seq_len:
            raise ModelError(
                f"positions={positions} is below seq_len={seq_len}",
                rule="every token of an input has a learned position",
                fix=f"model.args.positions={seq_len} or more, or a smaller train.seq_len",
            )
        blocks = {f"block{i}": Block(d_model, heads, mlp_ratio * d_model, dropout, norm_eps) for i in range(layers)}
        embed, head = Embed(vocab_size, positions or seq_len, d_model, dropout), Head(vocab_size, d_model, norm_eps)
        super().__init__({"embed": embed, **blocks, "head": head}, [tie("head.weight", "embed.weight")] if tied else [])
        self.depth = layers

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        """The rules of the base class, but smaller values, by depth, for weights that write to the residual stream.

        This is the initialization of GPT-2.
        """
        if name.endswith(("attn.out.weight", "mlp.down.weight")):
            return Normal(0.02 / math.sqrt(2 * self.depth))
        return super().init(name, shape)


def check_heads(d_model: int, heads: int) -> None:
    """Raises ModelError unless `heads` divides `d_model`."""
    if heads < 1 or d_model % heads:
        fits = ", ".join(str(n) for n in range(1, d_model + 1) if d_model % n == 0)
        raise ModelError(f"heads={heads} does not divide d_model={d_model}", exists=f"heads in {fits}")


def check_norm_eps(norm_eps: object) -> None:
    """Raises ModelError unless `norm_eps` is a number above 0."""
    if isinstance(norm_eps, bool) or not isinstance(norm_eps, int | float) or not 0 < norm_eps < math.inf:
        raise ModelError(
            f"norm_eps={norm_eps!r} is not a number above 0",
            rule="it is added to a variance, which may be 0",
            fix="norm_eps=1e-5",
        )
