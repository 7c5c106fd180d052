"""A configuration of the mesh: what a Reconfigure message says, as the worker that enters it needs it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elaswave_spmd.mesh import Topology
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, ProtocolSpec
from elaswave_spmd.recovery.messages import Reconfigure
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.worker.configuration import Configuration
from elaswave_spmd.worker.ready_order import KeptLimits
from tests.unit.scheduling.planning_cases import placed


def message_for(placement: Placement, **fields: Any) -> Reconfigure:
    """A Reconfigure of this placement, at the begin of a run."""
    mesh = placement.mesh
    return Reconfigure(mesh.epoch, mesh.stages, placement.layer_cuts, placement.microbatch_counts, {}, **fields)


def test_limits_are_those_of_the_message_or_follow_from_the_micro_batches() -> None:
    first = placed([1, 1, 1, 1], 8, 4)
    message = message_for(first)
    entered = Configuration.from_message(first, message)
    assert [entered.limits_of(stage) for stage in range(4)] == [
        KeptLimits(4),
        KeptLimits(3),
        KeptLimits(2),
        KeptLimits(1),
    ]
    message = message_for(first, split_layers=(1, 2, 3), put_off=(0, 0, 1, 2), in_flight=(5, 4, 3, 2))
    entered = Configuration.from_message(first, message)
    assert [entered.limits_of(stage) for stage in range(4)] == [
        KeptLimits(5),
        KeptLimits(4),
        KeptLimits(3, 1),
        KeptLimits(2, 2),
    ]


def test_workers_know_who_shares_a_host_if_they_are_told() -> None:
    placement = placed([3, 2], 8, 4)
    no_layout: Any = None
    domains = {0: ("rack0", "a"), 1: ("rack1", "a"), 2: ("rack0", "a"), 3: ("rack1", "a"), 4: ("rack0", "b")}
    spread = replace(placement, mesh=replace(placement.mesh, topology=Topology.of(domains)))
    for first, tells, wanted in ((placement, True, ()), (spread, False, ()), (spread, True, ((0, 1, 0), (1, 2)))):
        protocol = ControllerProtocol(first, ProtocolSpec(no_layout, steps=1, tells_hosts=tells))
        message = protocol._reconfigure_message(0, None)
        assert message.hosts == wanted
        topology = Configuration.from_message(placement, message).placement.mesh.topology
        pairs = {(a, b) for a in range(5) for b in range(a) if topology.distance(a, b) == 0}
        assert pairs == ({(2, 0), (3, 1)} if wanted else {(a, b) for a in range(5) for b in range(a)})
