"""Norms of pages: each value depends on its page alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.worker.page_norms import _folded, page_norm_values

PAGES = st.sampled_from([64, 128, 192, 256, 320, 4096])


def folded(page: list[float]) -> float:
    """The sum of squares by the documented rule, one addition at a time."""
    x = [torch.tensor(v) * torch.tensor(v) for v in page]
    x += [torch.tensor(0.0)] * ((1 << (len(x) - 1).bit_length()) - len(x))
    while len(x) > 1:
        x = [a + b for a, b in zip(x[: len(x) // 2], x[len(x) // 2 :], strict=True)]
    return float(x[0])


@settings(deadline=None)
@given(page_size=PAGES, pages=st.integers(1, 40), rest=st.integers(0, 3), seed=st.integers(0, 2**32), data=st.data())
def test_any_cut_of_a_page_range_gives_the_same_values(
    page_size: int, pages: int, rest: int, seed: int, data: st.DataObject
) -> None:
    length = pages * page_size + rest * 64 % page_size
    x = torch.randn(length, generator=torch.Generator().manual_seed(seed)) * 10
    whole = page_norm_values(x, page_size)
    assert len(whole) == -(-length // page_size)
    cuts = sorted({0, pages, *data.draw(st.lists(st.integers(0, pages), max_size=5))})
    parts = [x[a * page_size : b * page_size] for a, b in itertools.pairwise(cuts)]
    parts[-1] = x[cuts[-2] * page_size :]
    assert [value for part in parts for value in page_norm_values(part, page_size)] == whole


@pytest.mark.parametrize("page_size, length", [(64, 64), (128, 64), (192, 192), (192, 128), (64, 64 * 35)])
def test_the_order_of_additions_is_the_stated_one(page_size: int, length: int) -> None:
    x = torch.randn(length, generator=torch.Generator().manual_seed(length))
    pages = x.tolist()
    wanted = [folded(pages[at : at + page_size]) for at in range(0, length, page_size)]
    assert page_norm_values(x, page_size) == wanted


@given(pages=st.integers(1, 5), size=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_tensors_and_arrays_are_folded_alike(pages: int, size: int, seed: int) -> None:
    """On an accelerator it is tensors that are folded."""
    x = torch.randn(pages, size, generator=torch.Generator().manual_seed(seed)).square()
    as_array = _folded(x.clone().numpy(), 1)
    assert torch.equal(_folded(x.clone(), 1), torch.from_numpy(as_array)) and as_array.shape == (pages, 1)


def test_padding_adds_nothing_and_the_argument_is_not_changed() -> None:
    x = torch.randn(100)
    padded, before = torch.cat([x, torch.zeros(28)]), x.clone()
    assert page_norm_values(padded, 128) == page_norm_values(x, 128)
    assert torch.equal(x, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_affects_its_page_only(bad: float) -> None:
    x = torch.ones(256)
    x[70] = bad
    values = page_norm_values(x, 64)
    assert not math.isfinite(values[1]) and [values[0], *values[2:]] == [64.0] * 3


def test_threads_do_not_matter() -> None:
    x = torch.randn(4096 * 40)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(page_norm_values(x, 4096))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]
