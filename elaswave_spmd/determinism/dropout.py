"""Keyed dropout: the mask of a sample depends on (seed, step, sample id, layer, site) and nothing else.

Two implementations compute the same mask: randomgen for eager tensors on the CPU, because it is about ten times faster,
and int64 torch operators for compiled programs and other devices. Tests compare them. A random 32-bit word is compared
with the threshold as an integer, never as a float, so the two implementations agree bit for bit.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd.determinism.rng import DROPOUT, MASK32, MULTIPLIERS, ROUNDS, WEYL, fold, root, split64
from elaswave_spmd.determinism.rng_keys import Keys
from elaswave_spmd.errors import ModelError

# A module that is called twice within one layer call needs two masks. Its key therefore contains the number of earlier
# uses, above the bits of the site: `site + (use << USE_SHIFT)`.
USE_SHIFT = 16
# The bits above these are those of the purpose, DROPOUT. One more use would run into them and repeat the first masks.
MOST_USES = DROPOUT // 2**USE_SHIFT
_BF16_ONE = 0x3F80  # the bits of 1.0 in bfloat16, which numpy has no type for


def keyed_dropout(x_B___: Tensor, p: float, keys: Keys, site: int) -> Tensor:
    """Zeroes each element with probability p and scales the others by 1 / (1 - p).

    Args:
        x_B___: floating-point tensor [B, ...]; dim 0 is the sample. Contiguous tensors are fastest.
        p: probability in [0, 1); 0, or at most 2**-54, returns `x_B___` itself.
        keys: the keys of this layer call; `keys.sample_ids` has B elements.
        site: the number of the call site within the layer.

    Returns:
        A tensor of the shape and dtype of `x_B___`.

    Raises:
        ModelError: p outside [0, 1), or the site is used more than `MOST_USES` times within the layer call.
    """
    check_probability(p)
    if threshold(p) == 2**32:  # p is 0, or so small that no random word is above the threshold
        return x_B___
    use = keys.count(site)
    if use >= MOST_USES:
        raise ModelError(
            f"dropout {site} of a layer is used for time {use + 1:,} within one call of the layer",
            rule=f"within one call a KeyedDropout has {MOST_USES:,} masks; then they would repeat",
            fix="call it once for all steps of a loop, on their stacked inputs, or use several KeyedDropouts in turn",
        )
    word = site + (use << USE_SHIFT)
    scale = 1.0 / (1.0 - p)
    # All branches have the same bits: multiplying by a mask of 0 and 1 is exact, and multiplying by the scale rounds
    # once. For fp32 and bf16 autograd keeps a mask in the dtype of x, as F.dropout does. A mask of one byte per element
    # would save memory and takes 5 to 10 % more time (benchmarks/dropout.py).
    if x_B___.device.type != "cpu" or torch.compiler.is_compiling():
        return (x_B___ * keep_mask_torch(tuple(x_B___.shape), p, keys, word, x_B___.device)) * scale
    mask = keep_mask_numpy(tuple(x_B___.shape), p, keys, word)
    if x_B___.dtype == torch.float32:
        return x_B___ * torch.from_numpy(np.multiply(mask, np.float32(scale)))
    if x_B___.dtype == torch.bfloat16:
        return (x_B___ * torch.from_numpy(np.multiply(mask, np.uint16(_BF16_ONE))).view(torch.bfloat16)) * scale
    return (x_B___ * torch.from_numpy(mask)) * scale


class KeyedDropout(nn.Module):
    """`keyed_dropout` as a module. `LayeredModel` sets `site` to its position among the KeyedDropouts of its layer."""

    def __init__(self, p: float) -> None:
        super().__init__()
        check_probability(p)
        self.p = float(p)
        self.site = 0

    def forward(self, x_B___: Tensor, keys: Keys) -> Tensor:
        """Applies dropout in training mode; returns `x_B___` in evaluation mode."""
        return keyed_dropout(x_B___, self.p, keys, self.site) if self.training else x_B___

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site}"


def check_probability(p: float) -> None:
    """Raises ModelError unless 0 <= p < 1."""
    if not 0.0 <= p < 1.0:
        raise ModelError(f"a dropout probability of {p} is not in [0, 1)", fix="0 switches dropout off")


def threshold(p: float) -> int:
    """The threshold of the mask: an element is kept if its random word is below it."""
    return int((1.0 - p) * 2**32)


def keep_mask_numpy(shape: tuple[int, ...], p: float, keys: Keys, word: int) -> np.ndarray:
    """The mask as a bool array of `shape`, made by randomgen. Reads the key tensors, so these must be on the CPU."""
    samples = keys.sample_ids.tolist()
    _check_rows(shape, len(samples))
    key = fold(root(int(keys.seed.item())), *split64(int(keys.step.item())), int(keys.layer.item()), word | DROPOUT)
    mask = np.empty((shape[0], math.prod(shape[1:])), np.bool_)
    below = np.uint32(threshold(p))
    for row, sample in zip(mask, samples, strict=True):
        np.less(keys.source.words(key, 0, mask.shape[1], sample), below, out=row)
    return mask.reshape(shape)


def keep_mask_torch(shape: tuple[int, ...], p: float, keys: Keys, word: int, device: torch.device) -> Tensor:
    """The same mask as a bool tensor on `device`. Uses int64 torch operators only, so that it compiles everywhere."""
    samples, seed, step, layer = (t.to(device) for t in (keys.sample_ids, keys.seed, keys.step, keys.layer))
    _check_rows(shape, samples.shape[0])
    # As `fold` on integers: the sub-key's counter is (step low, step high, layer, word), its key the seed.
    last = torch.full_like(seed, word | DROPOUT)
    key_0, key_1, _, _ = _philox(*_split64(step), layer & MASK32, last, *_split64(seed))
    count = math.prod(shape[1:])
    block = torch.arange(-(-count // 4), dtype=torch.int64, device=device)
    sample_lo, sample_hi = _split64(samples[:, None])
    out = _philox(*_split64(block), sample_lo, sample_hi, key_0, key_1)
    return (torch.stack(out, dim=-1).flatten(1)[:, :count] < threshold(p)).view(shape)


def _philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, ...]:
    """Philox-4x32-10 on broadcasting int64 tensors whose values are 32-bit words.

    A product of two words may overflow int64. Overflow wraps around in two's complement, so that bits 32 to 63 are
    correct once they are masked.
    """
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = _high(p1) ^ c1 ^ k0, p1 & MASK32, _high(p0) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


def _split64(value: Tensor) -> tuple[Tensor, Tensor]:
    return value & MASK32, _high(value)


def _high(value: Tensor) -> Tensor:
    """Bits 32 to 63 of each element.

    The shift amount is a tensor: for a shift by a Python number XLA divides, which rounds negative values toward zero.
    """
    return torch.bitwise_right_shift(value, torch.full((), 32, dtype=torch.int64, device=value.device)) & MASK32


def _check_rows(shape: tuple[int, ...], samples: int) -> None:
    if len(shape) < 1 or shape[0] != samples:
        raise ModelError(
            f"dropout got an input of shape {shape} with {samples} sample ids",
            rule="the input has one row per sample id in dim 0",
        )
