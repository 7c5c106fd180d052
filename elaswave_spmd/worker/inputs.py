"""Micro-batches as a worker reads them: on its device, and as the input of the first layer.

Only the first stage (for its input) and the last one (for the loss) read data. What is read has its own dtypes; the
first layer's input is in the form of any activation, floats in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.data.tree import map_tree, named_leaves
from elaswave_spmd.errors import DataError, ModelError, add_note, exit_as_error
from elaswave_spmd.models import Batch
from elaswave_spmd.worker.activations import Activation, described, in_compute_dtype

if TYPE_CHECKING:
    from elaswave_spmd.worker.programs.eager import Batches

Inputs = Callable[[Any], Any]
"""A model's `inputs(batch)`."""


@dataclass(frozen=True)
class TokenRows:
    """Tokens and targets as they were read: int64 [samples, seq_len] each, in host memory."""

    tokens: np.ndarray
    targets: np.ndarray


def read_batch(data: Batches, ids: np.ndarray, seed: int, step: int) -> Any:
    """Read the samples with these ids into host memory.

    Args:
        step: that they are trained in, for data that depends on it (`SampleKeys`); 0 in a validation.
    """
    if getattr(data, "keyed", False):
        return data.batch(ids, seed, step)  # pyright: ignore[reportCallIssue]
    found = data.batch(ids)
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], np.ndarray):
        return TokenRows(*found)
    return found


def on_device(read: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """The samples that were read, as the model sees them: a `Batch` of tokens, or the tree of tensors.

    Args:
        move: brings a tensor from host memory to where the model wants it.
    """
    if isinstance(read, TokenRows):
        tokens, targets = (move(torch.from_numpy(np.ascontiguousarray(r))) for r in (read.tokens, read.targets))
        return Batch(tokens, targets)
    return map_tree(move, read)


def to_batch(data: Batches, ids: np.ndarray, place: torch.device, seed: int, step: int) -> Any:
    """The samples with these ids at `place`: `read_batch`, then `on_device`. It may wait for the device."""
    return on_device(read_batch(data, ids, seed, step), lambda values: values.to(place))


def first_input(inputs: Inputs, batch: Any, dtype: torch.dtype) -> Activation:
    """The input of the first layer.

    Raises:
        ModelError: `inputs(batch)` returned neither a tensor nor a flat tuple of tensors.
        Exception: whatever it raises, with a note that names it and the batch.
    """
    try:
        x = inputs(batch)
    except (Exception, SystemExit) as error:
        note = "in inputs(batch), of " + ", ".join(f"{name} {described(leaf)}" for name, leaf in leaves_of(batch))
        if isinstance(error, SystemExit):
            raise exit_as_error(error, note) from error
        add_note(error, note)
        raise
    found = in_compute_dtype(tuple(x) if isinstance(x, list) else x, dtype)
    if found is None:
        raise ModelError(
            f"inputs(batch) returned {described(x)}, which the first layer cannot be given",
            rule="inputs(batch) returns a tensor, or a flat tuple (or named tuple) of tensors",
            where="inputs(batch)",
            exists=", ".join(f"{name} {described(leaf)}" for name, leaf in leaves_of(batch)),
            fix='def inputs(self, batch): return batch["image"], or (batch["source"], batch["mask"])',
        )
    return found


def leaves_of(batch: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a batch with their names for a user, such as batch.tokens and batch["image"]."""
    if isinstance(batch, Batch):
        return [("batch.tokens", batch.tokens), ("batch.targets", batch.targets)]
    return list(named_leaves(batch))


def with_leaves(batch: Any, leaves: Iterable[Tensor]) -> Any:
    """A batch of the form of `batch`, with other tensors, in the order of `leaves_of`."""
    given = iter(leaves)
    if isinstance(batch, Batch):
        return Batch(next(given), next(given))
    return map_tree(lambda _: next(given), batch)


@dataclass(frozen=True)
class Example:
    """A micro-batch of the form that all have, where programs are compiled for one form.

    Args:
        x: the first layer's input.
        batch: the whole.
        num_samples: in it.
    """

    x: Activation
    batch: Any
    num_samples: int

    @classmethod
    def of_tokens(cls, tokens_BT: tuple[int, int], place: torch.device | None = None) -> Example:
        """Zeros in place of tokens; on the CPU, or at `place`."""
        tokens = torch.zeros(tokens_BT, dtype=torch.int64, device=place)
        return cls(tokens, Batch(tokens, tokens), tokens_BT[0])

    @property
    def form(self) -> tuple[tuple[str, str], ...]:
        """The names, dtypes and shapes of its tensors."""
        return form_of(self.batch)


def form_of(batch: Any) -> tuple[tuple[str, str], ...]:
    """The names, dtypes and shapes of the tensors of a batch."""
    return tuple((name, described(leaf).removeprefix("a tensor ")) for name, leaf in leaves_of(batch))


def refuse_other_form(example: Example, batch: Any) -> None:
    """Refuse a micro-batch that is not of the form that programs were compiled for.

    Raises:
        DataError: it is not.
    """
    for wanted, found in zip_longest(example.form, form_of(batch), fillvalue=("nothing", "more")):
        if wanted != found:
            raise DataError(
                f"a micro-batch has {found[0]} {found[1]}, and the first one had {wanted[0]} {wanted[1]}",
                rule="where layers are compiled all micro-batches have one form: nothing may be compiled once training "
                "has begun",
                where="collate(samples)",
                fix="pad all batches to one length in collate, or leave runtime.compile out (runtime.device=cpu)",
            )
