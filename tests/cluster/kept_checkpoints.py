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
from elaswave_spmd.worker.state import MASTER, HeldRange, Saved

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
        self._kept: dict[int, KeptCheckpoint] = {}

    def keep(self, step: int, shard: str, parts: list[HeldRange]) -> None:
        """A worker writes a shard. The state is copied now, since training goes on in the same memory."""
        self._shards[step, shard] = {
            part.pages.key: {kind: values.cpu().clone() for kind, values in _kinds(part).items()} for part in parts
        }

    def commit(self, manifest: Manifest) -> None:
        """The controller has written a manifest."""
        self._kept[manifest.step] = KeptCheckpoint(manifest)

    @property
    def newest(self) -> KeptCheckpoint | None:
        return self.newest_up_to(None)

    def newest_up_to(self, step: int | None) -> KeptCheckpoint | None:
        """The newest one of a step up to this; None: of any."""
        return max((one for one in self._kept.values() if step is None or one.step <= step), default=None, key=_step)

    def discard_after(self, step: int) -> None:
        """Those of later steps are given up."""
        self._kept = {at: one for at, one in self._kept.items() if at <= step}

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


def _step(checkpoint: KeptCheckpoint) -> int:
    return checkpoint.step


def _kinds(part: HeldRange) -> dict[str, Tensor]:
    return {MASTER: part.master, **part.optimizer_state}
