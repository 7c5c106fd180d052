from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.determinism import Key, permute_many, sample_ids
from elaswave_spmd.determinism.permutation import _ROUNDS, _sides
from elaswave_spmd.determinism.rng import philox_block

word32 = st.integers(0, 2**32 - 1)
key_pairs = st.tuples(word32, word32)


def permute(index: int, size: int, key: Key) -> int:
    """The image of one index, on Python integers: the reference of `permute_many`."""
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


@given(st.integers(1, 700), key_pairs)
def test_it_is_a_bijection(size: int, key: tuple[int, int]) -> None:
    assert sorted(permute_many(np.arange(size), size, key).tolist()) == list(range(size))


@given(st.integers(1, 2**62), key_pairs, st.data())
def test_one_by_one_equals_many_at_once(size: int, key: tuple[int, int], data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    many = permute_many(np.array(index), size, key)
    assert many.dtype == np.int64 and [permute(i, size, key) for i in index] == many.tolist()
    assert len(set(many.tolist())) == len(set(index))


def test_shape_is_kept_and_nothing_is_overwritten() -> None:
    index = np.arange(12).reshape(3, 4)
    before = index.copy()
    assert permute_many(index, 12, (1, 2)).shape == (3, 4)
    assert permute_many(np.zeros(0, np.int64), 12, (1, 2)).shape == (0,)
    np.testing.assert_array_equal(index, before)


def test_it_mixes() -> None:
    size = 10_000
    out = permute_many(np.arange(size), size, (3, 4))
    assert (out == np.arange(size)).sum() < 10
    assert abs(np.corrcoef(np.arange(size), out)[0, 1]) < 0.05
    other = permute_many(np.arange(size), size, (3, 5))
    assert (out == other).sum() < 10


@pytest.mark.parametrize(("index", "size"), [(-1, 4), (4, 4), (0, 0), (0, 2**62 + 1)])
def test_what_is_out_of_range_is_refused(index: int, size: int) -> None:
    with pytest.raises(ValueError):
        permute_many(np.array([index]), size, (0, 0))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**63 - 1), st.integers(1, 60), st.integers(1, 25), st.integers(1, 4))
def test_no_sample_comes_twice_within_a_pass(seed: int, num_samples: int, global_batch: int, passes: int) -> None:
    steps = -(-num_samples * passes // global_batch)
    ids = np.concatenate([sample_ids(seed, t, global_batch, num_samples) for t in range(1, steps + 1)])
    for number in range(passes):
        one_pass = ids[number * num_samples : (number + 1) * num_samples]
        assert sorted(one_pass.tolist()) == list(range(num_samples))


def test_passes_differ_and_the_order_does_not_depend_on_the_batch_size() -> None:
    first, second = sample_ids(7, 1, 100, 100), sample_ids(7, 2, 100, 100)
    assert (first != second).any()
    small = np.concatenate([sample_ids(7, t, 8, 100) for t in range(1, 26)])
    np.testing.assert_array_equal(small, np.concatenate([first, second]))
    assert (sample_ids(8, 1, 100, 100) != first).any()


@given(st.integers(0, 5), st.integers(1, 9), st.integers(1, 40), st.integers(1, 60), st.data())
@settings(deadline=None)
def test_some_slots_are_those_of_the_whole_batch(seed, step, global_batch, num_samples, data) -> None:
    slots = np.array(sorted(data.draw(st.sets(st.integers(0, global_batch - 1)))), dtype=np.int64)
    whole = sample_ids(seed, step, global_batch, num_samples)
    assert np.array_equal(sample_ids(seed, step, global_batch, num_samples, slots), whole[slots])
