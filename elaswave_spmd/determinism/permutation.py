"""A keyed bijection on range(n), computed from the index alone: the order of samples without a loader to save.

A generalised Feistel network over Z_a x Z_b with a * b barely above n, and cycle walking for the few values outside.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from elaswave_spmd.determinism.rng import ORDER, Key, fold, philox4x32, philox_block, root

_ROUNDS = 6


def permute(index: int, size: int, key: Key) -> int:
    """Where the permutation named by `key` of range(`size`) sends `index`.

    Raises:
        ValueError: `index` outside range(`size`), or a size outside 1 .. 2**62.
    """
    _check(size)
    if not 0 <= index < size:
        raise ValueError(f"index {index} is outside range({size})")
    a, b = _sides(size)
    while True:
        left, right = index // b, index % b
        for r in range(_ROUNDS):
            half = right if r % 2 == 0 else left
            out = philox_block((half & 0xFFFFFFFF, half >> 32, r, 0), key)
            word = (out[0] | out[1] << 32) >> 1
            if r % 2 == 0:
                left = (left + word % a) % a
            else:
                right = (right + word % b) % b
        index = left * b + right
        if index < size:
            return index


def permute_many(index: NDArray[np.int64], size: int, key: Key) -> NDArray[np.int64]:
    """`permute` of every element of an int64 array of any shape."""
    _check(size)
    flat = np.array(index, dtype=np.int64).reshape(-1)
    if flat.size and not (flat.min() >= 0 and flat.max() < size):
        raise ValueError(f"indices {flat.min()} .. {flat.max()} leave range({size})")
    a, b = _sides(size)
    todo = np.arange(flat.size)
    while todo.size:
        flat[todo] = _network(flat[todo], a, b, key)
        todo = todo[flat[todo] >= size]
    return flat.reshape(np.shape(index))


def sample_ids(
    seed: int, step: int, global_batch: int, num_samples: int, slots: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """The samples of one step: of `slots`, int64 [any] ascending, or by slot of the whole batch, int64 [global_batch].

    Steps count from 1. Slot j of step t is number i = (t - 1) * global_batch + j of the run; pass e = i // num_samples
    permutes all samples anew, so that none comes twice within a pass.
    """
    number = (step - 1) * global_batch + (np.arange(global_batch, dtype=np.int64) if slots is None else slots)
    out = np.empty(len(number), np.int64)
    if not len(number):
        return out
    passes = number // num_samples
    for epoch in range(int(passes[0]), int(passes[-1]) + 1):
        here = passes == epoch
        key = fold(root(seed), epoch & 0xFFFFFFFF, epoch >> 32, 0, ORDER)
        out[here] = permute_many(number[here] % num_samples, num_samples, key)
    return out


def _check(size: int) -> None:
    if not 1 <= size <= 1 << 62:
        raise ValueError(f"a permutation needs 1 .. 2**62 elements, got {size}")


def _sides(size: int) -> tuple[int, int]:
    """a * b >= size with a, b near sqrt(size): fewer than sqrt(size) values lie outside and must walk on."""
    a = max(1, math.isqrt(size))
    return a, -(-size // a)


def _network(index: NDArray[np.int64], a: int, b: int, key: Key) -> NDArray[np.int64]:
    left, right = index // b, index % b
    words = np.array(key, np.uint32)
    counter = np.zeros((len(index), 4), np.uint32)
    for r in range(_ROUNDS):
        half = right if r % 2 == 0 else left
        counter[:, 0], counter[:, 1], counter[:, 2] = half & 0xFFFFFFFF, half >> 32, r
        out = philox4x32(counter, words).astype(np.uint64)
        word = ((out[:, 0] | out[:, 1] << np.uint64(32)) >> np.uint64(1)).astype(np.int64)
        if r % 2 == 0:
            left = (left + word % a) % a
        else:
            right = (right + word % b) % b
    return left * b + right
