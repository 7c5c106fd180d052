"""Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases.

Shape suffixes: B samples of a micro-batch, T tokens, D model width, H query heads, G key/value heads, K width of a
head, F hidden width, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from elaswave_spmd.determinism import Init, KeyedDropout, Keys, Normal
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models.base import LayeredModel
from elaswave_spmd.models.gpt import check_heads
from elaswave_spmd.sharding import P, Shardings, shard, tie


class RMSNorm(nn.Module):
    """x / rms(x) * weight; computed in fp32, returned in the dtype of x."""

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_model))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        # Squares and their mean in fp32: in bf16 the sum over a wide model would lose most of its digits.
        wide_BTD = x_BTD.float()
        scale_BT1 = torch.rsqrt(wide_BTD.square().mean(-1, keepdim=True) + self.eps)
        return (wide_BTD * scale_BT1).to(x_BTD.dtype) * self.weight


class Embed(nn.Module):
    """Token embedding."""

    def __init__(self, vocab_size: int, d_model: int, dropout: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.drop = KeyedDropout(dropout)
        shard(self, weight=P("tp", "fsdp"))

    def forward(self, x_BT: Tensor, keys: Keys) -> Tensor:
        return self.drop(nn.functional.embedding(x_BT, self.weight), keys)


class Attention(nn.Module):
    """Causal attention with rotary positions; each key/value head serves heads // kv_heads query heads."""

    def __init__(self, d_model: int, heads: int, kv_heads: int, theta: float) -> None:
        super().__init__()
        width = d_model // heads
        self.heads = heads
        self.kv_heads = kv_heads
        self.theta = theta
        self.q = shard(nn.Linear(d_model, heads * width, bias=False), weight=P("tp", "fsdp"))
        self.k = shard(nn.Linear(d_model, kv_heads * width, bias=False), weight=P("tp", "fsdp"))
        self.v = shard(nn.Linear(d_model, kv_heads * width, bias=False), weight=P("tp", "fsdp"))
        self.out = shard(nn.Linear(heads * width, d_model, bias=False), weight=P("fsdp", "tp"))

    def forward(self, x_BTD: Tensor) -> Tensor:
        # Heads come before samples, so that XLA keeps the batched products split by head where heads are split over tp.
        q_HBTK = rearrange(self.q(x_BTD), "b t (h k) -> h b t k", h=self.heads)
        k_GBTK = rearrange(self.k(x_BTD), "b t (g k) -> g b t k", g=self.kv_heads)
        v_GBTK = rearrange(self.v(x_BTD), "b t (g k) -> g b t k", g=self.kv_heads)
        # Computed at each call, 1 % of the layer's time. A buffer would be state that has to move with the layer.
        cos_TK, sin_TK = rotary_tables(q_HBTK.shape[2], q_HBTK.shape[3], self.theta, x_BTD.device)
        q_HBTK, k_GBTK = rotate(q_HBTK, cos_TK, sin_TK), rotate(k_GBTK, cos_TK, sin_TK)
        shared = self.heads // self.kv_heads
        if shared > 1:
            k_GBTK, v_GBTK = (repeat(z, "g b t k -> (g n) b t k", n=shared) for z in (k_GBTK, v_GBTK))
        o_HBTK = nn.functional.scaled_dot_product_attention(q_HBTK, k_GBTK, v_GBTK, is_causal=True)
        return self.out(rearrange(o_HBTK, "h b t k -> b t (h k)"))


