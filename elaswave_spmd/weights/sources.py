"""Sources of given weights: parameters by our names, of which any range of elements can be read alone."""

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
    """Given weights. Nothing but names and shapes is in memory until values are read."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name of a parameter -> its shape."""
        ...

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Name of a parameter -> the type of its values, in the words of safetensors."""
        ...

    def read(self, name: str, first: int, stop: int) -> Tensor:
        """Elements [first, stop) of a flattened parameter, fp32."""
        ...

    def close(self) -> None:
        """Give back what reading has opened."""
        ...


class OwnTensors:
    """Tensors under our own names, such as weights.safetensors of a run."""

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
    """Tensors of a published model.

    Args:
        files: of the model.
        stored: name of a parameter of ours -> how it is stored, under the whole name of its tensor.
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
    """The places of rows [first, stop), ordered by (head, q k or v, width), among rows by (q k or v, head, width)."""
    width = num_rows // (3 * heads)
    runs = []
    for part in range(first // width, -(-stop // width)):
        head, which = divmod(part, 3)
        start = (which * heads + head) * width - part * width
        runs.append((start + max(first, part * width), start + min(stop, (part + 1) * width)))
    return runs


@dataclass(frozen=True)
class _Place:
    """The place of a parameter in a checkpoint: the elements of its layer's state that begin at `start`."""

    layer: int
    start: int
    shape: tuple[int, ...]


class SavedState:
    """The parameters in a checkpoint of a run.

    Args:
        average: their averages over the steps; of frozen ones, which stay as they are, the parameters.

    Raises:
        CheckpointError: it is unfinished or torn.
        ConfigError: it has no averages.
    """

    def __init__(self, path: Path, *, average: bool = False) -> None:
        # Not compared with its hashes: `resolve.resolved` has done that once, before any worker.
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
        """Nothing is open: each read opens its shard."""


def whole(source: WeightSource, name: str) -> Tensor:
    """A parameter in its own shape, fp32."""
    shape = source.shapes[name]
    return source.read(name, 0, math.prod(shape)).reshape(shape)


def no_average(path: Path) -> ConfigError:
    """The error about a run, or a checkpoint, that has no average of its weights."""
    return ConfigError(
        f"{path} has no average of its weights",
        rule="a run averages its weights if optim.ema is given when it begins",
        where="--ema, in Python ema=True",
        fix="leave it out",
    )
