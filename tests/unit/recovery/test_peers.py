"""The peers of a worker: whoever it may have something to send to is among them, on any mesh, and few others are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery.checks import CheckDraw
from elaswave_spmd.recovery.messages import PartialStep, Recompute, Reconfigure, StepReport
from elaswave_spmd.recovery.peers import Peers, Ran, Reached, Recovery, peers_of
from elaswave_spmd.recovery.sum_checks import checker_of
from elaswave_spmd.recovery.vote_exchange import WIDEST, pairs_of, rounds_of
from elaswave_spmd.scheduling.placement import Placement, place
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.sharding.replicas import ReplicaSet
from elaswave_spmd.worker.gradient_routes import routes
from tests.cluster.tiny import TinyRun
from tests.unit.recovery.controller_cases import answer, started

VALIDATION = 7


def drawn(seed: int) -> tuple[Placement, ModelLayout]:
    """A ragged mesh of two to four stages, whose ranks are in no order, and whose replicas are anywhere."""
    draw = random.Random(seed)
    run = TinyRun(blocks=draw.choice((2, 3)), tied=draw.random() < 0.5, microbatches=draw.randint(1, 12))
    sizes = [draw.randint(1, 7) for _ in range(draw.randint(2, 4))]
    layout, shardings = run.description.layout, run.shardings.with_zero(draw.randrange(4))
    mesh = Mesh.initial(MeshShape.of_stages(sizes))
    names = draw.sample(range(100), mesh.num_workers)
    mesh = Mesh(mesh.shape, tuple(tuple(names[rank] for rank in ranks) for ranks in mesh.stages))
    found = place(mesh, layout, shardings, run.microbatches)
    replicas = place_replicas(layout, found.state_sharding(draw.choice((0, 1, 2)), draw.choice((0, 1))))

    def elsewhere(pages: ReplicaSet) -> ReplicaSet:
        others = frozenset(draw.sample(names, draw.randint(0, min(3, len(names)))))
        held = pages.replicas | others if draw.random() < 0.3 else pages.replicas
        primary = draw.choice(sorted(held)) if draw.random() < 0.2 else pages.primary
        learners = frozenset(draw.sample(names, 1)) - held if draw.random() < 0.3 else frozenset[int]()
        return replace(pages, primary=primary, replicas=held, learners=learners)

    moved = {layer: tuple(map(elsewhere, of_layer)) for layer, of_layer in replicas.items()}
    return replace(found, replicas=moved), layout


def receivers_of(placement: Placement, layout: ModelLayout, rank: int) -> Iterator[int]:
    """Everybody that a worker sends something to in steps that run as placed, and in validations, by the worker's own
    functions."""
    mesh, replica_map = placement.mesh, placement.replica_map(layout)
    stage = mesh.stage_of(rank)
    for turn in rounds_of(mesh.members, rank, 2):
        yield from turn.receivers
    for layer in placement.layers_of_stage(stage):
        for route in routes(layout, replica_map, layer):
            yield route.pages.primary  # partial sums, and Need
    for of_layer in replica_map.values():
        for pages in (pages for pages in of_layer if pages.primary == rank):
            yield from pages.receivers
            block = layout.layers[pages.layer].block_of(pages.first)
            readers = (layer for layer, _ in layout.readers.get((pages.layer, block.first_page), ()))
            for layer in (pages.layer, *readers):
                yield from mesh.stages[placement.stage_of_layer(layer)]
        for pages in (pages for pages in of_layer if rank in pages.replicas):
            yield pages.primary  # what a mirror gives a primary that was promoted
    for other in {stage - 1, stage + 1} & {*range(placement.num_stages)}:
        for microbatch in placement.microbatches_of(rank):
            yield placement.worker_of_microbatch(other, microbatch)
    if stage + 1 < placement.num_stages:
        members, others = mesh.stages[stage], mesh.stages[stage + 1]
        for microbatch in range(members.index(rank), VALIDATION, len(members)):
            yield others[microbatch % len(others)]


def checkers_of(placement: Placement, layout: ModelLayout, rank: int, seed: int) -> Iterator[int]:
    """Everybody that a worker sends inputs, digests or gradients to that are checked, in some steps."""
    replica_map, draw = placement.replica_map(layout), CheckDraw(seed, 0.5)
    stage = placement.mesh.stage_of(rank)
    for step in range(1, 9):
        for near in range(max(0, stage - 1), min(placement.num_stages, stage + 2)):
            for pair in draw.pairs(step, near, placement):
                sender = placement.worker_of_microbatch(stage, pair.microbatch)
                if rank == sender:
                    yield pair.checker
        for layer in placement.layers_of_stage(stage):
            for route in routes(layout, replica_map, layer):
                yield checker_of(step, route.pages)


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_all_that_a_worker_sends_goes_to_its_peers(seed: int, checks: bool) -> None:
    placement, layout = drawn(seed)
    peers = peers_of(placement, layout, num_validation_microbatches=VALIDATION, checks=checks, widest=2)
    members = {*placement.mesh.members}
    if peers is None:
        assert len(members) <= 2
        return
    found = {rank: peers.of(rank) for rank in members}
    for rank in members:
        assert {rank} <= found[rank] <= members
        assert {*receivers_of(placement, layout, rank)} <= found[rank]
        assert not checks or {*checkers_of(placement, layout, rank, seed)} <= found[rank]
        assert all(rank in found[peer] for peer in found[rank]), "who is sent something may answer"
    assert peers.numbers() == {rank: len(found[rank]) - 1 for rank in members}


def test_on_a_mesh_of_many_stages_most_members_are_no_peers() -> None:
    run = TinyRun(blocks=10, microbatches=30)
    layout = run.description.layout
    mesh = Mesh.initial(MeshShape.of_stages([15] * 10))
    placement = place(mesh, layout, run.shardings.with_zero(2), 30)
    placement = replace(placement, replicas=place_replicas(layout, placement.state_sharding(1)))
    peers = peers_of(placement, layout)
    assert peers is not None
    assert max(len(peers.of(rank)) for rank in mesh.members) < 50, "its stage, neighbours, and the rounds of votes"


def test_up_to_the_widest_everybody_is_a_peer() -> None:
    run = TinyRun()
    for number, is_limited in ((WIDEST, False), (WIDEST + 1, True)):
        placement = place(Mesh.initial(MeshShape.of_stages([number - 1, 1])), run.description.layout, run.shardings, 5)
        assert (peers_of(placement, run.description.layout) is not None) == is_limited


@pytest.mark.parametrize("widest", [2, 3, 5, 32])
@pytest.mark.parametrize("number", [1, 2, 3, 7, 26, 33, 82, 129])
def test_the_pairs_of_all_rounds_are_those_of_each_member(number: int, widest: int) -> None:
    members = random.Random(number).sample(range(10 * number), number)
    wanted = {(rank, peer) for rank in members for turn in rounds_of(members, rank, widest) for peer in turn.receivers}
    pairs = pairs_of(members, widest)
    assert len(pairs) == len(wanted) and {*map(tuple, pairs.tolist())} == wanted


LINE = Recompute(2, 5, 8, True, 3)
"""Micro-batch 5 goes to worker 8, of stage 2."""


def recovered(**reported: PartialStep) -> Peers:
    """Peers after a change of a mesh with stages (0..3), (4..7), (8..11), (12..15) on which all votes go to few."""
    run = TinyRun(blocks=2, microbatches=16)
    layout = run.description.layout
    placement = place(Mesh.initial(MeshShape.of_stages([4] * 4)), layout, run.shardings, 16)
    reports = {int(rank[1:]): StepReport(1, int(rank[1:]), 3, (part,)) for rank, part in reported.items()}
    left = Recovery((Ran(4, placement, (Recompute(1, 5, 6, True, 3),)),), (LINE,), reports)
    found = peers_of(placement, layout, recovery=left, widest=2)
    assert found is not None
    return found


def test_whoever_may_have_an_input_of_a_line_reaches_its_worker() -> None:
    before = recovered()
    for rank in (6, 5, 13):  # by the plan before; as placed on the stages before and after
        assert 8 in before.of(rank) and rank in before.of(8)
    strangers = {*range(16)} - before.of(8)
    assert strangers, "else the rest shows nothing"
    rank = min(strangers)
    for part in (PartialStep(4, activations=((2, 5),)), PartialStep(4, gradients=((2, 5),))):
        assert rank in recovered(**{f"r{rank}": part}).of(8)
    elsewhere = PartialStep(4, assigned=(5,), activations=((2, 6), (3, 5)), gradients=((2, 6), (1, 5)))
    assert rank not in recovered(**{f"r{rank}": elsewhere}).of(8)


def test_lines_on_many_stages_meet_the_workers_of_the_stages_around_alone() -> None:
    """Not those of all stages: a plan may have a line for each micro-batch on each stage."""
    run = TinyRun(blocks=18, microbatches=40)
    layout = run.description.layout
    placement = place(Mesh.initial(MeshShape.of_stages([4] * 20)), layout, run.shardings, 40)
    lines = tuple(Recompute(s, u, placement.worker_of_microbatch(s, u), True, 2) for s in range(20) for u in range(40))
    recoveries = None, Recovery((Ran(3, placement),), lines, {})
    as_placed, found = (peers_of(placement, layout, recovery=left, widest=2) for left in recoveries)
    assert as_placed is not None and found is not None
    assert found.pairs.tolist() == as_placed.pairs.tolist(), "these have links anyway"


def test_inputs_are_where_a_stage_ended_or_began_when_they_were_made() -> None:
    """In an older epoch of the step two stages of today were one, and micro-batches were other workers'."""
    run = TinyRun(blocks=4, microbatches=16)
    layout = run.description.layout
    old = place(Mesh.initial(MeshShape.of_stages([8, 8])), layout, run.shardings, 16)
    old = replace(old, layer_cuts=(0, 2, 6))
    mesh = old.mesh.with_stages((range(8), range(8, 12), range(12, 16)))
    counts = (16, *(0,) * 7), (4,) * 4, (4,) * 4
    new = replace(old, mesh=mesh, layer_cuts=(0, 2, 4, 6), microbatch_counts=counts)
    as_placed = peers_of(new, layout, widest=2)
    assert as_placed is not None and not {*range(8)} <= as_placed.of(9), "else the rest shows nothing"
    for u in range(16):
        left = Recovery((Ran(2, old),), (Recompute(1, u, 9, True, 2),), {})
        found = peers_of(new, layout, recovery=left, widest=2)
        assert found is not None
        assert {old.worker_of_microbatch(0, u), old.worker_of_microbatch(1, u)} <= found.of(9)