def rotary_tables(tokens: int, width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position times frequency, fp32 [T, K]; dims i and i + K/2 of a head form a pair."""
    pair = torch.arange(width // 2, dtype=torch.float32, device=device)
    frequency = torch.exp(pair * (-2.0 * math.log(theta) / width))
    angle = torch.arange(tokens, dtype=torch.float32, device=device)[:, None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x_HBTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotate each pair (i, i + K/2) of a head by its angle, in fp32; returns the dtype of x."""
    first, second = x_HBTK.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x_HBTK * cos_TK + turned * sin_TK).to(x_HBTK.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.gate = shard(nn.Linear(d_model, hidden, bias=False), weight=P("tp", "fsdp"))
        self.up = shard(nn.Linear(d_model, hidden, bias=False), weight=P("tp", "fsdp"))
        self.down = shard(nn.Linear(hidden, d_model, bias=False), weight=P("fsdp", "tp"))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, d_model: int, heads: int, kv_heads: int, hidden: int, theta: float, dropout: float) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(d_model)
        self.attn = Attention(d_model, heads, kv_heads, theta)
        self.attn_drop = KeyedDropout(dropout)
        self.mlp_norm = RMSNorm(d_model)
        self.mlp = SwiGLU(d_model, hidden)
        self.mlp_drop = KeyedDropout(dropout)

    def forward(self, x_BTD: Tensor, keys: Keys) -> Tensor:
        x_BTD = x_BTD + self.attn_drop(self.attn(self.attn_norm(x_BTD)), keys)
        return x_BTD + self.mlp_drop(self.mlp(self.mlp_norm(x_BTD)), keys)


class Head(nn.Module):
    """Final norm and projection to the vocabulary."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.norm = RMSNorm(d_model)
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        shard(self, weight=P("tp", "fsdp"))

    def forward(self, x_BTD: Tensor, keys: Keys) -> Tensor:
        return nn.functional.linear(self.norm(x_BTD), self.weight)


class Llama(LayeredModel):
    """A decoder with `layers` blocks between embedding and head.

    Args:
        vocab_size, layers, d_model, heads, dropout: sizes. Inputs may have any length.
        kv_heads: key/value heads, a divisor of `heads`; 0 means `heads`.
        hidden: width of the SwiGLU; 0 means 8/3 of `d_model`, rounded up to a multiple of 64.
        theta: base of the rotary frequencies.
        tied: the head reads the embedding's weight.

    Raises:
        ModelError: heads that do not divide, an odd head width, or a dropout outside [0, 1).
    """

    shardings = Shardings(batch=P("dp"), layers=P("pp"), params=P(None), grads=P("dp"), optim=P("dp"))

    def __init__(
        self,
        vocab_size: int,
        layers: int,
        d_model: int,
        heads: int,
        dropout: float = 0.0,
        kv_heads: int = 0,
        hidden: int = 0,
        theta: float = 10000.0,
        tied: bool = False,
    ) -> None:
        kv_heads, hidden = kv_heads or heads, hidden or -(-8 * d_model // (3 * 64)) * 64
        _check_sizes(d_model, heads, kv_heads)
        blocks = {f"block{i}": Block(d_model, heads, kv_heads, hidden, theta, dropout) for i in range(layers)}
        embed, head = Embed(vocab_size, d_model, dropout), Head(vocab_size, d_model)
        super().__init__({"embed": embed, **blocks, "head": head}, [tie("head.weight", "embed.weight")] if tied else [])
        self.depth = layers

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        """The rule of the base class, but layers that write to the residual stream are scaled by its depth."""
        if name.endswith(("attn.out.weight", "mlp.down.weight")):
            return Normal(0.02 / math.sqrt(2 * self.depth))
        return super().init(name, shape)


def _check_sizes(d_model: int, heads: int, kv_heads: int) -> None:
    check_heads(d_model, heads)
    if kv_heads < 1 or heads % kv_heads:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ModelError(f"kv_heads={kv_heads} does not divide heads={heads}", exists=f"kv_heads in {fits}")
    if (d_model // heads) % 2:
        raise ModelError(
            f"d_model={d_model} with heads={heads} makes heads of width {d_model // heads}, which is odd",
            rule="rotary positions rotate pairs of dims, so a head's width is even",
            fix="fewer heads, or a larger d_model",
        )
