"""A model's final weights: their hash, and the file that holds them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np


def weights_sha256(weights: Mapping[str, np.ndarray]) -> str:
    """The sha256 of all parameters, sorted by name: each name in UTF-8, then its values as little-endian float32.

    Values are hashed in row-major order, whatever the strides of the array are.

    Raises:
        TypeError: an array is not float32.
    """
    return sha256_in_parts((name, (weights[name],)) for name in sorted(weights))


def sha256_in_parts(weights: Iterable[tuple[str, Iterable[np.ndarray]]]) -> str:
    """The hash of `weights_sha256`, for parameters that are not all in memory at once.

    Args:
        weights: (name, parts of its values in their order), sorted by name.

    Raises:
        TypeError: a part is not float32.
    """
    digest = hashlib.sha256()
    for name, parts in weights:
        digest.update(name.encode("utf-8"))
        for part in parts:
            digest.update(_little_endian(name, part).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def save_weights(path: Path, weights: Mapping[str, np.ndarray]) -> None:
    """Write `weights` (float32 arrays by parameter name) as safetensors.

    Raises:
        TypeError: an array is not float32.
        OSError: the file cannot be written.
    """
    from safetensors.numpy import save_file

    # Row-major copies: safetensors writes an array's memory as it is, and ignores its strides.
    arrays = {name: _little_endian(name, weights[name]) for name in sorted(weights)}
    with saving():
        save_file(arrays, str(path))


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Context for a block that writes by the safetensors library.

    Raises:
        OSError: in place of a SafetensorError in the block.
    """
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        # The library reports a full disk as a text that contains the system's error number.
        number = re.search(r"(?:os error|code:) (\d+)", str(error))
        raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error)) from error


def _little_endian(name: str, array: np.ndarray) -> np.ndarray:
    """The array as little-endian float32 in row-major order. It is copied only if it is not in this form already."""
    if (array.dtype.kind, array.dtype.itemsize) != ("f", 4):
        raise TypeError(f"weights are float32; {name} is {array.dtype}")
    return np.asarray(array, dtype="<f4", order="C")
