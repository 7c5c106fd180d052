"""The first mesh where workers are lost before there is one: of those that are left, or of others in their places."""

from __future__ import annotations

import dataclasses

from elaswave_spmd.mesh import Mesh, MeshShape, Topology
from elaswave_spmd.recovery.actions import RemoveMember, Unrecoverable
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, Policy, ProtocolSpec
from elaswave_spmd.recovery.messages import AT_ONCE, CaughtUp, Damaged, Ready
from elaswave_spmd.sharding.replica_placement import least_pages, place_replicas
from elaswave_spmd.sharding.replicas import from_rows
from tests.unit.recovery.controller_cases import (
    LAYOUT,
    answer,
    make,
    placement,
    prepares,
    reconfigures,
    replicas_of,
    started,
)


def mirrored(*stages: int, zero: int = 1, min_workers: int = 1, version: int = 0) -> ControllerProtocol:
    """Planned with one mirror of each page, as a run that is elastic is."""
    planned = placement(*stages, zero=zero)
    replicas = place_replicas(LAYOUT, planned.state_sharding(1), least_pages=least_pages(LAYOUT))
    planned = dataclasses.replace(planned, replicas=replicas)
    return ControllerProtocol(planned, ProtocolSpec(LAYOUT, 20, version=version), Policy(min_workers=min_workers))


def ready(protocol: ControllerProtocol, *ranks: int) -> list:
    effects = []
    for rank in ranks:
        assert not reconfigures(effects), "nobody has a place before all are there"
        effects = protocol.ready(Ready(rank, f"at {rank}"))
    return effects


def test_whoever_is_left_forms_the_first_mesh() -> None:
    protocol = mirrored(3, version=7)
    assert ready(protocol, 0, 2) == []
    effects = protocol.lost(1, "killed")
    assert effects[0] == RemoveMember(1, lost=True)
    places = reconfigures(effects)
    assert places.keys() == {0, 2} and protocol.started and protocol.members == (0, 2)
    place = places[0]
    assert (place.epoch, place.version, place.stages, place.microbatch_counts) == (0, 7, ((0, 2),), ((3, 2),))
    assert place.addresses == {0: "at 0", 2: "at 2"} and place.recovery_plan is None and not place.save


def test_rows_of_replicas_are_sent_unless_the_mesh_is_as_planned() -> None:
    protocol = mirrored(3)
    assert reconfigures(ready(protocol, 0, 1, 2))[0].replicas == ()
    protocol = mirrored(3)
    ready(protocol, 0, 2)
    place = reconfigures(protocol.lost(1, "killed"))[0]
    replicas = from_rows(place.replicas)
    assert replicas == protocol.placement.replica_map(LAYOUT)
    assert {rank for pages in replicas_of(protocol) for rank in pages.replicas} == {0, 2}
    assert all(len(pages.replicas) == 2 and not pages.learners for pages in replicas_of(protocol))


def test_the_first_mesh_waits_for_whoever_was_started_in_place_of_a_lost_one() -> None:
    protocol = mirrored(2, 1)
    ready(protocol, 0, 1)
    assert protocol.lost(2, "killed", replacement=3) == [RemoveMember(2, lost=True)], "all others are ready"
    places = reconfigures(ready(protocol, 3))
    assert places[3].stages == ((0, 1), (3,)) and places[3].layer_cuts == (0, 1, 3) and places[3].epoch == 0


def test_a_replacement_is_lost_as_any_other() -> None:
    protocol = mirrored(2, 1)
    ready(protocol, 0, 1)
    protocol.lost(2, "killed", replacement=3)
    assert not reconfigures(protocol.lost(3, "killed", replacement=4)) and protocol.not_ready == (4,)
    places = reconfigures(protocol.lost(4, "killed"))
    assert places.keys() == {0, 1} and places[0].stages == ((0,), (1,)), "its stage gets one of the other's"


def test_a_replacement_that_is_not_waited_for_and_comes_in_time_is_taken() -> None:
    protocol = mirrored(3)
    protocol.lost(1, "killed")
    assert not ready(protocol, 0, 3)
    assert reconfigures(ready(protocol, 2))[3].stages == ((0, 2, 3),)


def test_all_workers_of_a_stage_are_lost_and_no_state_with_them() -> None:
    protocol = mirrored(2, 2)
    ready(protocol, 0, 1)
    protocol.lost(2, "killed")
    places = reconfigures(protocol.lost(3, "killed"))
    assert places[1].stages == ((0,), (1,)) and places[1].layer_cuts == (0, 1, 3)


