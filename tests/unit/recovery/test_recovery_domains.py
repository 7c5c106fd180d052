"""Several failure domains: the first Reconfigure says who holds what, and newcomers stand where they were started."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaswave_spmd.mesh import Mesh, MeshShape, Topology
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, ProtocolSpec
from elaswave_spmd.recovery.messages import Ready, Reconfigure, StepReport
from elaswave_spmd.scheduling.placement import place
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.sharding.layout import LayerUse, ParameterInfo, lay_out
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.sharding.replicas import from_rows
from tests.unit.recovery.controller_cases import prepares, reconfigures

LAYOUT = lay_out([LayerUse(f"l{i}", (ParameterInfo(f"l{i}.w", (600,)),)) for i in range(2)], page_size=64)


def protocol_of(hosts: str, newcomers: str = "") -> ControllerProtocol:
    """A run on one stage, its ranks and those of newcomers on these hosts, one letter each."""
    topology = Topology.of({rank: (host,) for rank, host in enumerate(hosts)})
    mesh = Mesh.initial(MeshShape.of(dp=len(hosts)), topology)
    placement = place(mesh, LAYOUT, Shardings().with_zero(2), 8)
    replicas = place_replicas(LAYOUT, placement.state_sharding(mirror_count=1, scatter=1))
    protocol = ControllerProtocol(replace(placement, replicas=replicas), ProtocolSpec(LAYOUT, 10))
    for number, host in enumerate(newcomers):
        protocol.expect(len(hosts) + number, (host,))
    return protocol


def start(protocol: ControllerProtocol) -> Reconfigure:
    sent = [it for rank in protocol.placement.mesh.members for it in protocol.ready(Ready(rank, f"at {rank}"))]
    message, *_ = reconfigures(sent).values()
    return message


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aabc"])
def test_the_first_place_names_replicas_that_only_the_controller_can_work_out(hosts: str) -> None:
    protocol = protocol_of(hosts)
    message = start(protocol)
    assert from_rows(message.replicas) == protocol.placement.replicas
    for runs in from_rows(message.replicas).values():
        for run in runs:
            assert len({hosts[rank] for rank in run.replicas}) == 2, "primary and mirror on two hosts"


def test_on_one_host_the_first_place_stays_short() -> None:
    assert start(protocol_of("aaa")).replicas == ()


@pytest.mark.parametrize("host", ["a", "b", "c"])
def test_a_newcomer_stands_where_it_was_started(host: str) -> None:
    protocol = protocol_of("ab", host)
    start(protocol)
    effects = protocol.ready(Ready(2, "at 2"))
    (epoch,) = {prepare.epoch for prepare in prepares(effects).values()}
    for rank in (0, 1):
        effects = protocol.report_received(StepReport(epoch, rank, 0, ()))
    assert reconfigures(effects)
    assert protocol.placement.mesh.members == (0, 1, 2)
    assert protocol.placement.mesh.topology.path(2) == (host,)
