"""The validation losses that a controller knows: those before its begin, their order, and the end that follows."""

from __future__ import annotations

import math
from dataclasses import replace

from elaswave_spmd.controller.validations import Validations
from elaswave_spmd.recovery.early_stop import EarlyStop
from tests.simulated.bits_cases import Run

JOB = replace(Run(steps=20).job(), validate_every=4, num_validation_microbatches=3, early_stop=EarlyStop(2))


def ends_at(validations: Validations, step: int, loss: float) -> bool:
    """Adds a loss. Returns True if the run ends after this step."""
    validations.add(step, loss)
    assert validations.ended_at in (None, step)
    return validations.ended_at == step


def test_known_losses_count_up_to_the_version_at_which_the_run_goes_on() -> None:
    known = {(4, 3): (2.0).hex(), (8, 3): (2.5).hex(), (12, 3): (1.0).hex(), (4, 5): (0.5).hex()}
    validations = Validations(JOB, known, 8)
    assert validations.ranked == (4, 8)
    assert ends_at(validations, 12, 2.5), "its patience was 2, and one validation in vain was known"
    assert validations.early_stop() == {
        "best_step": 4,
        "best_loss": 2.0,
        "validations_since": 2,
        "patience": 2,
        "min_delta": 0.0,
    }


def test_a_validation_at_the_end_of_a_shorter_run_is_ranked_and_does_not_end_the_longer_one() -> None:
    """Its checkpoint may be the best one; the run from the start has not validated there."""
    validations = Validations(JOB, {(4, 3): (2.0).hex(), (10, 3): (1.0).hex()}, 10)
    assert validations.ranked == (10, 4)
    assert not ends_at(validations, 12, 1.5)
    about = validations.early_stop()
    assert (about["best_step"], about["validations_since"]) == (12, 0)


def test_the_same_validation_twice_counts_once() -> None:
    validations = Validations(JOB, {}, 0)
    assert not ends_at(validations, 4, 2.0)
    assert [ends_at(validations, 8, 3.0) for _ in range(3)] == [False] * 3


def test_the_last_step_is_no_early_end() -> None:
    validations = Validations(JOB, {}, 0)
    assert [ends_at(validations, step, 1.0) for step in (4, 8, 20)] == [False, False, False]


def test_without_a_rule_no_run_ends_early_and_losses_are_ranked() -> None:
    validations = Validations(replace(JOB, early_stop=None), {}, 0)
    for step, loss in ((4, math.nan), (8, 3.0), (12, 2.0), (16, 3.0)):
        assert not ends_at(validations, step, loss)
    assert validations.ranked == (12, 8, 16, 4)
