"""Constructs the model of a run under seeded generators, with memory for the layers that a worker needs.

Constructors draw initial values from generators that the whole process shares. These are seeded before a model is
constructed, and restored afterwards, so every worker gets the same values. A layer that is given as a factory has a
seed of its own, so its values do not depend on which other layers are built in this process.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils import deterministic


@dataclass(frozen=True)
class _Construction:
    """The construction that is under way in this context. The fields are the arguments of `constructing`."""

    seed: int
    layers: Collection[str] | None


_present: ContextVar[_Construction | None] = ContextVar("elaswave_spmd.construction", default=None)


@contextmanager
def constructing(seed: int, layers: Collection[str] | None = None) -> Iterator[None]:
    """A context in which a model is constructed as every worker of a run with this seed constructs it.

    Memory that a constructor leaves uninitialised (`torch.empty`) is filled with NaN, so that it can be found.

    Args:
        seed: the seed of the run.
        layers: names of the layers that get memory if they are given as factories. Other factories are called on the
            meta device, so that their layers have shapes only. None: all layers get memory.
    """
    token = _present.set(_Construction(seed, layers))
    # torch.use_deterministic_algorithms would import the compiler, which takes seconds in each worker.
    before = torch.get_deterministic_debug_mode()
    filled = deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_deterministic_debug_mode("warn")
    # A device that has made torch deterministic in this process may have switched the filling off.
    deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with seeded(seed, ""):
            yield
    finally:
        torch.set_deterministic_debug_mode(before)
        deterministic.fill_uninitialized_memory = filled  # pyright: ignore[reportAttributeAccessIssue]
        _present.reset(token)


def build_layer(name: str, factory: Callable[[], object]) -> object:
    """Build a layer that a model gives as a factory.

    Within `constructing` it is built under a seed of its own, and on the meta device if it is not needed here.
    """
    if (now := _present.get()) is None:
        return factory()
    with seeded(now.seed, name):
        if now.layers is None or name in now.layers:
            return factory()
        with torch.device("meta"):
            return factory()


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """A context in which the global generators of torch (CPU), numpy and Python are seeded. Restores them at its end.

    Args:
        seed: the seed of the run.
        name: the name of a layer; "" for the whole model.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    key = int.from_bytes(digest, "little")
    before = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    # torch.manual_seed would seed accelerators as well.
    torch.random.default_generator.manual_seed(key % 2**63)  # pyright: ignore[reportPrivateImportUsage]
    np.random.seed(np.frombuffer(digest, "<u4"))
    random.seed(key)
    try:
        yield
    finally:
        torch.random.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
