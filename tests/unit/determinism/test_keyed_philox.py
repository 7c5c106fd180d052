from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.determinism import fast_words, fold, philox4x32, root, words
from elaswave_spmd.determinism.rng import WordSource, philox_block
from tests.waiting import PATIENCE_S

# Published known-answer vectors of Random123 (kat_vectors, philox4x32 with 10 rounds): counter, key, output.
RANDOM123 = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
word32, word64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
key_pairs = st.tuples(word32, word32)


def hexes(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), RANDOM123)
def test_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    out = philox4x32(np.array(hexes(counter), np.uint32), np.array(hexes(key), np.uint32))
    assert tuple(out.tolist()) == hexes(expected)
    assert philox_block(hexes(counter), hexes(key)) == hexes(expected)  # type: ignore[arg-type]


def test_leading_dims_of_counter_and_key_broadcast() -> None:
    counter = np.arange(24, dtype=np.uint32).reshape(2, 3, 4)
    key = np.arange(6, dtype=np.uint32).reshape(3, 2)
    out = philox4x32(counter, key)
    assert out.shape == (2, 3, 4) and out.dtype == np.uint32
    assert tuple(out[1, 2].tolist()) == philox_block((20, 21, 22, 23), (4, 5))


@given(key_pairs, st.integers(0, 2**66 - 100), st.integers(0, 40), word64)
def test_randomgen_gives_the_words_of_the_oracle(key: tuple[int, int], start: int, count: int, stream: int) -> None:
    expected = words(key, start, count, stream)
    assert expected.shape == (count,)
    np.testing.assert_array_equal(fast_words(key, start, count, stream), expected)


@given(st.lists(st.tuples(key_pairs, st.integers(0, 9), st.integers(0, 20), word64), min_size=1, max_size=5))
def test_one_source_serves_any_keys_and_streams_in_turn(calls: list[tuple[tuple[int, int], int, int, int]]) -> None:
    source = WordSource()
    for call in calls:
        np.testing.assert_array_equal(source.words(*call), words(*call))


@given(key_pairs, st.integers(0, 50), st.integers(0, 50))
def test_words_do_not_depend_on_where_reading_begins(key: tuple[int, int], start: int, count: int) -> None:
    np.testing.assert_array_equal(words(key, start, count), words(key, 0, start + count)[start:])


def test_streams_and_blocks_above_32_bits_are_told_apart() -> None:
    key = root(1)
    seen = {fast_words(key, start, 4, stream).tobytes() for start in (0, 2**34) for stream in (0, 1, 2**32, 2**63)}
    assert len(seen) == 8


def test_fold_is_the_head_of_one_block() -> None:
    assert fold((7, 9), 1, 2) == philox_block((1, 2, 0, 0), (7, 9))[:2]
    assert fold((7, 9), -1) == fold((7, 9), 2**32 - 1)
    assert root(3 + (5 << 32)) == (3, 5)
    with pytest.raises(ValueError, match="fold twice"):
        fold((7, 9), 1, 2, 3, 4, 5)


def test_the_room_imports_without_torch_and_knows_its_names() -> None:
    program = """
import sys, elaswave_spmd.keyed as keyed
assert "torch" not in sys.modules
eager = [name for name in keyed.__all__ if name not in keyed._NEEDS_TORCH]
for name in eager: getattr(keyed, name)
assert "torch" not in sys.modules
for name in keyed.__all__: getattr(keyed, name)
try: keyed.nothing
except AttributeError as error: assert "nothing" in str(error)
else: raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)
