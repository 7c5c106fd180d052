"""Philox-4x32-10 (Salmon et al., SC11), a counter-based generator: a random word is a pure function of key and counter.

It is implemented three times, with equal output: on numpy arrays (the reference), on Python integers (for one block),
and through randomgen's compiled code (for many words). A key is a pair of 32-bit words. A stream is named by (key,
64-bit stream number). Word i of a stream is lane i % 4 of the block whose counter is (i // 4 low, i // 4 high, stream
low, stream high). No generator state is kept, so there is none to save or to move between workers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import randomgen
from numpy.typing import NDArray

Key = tuple[int, int]
Block = tuple[int, int, int, int]

# The purpose of a sub-key of the run's seed, in the top four bits of the last word that is folded in. Different
# purposes therefore never share a key.
DROPOUT, ORDER, INIT, CHECKS, SUM_CHECKS, SAMPLES = 1 << 28, 2 << 28, 3 << 28, 4 << 28, 5 << 28, 6 << 28
# Of generators that a user's code draws from: they are seeded by `generator_seeds`.
NOISE, AUGMENTATION = 7 << 28, 8 << 28

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK32 = 0xFFFFFFFF
MASK64 = (1 << 64) - 1
MASK128 = (1 << 128) - 1


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Ten rounds of Philox-4x32 for every counter; leading dims of the two arguments broadcast.

    Args:
        counter: uint32 [..., 4], least significant word first.
        key: uint32 [..., 2].

    Returns:
        uint32 [..., 4], the four output words of each block.
    """
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[..., i].astype(np.uint64) for i in range(2))
    mask, shift = np.uint64(MASK32), np.uint64(32)
    m0, m1 = (np.uint64(m) for m in MULTIPLIERS)
    w0, w1 = (np.uint64(w) for w in WEYL)
    for _ in range(ROUNDS):
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & mask, (p0 >> shift) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + w0) & mask, (k1 + w1) & mask
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def philox_block(counter: Block, key: Key) -> Block:
    """One block on Python integers. For a single block this is ten times faster than numpy."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


def root(seed: int) -> Key:
    """The root key of a run: the two 32-bit words of its seed. A negative seed is taken modulo 2**64."""
    return split64(seed)


def split64(value: int) -> tuple[int, int]:
    """(low word, high word) of an integer modulo 2**64."""
    return value & MASK32, (value >> 32) & MASK32


def fold(key: Key, *words: int) -> Key:
    """Derives a sub-key from up to four 32-bit words: the first 64 bits of Philox(counter=words, padded with zeros).

    Words are taken modulo 2**32. Each purpose folds in a fixed number of words, so the padding is unambiguous.

    Raises:
        ValueError: more than four words.
    """
    if len(words) > 4:
        raise ValueError(f"fold takes at most four 32-bit words, got {len(words)}: fold twice")
    padded = [w & MASK32 for w in words] + [0] * (4 - len(words))
    out = philox_block((padded[0], padded[1], padded[2], padded[3]), key)
    return out[0], out[1]


def generator_seeds(purpose: int, *numbers: int) -> np.random.SeedSequence:
    """Seeds of a generator of numpy or torch. Each number, modulo 2**64, has two words, so that no two keys coincide.

    numpy itself takes as many words as a number needs, and pads with zeros: [1, 2, 3] and [1, 2, 3, 0] are the same.
    """
    return np.random.SeedSequence([purpose, *(word for number in numbers for word in split64(number))])


def words(key: Key, start: int, count: int, stream: int = 0) -> NDArray[np.uint32]:
    """Words [start, start + count) of a stream under `key`: uint32 [count]. The numpy reference of `fast_words`."""
    first, last = start // 4, -(-(start + count) // 4)
    blocks = np.arange(first, last, dtype=np.uint64)
    counter = np.empty((len(blocks), 4), np.uint32)
    counter[:, 0] = blocks & np.uint64(MASK32)
    counter[:, 1] = blocks >> np.uint64(32)
    counter[:, 2:] = split64(stream)
    out = philox4x32(counter, np.array(key, np.uint32)).reshape(-1)
    return out[start - 4 * first : start - 4 * first + count]


def fast_words(key: Key, start: int, count: int, stream: int = 0) -> NDArray[np.uint32]:
    """The same words as those of `words`, made by randomgen's compiled Philox (4 ns per word)."""
    return WordSource().words(key, start, count, stream)


class WordSource:
    """A source of `fast_words` for many calls: it keeps one generator object and sets its key and counter at each call.

    The result of `words` depends on its arguments only. A source may be used by one thread at a time. Measured: making
    a generator takes 50 us, setting its state 4 us; drawing takes 13 us by `integers` of numpy's Generator and 1 us by
    `uintegers`.
    """

    __slots__ = ("_bits", "_draw", "_state")

    def __init__(self) -> None:
        self._bits: Any = None  # made on first use, as most `Keys` are passed on without drawing

    def words(self, key: Key, start: int, count: int, stream: int = 0) -> NDArray[np.uint32]:
        """Words [start, start + count) of a stream under `key`: uint32 [count]."""
        if self._bits is None:
            self._bits = randomgen.Philox(key=0, counter=0, number=4, width=32)
            self._draw = randomgen.ExtendedGenerator(self._bits).uintegers
            self._state = self._bits.state
        # randomgen increments the counter before it makes the first block, so it is set to one less.
        before = (start // 4 + ((stream & MASK64) << 64) - 1) & MASK128
        inner = self._state["state"]
        inner["counter"][:] = before & MASK32, before >> 32 & MASK32, before >> 64 & MASK32, before >> 96
        inner["key"][:] = key
        self._bits.state = self._state
        skip = start % 4
        return self._draw(skip + count, bits=32)[skip:]
