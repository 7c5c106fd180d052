"""Initial values of parameters. An element depends on (seed, name, index) only, so any worker can make any tile."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elaswave_spmd.determinism.rng import INIT, Key, fast_words, fold, root
from elaswave_spmd.errors import ModelError

CHUNK = 4096
"""Elements are computed in whole aligned chunks of this size, even where fewer are needed. numpy's vector loops may
round the last elements of an array differently, and a tile must have the bits of that slice of the whole parameter."""


@dataclass(frozen=True)
class Normal:
    """Gaussian values of mean 0 and standard deviation `std`."""

    std: float

    def __post_init__(self) -> None:
        _finite("std of Normal", self.std)


@dataclass(frozen=True)
class Uniform:
    """Values uniform in (-bound, bound)."""

    bound: float

    def __post_init__(self) -> None:
        _finite("bound of Uniform", self.bound)


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def __post_init__(self) -> None:
        if math.isnan(self.value):
            raise ModelError(f"value of Constant is {self.value}", rule="it is a number")


Init = Normal | Uniform | Constant


def materialize(init: Init, seed: int, name: str, start: int, stop: int) -> NDArray[np.float32]:
    """Elements [start, stop) of the flattened parameter `name`: float32 [stop - start], computed in float64.

    Element i depends on (seed, name, i) and `init` only.

    Raises:
        ValueError: start > stop or start < 0.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"elements [{start}, {stop}) of {name!r} are not a range")
    if isinstance(init, Constant):
        return np.full(stop - start, init.value, np.float32)
    key = _key(seed, name)
    out = np.empty(stop - start, np.float32)
    for chunk in range(start // CHUNK, -(-stop // CHUNK)):
        base = chunk * CHUNK
        lo, hi = max(start, base), min(stop, base + CHUNK)
        out[lo - start : hi - start] = _chunk(init, key, base)[lo - base : hi - base]
    return out


def _chunk(init: Normal | Uniform, key: Key, base: int) -> NDArray[np.float32]:
    # One 32-bit word per element. Adding 0.5 excludes 0 and 1, so that the logarithm is finite.
    uniform = (fast_words(key, base, CHUNK).astype(np.float64) + 0.5) * 2.0**-32
    if isinstance(init, Uniform):
        return ((2.0 * uniform - 1.0) * init.bound).astype(np.float32)
    first, second = uniform[: CHUNK // 2], uniform[CHUNK // 2 :]  # Box-Muller: two uniform numbers make two normal ones
    radius, angle = np.sqrt(-2.0 * np.log(first)) * init.std, (2.0 * math.pi) * second
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)]).astype(np.float32)


def _key(seed: int, name: str) -> Key:
    digest = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), "<u4")
    return fold(fold(root(seed), 0, 0, 0, INIT), *(int(word) for word in digest))


def _finite(what: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ModelError(f"{what} is {value}", rule="it is a finite number of at least 0")
