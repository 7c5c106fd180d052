"""Reductions whose order is fixed by construction: they use elementwise operations only."""

from __future__ import annotations

import torch
from torch import Tensor

_PAGES_AT_ONCE = 32  # 512 KiB of fp32 at the default page size: on the CPU the folds stay in cache
_NARROW = 64  # elements per page down to which pages are folded in those groups, and from which all are folded at once


def page_norm_values(gradient: Tensor, page_size: int) -> list[float]:
    """Sum of squares of each page of a page range, in fp32.

    A page is squared elementwise and folded in halves, x[:n/2] + x[n/2:], until one element is left; a short page is
    padded with zeros to a power of two. So the value is a function of the page alone: not of the run that it lies in,
    nor of a library's reduction order or number of threads.

    Args:
        gradient: fp32 [elements], whole pages of `page_size` except the last, which may be shorter.
    """
    whole = gradient.numel() // page_size
    values = _whole_pages(gradient[: whole * page_size].view(whole, page_size)) if whole else []
    if rest := gradient.numel() - whole * page_size:
        values += _whole_pages(gradient[-rest:].view(1, rest))
    return values


def _whole_pages(pages_PE: Tensor) -> list[float]:
    num_pages, size = pages_PE.shape
    width = 1 << (size - 1).bit_length()
    narrow = torch.empty(num_pages, min(width, _NARROW), dtype=pages_PE.dtype, device=pages_PE.device)
    at_once = _PAGES_AT_ONCE if pages_PE.device.type == "cpu" else num_pages  # elsewhere a call costs more than a cache
    for first in range(0, num_pages, at_once):
        group = pages_PE[first : first + at_once]
        if width == size:
            squares = group * group
        else:
            squares = torch.zeros(len(group), width, dtype=group.dtype, device=group.device)
            squares[:, :size] = group * group
        narrow[first : first + at_once] = _fold(squares, narrow.shape[1])
    return _fold(narrow, 1)[:, 0].tolist()


def _fold(x_PE: Tensor, width: int) -> Tensor:
    """[pages, 2**k] -> [pages, width], adding the upper half of every row to its lower half. Overwrites x."""
    half = x_PE.shape[1] // 2
    while half >= width:
        x_PE[:, :half].add_(x_PE[:, half : 2 * half])
        half //= 2
    return x_PE[:, :width]
