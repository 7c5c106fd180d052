"""What comes from a worker that has entered the next mesh epoch first, and has page ranges as that has them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from elaswave_spmd.recovery.messages import PageState, ReducedGradient
from elaswave_spmd.sharding.replicas import PageRange
from elaswave_spmd.worker.state import BackgroundCopies
from elaswave_spmd.worker.state_replica import StateReplica
from tests.unit.runtime.runtime_cases import small_layout


def learner_of(*ranges: PageRange) -> StateReplica:
    """A worker that learns these page ranges, at version 4."""
    replica = StateReplica.__new__(StateReplica)
    state = SimpleNamespace(is_frozen=lambda layer, page: False)
    vars(replica).update(
        _held=dict.fromkeys(ranges),
        _since=dict.fromkeys(ranges, 4),
        _early={},
        _loss_range=None,
        state=state,
        protocol=SimpleNamespace(version=4),
        background=BackgroundCopies(),
        _job=SimpleNamespace(compares_at=lambda version: False),
    )
    return replica


@pytest.mark.parametrize(("first", "stop"), [(0, 3), (3, 5), (1, 4), (5, 8)])
def test_state_of_a_part_of_a_page_range_waits_for_the_epoch_that_cuts_it(first: int, stop: int) -> None:
    """The primary sends it once: if it were ignored, this worker would never have all of its state."""
    replica, message, payload = learner_of((0, 0, 5)), PageState(4, 0, first, stop, b""), torch.zeros(1)
    replica.handle(2, message, payload)
    assert replica.pop_early() == [(2, message, payload)]


def test_state_of_whole_page_ranges_is_taken_at_once_and_not_kept() -> None:
    replica = learner_of((0, 0, 3), (0, 3, 5), (1, 0, 5))
    replica.handle(2, PageState(4, 0, 0, 5, b""), torch.zeros(1))
    assert replica.background and not replica.pop_early()


@pytest.mark.parametrize("held", [[(0, 0, 3), (0, 3, 4)], [(0, 0, 3)], [(0, 0, 4)]])
def test_a_reduced_gradient_of_ranges_that_are_joined_in_the_next_epoch_is_kept_for_it(held: list[PageRange]) -> None:
    """It counts for the ranges that are inside it until then, which that epoch does not have."""
    replica, layout, complete = learner_of(*held), small_layout(64), list[PageRange]()
    vars(replica).update(
        _layout=layout,
        _gradients={},
        reducer=SimpleNamespace(gradient_known=lambda step, key: None),
        sums=SimpleNamespace(gradient=lambda *what: None),
        _commit=SimpleNamespace(gradient_complete=lambda step, key, *what: complete.append(key)),
        _relay_gradient=lambda *what, **how: None,
    )
    start, stop = layout.layers[0].span(0, 4)
    message, payload = ReducedGradient(5, 0, 0, 4, b"\0" * 16), torch.arange(stop - start, dtype=torch.float32)
    replica.handle(2, message, payload)
    assert complete == held
    assert replica.pop_early() == ([] if held == [(0, 0, 4)] else [(2, message, payload)])
