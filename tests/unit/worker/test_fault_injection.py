"""Injected miscomputation: one bit, in the step and at the point that are named, the same whoever draws it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.conf.schema import ChaosEvent, ChaosSettings
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.worker.fault_injection import FaultInjector, with_a_flipped_bit
from elaswave_spmd.worker.fault_points import FaultPoint

ONES = torch.ones(7)


def injector(rank: int, *events: ChaosEvent, seed: int = 0) -> FaultInjector:
    return FaultInjector(rank, ChaosSettings(events=events, seed=seed), cast(Any, None), lambda: None, 0)


def wrong_steps(worker: FaultInjector, point: FaultPoint, steps: int) -> list[int]:
    found = []
    for step in range(1, steps + 1):
        some = [worker.computed(point, step, (0, 1, 2), ONES) for _ in range(3)]
        assert sum(not torch.equal(it, ONES) for it in some) <= 1, "at most once in a step"
        found += [step] * any(not torch.equal(it, ONES) for it in some)
    return found


@given(st.integers(0, 2**32), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 5))
def test_exactly_one_bit_is_another(seed: int, dtype: torch.dtype, rows: int) -> None:
    right = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)
    kept = right.clone()
    wrong = with_a_flipped_bit(right, random.Random(seed))
    as_bytes = [t.view(torch.uint8).reshape(-1).tolist() for t in (right, wrong)]
    assert sum((a ^ b).bit_count() for a, b in zip(*as_bytes, strict=True)) == 1
    assert torch.equal(right.view(torch.uint8), kept.view(torch.uint8)), "what was given is left alone"
    assert wrong.dtype == dtype and wrong.shape == right.shape


def test_once_in_its_step_at_its_point_on_its_worker() -> None:
    event = ChaosEvent(3, "miscompute", 1, "reduce")
    assert wrong_steps(injector(1, event), FaultPoint.REDUCE, 5) == [3]
    assert wrong_steps(injector(1, event), FaultPoint.FORWARD, 5) == []
    assert wrong_steps(injector(0, event), FaultPoint.REDUCE, 5) == []


def test_any_worker_is_one_worker_and_all_draw_the_same() -> None:
    event = ChaosEvent(3, "miscompute", point="forward")
    assert sum(wrong_steps(injector(rank, event), FaultPoint.FORWARD, 5) == [3] for rank in range(3)) == 1


def test_a_rate_is_a_probability_in_each_step_from_its_step_on() -> None:
    event = ChaosEvent(11, "miscompute", 1, "norm", rate=0.25)
    found = wrong_steps(injector(1, event), FaultPoint.NORM, 410)
    assert min(found) > 10 and 70 < len(found) < 130
    assert found == wrong_steps(injector(1, event), FaultPoint.NORM, 410)
    assert found != wrong_steps(injector(1, event, seed=1), FaultPoint.NORM, 410)


@pytest.mark.parametrize(
    ("event", "where"),
    [
        ({"step": 3, "kind": "miscompute"}, "chaos.events.point=any"),
        ({"step": 3, "kind": "miscompute", "point": "publish"}, "chaos.events.point=publish"),
        ({"step": 3, "kind": "kill", "rate": 0.5}, "chaos.events.rate=0.5"),
        ({"step": 3, "kind": "miscompute", "point": "norm", "rate": 1.5}, "chaos.events.rate=1.5"),
    ],
)
def test_what_cannot_be_injected_is_refused(event: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ChaosSettings(events=(event,))  # type: ignore[arg-type]
    assert where in str(caught.value)


def test_a_bit_of_state_flips_as_the_seed_has_it() -> None:
    drawn = list[float]()
    state = cast(Any, SimpleNamespace(flip_a_bit=lambda *, draw: drawn.append(draw.random())))
    for seed in (1, 1, 2):
        worker = injector(1, ChaosEvent(3, "corrupt", 1, "forward"), seed=seed)
        for step in (2, 3, 3, 4):
            worker.visit(FaultPoint.FORWARD, step, (0, 1, 2), state)
    first, again, other = drawn
    assert first == again != other
