"""The controller's half: places once, believes nobody who disagrees, adds up validations."""

from __future__ import annotations

import math

import pytest

from elaswave_spmd.errors import RunError
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery import ControllerProtocol
from elaswave_spmd.recovery.messages import Applied, Ready, ValidationLoss
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding import Shardings

PLACEMENT = Placement(Mesh.initial(MeshShape.of_stages((2, 1))), 5, (0, 1, 3), ((3, 2), (5,)), Shardings())


def applied(rank: int, step: int = 1, loss: float = 1.5, norm: float = 0.5) -> Applied:
    return Applied(step, 0, rank, loss, norm, True)


def test_the_place_comes_with_the_last_member_and_says_everything() -> None:
    protocol = ControllerProtocol(PLACEMENT)
    assert protocol.ready(Ready(2, "c")) is None and protocol.ready(Ready(0, "a")) is None
    assert protocol.ready(Ready(0, "a")) is None, "one member twice is one member"
    place = protocol.ready(Ready(1, "b"))
    assert place is not None
    assert (place.epoch, place.stages, place.layer_cuts, place.unit_counts) == (
        0,
        ((0, 1), (2,)),
        (0, 1, 3),
        ((3, 2), (5,)),
    )
    assert place.addresses == {0: "a", 1: "b", 2: "c"}


def test_a_step_is_committed_once_at_its_first_report() -> None:
    protocol = ControllerProtocol(PLACEMENT)
    first = applied(1)
    assert protocol.applied(first) is first and protocol.version == 1
    assert protocol.applied(applied(0)) is None and protocol.applied(applied(2)) is None
    second = applied(2, step=2, loss=1.25)
    assert protocol.applied(second) is second
    assert protocol.applied(applied(0, step=2, loss=1.25)) is None


@pytest.mark.parametrize(
    "wrong", [applied(0, loss=math.nextafter(1.5, 2)), applied(0, norm=math.nextafter(0.5, 0)), applied(0, loss=-1.5)]
)
def test_workers_that_disagree_by_one_bit_end_the_run(wrong: Applied) -> None:
    protocol = ControllerProtocol(PLACEMENT)
    protocol.applied(applied(2))
    with pytest.raises(RunError, match="workers 2 and 0 disagree about step 1"):
        protocol.applied(wrong)


def test_a_late_report_of_the_step_before_is_compared_too() -> None:
    protocol = ControllerProtocol(PLACEMENT)
    protocol.applied(applied(1))
    protocol.applied(applied(1, step=2))
    with pytest.raises(RunError):
        protocol.applied(applied(0, loss=9.0))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_equal_values_that_are_not_finite_agree(value: float) -> None:
    protocol = ControllerProtocol(PLACEMENT)
    first = both(applied(0), value)
    assert protocol.applied(first) is first
    assert protocol.applied(both(applied(1), value)) is None


def both(message: Applied, value: float) -> Applied:
    return Applied(message.step, 0, message.rank, value, value, False)


def test_reports_are_forgotten_after_a_while() -> None:
    protocol = ControllerProtocol(PLACEMENT)
    for step in range(1, 50):
        for rank in (0, 1, 2):
            protocol.applied(applied(rank, step))
    assert len(protocol._reports) <= 4


def test_a_validation_is_the_exactly_rounded_sum_in_any_order() -> None:
    losses = [1e16, 1.0, 1.0, -1e16, 0.25]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        protocol = ControllerProtocol(PLACEMENT, num_validation_units=5)
        results = [protocol.validation(ValidationLoss(7, 2, (u,), (losses[u],))) for u in order]
        assert results == [None] * 4 + [(7, 2.25)]


def test_validations_of_two_steps_do_not_mix() -> None:
    protocol = ControllerProtocol(PLACEMENT, num_validation_units=2)
    assert protocol.validation(ValidationLoss(1, 1, (0,), (1.0,))) is None
    assert protocol.validation(ValidationLoss(2, 2, (0, 1), (3.0, 4.0))) == (2, 7.0)
    assert protocol.validation(ValidationLoss(1, 1, (0,), (1.0,))) is None, "the same unit twice is one unit"
    assert protocol.validation(ValidationLoss(1, 2, (1,), (2.0,))) == (1, 3.0)
