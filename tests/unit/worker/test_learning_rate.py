"""Learning rates as functions of the step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elaswave_spmd.conf.schema import SCHEDULES, OptimSettings, Settings
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
    assert caught.value.exists == "constant, linear, cosine, wsd, inverse_sqrt"


def test_wsd_stays_at_its_peak_and_falls_linearly_at_the_end() -> None:
    rate = LearningRate(2.0, "wsd", warmup_steps=4, num_steps=20, final_ratio=0.5, decay_steps=8)
    assert [rate.at(s) for s in (1, 2, 4, 5, 12)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    assert [rate.at(s) for s in range(13, 21)] == [2.0 * (0.5 + 0.5 * (1 - k / 8)) for k in range(1, 9)]
    assert rate.at(20) == rate.at(99) == 1.0


@pytest.mark.parametrize(
    ("warmup", "steps", "begin"), [(0, 100, 80), (20, 100, 80), (90, 100, 90), (200, 100, 200), (0, 1, 1), (0, 3, 2)]
)
def test_wsd_decays_in_a_fifth_of_the_steps_or_in_those_that_are_left(warmup: int, steps: int, begin: int) -> None:
    rate = LearningRate(1.0, "wsd", warmup_steps=warmup, num_steps=steps, final_ratio=0.0)
    assert rate.decay_begin == begin
    assert [s for s in range(warmup + 1, steps + 1) if rate.at(s) < 1.0] == list(range(begin + 1, steps + 1))
    assert begin >= steps or rate.at(steps) == 0.0


@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_inverse_sqrt_goes_on_without_an_end(warmup: int) -> None:
    rate = LearningRate(3.0, "inverse_sqrt", warmup_steps=warmup, num_steps=10)
    for step in (warmup + 1, 50, 10_000):
        assert rate.at(step) == 3.0 * math.sqrt(max(1, warmup) / step)
    assert rate.at(max(1, warmup)) == 3.0, "it meets the warm-up at the peak"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_longer_run_has_the_same_rates_where_the_schedule_says_so(schedule: str) -> None:
    """What `train.steps` may grow to without a word: docs and README name these cases."""
    settings = OptimSettings(schedule=schedule, warmup_steps=5)
    short, long = LearningRate.of(settings, 50), LearningRate.of(settings, 100)
    same = next((s - 1 for s in range(1, 51) if short.at(s) != long.at(s)), 50)
    assert same == {"constant": 50, "inverse_sqrt": 50, "wsd": 40}.get(schedule, 5)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_schedule_of_its_own_length_stays_at_its_end(schedule: str) -> None:
    settings = OptimSettings(schedule=schedule, warmup_steps=5, schedule_steps=50, final_lr_ratio=0.25)
    short, long = LearningRate.of(settings, 50), LearningRate.of(settings, 100)
    assert [short.at(s) for s in range(1, 101)] == [long.at(s) for s in range(1, 101)]
    assert long.at(51) == long.at(100) == settings.lr * 0.25


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"decay_steps": 10}, "optim.decay_steps=10 is given with optim.schedule=cosine"),
        ({"schedule_steps": 10, "schedule": "constant"}, "optim.schedule_steps=10 is given with optim.schedule=const"),
        ({"schedule_steps": 5}, "optim.schedule_steps=5 is no more than optim.warmup_steps=20"),
        ({"schedule_steps": 7, "warmup_steps": 7, "schedule": "linear"}, "no more than optim.warmup_steps=7"),
        ({"decay_steps": 381, "schedule": "wsd"}, "optim.decay_steps=381 and optim.warmup_steps=20 are more than"),
        ({"decay_steps": 81, "schedule": "wsd", "schedule_steps": 100}, "more than the schedule's 100 steps"),
    ],
)
def test_settings_that_contradict_the_schedule_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        Settings.from_dict({"optim": fields})
    assert caught.value.rule and caught.value.fix


@pytest.mark.parametrize(("warmup", "decay", "steps"), [(20, 2, 10), (20, 15, 30), (5, 30, 30), (3, 40, 10)])
def test_a_schedule_that_does_not_fit_is_refused_with_what_fits(warmup: int, decay: int, steps: int) -> None:
    fields = {"schedule": "wsd", "warmup_steps": warmup, "decay_steps": decay}
    with pytest.raises(ConfigError) as caught:
        Settings.from_dict({"optim": fields, "train": {"steps": steps}})
    for way in str(caught.value.fix).split(", or "):
        name, _, most = way.removeprefix("optim.").partition(" of at most ")
        longer = {} if most else {"steps": int(way.removeprefix("a schedule of ").removesuffix(" steps"))}
        changed = {**fields, name: int(most)} if most else fields
        Settings.from_dict({"optim": changed, "train": {"steps": steps, **longer}})
