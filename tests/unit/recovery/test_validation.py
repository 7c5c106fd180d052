"""The sums of a validation, from what its workers report of their micro-batches."""

from __future__ import annotations

import math

import pytest

from elaswave_spmd.errors import ModelError
from elaswave_spmd.recovery.messages import ValidationLoss
from elaswave_spmd.recovery.validation import scores_of, validation_done


def report(*microbatches: int, weights: tuple[float, ...] = (), metrics: tuple[str, ...] = ()) -> ValidationLoss:
    losses = tuple(0.1 * microbatch for microbatch in microbatches)
    rows = tuple((name, tuple(1.0 for _ in microbatches), ()) for name in metrics)
    return ValidationLoss(6, 0, 0, microbatches, losses, weights, rows)


def test_sums_are_exactly_rounded_whoever_reports_first() -> None:
    one, other = report(1, 4, metrics=("right",)), report(2, 3, metrics=("right",))
    done = validation_done(6, scores_of(one) | scores_of(other))
    assert done == validation_done(6, scores_of(other) | scores_of(one))
    assert done.total == math.fsum(0.1 * microbatch for microbatch in (1, 2, 3, 4))
    assert done.metrics == (("right", 4.0, None),) and done.weight is None


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (report(2), "returned loss for micro-batch 2 of the validation at step 6, and loss, right for micro-batch 1"),
        (report(2, metrics=("right", "wrong")), "returned loss, right, wrong for micro-batch 2"),
        (report(2, weights=(3.0,), metrics=("right",)), r"returned loss \(sum, weight\), right for micro-batch 2"),
    ],
    ids=["none", "more", "a weight"],
)
def test_workers_whose_micro_batches_have_other_metrics_are_told_of(other: ValidationLoss, told: str) -> None:
    """Each of them alone has seen nothing wrong."""
    with pytest.raises(ModelError, match=told):
        validation_done(6, scores_of(report(1, metrics=("right",))) | scores_of(other))