@pytest.mark.parametrize("seed", range(40))
def test_a_worker_is_told_the_lines_of_all_micro_batches_that_it_has_to_do_with(seed: int) -> None:
    """It has a line for them, or may keep something of them: it has run them in an epoch of the step, or reports it."""
    draw, (old, layout) = random.Random(seed), drawn(seed)
    members, number = old.mesh.members, old.num_microbatches

    def lines() -> tuple[Recompute, ...]:
        places = [(stage, u) for stage in range(old.num_stages) for u in range(number) if draw.random() < 0.4]
        return tuple(Recompute(s, u, draw.choice(old.mesh.stages[s]), True, 2) for s, u in places)

    ran, plan = tuple(Ran(4, old, lines()) for _ in range(draw.randint(1, 3))), lines()
    kept = {rank: (draw.randint(0, 5), draw.randrange(number)) for rank in draw.sample(members, len(members) // 2)}
    reports: dict[int, StepReport] = {}
    for rank, at in kept.items():
        part = PartialStep(4, activations=(at,)) if draw.random() < 0.5 else PartialStep(4, gradients=(at,))
        reports[rank] = StepReport(1, rank, 3, (part,))
    found = peers_of(old, layout, recovery=Recovery(ran, plan, reports), widest=2)
    if found is None or not plan:
        assert len(members) <= 2 or (found is not None and found.microbatches is None), "there is nothing to tell"
        return
    assert found.microbatches is not None
    expected = {(line.worker, line.microbatch) for line in plan} | {(rank, u) for rank, (_, u) in kept.items()}
    for epoch in ran:
        planned = {(line.stage, line.microbatch): line.worker for line in epoch.plan}
        for stage in range(old.num_stages):
            for u in range(number):
                expected.add((planned.get((stage, u), old.worker_of_microbatch(stage, u)), u))
    assert [(key >> 32, key & 0xFFFFFFFF) for key in found.microbatches.tolist()] == sorted(expected)
    anew = peers_of(old, layout, recovery=Recovery(ran, (), reports), widest=2)
    assert anew is not None and anew.microbatches is None, "of a step that begins anew all are told the whole plan"


def test_links_that_are_made_again_are_between_peers() -> None:
    placement, layout = drawn(3)
    peers = peers_of(placement, layout, widest=2)
    assert peers is not None
    a, b = next((a, b) for a in placement.mesh.members for b in {*placement.mesh.members} - peers.of(a))
    left = Recovery((Ran(1, placement),), None, {}, (frozenset((a, b)), frozenset((a, 1000))))
    found = peers_of(placement, layout, recovery=left, widest=2)
    assert found is not None and b in found.of(a) and a in found.of(b) and 1000 not in found.of(a)


def test_a_worker_that_has_changed_its_stage_reaches_the_one_that_it_has_sums_for() -> None:
    """In the middle of a step alone; and all whose layers have gone to another stage do."""
    run = TinyRun(blocks=2, microbatches=4)
    layout = run.description.layout
    old = place(Mesh.initial(MeshShape.of_stages([4] * 4)), layout, run.shardings.with_zero(2), 4)
    mesh = old.mesh.with_stages(((1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15, 0)))
    new = replace(old, mesh=mesh, microbatch_counts=((2, 1, 1), (1,) * 4, (1,) * 4, (1, 1, 1, 1, 0)))
    plans: tuple[tuple[Recompute, ...] | None, ...] = ((), None)
    ran = (Ran(1, old),)
    in_step, between = (peers_of(new, layout, recovery=Recovery(ran, plan, {}), widest=2) for plan in plans)
    assert in_step is not None and between is not None
    assert {1, 2, 3} <= in_step.of(0) and 0 in in_step.of(3)
    assert not {1, 2, 3} <= between.of(0)


def test_where_nearly_all_are_guests_of_another_stage_those_of_a_kind_share_their_set() -> None:
    """Layers have moved in the middle of a step. A set for each worker would be the square of a large mesh."""
    run = TinyRun(blocks=4, microbatches=5)
    layout = run.description.layout
    old = replace(place(Mesh.initial(MeshShape.of_stages([5] * 3)), layout, run.shardings, 5), layer_cuts=(0, 2, 4, 6))
    new = replace(old, layer_cuts=(0, 1, 3, 6))
    found = peers_of(new, layout, recovery=Recovery((Ran(1, old),), (), {}), widest=2)
    assert found is not None
    assert {*range(5)} <= found.of(5) and {*range(5, 10)} <= found.of(10), "they have sums of its layers"
    assert len({id(peers) for peers in found.shared.values()}) == 3


def test_a_pair_that_had_no_link_and_wanted_it_has_one_from_the_next_epoch_on() -> None:
    protocol = started(6, 6, 6, widest=2)
    members = protocol.placement.mesh.members
    assert protocol.peers is not None
    a, b = next((a, b) for a in members for b in members if b not in protocol.peers.of(a))
    protocol.missed(frozenset((a, b)))
    for other in (frozenset((a, b)), frozenset((0, 1)), frozenset((0, 1))):  # this one is made; others later
        protocol.relink({other: "lost"})
        answer(protocol)
        assert b in protocol.peers.of(a) and a in protocol.peers.of(b)
    protocol.lost(a, "it ended")
    answer(protocol)
    assert a not in protocol.placement.mesh and protocol._missed == set()


def test_what_older_epochs_have_counts_until_a_change_finds_nothing_of_a_step() -> None:
    protocol, part = started(6, 6, 6, widest=2), PartialStep(1, assigned=(0,))
    for number in (1, 2):
        protocol.relink({frozenset((0, 1)): "lost"})
        answer(protocol, 0, part)
        assert [ran.step for ran in protocol._ran] == [1] * number
    assert protocol._ran[1].plan, "that with which the epoch of the first change began"
    protocol.relink({frozenset((0, 1)): "lost"})
    answer(protocol, 1)
    assert protocol._ran == ()


def test_links_stay_until_another_mesh_epoch_is_entered() -> None:
    def told(epoch: int, *ranks: int) -> Reconfigure:
        return Reconfigure(epoch, ((0, 1, 2, 3),), (0, 4), ((1, 1, 1, 1),), dict.fromkeys(ranks, "a"))

    reached = Reached().after(told(0, 0, 1), -1)
    assert reached.ranks == {0, 1}
    reached = reached.after(told(1, 0, 2), 0)
    assert reached.ranks == {0, 1, 2}
    reached = reached.after(told(2, 0, 3), 0)
    assert reached.ranks == {0, 1, 2, 3}, "epoch 1 was overtaken, and what is done for epoch 0 goes on"
    assert reached.after(told(3, 0, 3), 2).ranks == {0, 3}


def mesh_of(draw: random.Random, ranks: list[int]) -> Peers:
    """Two groups that share their peers, and some pairs; or everybody is a peer of everybody."""
    if draw.random() < 0.2:
        return Peers.among(ranks)
    cut = draw.randint(1, len(ranks) - 1)
    groups = [frozenset(ranks[:cut]), frozenset(ranks[cut:])]
    pairs = [draw.sample(ranks, 2) for _ in range(8)]
    ends = np.unique([min(pair) << 32 | max(pair) for pair in pairs])
    return Peers({rank: next(group for group in groups if rank in group) for rank in ranks}, ends)


@pytest.mark.parametrize("seed", range(60))
def test_what_has_come_and_what_has_gone_are_all_that_has_changed(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.sample(range(30), 12)
    before = mesh_of(draw, ranks)
    ranks = [*draw.sample(ranks, 9), *draw.sample([rank for rank in range(40) if rank not in ranks], 3)]
    now, members = mesh_of(draw, ranks), frozenset(ranks)
    was = {rank: before.of(rank) if rank in before.shared else frozenset[int]() for rank in ranks}
    came = {rank: (common, own) for rank, common, own in now.since(before, ranks)}
    for rank, (common, own) in came.items():
        assert not common & own
        assert (was[rank] & members) | common | own == (was[rank] & members) | now.of(rank)
    gone = before.not_in(now)
    assert {rank: gone.get(rank, frozenset()) for rank in ranks} == {r: (was[r] & members) - now.of(r) for r in ranks}
    both = now | before
    assert {rank: both.of(rank) for rank in ranks} == {rank: was[rank] | now.of(rank) for rank in ranks}
