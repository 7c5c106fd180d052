"""Sources of weights: parameters under our names, of which any range of elements can be read by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.errors import CheckpointError, ConfigError
from elaswave_spmd.run_dir.checkpoints import Checkpoint, open_checkpoint
from elaswave_spmd.run_dir.manifest import AVERAGE
from elaswave_spmd.weights.families import Stored
from elaswave_spmd.weights.tensor_files import TensorFiles, elements, row_span


class WeightSource(Protocol):
    """Weights that are read in ranges. Only names, shapes and types are in memory until values are read."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name of a parameter -> its shape."""
        ...

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Name of a parameter -> the type of its stored values, as safetensors names it: "F32", "BF16"."""
        ...

    def read(self, name: str, first: int, stop: int) -> Tensor:
        """Elements [first, stop) of a flattened parameter, fp32."""
        ...

    def close(self) -> None:
        """Close what reading has opened. A later read opens it again."""
        ...


class OwnTensors:
    """The weights in safetensors files with our own names, such as weights.safetensors of a run."""

    def __init__(self, files: TensorFiles) -> None:
        self._files = files
        self.shapes = {name: info.shape for name, info in files.tensors.items()}
        self.dtypes = {name: info.dtype for name, info in files.tensors.items()}

    def read(self, name: str, first: int, stop: int) -> Tensor:
        a, b = row_span(self.shapes[name], first, stop)
        return elements(self._files.rows(name, a, b), a, first, stop)

    def close(self) -> None:
        self._files.close()


class StoredTensors:
    """The weights of a published model, under our names and in our order of rows and dims.

    Args:
        files: the tensors of the model.
        stored: name of our parameter -> the form in which it is stored, with the full name of the tensor. Parameters
            whose tensor is missing are left out of `shapes`.
    """

    def __init__(self, files: TensorFiles, stored: Mapping[str, Stored]) -> None:
        self._files = files
        self._stored = {name: how for name, how in stored.items() if how.name in files.tensors}
        self.dtypes = {name: files.tensors[how.name].dtype for name, how in self._stored.items()}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, how in self._stored.items():
            shape = files.tensors[how.name].shape
            self.shapes[name] = shape[::-1] if how.transposed else shape

    def read(self, name: str, first: int, stop: int) -> Tensor:
        how, shape = self._stored[name], self.shapes[name]
        rows = self._files.columns if how.transposed else self._files.rows
        a, b = row_span(shape, first, stop)
        runs = [(a, b)] if not how.heads else qkv_runs(shape[0], how.heads, a, b)
        found = torch.cat([rows(how.name, low, high) for low, high in runs])
        return elements(found, a, first, stop)

    def close(self) -> None:
        self._files.close()


def qkv_runs(num_rows: int, heads: int, first: int, stop: int) -> list[tuple[int, int]]:
    """The rows of a published q, k, v projection that are our rows [first, stop).

    Our rows are ordered by (head, q k or v, width), the published ones by (q k or v, head, width).

    Args:
        num_rows: the number of rows of the whole projection.
        heads: the number of attention heads.

    Returns:
        Ranges [start, stop) of published rows, in the order of our rows.
    """
    width = num_rows // (3 * heads)
    runs = []
    for part in range(first // width, -(-stop // width)):
        head, which = divmod(part, 3)
        start = (which * heads + head) * width - part * width
        runs.append((start + max(first, part * width), start + min(stop, (part + 1) * width)))
    return runs


@dataclass(frozen=True)
class _Place:
    """Where a parameter lies in a checkpoint: in the flat state of layer number `layer`, from element `start` on."""

    layer: int
    start: int
    shape: tuple[int, ...]


class SavedState:
    """The weights in a checkpoint of a run.

    Args:
        path: the directory of the checkpoint.
        average: read the averages of the parameters over the steps instead (`optim.ema`). Frozen parameters have no
            average; they do not change, so their values are read.

    Raises:
        CheckpointError: the checkpoint is unfinished or torn.
        ConfigError: it has no averages.
    """

    def __init__(self, path: Path, *, average: bool = False) -> None:
        # The data is not compared with its hashes here. That was done when the checkpoint was chosen: for workers by
        # `resolve.resolved`, once for all of them.
        self.checkpoint: Checkpoint = open_checkpoint(path, verify=False)
        self._average = average
        if average and AVERAGE not in self.checkpoint.manifest.kinds:
            raise no_average(path)
        self._places: dict[str, _Place] = {}
        for number, layer in enumerate(self.checkpoint.manifest.layout["layers"]):
            for found in layer["parameters"]:
                self._places[found["name"]] = _Place(number, found["start"], tuple(found["shape"]))
        self.shapes = {name: place.shape for name, place in self._places.items()}
        self.dtypes = dict.fromkeys(self._places, "F32")

    def read(self, name: str, first: int, stop: int) -> Tensor:
        place = self._places[name]
        a, b = place.start + first, place.start + stop
        found, missing = np.empty(b - a, np.float32), b - a
        manifest = self.checkpoint.manifest
        for pages in self.checkpoint.replicas[place.layer]:
            start, end = manifest.layers[place.layer].span(pages.first, pages.stop)
            low, high = max(a, start), min(b, end)
            if low < high:
                shard = self.checkpoint.shards[-1 - pages.primary]
                kinds = manifest.kinds_of(pages.key)
                kind = AVERAGE if self._average and AVERAGE in kinds else kinds[0]
                shard.read_into(found[low - a : high - a], pages.key, kind, low - start)
                missing -= high - low
        if missing:
            raise CheckpointError(f"{self.checkpoint.path} does not hold all of {name}")
        return torch.from_numpy(found)

    def close(self) -> None:
        """Do nothing: each read opens and closes the shards that it needs."""


def whole(source: WeightSource, name: str) -> Tensor:
    """All values of a parameter in its own shape, fp32."""
    shape = source.shapes[name]
    return source.read(name, 0, math.prod(shape)).reshape(shape)


def no_average(path: Path) -> ConfigError:
    """The error about a run or a checkpoint that has no average of its weights."""
    return ConfigError(
        f"{path} has no average of its weights",
        rule="a run averages its weights if optim.ema is given when it begins",
        where="--ema, in Python ema=True",
        fix="leave it out",
    )
