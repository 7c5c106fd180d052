"""Norms of gradient pages, by a reduction whose order of additions is fixed.

The gradient norm decides about clipping, so its bits must not depend on the mesh. `Tensor.sum` and `Tensor.norm` do not
promise an order of additions: it varies with the length, the alignment, the number of threads and the library. Here
every addition is elementwise, and elementwise operations leave no freedom.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Shape suffixes: P pages, E elements of a page.

_CPU_GROUP_PAGES = 32
"""Pages that are folded together on the CPU: 512 KiB of fp32 at the default page size, so that they stay in cache."""

_NARROW = 64
"""Elements per page down to which pages are folded group by group. The remainder of all pages is folded at once."""


def page_norm_values(gradient: Tensor, page_size: int) -> list[float]:
    """The sum of squares of each page of a page range, in fp32.

    A page is squared elementwise and folded in halves, x[:n/2] + x[n/2:], until one element is left; a short page is
    padded with zeros to a power of two. So the value is a function of the page alone: it does not depend on the page
    range that the page is part of, on a library's reduction order or on the number of threads.

    Args:
        gradient: fp32 [elements]: whole pages of `page_size` elements, except the last, which may be shorter. It is
            not changed.

    Returns:
        One number per page, in order; not finite where the page has an element that is not, or that overflows.
    """
    whole = gradient.numel() // page_size
    values = _fold_pages(gradient[: whole * page_size].view(whole, page_size)) if whole else []
    if rest := gradient.numel() - whole * page_size:
        values += _fold_pages(gradient[-rest:].view(1, rest))
    return values


def _fold_pages(pages_PE: Tensor) -> list[float]:
    """The sum of squares of each row."""
    num_pages, size = pages_PE.shape
    width = 1 << (size - 1).bit_length()
    narrow = torch.empty(num_pages, min(width, _NARROW), dtype=pages_PE.dtype, device=pages_PE.device)
    # On an accelerator one kernel launch costs more than a cache miss, so all pages are one group there.
    group_pages = _CPU_GROUP_PAGES if pages_PE.device.type == "cpu" else num_pages
    for first in range(0, num_pages, group_pages):
        group = pages_PE[first : first + group_pages]
        if width == size:
            squares = group * group
        else:
            squares = torch.zeros(len(group), width, dtype=group.dtype, device=group.device)
            squares[:, :size] = group * group
        narrow[first : first + group_pages] = _fold(squares, narrow.shape[1])
    return _fold(narrow, 1)[:, 0].tolist()


def _fold(x_PE: Tensor, width: int) -> Tensor:
    """[pages, 2**k] -> [pages, width]: adds the upper half of every row to its lower half. Overwrites `x_PE`."""
    half = x_PE.shape[1] // 2
    while half >= width:
        x_PE[:, :half].add_(x_PE[:, half : 2 * half])
        half //= 2
    return x_PE[:, :width]
