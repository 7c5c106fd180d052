"""A run's job: when it validates."""

from __future__ import annotations

import pytest

from elaswave_spmd.worker.learning_rate import LearningRate
from elaswave_spmd.worker.optimizers import AdamW
from elaswave_spmd.worker.spec import Job


@pytest.mark.parametrize(
    ("every", "microbatches", "steps", "wanted"),
    [(2, 3, 7, [2, 4, 6, 7]), (3, 3, 6, [3, 6]), (10, 1, 4, [4]), (0, 3, 4, []), (2, 0, 4, [])],
)
def test_a_run_validates_every_so_many_steps_and_after_the_last_one(
    every: int, microbatches: int, steps: int, wanted: list[int]
) -> None:
    job = Job(
        seed=0,
        steps=steps,
        global_batch=4,
        microbatch_size=2,
        seq_len=8,
        dtype="fp32",
        optimizer=AdamW(),
        learning_rate=LearningRate(1e-3),
        validate_every=every,
        num_validation_microbatches=microbatches,
    )
    assert [step for step in range(1, steps + 1) if job.validates_at(step)] == wanted
