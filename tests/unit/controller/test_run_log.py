"""What a run says as it starts, and of steps that it gives up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_spmd.conf.compose import settings_from
from elaswave_spmd.controller.actions import Record
from elaswave_spmd.controller.resume import ResumePoint
from elaswave_spmd.controller.run_log import RunLog
from elaswave_spmd.data import PreparedData
from elaswave_spmd.recovery.actions import Committed
from elaswave_spmd.recovery.messages import Applied
from elaswave_spmd.run_dir import MetricsLine
from elaswave_spmd.run_dir.rollback import ROLLBACK
from elaswave_spmd.worker.plan_run import plan_run

SMALL = ("model=mlp_tiny", "train.seq_len=8", "model.layers=2", "model.d_model=8", "page.size=64")


def told_at_the_start(*words: str) -> dict[str, str]:
    """The events of the start, by kind, with their lines."""
    data = PreparedData("text", "", 1, "bytes", 11, 8, 100, 10, token_file="tokens", dtype="uint8", num_tokens=900)
    plan, told = plan_run(settings_from([*SMALL, *words]), data), dict[str, str]()
    observer = SimpleNamespace(
        run_dir=SimpleNamespace(path=Path("run")),
        on_start=lambda info: None,
        on_event=lambda kind, message: told.update({kind: message}),
    )
    RunLog(plan, cast("Any", observer), ResumePoint("run", 1)).started()
    return told


@pytest.mark.parametrize(("steps", "is_told"), [(19, True), (20, False)])
def test_a_run_that_is_shorter_than_its_warm_up_says_so(steps: int, is_told: bool) -> None:
    told = told_at_the_start(f"train.steps={steps}", "optim.warmup_steps=20")
    assert (told.keys() == {"short_of_peak"}) is is_told
    assert is_told or not told


@pytest.mark.parametrize(
    ("words", "is_told"),
    [
        ("checkpoint.every=30", True),
        ("checkpoint.every=40", True),
        ("checkpoint.every=29", False),
        ("checkpoint.every=0", False),
        ("checkpoint.every=40 checkpoint.keep_best=1 train.validate_every=30", True),
        ("checkpoint.every=40 checkpoint.keep_best=1 train.validate_every=29", False),
    ],
)
def test_a_run_that_ends_before_its_first_checkpoint_says_so(words: str, is_told: bool) -> None:
    told = told_at_the_start("train.steps=30", *words.split())
    assert [*told] == ["no_checkpoint"] * is_told


def test_a_held_out_split_without_a_micro_batch_is_told() -> None:
    told = told_at_the_start("train.steps=20", "train.microbatch_size=16", "train.global_batch=32")
    assert told.keys() == {"no_validation"} and "has 10 samples" in told["no_validation"]


@pytest.mark.parametrize(
    ("words", "is_told"),
    [
        ("train.validate_every=0 train.validate_microbatches=2", True),
        ("train.validate_every=0 train.validate_microbatches=32", False),  # as it is where nobody says anything
        ("train.validate_every=10 train.validate_microbatches=2", False),
    ],
)
def test_the_length_of_validations_is_told_to_do_nothing_where_there_are_none(words: str, is_told: bool) -> None:
    told = told_at_the_start("train.steps=20", *words.split())
    assert [*told] == ["no_validation"] * is_told
    assert not is_told or "train.validate_microbatches=2 " in told["no_validation"]


@pytest.mark.parametrize(("back", "seconds"), [(0, 17.0), (1, 16.0), (2, 14.0), (3, 9.0), (4, 0.0)])
def test_a_rollback_tells_how_long_the_steps_took_that_are_given_up(back: int, seconds: float) -> None:
    """Also those of an earlier life of the run. Their lines are removed, so nobody could tell later."""
    data = PreparedData("text", "", 1, "bytes", 11, 8, 100, 10, token_file="tokens", dtype="uint8", num_tokens=900)
    told = dict[str, Any]()
    observer: Any = SimpleNamespace(
        run_dir=SimpleNamespace(path=Path("run")),
        on_step=lambda line: None,
        on_event=lambda kind, **fields: told.update({kind: fields}),
    )
    numbers: Any = {"mesh_epoch": 0, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 1, "workers": 1}
    lines = {step: MetricsLine.of(step=step, seconds=float(step), **numbers) for step in (1, 2, 3)}
    checkpoint: Any = SimpleNamespace(step=2)  # so step 3 is done again
    log = RunLog(plan_run(settings_from([*SMALL]), data), observer, ResumePoint("run", 2, checkpoint, lines=lines))
    for step, now in ((3, 5.0), (4, 14.0)):
        log.action(Committed(Applied(step, 0, 0, 1.0, 1.0, True)), now)
    log.action(Record(ROLLBACK, {"step": back, "given_up": 4}), 20.0)
    assert told == {"rollback": {"step": back, "given_up": 4, "seconds": seconds}}
