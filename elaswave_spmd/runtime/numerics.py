"""Reductions whose order is fixed by construction: they use elementwise operations only."""

from __future__ import annotations

import torch
from torch import Tensor

_PAGES_AT_ONCE = 32  # 512 KiB of fp32 at the default page size: the folds stay in cache
_NARROW = 64  # elements per page down to which pages are folded in those groups, and from which all are folded at once


def page_norm_values(gradient: Tensor, page_size: int) -> list[float]:
    """Sum of squares of each page of a run of pages, in fp32.

    A page is squared elementwise and folded in halves, x[:n/2] + x[n/2:], until one element is left; a short page is
    padded with zeros to a power of two. So the value is a function of the page alone: not of the run that it lies in,
    nor of a library's reduction order or number of threads.

    Args:
        gradient: fp32 [elements], whole pages of `page_size` except the last, which may be shorter.
    """
    whole = gradient.numel() // page_size
    values: list[float] = []
    if whole and page_size & (page_size - 1) == 0 and page_size > _NARROW:
        narrow = torch.empty(whole, _NARROW, dtype=gradient.dtype)
        for first in range(0, whole, _PAGES_AT_ONCE):
            stop = min(whole, first + _PAGES_AT_ONCE)
            pages = gradient[first * page_size : stop * page_size].view(stop - first, page_size)
            narrow[first:stop] = _fold(pages * pages, _NARROW)
        values += _fold(narrow, 1)[:, 0].tolist()
    else:
        values += [_short_page(page) for page in gradient[: whole * page_size].view(whole, page_size)]
    if rest := gradient.numel() - whole * page_size:
        values.append(_short_page(gradient[-rest:]))
    return values


def _short_page(page: Tensor) -> float:
    length = 1 << (page.numel() - 1).bit_length()
    squares = torch.zeros(1, length, dtype=page.dtype)
    torch.mul(page, page, out=squares[0, : page.numel()])
    return _fold(squares, 1).item()


def _fold(x_PE: Tensor, width: int) -> Tensor:
    """[pages, 2**k] -> [pages, width], adding the upper half of every row to its lower half. Overwrites x."""
    half = x_PE.shape[1] // 2
    while half >= width:
        x_PE[:, :half].add_(x_PE[:, half : 2 * half])
        half //= 2
    return x_PE[:, :width]
