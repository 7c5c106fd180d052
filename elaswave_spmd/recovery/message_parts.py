"""What messages have as fields, where that is more than numbers and words."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

HolderRow: TypeAlias = tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]]
"""(layer, first page, stop page, primary, mirrors, learners): scheduling.holders.to_rows."""


class StepHeld(msgspec.Struct, frozen=True, array_like=True):
    """What one worker has of one step that is not decided. Everything in it is a pure function of (run, step, id).

    Args:
        assigned: units that it regards as its own on its stage.
        computed: units whose backward it has done, through all layers of its stage.
        forwarded: units with a saved forward whose backward is not done.
        activations: (layer, unit): outgoing activations that it keeps; `layer` is the consumer's first.
        gradients: (layer, unit): outgoing gradients that it keeps, of the output of `layer`, the consumer's last.
        nodes: layer -> tree nodes whose sum it keeps for the whole layer, but for pages that it is the primary of.
        trees: (layer, first, stop, use, nodes): of runs that it is the primary of, the nodes held of `use`'s tree.
        entries: runs (layer, first, stop) whose entry it holds.
    """

    step: int
    assigned: tuple[int, ...] = ()
    computed: tuple[int, ...] = ()
    forwarded: tuple[int, ...] = ()
    activations: tuple[tuple[int, int], ...] = ()
    gradients: tuple[tuple[int, int], ...] = ()
    nodes: dict[int, tuple[tuple[int, int], ...]] = {}
    trees: tuple[tuple[int, int, int, int, tuple[tuple[int, int], ...]], ...] = ()
    entries: tuple[tuple[int, int, int], ...] = ()


class Work(msgspec.Struct, frozen=True, array_like=True):
    """One line of a salvage plan: `worker` runs `unit` through `stage`.

    `forward`: it has to run forward (else the saved one serves). `backward`: 0 none, 1 for the gradient of its input
    only, 2 in full.
    """

    stage: int
    unit: int
    worker: int
    forward: bool
    backward: int
