"""A user's dataset whose samples are no tokens: trees of tensors, arrays and numbers, collated into batches.

A batch is a tree of tensors, each in its own dtype. It is a function of its sample ids alone, or, of a dataset that
asks for keys, of the run's seed, the step and the ids: whichever worker reads it, and however often, it has the same
bits. Imports torch, so it is imported only where such a dataset is opened.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from elaswave_spmd.data.tree import map_tree, named_leaves
from elaswave_spmd.errors import DataError, add_note, exit_as_error, headline_of

_COLLATE = "def collate(self, samples), a method of the dataset that returns a dict or tuple of tensors"
_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class SampleKeys:
    """The keys of the random numbers of one sample in one step; given to a dataset that asks for them.

    Args:
        seed: of the run.
        step: that the sample is trained in; 0 in a validation, which is the same each time.
        sample_id: number of the sample within its split.
    """

    seed: int
    step: int
    sample_id: int

    def generator(self) -> torch.Generator:
        """A new generator of torch, for `torch.rand(..., generator=g)`. Each call begins the same stream again."""
        return torch.Generator().manual_seed(int(self._seeds.generate_state(1, np.uint64)[0]) & _MASK)

    def numpy(self) -> np.random.Generator:
        """A new generator of numpy. Each call begins the same stream again."""
        return np.random.Generator(np.random.Philox(self._seeds))

    @property
    def _seeds(self) -> np.random.SeedSequence:
        return np.random.SeedSequence([self.seed & _MASK, self.step, self.sample_id])


class GenericDataset:
    """`num_samples` samples of a user's dataset, from `first` on, as collated batches.

    Args:
        dataset: map-style, `dataset[i]`, or with `__getitem__(self, index, keys)` for random augmentation. Its method
            `collate(samples)`, if it has one, makes a batch; else torch's default_collate stacks the leaves.
        first: number of the split's first sample in the dataset.
        num_samples: length of the split.
        name: of the dataset, for errors.
    """

    def __init__(self, dataset: Any, first: int, num_samples: int, name: str) -> None:
        self._dataset = dataset
        self._first = first
        self._num_samples = num_samples
        self._name = name
        self.keyed = takes_keys(dataset)
        """The samples depend on the seed and the step as well."""

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, ids: np.ndarray, seed: int = 0, step: int = 0) -> Any:
        """The samples with these ids, collated: a tree of tensors on the CPU.

        Raises:
            IndexError: an id outside [0, len).
            DataError: the batch is no tree of tensors.
            Exception: whatever the dataset raises, with a note that names the sample.
        """
        if len(ids) and (int(np.min(ids)) < 0 or int(np.max(ids)) >= len(self)):
            raise IndexError(f"sample ids must lie in [0, {len(self)}), got {int(np.min(ids))} to {int(np.max(ids))}")
        samples = [self._read(int(i), seed, step) for i in ids]
        return collated(samples, self._dataset, self._name, [self._first + int(i) for i in ids])

    def _read(self, sample_id: int, seed: int, step: int) -> Any:
        index = self._first + sample_id
        try:
            if self.keyed:
                return self._dataset.__getitem__(index, SampleKeys(seed, step, sample_id))
            return self._dataset[index]
        except Exception as error:
            add_note(error, f"in sample {index} of {self._name}")
            raise
        except SystemExit as end:
            raise exit_as_error(end, f"in sample {index} of {self._name}") from end


def takes_keys(dataset: Any) -> bool:
    """True if `__getitem__` has a second parameter `keys`: the samples are augmented by keyed random numbers."""
    try:
        parameters = inspect.signature(dataset.__getitem__).parameters
    except (TypeError, ValueError):
        return False
    return "keys" in parameters


def collated(samples: Sequence[Any], dataset: Any, name: str, indices: Sequence[int]) -> Any:
    """Several samples as one batch: by the dataset's own `collate(samples)`, or by stacking their leaves.

    Args:
        name: of the dataset, for errors.
        indices: of the samples, for errors.

    Raises:
        DataError: samples cannot be stacked, or a leaf of the batch is no tensor.
    """
    own = getattr(dataset, "collate", None)
    if callable(own):
        try:
            batch = own(list(samples))
        except Exception as error:
            add_note(error, f"in collate(samples) of {name}, of {_described(samples[0])}")
            raise
        except SystemExit as end:
            raise exit_as_error(end, f"in collate(samples) of {name}") from end
    else:
        try:
            batch = _stacked(samples)
        except Exception as error:
            raise DataError(
                f"samples of {name} cannot be stacked: {_odd_one(samples, indices) or headline_of(error)}",
                rule="without a collate of its own a dataset's samples are alike: tensors, arrays and numbers of the "
                "same shapes, in dicts or tuples",
                where="data.target",
                exists=_described(samples[0], f"sample {indices[0]}") if samples else "no samples",
                fix=_COLLATE,
            ) from error
    batch = map_tree(_as_tensor, batch)
    if callable(own):
        # It may fill the same memory again for the next batch, which is read while this one is still in use.
        batch = map_tree(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
    leaves = list(named_leaves(batch))
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise DataError(
                f"{path} of {name} is of type {type(leaf).__name__}",
                rule="a batch is a tensor, or a dict, tuple or named tuple of tensors, nested in any way",
                where="data.target",
                exists=_described(batch),
                fix=f"leave it out of the sample, or make a tensor of it: {_COLLATE}",
            )
    if not leaves:
        raise DataError(f"a batch of {name} has no tensors", where="data.target", fix=_COLLATE)
    return batch


def _stacked(samples: Sequence[Any]) -> Any:
    """The samples' leaves, stacked by torch, which would leave out what the first sample lacks.

    Raises:
        KeyError: dicts of the samples have other keys.
    """
    first = _keys_of(samples[0])
    if any(_keys_of(one) != first for one in samples[1:]):
        raise KeyError("their keys differ")
    return default_collate(list(samples))


def _keys_of(tree: Any) -> Any:
    """The keys of all dicts in a tree, in its form; None for a leaf. The order of keys does not count."""
    if isinstance(tree, Mapping):
        return {key: _keys_of(value) for key, value in tree.items()}
    return [_keys_of(value) for value in tree] if isinstance(tree, (list, tuple)) else None


def _odd_one(samples: Sequence[Any], indices: Sequence[int]) -> str:
    """The first sample of another form than the one at the front, in words; "" if all are alike."""
    described = [_described(sample) for sample in samples]
    odd = next((number for number, text in enumerate(described) if text != described[0]), None)
    return "" if odd is None else f"one is {_described(samples[odd], f'sample {indices[odd]}')}"


def _as_tensor(leaf: Any) -> Any:
    """Arrays and numbers as tensors; without a graph, in memory of its own layout. Anything else stays as it is."""
    if isinstance(leaf, Tensor):
        return leaf.detach().contiguous()
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
        return torch.from_numpy(np.ascontiguousarray(leaf))
    if isinstance(leaf, (bool, int, float, np.number, np.bool_)):
        return torch.as_tensor(leaf)
    return leaf


def _described(tree: Any, name: str = "sample") -> str:
    """The leaves of a tree in words."""
    parts = []
    for path, leaf in named_leaves(tree, name):
        is_array = isinstance(leaf, (Tensor, np.ndarray))
        kind = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if is_array else type(leaf).__name__
        parts.append(f"{path} {kind}")
    return ", ".join(parts[:12]) + (", ..." if len(parts) > 12 else "")


def plain_attributes(dataset: Any) -> dict[str, Any]:
    """The public integers and tuples of integers that a dataset or its class has as plain attributes.

    Those of its base classes that are the framework's say how it reads, and not what its samples are.
    """
    found: dict[str, Any] = {}
    for name, value in {**_of_classes(dataset), **getattr(dataset, "__dict__", {})}.items():
        if name.startswith("_"):
            continue
        if _is_integer(value):
            found[name] = int(value)
        elif isinstance(value, (tuple, list)) and 0 < len(value) <= 8 and all(map(_is_integer, value)):
            found[name] = [int(one) for one in value]
    return found


def _of_classes(dataset: Any) -> dict[str, Any]:
    classes = [cls for cls in reversed(type(dataset).__mro__) if not cls.__module__.startswith("elaswave_spmd.")]
    return {name: value for cls in classes for name, value in vars(cls).items()}


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
