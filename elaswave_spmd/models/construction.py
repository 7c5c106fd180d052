"""The construction of a model for a run: under seeded generators, with the layers built that a worker needs.

A constructor draws initial values from generators that the whole process shares. Seeded before it, and put back
afterwards, they give every worker the same values. A layer that is given as a factory has a seed of its own, so its
values do not depend on which other layers were built in this process.
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
    """The model that is being made: the run's seed, and the layers given as factories that get memory; None: all."""

    seed: int
    layers: Collection[str] | None


_present: ContextVar[_Construction | None] = ContextVar("elaswave_spmd.construction", default=None)


@contextmanager
def constructing(seed: int, layers: Collection[str] | None = None) -> Iterator[None]:
    """Make a model inside the `with`, as every worker of a run with this seed makes it.

    Memory that a constructor leaves as it found it (`torch.empty`) is filled with NaN, so that it can be told.

    Args:
        seed: of the run.
        layers: names of the layers that are built if they are given as factories; the others have shapes and no memory.
            None: all of them.
    """
    token = _present.set(_Construction(seed, layers))
    # Not torch.use_deterministic_algorithms, which imports the compiler: seconds, for each worker.
    before = torch.get_deterministic_debug_mode()
    filled = deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_deterministic_debug_mode("warn")
    # A device of this process that is deterministic itself has switched the filling off.
    deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with seeded(seed, ""):
            yield
    finally:
        torch.set_deterministic_debug_mode(before)
        deterministic.fill_uninitialized_memory = filled  # pyright: ignore[reportAttributeAccessIssue]
        _present.reset(token)


def build_layer(name: str, factory: Callable[[], object]) -> object:
    """Build a layer that a model gives as a factory: under its own seed, and without memory where nobody needs it."""
    if (now := _present.get()) is None:
        return factory()
    with seeded(now.seed, name):
        if now.layers is None or name in now.layers:
            return factory()
        with torch.device("meta"):
            return factory()


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Seed the global generators of torch (on the CPU), numpy and Python inside the `with`, and put them back after it.

    Args:
        seed: of the run.
        name: of a layer; empty: the whole model.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    key = int.from_bytes(digest, "little")
    before = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    # Not torch.manual_seed, which would begin with accelerators as well.
    torch.random.default_generator.manual_seed(key % 2**63)  # pyright: ignore[reportPrivateImportUsage]
    np.random.seed(np.frombuffer(digest, "<u4"))
    random.seed(key)
    try:
        yield
    finally:
        torch.random.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
