"""Which settings of length and learning rate a run may be resumed with."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller.changed_schedule import ScheduleChange, check_schedule_change
from elaswave_spmd.controller.run_fingerprint import without_average
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.run_dir import MetricsLine
from elaswave_spmd.run_dir.run_identity import check_identity
from elaswave_spmd.worker.learning_rate import LearningRate

STEP, LAST = 40, 45
WHERE = "train.resume=a"
SAVED: dict[str, dict[str, Any]] = {"optim": {"warmup_steps": 5}, "train": {"steps": 50}}


def settings(*changes: dict[str, dict[str, Any]], **optim: Any) -> Settings:
    fields = copy.deepcopy(SAVED)
    fields["train"]["resume"] = "a"
    for change in ({"optim": optim}, *changes):
        for group, values in change.items():
            fields[group] |= values
    return Settings.from_dict(fields)


def identity(s: Settings) -> dict[str, Any]:
    """The part of `identity_of` that is looked at here, and a field beside it."""
    optim = {name: value for name, value in s.to_dict()["optim"].items() if value is not None}
    return {"seed": s.seed, "train": {"steps": s.train.steps, "seq_len": s.train.seq_len}, "optim": optim}


def lines(s: Settings, last: int = LAST) -> dict[int, MetricsLine]:
    rate = LearningRate.of(s.optim, s.train.steps)
    return {
        n: MetricsLine.of(step=n, mesh_epoch=0, loss=1, grad_norm=1, lr=rate.at(n), tokens=1, seconds=0, workers=1)
        for n in range(1, last + 1)
    }


def check(saved: Settings, present: Settings, step: int = STEP) -> ScheduleChange:
    return check_schedule_change(identity(saved), identity(present), present, lines(saved), step, where=WHERE)


def longer(steps: int, **more: Any) -> dict[str, dict[str, Any]]:
    return {"train": {"steps": steps, **more}}


def test_without_a_change_every_step_that_is_known_comes_again() -> None:
    found = check(settings(), settings())
    assert found == ScheduleChange({}, LAST) and found.message == ""


@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt"])
@pytest.mark.parametrize("steps", [STEP, 44, 500])
def test_schedules_without_an_end_go_on_for_any_length(schedule: str, steps: int) -> None:
    found = check(settings(schedule=schedule), settings(longer(steps), schedule=schedule))
    assert found == ScheduleChange({"train.steps": (50, steps)}, LAST)
    assert found.message == f"train.steps={steps} in place of 50"


def test_wsd_goes_on_until_its_decay_has_begun() -> None:
    saved = settings(schedule="wsd", decay_steps=8)  # after step 42
    found = check(saved, settings(longer(100), schedule="wsd", decay_steps=8))
    assert found.same_until == 42 and not found.is_stretched, "steps 43 to 45 will be others: they are at the peak"
    # A decay that is decided on late: after the steps that are done, also on from a constant rate.
    constant = settings(schedule="constant")
    assert check(constant, settings(longer(60), schedule="wsd", decay_steps=15)).same_until == LAST
    with pytest.raises(ConfigError, match="decay_steps: saved nothing, now 30"):
        check(constant, settings(longer(60), schedule="wsd", decay_steps=30))
    with pytest.raises(ConfigError, match=r"train\.steps: saved 50, now 100") as caught:
        check(saved, settings(longer(100), schedule="wsd", decay_steps=8), step=44)
    assert "train.resume_at=42 with another run.dir" in caught.value.fix


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_other_schedules_stretch_only_if_that_is_asked_for(schedule: str) -> None:
    saved = settings(schedule=schedule)
    with pytest.raises(ConfigError, match=r"train\.steps: saved 50, now 100") as caught:
        check(saved, settings(longer(100), schedule=schedule))
    assert "optim.schedule_steps=50" in caught.value.fix and "train.reschedule=true" in caught.value.fix
    assert "train.resume_at=5 " in caught.value.fix and caught.value.where == WHERE
    same = check(saved, settings(longer(100), schedule=schedule, schedule_steps=50))
    assert same.same_until == LAST and not same.is_stretched, "the first way that the error names"
    stretched = check(saved, settings(longer(100, reschedule=True), schedule=schedule))
    assert stretched.is_stretched and stretched.same_until == STEP, "the steps after the checkpoint are not compared"
    assert "other learning rates" in stretched.message
    early = check(saved, settings(longer(100), schedule=schedule), step=5)
    assert early.same_until == 5 and not early.is_stretched


def test_rates_that_were_stretched_once_are_those_that_are_compared_later() -> None:
    """Restarted from the checkpoint from before: the steps after it have the new rates already."""
    saved, present = settings(), settings(longer(100, reschedule=True))
    known = lines(saved, STEP) | {n: line for n, line in lines(present, LAST).items() if n > STEP}
    found = check_schedule_change(identity(saved), identity(present), present, known, STEP, where=WHERE)
    assert found.is_stretched and found.same_until == LAST
    # From a checkpoint of the stretched run itself nothing has changed.
    same = check_schedule_change(identity(present), identity(present), present, known, STEP + 1, where=WHERE)
    assert same.changed == {}


def test_all_other_differences_are_refused_as_ever() -> None:
    with pytest.raises(ConfigError, match="seed: saved 0, now 3") as caught:
        check(
            settings(schedule="constant"),
            Settings.from_dict({**settings(longer(60), schedule="constant").to_dict(), "seed": 3}),
        )
    assert "train.steps" not in caught.value.what, "the length alone would be fine"
    with pytest.raises(ConfigError, match=r"optim.lr: saved 0.002, now 0.5"):
        check(settings(), settings(lr=0.5))
    with pytest.raises(ConfigError, match="momentum"):
        check(settings(), settings(longer(60, reschedule=True), momentum=0.5))


def test_a_run_is_not_shorter_than_what_is_done() -> None:
    with pytest.raises(ConfigError, match=r"train\.steps=39 is less than the 40 steps that the checkpoint has"):
        check(settings(schedule="constant"), settings(longer(39), schedule="constant"))


def test_an_average_is_switched_off_by_a_resume_and_not_on_or_changed() -> None:
    plain, averaged, other = (identity(settings(ema=ema)) for ema in (None, 0.9, 0.99))
    check_identity(without_average(averaged, plain), plain)
    check_identity(without_average(averaged, averaged), averaged)
    for saved, present, told in ((plain, averaged, "saved nothing, now 0.9"), (averaged, other, "saved 0.9, now 0.99")):
        with pytest.raises(ConfigError, match=f"optim.ema: {told}"):
            check_identity(without_average(saved, present), present)
