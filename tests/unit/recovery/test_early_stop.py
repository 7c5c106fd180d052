"""The rule by which a run ends early: a pure function of its validation losses."""

from __future__ import annotations

import math

import pytest

from elaswave_spmd.recovery.early_stop import EarlyStop, Progress

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("rule", "losses", "best", "over"),
    [
        (EarlyStop(2), {}, Progress(), False),
        (EarlyStop(2), {10: 3.0}, Progress(10, 3.0, 0), False),
        (EarlyStop(2), {10: 3.0, 20: 3.0, 30: 2.9}, Progress(30, 2.9, 0), False),
        (EarlyStop(2), {10: 3.0, 20: 3.0, 30: 3.0}, Progress(10, 3.0, 2), True),
        (EarlyStop(2), {30: 3.5, 10: 3.0, 20: 3.1}, Progress(10, 3.0, 2), True),
        (EarlyStop(1, 0.5), {10: 3.0, 20: 2.5}, Progress(10, 3.0, 1), True),
        (EarlyStop(1, 0.5), {10: 3.0, 20: 2.25}, Progress(20, 2.25, 0), False),
        (EarlyStop(2), {10: NAN, 20: 3.0, 30: NAN}, Progress(20, 3.0, 1), False),
        (EarlyStop(2), {10: NAN, 20: INF}, Progress(0, INF, 2), True),
    ],
)
def test_what_is_best_and_whether_the_run_is_over(
    rule: EarlyStop, losses: dict[int, float], best: Progress, over: bool
) -> None:
    assert rule.progress(losses) == best
    assert rule.is_over(losses) is over
