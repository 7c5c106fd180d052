"""Digests: any single difference is seen, and columns that differ are counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.recovery.checks import DIGEST_BYTES, DIGEST_COLUMNS
from elaswave_spmd.runtime.devices import device_of
from elaswave_spmd.runtime.devices.host import HostDevice
from elaswave_spmd.worker.digests import Digester, MicrobatchDigests

DIGESTER = Digester(HostDevice(device_of("cpu")))
DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def columns(digest: bytes) -> np.ndarray:
    return np.frombuffer(digest, np.uint64)


@given(st.integers(0, 2**32), st.integers(1, 300), st.sampled_from(list(DTYPES)), st.data())
def test_every_bit_of_every_element_counts(seed: int, size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    at = data.draw(st.integers(0, size - 1))
    bits = 8 * tensor.element_size()
    bit = data.draw(st.integers(0, bits - 1))
    other = tensor.clone()
    other.view(DTYPES[dtype])[at] ^= 1 << bit if bit < bits - 1 else -(1 << bit)
    one, two = columns(DIGESTER.digest(tensor)), columns(DIGESTER.digest(other))
    assert np.flatnonzero(one != two).tolist() == [at % DIGEST_COLUMNS]
    assert DIGESTER.digest(tensor) == Digester(HostDevice(device_of("cpu"))).digest(tensor.clone())


@given(st.integers(0, 2**32), st.integers(2, 40))
def test_elements_that_change_places_are_seen(seed: int, rows: int) -> None:
    tensor = torch.randn(rows * DIGEST_COLUMNS, generator=torch.Generator().manual_seed(seed))
    moved = tensor.view(rows, DIGEST_COLUMNS).roll(1, 0).reshape(-1)
    assert (columns(DIGESTER.digest(tensor)) != columns(DIGESTER.digest(moved))).all()


@pytest.mark.parametrize("tensor", [torch.tensor(1.5), torch.zeros(0), torch.full((3, 5), torch.nan)])
def test_odd_tensors_have_digests_of_the_same_size(tensor: torch.Tensor) -> None:
    assert len(DIGESTER.digest(tensor)) == DIGEST_BYTES * DIGEST_COLUMNS
    assert DIGESTER.digest(tensor) == DIGESTER.digest(tensor.clone()) and DIGESTER.digest(None) == b""


def test_zero_and_minus_zero_are_two_results() -> None:
    assert DIGESTER.digest(torch.tensor([0.0])) != DIGESTER.digest(torch.tensor([-0.0]))


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_all_nan_are_one_result_of_a_sum_and_every_other_bit_counts(dtype: torch.dtype) -> None:
    one = torch.tensor([1.0, torch.nan, -0.0, torch.inf, torch.nan]).to(dtype)
    other = one.clone()
    other.view(DTYPES[dtype])[one.isnan()] |= 1
    other[1].neg_()
    assert DIGESTER.digest(one) != DIGESTER.digest(other)
    assert DIGESTER.digest_of_sum(one) == DIGESTER.digest_of_sum(other)
    for at, value in ((0, 2.0), (2, 0.0), (3, -torch.inf), (4, 3.0)):
        changed = other.clone()
        changed[at] = value
        assert DIGESTER.digest_of_sum(changed) != DIGESTER.digest_of_sum(other)
    assert DIGESTER.digest_of_sum(one[:1]) == DIGESTER.digest(one[:1])


def test_the_results_of_a_micro_batch_by_layer() -> None:
    digests = MicrobatchDigests(DIGESTER)
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    digests.forward(4, one)
    digests.forward(5, two)
    digests.input_gradient(5, three)
    digests.input_gradient(4, None)
    digests.weight_gradient(4, two)  # in whichever order both come
    digests.weight_gradient(5, one)
    of = DIGESTER.digest
    assert digests.rows == ((4, of(one), b"", of(two)), (5, of(two), of(three), of(one)))
