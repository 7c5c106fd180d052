"""Norms of gradient pages, by a reduction whose order of additions is fixed.

The gradient norm decides about clipping, so its bits must not depend on the mesh. `Tensor.sum` and `Tensor.norm` do not
promise an order of additions: it varies with the length, the alignment, the number of threads and the library. Here
every addition is elementwise, and elementwise operations leave no freedom.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

# Shape suffixes: P pages, E elements of a page.

_CPU_GROUP_PAGES = 32
"""Pages that are folded together on the CPU: 512 KiB of fp32 at the default page size, so that they stay in cache."""

_NARROW = 64
"""Elements per page down to which pages are folded group by group. The remainder of all pages is folded at once."""

_Array = TypeVar("_Array", np.ndarray, Tensor)


def page_norm_values(gradient: Tensor, page_size: int) -> list[float]:
    """The sum of squares of each page of a page range, in fp32.

    A page is squared elementwise and folded in halves, x[:n/2] + x[n/2:], until one element is left; a short page is
    folded as if it had zeros up to a power of two. So the value is a function of the page alone: it does not depend on
    the page range that the page is part of, on a library's reduction order or on the number of threads.

    Args:
        gradient: fp32 [elements]: whole pages of `page_size` elements, except the last, which may be shorter. It is
            not changed.

    Returns:
        One number per page, in order; not finite where the page has an element that is not, or that overflows.
    """
    whole = gradient.numel() // page_size
    values: list[float] = []
    if whole:
        values += _sums(_narrow_squares(gradient[: whole * page_size].view(whole, page_size)))
    if rest := gradient.numel() - whole * page_size:
        short = gradient[-rest:].view(1, rest)
        values += _sums(short * short)
    return values


def _narrow_squares(pages_PE: Tensor) -> Tensor:
    """[pages, elements] -> [pages, _NARROW]: the squares, with rows folded so far. Pages have `_NARROW` or more."""
    num_pages = len(pages_PE)
    narrow = torch.empty(num_pages, _NARROW, dtype=pages_PE.dtype, device=pages_PE.device)
    # On an accelerator one kernel launch costs more than a cache miss, so all pages are one group there.
    group_pages = _CPU_GROUP_PAGES if pages_PE.is_cpu else num_pages
    for first in range(0, num_pages, group_pages):
        group = pages_PE[first : first + group_pages]
        narrow[first : first + group_pages] = _folded(group * group, _NARROW)
    return narrow


def _sums(squares_PE: Tensor) -> list[float]:
    """The sum of each row, by the same folding to its end."""
    if not squares_PE.is_cpu:
        return _folded(squares_PE, 1)[:, 0].tolist()
    # By numpy: its elementwise operations have the same bits, and it takes a fraction of the time to call one.
    with np.errstate(over="ignore", invalid="ignore"):
        return _folded(squares_PE.detach().numpy(), 1)[:, 0].tolist()


def _folded(x_PE: _Array, width: int) -> _Array:
    """[pages, elements] -> [pages, width]: adds the upper half of every row to its lower half, until it is so narrow.

    What the upper half lacks at first counts as zeros, which change no square. It may overwrite `x_PE`.

    Args:
        width: a power of two, no more than the elements of a row.
    """
    while (size := x_PE.shape[1]) > width:
        half = 1 << ((size - 1).bit_length() - 1)  # the largest power of two below the size
        lower, upper = x_PE[:, :half], x_PE[:, half:]
        if size == 2 * half:
            x_PE = lower + upper
        else:
            paired = lower[:, : size - half]
            paired += upper
            x_PE = lower
    return x_PE
