"""The samples of a worker's micro-batches, whatever was asked before."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.determinism import sample_ids
from elaswave_spmd.worker import sample_order
from elaswave_spmd.worker.learning_rate import LearningRate
from elaswave_spmd.worker.optimizers import AdamW
from elaswave_spmd.worker.sample_order import SampleOrder
from elaswave_spmd.worker.spec import Job

SIZE, MICROBATCHES, STEPS = 3, 8, 40


JOB = Job(
    seed=5,
    steps=STEPS,
    global_batch=SIZE * MICROBATCHES,
    microbatch_size=SIZE,
    seq_len=8,
    dtype="fp32",
    optimizer=AdamW(),
    learning_rate=LearningRate(1e-3),
)


def of(num_samples: int, step: int, microbatches: tuple[int, ...]) -> np.ndarray:
    """The ids by their definition."""
    ids = sample_ids(JOB.seed, step, JOB.global_batch, num_samples).reshape(MICROBATCHES, SIZE)
    return ids[list(microbatches)]


@given(
    num_samples=st.integers(1, 200),
    asked=st.lists(
        st.tuples(
            st.integers(1, STEPS), st.sampled_from([(0, 1, 2, 3), (4,), (), (1, 5, 7), tuple(range(MICROBATCHES))])
        ),
        max_size=12,
    ),
)
def test_the_ids_are_those_of_the_step(num_samples: int, asked: list[tuple[int, tuple[int, ...]]]):
    order = SampleOrder(JOB, num_samples)
    for step, microbatches in asked:
        for number in (step, step + 1, step + 2):  # in a row, as a run asks
            found = order.ids_of(number, microbatches)
            assert found.shape == (len(microbatches), SIZE) and found.dtype == np.int64
            assert np.array_equal(found, of(num_samples, number, microbatches))


def test_few_draws_serve_many_steps():
    draws: list[tuple[object, ...]] = []

    def counted(*args: object) -> np.ndarray:
        draws.append(args)
        return sample_ids(*args)  # pyright: ignore[reportArgumentType]

    with mock.patch.object(sample_order, "sample_ids", counted):
        order = SampleOrder(JOB, 1000)
        for step in range(1, STEPS + 1):
            order.ids_of(step, (0, 1))
    assert len(draws) == 2
