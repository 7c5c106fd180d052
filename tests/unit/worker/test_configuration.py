"""A configuration of the mesh: what a Reconfigure message says, as the worker that enters it needs it."""

from __future__ import annotations

from elaswave_spmd.recovery.reconfiguration import reconfigure_message
from elaswave_spmd.worker.configuration import Configuration
from elaswave_spmd.worker.ready_order import KeptLimits
from tests.unit.scheduling.planning_cases import placed


def test_limits_are_those_of_the_message_or_follow_from_the_micro_batches() -> None:
    first = placed([1, 1, 1, 1], 8, 4)
    message = reconfigure_message(first, {}, 0, None, None, saves=False)
    entered = Configuration.from_message(first, message)
    assert [entered.limits_of(stage) for stage in range(4)] == [
        KeptLimits(4),
        KeptLimits(3),
        KeptLimits(2),
        KeptLimits(1),
    ]
    message = reconfigure_message(
        first, {}, 0, None, None, saves=False, split_layers=(1, 2, 3), put_off=(0, 0, 1, 2), in_flight=(5, 4, 3, 2)
    )
    entered = Configuration.from_message(first, message)
    assert [entered.limits_of(stage) for stage in range(4)] == [
        KeptLimits(5),
        KeptLimits(4),
        KeptLimits(3, 1),
        KeptLimits(2, 2),
    ]
