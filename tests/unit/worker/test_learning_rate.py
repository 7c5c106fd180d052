"""Learning rates as functions of the step."""

from __future__ import annotations

import pytest

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.worker.learning_rate import LearningRate


def test_learning_rate_is_a_function_of_the_step() -> None:
    rate = LearningRate(1.0, "linear", warmup_steps=2, num_steps=12, final_ratio=0.0)
    assert [rate.at(s) for s in (1, 2, 7, 12, 99)] == [0.5, 1.0, 0.5, 0.0, 0.0]
    cosine = LearningRate(2.0, "cosine", num_steps=10, final_ratio=0.5)
    assert cosine.at(10) == pytest.approx(1.0) and cosine.at(5) == pytest.approx(1.5)
    assert LearningRate(3.0).at(1000) == 3.0


def test_an_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        LearningRate(1.0, "cosin")
    assert caught.value.what == "optim.schedule=cosin is not a known learning-rate schedule"
    assert caught.value.exists == "constant, linear, cosine"
