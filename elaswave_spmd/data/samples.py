"""A user's dataset without a vocabulary. Its samples are trees of tensors, arrays and numbers, collated into batches.

A batch is a tree of tensors, each in its own dtype. It depends only on the ids of its samples, and, if the dataset asks
for random keys (`takes_keys`), on the seed of the run and the step. So a batch has the same bits whichever worker reads
it, and however often. This module imports torch, so it is imported only where such a dataset is opened.
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
from elaswave_spmd.determinism.rng import AUGMENTATION, generator_seeds
from elaswave_spmd.errors import DataError, add_note, exit_as_error, headline_of

_COLLATE = "def collate(self, samples), a method of the dataset that returns a dict or tuple of tensors"
_MASK = (1 << 63) - 1  # what `manual_seed` takes


@dataclass(frozen=True)
class SampleKeys:
    """The keys of the random numbers of one sample in one step, given to a dataset that asks for them (`takes_keys`).

    Args:
        seed: the seed of the run.
        step: the step in which the sample is trained; 0 in a validation, so that all validations are alike.
        sample_id: id of the sample within its split.
    """

    seed: int
    step: int
    sample_id: int

    def generator(self) -> torch.Generator:
        """A new torch generator on the CPU, for `torch.rand(..., generator=g)`. Each call begins the same stream.

        torch takes 32 bits of a seed, so that of many samples two may have the same stream by chance; `numpy` has more.
        """
        return torch.Generator().manual_seed(int(self._seeds.generate_state(1, np.uint64)[0]) & _MASK)

    def numpy(self) -> np.random.Generator:
        """A new numpy generator. Each call begins the same stream."""
        return np.random.Generator(np.random.Philox(self._seeds))

    @property
    def _seeds(self) -> np.random.SeedSequence:
        return generator_seeds(AUGMENTATION, self.seed, self.step, self.sample_id)


class GenericDataset:
    """One split of a user's dataset without a vocabulary, read as collated batches.

    Args:
        dataset: a map-style dataset, read by `dataset[i]`; or by `dataset.__getitem__(i, keys=...)` if it asks for
            keys, for random augmentation. If it has a method `collate(samples)`, this makes the batches; otherwise
            torch's `default_collate` does.
        first: index of the split's first sample in `dataset`.
        num_samples: length of the split.
        name: the name of the dataset in errors.
    """

    def __init__(self, dataset: Any, first: int, num_samples: int, name: str) -> None:
        self._dataset = dataset
        self._first = first
        self._num_samples = num_samples
        self._name = name
        self.keyed = takes_keys(dataset)
        """True if the samples depend on the seed and the step as well."""

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, ids: np.ndarray, seed: int = 0, step: int = 0) -> Any:
        """The samples with these ids, collated into a tree of tensors on the CPU.

        Args:
            ids: sample ids, integers [B].
            seed, step: the seed of the run and the step. They are read only if the dataset asks for keys.

        Raises:
            IndexError: an id is outside [0, len).
            DataError: the samples cannot be stacked, or the batch is not a tree of tensors.
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
                return self._dataset.__getitem__(index, keys=SampleKeys(seed, step, sample_id))
            return self._dataset[index]
        except Exception as error:
            add_note(error, f"in sample {index} of {self._name}")
            raise
        except SystemExit as end:
            raise exit_as_error(end, f"in sample {index} of {self._name}") from end


def takes_keys(dataset: Any) -> bool:
    """True if the dataset's `__getitem__` has a parameter `keys`, which gets `SampleKeys` by its name."""
    try:
        parameters = inspect.signature(dataset.__getitem__).parameters
    except (TypeError, ValueError):
        return False
    return "keys" in parameters and parameters["keys"].kind is not inspect.Parameter.POSITIONAL_ONLY


def collated(samples: Sequence[Any], dataset: Any, name: str, indices: Sequence[int]) -> Any:
    """Collate samples into one batch: by the dataset's own `collate(samples)`, or else by stacking their leaves.

    Args:
        samples: what the dataset returned for each sample.
        dataset: the user's dataset, whose `collate` is called if it has one.
        name: the name of the dataset in errors.
        indices: the indices of the samples in the dataset, for errors.

    Raises:
        DataError: the samples cannot be stacked, or the batch has no leaves, or one that is not a tensor.
        Exception: whatever the dataset's `collate` raises, with a note that names it.
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
        # The next batch is read while this one is still in use. A user's `collate` may return the same memory for both,
        # so this batch gets memory of its own.
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
    """Stack the leaves of the samples by torch's `default_collate`.

    `default_collate` would silently leave out keys that the first sample lacks, so unequal keys are refused here.

    Raises:
        KeyError: the dicts of two samples have different keys.
    """
    first = _keys_of(samples[0])
    if any(_keys_of(one) != first for one in samples[1:]):
        raise KeyError("their keys differ")
    return default_collate(list(samples))


def _keys_of(tree: Any) -> Any:
    """The structure of a tree with None in place of each leaf, to compare the dict keys of samples in any order."""
    if isinstance(tree, Mapping):
        return {key: _keys_of(value) for key, value in tree.items()}
    return [_keys_of(value) for value in tree] if isinstance(tree, (list, tuple)) else None


def _odd_one(samples: Sequence[Any], indices: Sequence[int]) -> str:
    """A description of the first sample whose names, shapes or types differ from those of sample 0; "" if none does."""
    described = [_described(sample) for sample in samples]
    odd = next((number for number, text in enumerate(described) if text != described[0]), None)
    return "" if odd is None else f"one is {_described(samples[odd], f'sample {indices[odd]}')}"


def _as_tensor(leaf: Any) -> Any:
    """A leaf as a tensor: arrays and numbers are converted, tensors detached and made contiguous; others stay."""
    if isinstance(leaf, Tensor):
        return leaf.detach().contiguous()
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
        return torch.from_numpy(np.ascontiguousarray(leaf)).reshape(leaf.shape)  # an array without dims gets one
    if isinstance(leaf, (bool, int, float, np.number, np.bool_)):
        return torch.as_tensor(leaf)
    return leaf


def _described(tree: Any, name: str = "sample") -> str:
    """A description of a tree for errors: the name of each leaf, with its dtype and shape, or its type."""
    parts = []
    for path, leaf in named_leaves(tree, name):
        is_array = isinstance(leaf, (Tensor, np.ndarray))
        kind = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if is_array else type(leaf).__name__
        parts.append(f"{path} {kind}")
    return ", ".join(parts[:12]) + (", ..." if len(parts) > 12 else "")


def plain_attributes(dataset: Any) -> dict[str, Any]:
    """The public attributes of a dataset, or of its classes, that are integers or lists and tuples of 1 to 8 integers.

    They are offered to the constructor of the model, as `num_classes` is. The attributes of this package's own base
    classes (`ShardedDataset`) are left out, because they configure how samples are read. Properties are left out, too:
    they are code of the user's, which may take any time, and mostly no model asks for them.

    Returns:
        name -> int, or list of int.
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
