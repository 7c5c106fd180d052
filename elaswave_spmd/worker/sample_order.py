"""The ids of the samples of a worker's micro-batches, step after step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from elaswave_spmd.determinism import sample_ids
from elaswave_spmd.worker.spec import Job

_IDS_DRAWN = 1024
"""Ids that are drawn at a time, if they are of several steps. A draw costs about a millisecond, of up to so many."""


class SampleOrder:
    """The samples of a worker's micro-batches, drawn for several steps at once while the micro-batches stay the same.

    What it returns depends on the arguments alone.

    Args:
        job: whose seed and batch sizes count.
        num_samples: in the training split.
    """

    def __init__(self, job: Job, num_samples: int) -> None:
        self._job = job
        self._num_samples = num_samples
        self._drawn_for: tuple[int, ...] = ()
        self._drawn: dict[int, NDArray[np.int64]] = {}  # step -> ids of the micro-batches `_drawn_for`

    def ids_of(self, step: int, microbatches: Sequence[int]) -> NDArray[np.int64]:
        """The sample ids of micro-batches of a step, int64 [micro-batches, samples].

        Args:
            microbatches: ids within the step, ascending.
        """
        are_same = tuple(microbatches) == self._drawn_for
        if not are_same or step not in self._drawn:
            size = max(1, len(microbatches) * self._job.microbatch_size)
            most = _IDS_DRAWN // size if are_same else 1
            self._drawn_for = tuple(microbatches)
            self._drawn = self._draw(step, max(1, min(most, self._job.steps - step + 1)))
        return self._drawn[step]

    def _draw(self, step: int, num_steps: int) -> dict[int, NDArray[np.int64]]:
        """Step -> ids, of so many steps."""
        size, global_batch = self._job.microbatch_size, self._job.global_batch
        microbatches = self._drawn_for
        slots = (np.array(microbatches, dtype=np.int64)[:, None] * size + np.arange(size)).reshape(-1)
        numbers = (np.arange(num_steps)[:, None] * global_batch + slots).reshape(-1)
        ids = sample_ids(self._job.seed, step, global_batch, self._num_samples, numbers)
        return dict(zip(range(step, step + num_steps), ids.reshape(num_steps, -1, size), strict=True))
