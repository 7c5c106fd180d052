"""Workers go and come over and over: what the run has of page ranges, and the bits, stay as they would have been."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from elaswave_spmd.recovery import controller_protocol
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import ReplicaMap
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.faults import Fault
from tests.cluster.schedules import Schedule, cluster_of, judge, undisturbed
from tests.cluster.tiny import TinyRun
from tests.simulated.bits_cases import one_thread

CHANGES = 8


class Counted(SimulatedCluster):
    """A cluster that counts the page ranges of each mesh epoch."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.num_ranges: list[int] = []
        super().__init__(*args, **options)

    def send(self, sender: int, peer: int, message: m.Message, payload: Any) -> None:
        replicas = self.protocol.placement.replicas
        if replicas is not None:
            num_ranges = sum(map(len, replicas.values()))
            if self.num_ranges[-1:] != [num_ranges]:
                self.num_ranges.append(num_ranges)
        super().send(sender, peer, message, payload)


def run(mesh: str, zero: int, *, seed: int) -> Counted:
    """A run in which the oldest worker is lost and a new one comes, many times."""
    members = list(Schedule(0, TinyRun(), mesh, zero).placement.mesh.members)
    faults = list[Fault]()
    for number in range(CHANGES):
        step = 3 * number + 2
        faults.append(Fault(step, "kill", members.pop(0), "backward"))
        faults.append(Fault(step + 1, "join", members[-1], "forward"))
        members.append(members[-1] + 1)
    schedule = Schedule(seed, TinyRun(steps=3 * CHANGES + 3, width=48), mesh, zero, faults=tuple(faults))
    wanted = undisturbed(schedule.run.key)
    cluster = cluster_of(schedule, kind=Counted)
    how, failure, detail = judge(schedule, cluster, wanted)
    assert (how, failure) == ("bits", ""), detail
    assert isinstance(cluster, Counted) and not cluster.rejected
    assert set(cluster.protocol.members) == set(members), "all of them were lost, and all have come"
    return cluster


@pytest.mark.parametrize(("mesh", "zero"), [("dp4", 1), ("dp4", 3), ("dp3", 0), ("dp4_pp2", 2)])
@one_thread()
def test_page_ranges_stay_few(mesh: str, zero: int) -> None:
    found = run(mesh, zero, seed=1).num_ranges
    with mock.patch.object(controller_protocol, "joined", _as_they_are):
        split = run(mesh, zero, seed=1).num_ranges
    assert split == sorted(split), "without that each change leaves more of them"
    assert max(found) <= 1.5 * found[0] and max(found) < split[-1], (found, split)


def _as_they_are(replicas: ReplicaMap, layout: ModelLayout) -> ReplicaMap:
    return replicas
