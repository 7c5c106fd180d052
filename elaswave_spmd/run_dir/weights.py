"""The hash over a model's weights, and the file that holds them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np


def weights_sha256(weights: Mapping[str, np.ndarray]) -> str:
    """sha256 over parameters sorted by name: the name in UTF-8, then its values as little-endian float32, row-major.

    Raises:
        TypeError: an array is not float32.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode("utf-8"))
        digest.update(_little_endian(name, weights[name]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def save_weights(path: Path, weights: Mapping[str, np.ndarray]) -> None:
    """Write `weights` (float32 arrays by parameter name) as safetensors.

    Raises:
        TypeError: an array is not float32.
        OSError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    # Row-major copies: safetensors writes the memory as it lies, whatever the strides say.
    arrays = {name: _little_endian(name, weights[name]) for name in sorted(weights)}
    try:
        save_file(arrays, str(path))
    except SafetensorError as error:  # how it reports a full disk: a text with the system's error number in it
        number = re.search(r"(?:os error|code:) (\d+)", str(error))
        raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error)) from error


def _little_endian(name: str, array: np.ndarray) -> np.ndarray:
    if (array.dtype.kind, array.dtype.itemsize) != ("f", 4):
        raise TypeError(f"weights are float32; {name} is {array.dtype}")
    return np.asarray(array, dtype="<f4", order="C")
