"""Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases.

Shape suffixes: B samples of a micro-batch, T tokens, D model width, H query heads, G key/value heads, K width of a
head, F hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from elaswave_spmd.determinism import Init, KeyedDropout, Keys, Normal
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models.base import LayeredModel
from elaswave_spmd.models.gpt import check_heads, check_norm_eps
from elaswave_spmd.sharding import P, Shardings, shard, tie


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary frequencies by which Llama 3 has a longer context.

    What counts is how often a frequency turns within the `original_max_position_embeddings` tokens of the first
    training. Slow frequencies, which turn fewer than `low_freq_factor` times, are divided by `factor`. Fast ones, which
    turn more than `high_freq_factor` times, stay as they are. Those between are interpolated. The fields are those of
    `rope_scaling` in a config.json of Hugging Face.

    Raises:
        ModelError: a field that is not a number above 0, or a `high_freq_factor` that is not above `low_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ModelError(f"rope_scaling.{field.name}={value!r} is not a number above 0", fix=_ROPE_EXAMPLE)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(
                f"rope_scaling has high_freq_factor={self.high_freq_factor} and low_freq_factor={self.low_freq_factor}",
                rule="high_freq_factor is above low_freq_factor",
                fix=_ROPE_EXAMPLE,
            )

    @classmethod
    def of(cls, given: object) -> RopeScaling | None:
        """The scaling that the argument `rope_scaling` of a model stands for; None if frequencies are not scaled.

        Raises:
            ModelError: the argument is not a mapping with exactly these fields, or a value is out of range.
        """
        if given is None or isinstance(given, RopeScaling):
            return given
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or set(given) != set(names):
            raise ModelError(
                f"rope_scaling={given!r} is not a mapping with these fields",
                rule="it is the scaling of Llama 3, with all of its fields and no other",
                exists=", ".join(names),
                fix=_ROPE_EXAMPLE,
            )
        return cls(**given)

    def scaled(self, frequency: Tensor) -> Tensor:
        """The scaled frequencies, in radians per token as the given ones."""
        turns = frequency * (self.original_max_position_embeddings / (2 * math.pi))
        fast = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0.0, 1.0)
        return (1 - fast) * (frequency / self.factor) + fast * frequency


_ROPE_EXAMPLE = (
    "'++model.args.rope_scaling={factor: 32, low_freq_factor: 1, high_freq_factor: 4, "
    "original_max_position_embeddings: 8192}'"
)


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

    def __init__(
        self, d_model: int, heads: int, kv_heads: int, theta: float, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        width = d_model // heads
        self.heads = heads
        self.kv_heads = kv_heads
        self.theta = theta
        self.scaling = scaling
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
        cos_TK, sin_TK = rotary_tables(q_HBTK.shape[2], q_HBTK.shape[3], self.theta, x_BTD.device, self.scaling)
        q_HBTK, k_GBTK = rotate(q_HBTK, cos_TK, sin_TK), rotate(k_GBTK, cos_TK, sin_TK)
        shared = self.heads // self.kv_heads
        if shared > 1:
            k_GBTK, v_GBTK = (repeat(z, "g b t k -> (g n) b t k", n=shared) for z in (k_GBTK, v_GBTK))
        o_HBTK = nn.functional.scaled_dot_product_attention(q_HBTK, k_GBTK, v_GBTK, is_causal=True)
        return self.out(rearrange(o_HBTK, "h b t k -> b t (h k)"))


def rotary_tables(
    tokens: int, width: int, theta: float, device: torch.device, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position times frequency, each fp32 [T, K]. Dims i and i + K/2 of a head form a pair.

    Args:
        tokens, width: T and K.
        theta: base of the frequencies.
    """
    pair = torch.arange(width // 2, dtype=torch.float32, device=device)
    frequency = torch.exp(pair * (-2.0 * math.log(theta) / width))
    if scaling is not None:
        frequency = scaling.scaled(frequency)
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
    """One pre-norm transformer layer around the given attention, with dropout on both residual branches."""

    def __init__(self, d_model: int, attention: Attention, hidden: int, dropout: float, norm_eps: float) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(d_model, norm_eps)
        self.attn = attention
        self.attn_drop = KeyedDropout(dropout)
        self.mlp_norm = RMSNorm(d_model, norm_eps)
        self.mlp = SwiGLU(d_model, hidden)
        self.mlp_drop = KeyedDropout(dropout)

    def forward(self, x_BTD: Tensor, keys: Keys) -> Tensor:
        x_BTD = x_BTD + self.attn_drop(self.attn(self.attn_norm(x_BTD)), keys)
        return x_BTD + self.mlp_drop(self.mlp(self.mlp_norm(x_BTD)), keys)


class Head(nn.Module):
    """Final norm and projection to the vocabulary."""

    def __init__(self, vocab_size: int, d_model: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(d_model, norm_eps)
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        shard(self, weight=P("tp", "fsdp"))

    def forward(self, x_BTD: Tensor, keys: Keys) -> Tensor:
        return nn.functional.linear(self.norm(x_BTD), self.weight)


class Llama(LayeredModel):
    """A decoder with `layers` blocks between embedding and head.

    Args:
        vocab_size, layers, d_model, heads, dropout: the sizes of the model. Inputs may have any length.
        kv_heads: number of key/value heads, a divisor of `heads`; 0 means `heads`.
        hidden: width of the SwiGLU; 0 means 8/3 of `d_model`, rounded up to a multiple of 64.
        theta: base of the rotary frequencies.
        tied: the head reads the embedding's weight.
        norm_eps: number that every norm adds to the mean square.
        rope_scaling: the fields of a `RopeScaling`; None: frequencies are not scaled.

    Raises:
        ModelError: `heads` does not divide `d_model`, or `kv_heads` does not divide `heads`; an odd head width; a
            dropout outside [0, 1); a `norm_eps` or a `theta` that is not above 0; or an invalid `rope_scaling`.
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
        norm_eps: float = 1e-5,
        rope_scaling: Mapping[str, float] | None = None,
    ) -> None:
        kv_heads, hidden = kv_heads or heads, hidden or -(-8 * d_model // (3 * 64)) * 64
        _check_sizes(d_model, heads, kv_heads)
        check_norm_eps(norm_eps)
        if not theta > 0:
            raise ModelError(
                f"theta={theta} is not above 0", rule="rotary frequencies are powers of theta", fix="theta=10000.0"
            )
        scaling = RopeScaling.of(rope_scaling)
        blocks = {}
        for i in range(layers):
            attention = Attention(d_model, heads, kv_heads, theta, scaling)
            blocks[f"block{i}"] = Block(d_model, attention, hidden, dropout, norm_eps)
        embed, head = Embed(vocab_size, d_model, dropout), Head(vocab_size, d_model, norm_eps)
        super().__init__({"embed": embed, **blocks, "head": head}, [tie("head.weight", "embed.weight")] if tied else [])
        self.depth = layers

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        """The rules of the base class, but smaller values, by depth, for weights that write to the residual stream."""
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
