"""The order of samples: a keyed permutation of range(n) that is computed from an index alone.

A data loader therefore has no state to save, and any worker can compute the samples of any micro-batch. The permutation
is a generalised Feistel network over Z_a x Z_b, with a * b slightly above n. Values of n or more are sent through the
network again until they fall inside (cycle walking; Black and Rogaway, 2002).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from elaswave_spmd.determinism.rng import ORDER, Key, fold, philox4x32, root

_ROUNDS = 6


def permute_many(index: NDArray[np.int64], size: int, key: Key) -> NDArray[np.int64]:
    """The images of all elements of `index` under the permutation of range(`size`) that `key` names.

    Returns:
        int64, of the shape of `index`.

    Raises:
        ValueError: an index is outside range(`size`), or the size is outside 1 .. 2**62.
    """
    _check(size)
    flat = np.array(index, dtype=np.int64).reshape(-1)
    if flat.size and not (flat.min() >= 0 and flat.max() < size):
        raise ValueError(f"indices {flat.min()} .. {flat.max()} leave range({size})")
    a, b = _sides(size)
    # Cycle walking: a * b is slightly above size, so a few values take another pass.
    todo = np.arange(flat.size)
    while todo.size:
        flat[todo] = _network(flat[todo], a, b, key)
        todo = todo[flat[todo] >= size]
    return flat.reshape(np.shape(index))


def sample_ids(
    seed: int, step: int, global_batch: int, num_samples: int, slots: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """The ids of the samples of one step: int64, one for each slot of the global batch.

    Steps count from 1. Slot j of step t has the number i = (t - 1) * global_batch + j within the whole run. Each pass
    over the data, e = i // num_samples, has a permutation of its own, so that no sample comes twice within a pass.

    Args:
        slots: the slots that are wanted, int64 [any], ascending. Slots from `global_batch` on are those of the steps
            after this one. None: all slots of this step.
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
    """(a, b), both near sqrt(size), with a * b >= size. Fewer than sqrt(size) values are outside range(size)."""
    a = max(1, math.isqrt(size))
    return a, -(-size // a)


def _network(index: NDArray[np.int64], a: int, b: int, key: Key) -> NDArray[np.int64]:
    """One pass of the Feistel network: each round adds a keyed function of one half to the other half."""
    left, right = index // b, index % b
    words = np.array(key, np.uint32)
    counter = np.zeros((len(index), 4), np.uint32)
    for r in range(_ROUNDS):
        half = right if r % 2 == 0 else left
        counter[:, 0], counter[:, 1], counter[:, 2] = half & 0xFFFFFFFF, half >> 32, r
        out = philox4x32(counter, words).astype(np.uint64)
        # 63 bits, so that the word is positive as int64; modulo a or b it is close enough to uniform.
        word = ((out[:, 0] | out[:, 1] << np.uint64(32)) >> np.uint64(1)).astype(np.int64)
        if r % 2 == 0:
            left = (left + word % a) % a
        else:
            right = (right + word % b) % b
    return left * b + right
