"""Putting pages together again as named parameters."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from elaswave_spmd.recovery.messages import FinalPages
from elaswave_spmd.sharding.layout import ModelLayout


def collect_pages(layout: ModelLayout, pages: FinalPages, payload: Tensor, weights: dict[str, np.ndarray]) -> None:
    """Copies a run of master pages into the parameters that they hold parts of, making those when first met.

    Args:
        payload: fp32 values of state pages [first, stop) of a layer.
        weights: parameter name -> fp32 array of the parameter's shape; extended in place.
    """
    layer = layout.layers[pages.layer]
    start, stop = layer.span(pages.first, pages.stop)
    values = payload.numpy()
    for block in layer.state_blocks:
        for slot in block.slots:
            first, last = max(slot.start, start), min(slot.stop, stop)
            if first < last:
                p = slot.parameter
                if p.name not in weights:
                    weights[p.name] = np.zeros(p.shape, np.float32)
                array = weights[p.name].reshape(-1)
                array[first - slot.start : last - slot.start] = values[first - start : last - start]


def is_complete(layout: ModelLayout, received: set[tuple[int, int, int]]) -> bool:
    """Whether the runs received cover every state page. They may overlap: after a loss pages come again, cut anew."""
    pages: list[set[int]] = [set() for _ in layout.layers]
    for layer, first, stop in received:
        pages[layer].update(range(first, stop))
    return all(len(pages[layer.index]) == layer.num_state_pages for layer in layout.layers)
