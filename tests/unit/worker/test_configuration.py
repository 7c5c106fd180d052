"""A configuration of the mesh: what a Reconfigure message says, as the worker that enters it needs it."""

from __future__ import annotations

from dataclasses import replace

from elaswave_spmd.mesh import Topology
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


def test_workers_know_who_shares_a_host_if_they_are_told() -> None:
    placement = placed([3, 2], 8, 4)
    domains = {0: ("rack0", "a"), 1: ("rack1", "a"), 2: ("rack0", "a"), 3: ("rack1", "a"), 4: ("rack0", "b")}
    spread = replace(placement, mesh=replace(placement.mesh, topology=Topology.of(domains)))
    for first, tells, wanted in ((placement, True, ()), (spread, False, ()), (spread, True, ((0, 1, 0), (1, 2)))):
        message = reconfigure_message(first, {}, 0, None, None, saves=False, tells_hosts=tells)
        assert message.hosts == wanted
        topology = Configuration.from_message(placement, message).placement.mesh.topology
        pairs = {(a, b) for a in range(5) for b in range(a) if topology.distance(a, b) == 0}
        assert pairs == ({(2, 0), (3, 1)} if wanted else {(a, b) for a in range(5) for b in range(a)})
