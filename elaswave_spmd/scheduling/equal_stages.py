"""Values that are computed once for all equal stages.

On a large mesh most stages are equal. What they have in common is stored as one object, so that it can be told to be
equal by identity, which takes no time, however many workers a stage has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


def once_each(make: Callable[[_Given], _Made], values: Sequence[_Given]) -> list[_Made]:
    """The result of `make` for each value. Values that are the same object have the same result, computed once."""
    made = {key: make(value) for key, value in {id(value): value for value in values}.items()}
    return [made[id(value)] for value in values]


def with_equal_shared(arrays: Iterable[np.ndarray]) -> list[np.ndarray]:
    """These arrays of one dtype, with the same object for all that are equal."""
    shared: dict[bytes, np.ndarray] = {}
    return [shared.setdefault(array.tobytes(), array) for array in arrays]
