"""Checkpoints of a simulated run, kept in memory: what shards and manifests in a run directory are to a real one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from elaswave_spmd.run_dir.checkpoint_shard import checkpoint_path
from elaswave_spmd.run_dir.manifest import Manifest
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import PageRange
from elaswave_spmd.worker.checkpoint_writer import MASTER
from elaswave_spmd.worker.state import HeldRange, Saved

RUN_DIR = Path("simulated")


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint that a run can go on from (controller.events.SavedState).

    Args:
        manifest: says which shards it is made of.
    """

    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def path(self) -> Path:
        return checkpoint_path(RUN_DIR, self.step)


class KeptCheckpoints:
    """All shards that were written in a run, and the checkpoints that the controller has made of them.

    A shard counts only if the manifest of a checkpoint names it.
    """

    def __init__(self, layout: ModelLayout) -> None:
        self._layout = layout
        self._shards: dict[tuple[int, str], dict[PageRange, dict[str, Tensor]]] = {}  # (step, name of the shard) ->
        self.newest: KeptCheckpoint | None = None

    def keep(self, step: int, shard: str, parts: list[HeldRange]) -> None:
        """A worker writes a shard. The state is copied now, since training goes on in the same memory."""
        self._shards[step, shard] = {
            part.pages.key: {kind: values.cpu().clone() for kind, values in _kinds(part).items()} for part in parts
        }

    def commit(self, manifest: Manifest) -> None:
        """The controller has written a manifest."""
        if self.newest is None or manifest.step > self.newest.step:
            self.newest = KeptCheckpoint(manifest)

    def reader(self, checkpoint: KeptCheckpoint) -> Saved:
        """The state of a checkpoint, for page ranges that may be cut in any other way."""
        step = checkpoint.step
        ranges = {}
        for shard in checkpoint.manifest.shards:
            ranges |= self._shards[step, shard.name]

        @cache
        def flat(layer: int, kind: str) -> Tensor:
            """The state of one kind of a whole layer; what no shard has stays NaN, which would show in every bit."""
            found = torch.full((self._layout.layers[layer].num_state_elements,), torch.nan)
            for (of_layer, first, stop), kinds in ranges.items():
                if of_layer == layer and kind in kinds:  # frozen pages have a master alone
                    found[slice(*self._layout.layers[layer].span(first, stop))] = kinds[kind]
            return found

        def read(key: PageRange, kind: str) -> Tensor:
            layer, first, stop = key
            return flat(layer, kind)[slice(*self._layout.layers[layer].span(first, stop))]

        return read


def _kinds(part: HeldRange) -> dict[str, Tensor]:
    return {MASTER: part.master, **part.optimizer_state}