def test_with_fewer_workers_than_stages_there_are_fewer_stages_until_others_come() -> None:
    protocol = mirrored(1, 1, 1)
    ready(protocol, 0, 1)
    place = reconfigures(protocol.lost(2, "killed"))[0]
    assert place.stages == ((0,), (1,)) and place.layer_cuts[-1] == 3 and len(place.layer_cuts) == 3
    ready(protocol, 5)
    assert [len(members) for members in reconfigures(answer(protocol))[5].stages] == [1, 1, 1]


def test_too_few_are_left() -> None:
    protocol = mirrored(3, min_workers=2)
    ready(protocol, 0)
    assert protocol.lost(1, "killed") == [RemoveMember(1, lost=True)]
    removed, end = protocol.lost(2, "hangs")
    assert removed == RemoveMember(2, lost=True) and not protocol.started
    assert end == Unrecoverable(
        (),
        "1 workers are left, elastic.min_workers is 2, as 2 were lost while workers started "
        "(worker 1: killed; worker 2: hangs)",
    )
    protocol = mirrored(2)
    protocol.lost(0, "killed")
    assert isinstance(protocol.lost(1, "killed")[-1], Unrecoverable) and protocol.members == ()


def test_a_worker_is_lost_once_and_strangers_never() -> None:
    protocol = mirrored(3)
    protocol.lost(1, "killed")
    assert protocol.lost(1, "again") == [] and protocol.lost(77, "unknown") == []
    assert protocol.members == (0, 2)


def test_reports_of_members_are_void_before_there_are_any() -> None:
    """A worker with the run's keys may send anything; a change of the mesh begins with a mesh."""
    protocol = mirrored(3)
    ready(protocol, 0, 1)
    assert protocol.caught_up(CaughtUp(0, 0)) == []
    assert protocol.damaged(Damaged(0, 0, 1, ((0, 0, 1),))) == []
    assert protocol.relink({frozenset({0, 1}): "lost"}) == []
    assert protocol.last_epoch == 0 and protocol.changing == ()


def test_the_newcomer_has_the_failure_domain_in_which_it_was_started() -> None:
    planned = placement(3, zero=1)
    topology = Topology.of({rank: (f"host {rank % 2}",) for rank in range(3)})
    mesh = Mesh.initial(MeshShape.of_stages((3,)), topology)
    protocol = ControllerProtocol(dataclasses.replace(planned, mesh=mesh), ProtocolSpec(LAYOUT, 20))
    protocol.expect(3, ("host 1",))
    protocol.lost(2, "killed", replacement=3)
    ready(protocol, 0, 1, 3)
    assert protocol.placement.mesh.topology.path(3) == ("host 1",)


# ---- spares


def test_a_spare_takes_a_lost_members_place_in_the_same_epoch() -> None:
    protocol = started()
    effects = protocol.lost(1, "killed", spare=Ready(3, "at 3"))
    assert {p.after for p in prepares(effects).values()} == {AT_ONCE} and prepares(effects).keys() == {0, 2}
    assert all(p.epoch == 1 for p in prepares(effects).values()), "one change"
    places = reconfigures(answer(protocol, 3))
    assert places[3].stages == ((0, 3), (2,)) and places[3].addresses[3] == "at 3"
    assert all(3 not in pages.replicas for pages in replicas_of(protocol)), "it learns, as every newcomer"


def test_a_spare_comes_for_a_newcomer_that_is_lost_before_it_joins() -> None:
    protocol = started()
    protocol.ready(Ready(3, "at 3"))
    effects = protocol.lost(3, "killed", spare=Ready(4, "at 4"))
    assert effects[0] == RemoveMember(3, lost=True) and prepares(effects)
    assert reconfigures(answer(protocol))[4].stages == ((0, 1), (2, 4))


def test_a_spare_saves_a_run_from_having_too_few_workers() -> None:
    protocol = started(policy=Policy(min_workers=3))
    protocol.lost(1, "killed", spare=Ready(3, "at 3"))
    place = reconfigures(answer(protocol, 3))[3]
    assert not place.save and not protocol.stops


def test_a_loss_before_the_first_place_sends_nothing() -> None:
    protocol = make()
    protocol.ready(Ready(0, "a"))
    assert protocol.lost(0, "killed") == [RemoveMember(0, lost=True)] and not protocol.changing
    assert 0 not in protocol.addresses
