"""The splits of the data, whose samples a worker reads by id: from a token file, or from a user's dataset."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from elaswave_spmd.by_value import as_given
from elaswave_spmd.data.columns import ChunkedTokens, map_tokens
from elaswave_spmd.data.custom import has_tokens, make_dataset, read_sample
from elaswave_spmd.data.spec import PreparedData, Split, check_split
from elaswave_spmd.data.tables import ARROW, Table
from elaswave_spmd.errors import DataError

if TYPE_CHECKING:
    from elaswave_spmd.data.samples import GenericDataset


class DataSplit(Protocol):
    """One split of the data, as a worker reads it. Sample ids count from 0 within the split.

    `batch(ids)` returns the samples with these ids. For token data these are (tokens, targets), two int64 arrays
    [B, T]; for a dataset without a vocabulary they are a tree of tensors on the CPU (`samples.GenericDataset`). Equal
    ids give equal batches. The one exception is a dataset that asks for random keys: its batches also depend on the
    seed of the run and the step, which are further arguments of its `batch`.
    """

    def __len__(self) -> int: ...
    def batch(self, ids: np.ndarray) -> Any: ...


class TokenDataset:
    """Samples of a token array: sample i is tokens[(first + i) * T : (first + i) * T + T + 1].

    Args:
        tokens: 1-D integers; usually a read-only memory map, or several of them addressed as one (`ChunkedTokens`).
        seq_len: T.
        first: index of the split's first sample among the samples of `tokens`.
        num_samples: length of the split.
        vocab_size: every token lies in [0, vocab_size).

    Raises:
        DataError: the samples reach beyond the tokens.
    """

    def __init__(
        self, tokens: np.ndarray | ChunkedTokens, seq_len: int, first: int, num_samples: int, vocab_size: int
    ) -> None:
        needed = (first + num_samples) * seq_len + 1 if num_samples else 0
        if tokens.ndim != 1 or needed > tokens.shape[0]:
            raise DataError(
                f"the token file is too short: shape {tokens.shape}, and {needed} tokens are needed",
                fix="delete the entry in the token cache; the next start makes it again",
            )
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self._tokens = tokens
        self._first = first
        self._num_samples = num_samples
        self._window = np.arange(seq_len + 1, dtype=np.int64)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`, int64[T + 1]. Raises IndexError outside [0, len)."""
        return self._samples(np.asarray([index]))[0]

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The samples with these ids as (tokens, targets), both int64 [B, T]. A target is the token after its token.

        Raises:
            IndexError: an id is outside [0, len).
        """
        samples = self._samples(np.asarray(ids))
        return np.ascontiguousarray(samples[:, :-1]), np.ascontiguousarray(samples[:, 1:])

    def _samples(self, ids: np.ndarray) -> np.ndarray:
        _check_ids(ids, len(self))
        starts = (self._first + ids.astype(np.int64)) * self.seq_len
        return np.asarray(self._tokens[starts[:, None] + self._window]).astype(np.int64)


class CustomDataset:
    """One split of a user's map-style dataset of tokens. Every sample is checked when it is read (`read_sample`).

    Args:
        dataset: the user's dataset, which has a `vocab_size`.
        seq_len: T.
        first: index of the split's first sample in `dataset`.
        num_samples: length of the split.
        name: the name of the dataset in errors.
    """

    def __init__(self, dataset: Any, seq_len: int, first: int, num_samples: int, name: str) -> None:
        self.seq_len = seq_len
        self.vocab_size = int(dataset.vocab_size)
        self._dataset = dataset
        self._first = first
        self._num_samples = num_samples
        self._name = name

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`, int64[T + 1]. Raises IndexError outside [0, len), DataError for a malformed sample."""
        _check_ids(np.asarray([index]), len(self))
        return read_sample(self._dataset, self._first + int(index), self.seq_len, self._name)

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The samples with these ids as (tokens, targets), both int64 [B, T]. A target is the token after its token.

        Raises:
            IndexError: an id is outside [0, len).
            DataError: a sample is malformed.
        """
        rows = [self[int(i)] for i in ids]
        samples = np.stack(rows) if rows else np.empty((0, self.seq_len + 1), dtype=np.int64)
        return np.ascontiguousarray(samples[:, :-1]), np.ascontiguousarray(samples[:, 1:])


def open_split(prepared: PreparedData, split: Split) -> DataSplit:
    """Open one split in this process. Any number of processes may do so at once.

    Token files and Arrow files are memory-mapped. A user's dataset is constructed here.

    Raises:
        DataError: the token file is missing or damaged; the user's dataset cannot be constructed, or is not the one
            that the controller has seen; or there is no such split.
    """
    check_split(split)
    num_samples = prepared.num_samples(split)
    if prepared.target:
        return _open_custom(prepared, split, num_samples)
    has_own = bool(prepared.validation_file or prepared.arrow_validation_files)
    first = 0 if split == "train" or has_own else prepared.num_train_samples
    tokens = _open_tokens(prepared, own_validation=split == "validation" and has_own)
    return TokenDataset(tokens, prepared.seq_len, first, num_samples, prepared.vocab_size)


def _open_tokens(prepared: PreparedData, *, own_validation: bool) -> np.ndarray | ChunkedTokens:
    p = prepared
    num_tokens = p.num_validation_tokens if own_validation else p.num_tokens
    if not p.arrow_files:
        return _map_tokens(p.validation_file if own_validation else p.token_file, num_tokens, p)
    files = p.arrow_validation_files if own_validation else p.arrow_files
    tokens = map_tokens(Table(ARROW, files), p.column)
    if tokens.shape[0] != num_tokens:
        raise DataError(
            f"column {p.column} of {files[0]} and its other files has {tokens.shape[0]} tokens, not {num_tokens}",
            fix="start again when nobody writes to them",
        )
    return tokens


def _open_custom(prepared: PreparedData, split: Split, num_samples: int) -> CustomDataset | GenericDataset:
    kwargs = dict(prepared.kwargs)
    first = 0
    # A dataset whose constructor takes `split` numbers the samples of each split from 0. For any other dataset the
    # validation split is the tail of its samples.
    if "split" in kwargs:
        kwargs["split"] = split
    elif split == "validation":
        first = prepared.num_train_samples
    dataset, name = make_dataset(prepared.target, kwargs), as_given(prepared.target, "data")
    vocab_size = int(dataset.vocab_size) if has_tokens(dataset) else 0
    if first + num_samples > len(dataset) or vocab_size != prepared.vocab_size:
        raise DataError(
            f"{name} has {len(dataset)} samples and vocab_size {vocab_size} in this worker, which "
            f"differs from the {first + num_samples} samples and vocab_size {prepared.vocab_size} of the controller",
            rule="its length and vocabulary do not depend on the process",
            where="data.target",
        )
    if not prepared.is_tokens:
        from elaswave_spmd.data.samples import GenericDataset  # imports torch

        return GenericDataset(dataset, first, num_samples, name)
    return CustomDataset(dataset, prepared.seq_len, first, num_samples, name)


def _map_tokens(path: str, num_tokens: int, prepared: PreparedData) -> np.ndarray:
    dtype = np.dtype(prepared.dtype).newbyteorder("<")
    owned = prepared.corpus != "bin"  # data=bin names a user's own file, which the next start does not write again
    try:
        size = os.stat(path).st_size
        if size != num_tokens * dtype.itemsize:
            raise DataError(
                f"the token file {path} has {size} bytes, not {num_tokens * dtype.itemsize}",
                fix="delete it; the next start makes it again" if owned else "start again when nobody writes to it",
            )
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        again = "start again: it is made anew; on several hosts data.cache must be a directory that all of them see"
        raise DataError(
            f"the token file {path} cannot be opened ({error.strerror or error})",
            fix=again if owned else "put it back; on several hosts data.path must exist on all of them",
        ) from error


def _check_ids(ids: np.ndarray, length: int) -> None:
    # A negative id would silently read from the end of the data.
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= length):
        raise IndexError(f"sample ids must lie in [0, {length}), got {int(ids.min())} to {int(ids.max())}")
