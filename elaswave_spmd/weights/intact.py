"""Checks that the weights of a finished run are still those that it wrote, by the hash in the run's summary."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from elaswave_spmd.errors import CheckpointError
from elaswave_spmd.run_dir.directory import SUMMARY, WEIGHTS, WEIGHTS_EMA, read_summary
from elaswave_spmd.run_dir.weights import sha256_in_parts
from elaswave_spmd.weights.sources import SavedState, WeightSource

_CHUNK = 1 << 22  # elements that are hashed at once
_HASHES = {WEIGHTS: "weights_sha256", WEIGHTS_EMA: "weights_ema_sha256"}


def check_intact(path: Path, source: WeightSource) -> None:
    """Compare the weights of a finished run with their hash in its summary.

    Nothing is compared for checkpoints, which have hashes of their own, and for files that do not lie in a run's
    directory under the name that a run gives them.

    Args:
        path: the file that holds the weights.
        source: the weights in this file. If they are compared, all of them are read, part by part, and it is closed.

    Raises:
        CheckpointError: the weights do not match the hash.
        DataError: the summary is malformed.
    """
    if isinstance(source, SavedState) or path.name not in _HASHES or not os.path.exists(path.parent / SUMMARY):
        return
    wanted = read_summary(path.parent).get(_HASHES[path.name])
    if wanted is None:  # the summary of an earlier version, or of a run without an average
        return
    found = sha256_in_parts((name, _parts_of(source, name)) for name in sorted(source.shapes))
    source.close()
    if found != wanted:
        raise CheckpointError(
            f"{path} does not match its sha256 in {SUMMARY}",
            rule="the weights that are used are those that were trained",
            where=str(path),
            fix="copy the run again, or name one of its checkpoints: runs/NAME/checkpoints/step_...; weights that were "
            "changed on purpose are named as a file outside of the run",
        )


def _parts_of(source: WeightSource, name: str) -> Iterator[np.ndarray]:
    """The values of a parameter, in parts of at most `_CHUNK` elements, little-endian fp32."""
    number = math.prod(source.shapes[name])
    for first in range(0, number, _CHUNK):
        part = source.read(name, first, min(first + _CHUNK, number))
        yield part.contiguous().numpy().astype("<f4", copy=False)
