"""Runs of pages inside others: data that was sent for a longer run, in an older mesh epoch, is cut."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from elaswave_spmd.scheduling.placement import RunKey
from elaswave_spmd.sharding.layout import ModelLayout


def contains(whole: RunKey, part: RunKey) -> bool:
    """Whether all pages of `part` are pages of `whole`."""
    return whole[0] == part[0] and whole[1] <= part[1] and part[2] <= whole[2]


def cut(layout: ModelLayout, runs: Collection[RunKey], whole: RunKey, payload: Tensor) -> dict[RunKey, Tensor]:
    """Those of `runs` that lie inside `whole`, each with its part of the payload, which is that of `whole`."""
    if whole in runs:
        return {whole: payload}
    inside = [key for key in runs if contains(whole, key)]
    if not inside:
        return {}
    of_layer = layout.layers[whole[0]]
    start, _ = of_layer.span(whole[1], whole[2])
    spans = {key: of_layer.span(key[1], key[2]) for key in inside}
    return {key: payload[a - start : b - start] for key, (a, b) in spans.items()}
