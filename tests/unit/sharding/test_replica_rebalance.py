"""Maps of new meshes and after any change: every page held as often as the mesh allows, for the fewest copies made."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape, Topology
from elaswave_spmd.scheduling.placement import place
from elaswave_spmd.sharding import P, Shardings, replica_rebalance
from elaswave_spmd.sharding.layout import LayerUse, ModelLayout, ParameterInfo, lay_out
from elaswave_spmd.sharding.replica_placement import copyset_width, copysets, place_replicas, replicas_at
from elaswave_spmd.sharding.replica_rebalance import rebalance_replicas
from elaswave_spmd.sharding.replicas import (
    ReplicaMap,
    ReplicaSet,
    adopt,
    all_replica_sets,
    from_rows,
    promote,
    to_rows,
    unsurvived,
    unsurvived_text,
    with_learners,
)
from elaswave_spmd.sharding.reshard import plan_reshard
from elaswave_spmd.sharding.state_sharding import StateSharding
from tests.unit.sharding.replica_counts import copied_pages, pages_held, primary_pages
from tests.unit.sharding.sharding_strategies import regular_topology

Stages = tuple[tuple[int, ...], ...]
NOBODY = frozenset()


def layout_of(pages: Sequence[int], tied: int = 0) -> ModelLayout:
    """Layers of so many pages, 0 for none; the last layer reads a parameter of `tied` more pages in the first."""
    uses = []
    for i, count in enumerate(pages):
        infos = [ParameterInfo(f"l{i}.w", (64 * count,))] if count else []
        if tied and i == 0:
            infos.append(ParameterInfo("l0.tied", (64 * tied,)))
        reads = (("reader", "l0.tied"),) if tied and i == len(pages) - 1 else ()
        uses.append(LayerUse(f"l{i}", tuple(infos), reads))
    return lay_out(uses, page_size=64)


@dataclass(frozen=True)
class Case:
    """All arguments of replica maps."""

    layout: ModelLayout
    stages: Stages
    cuts: tuple[int, ...]
    replicated: bool
    topology: Topology
    mirror_count: int
    scatter: int

    @property
    def sharding(self) -> StateSharding:
        mesh = Mesh(MeshShape.of_stages(map(len, self.stages)), self.stages, 0, self.topology)
        return StateSharding(mesh, self.cuts, P(None) if self.replicated else P("dp"), self.mirror_count, self.scatter)

    def place(self, least_pages: int = 1) -> ReplicaMap:
        return place_replicas(self.layout, self.sharding, least_pages=least_pages)

    def rebalance(self, replicas: ReplicaMap) -> ReplicaMap:
        return rebalance_replicas(replicas, self.layout, self.sharding)

    def copies(self, current: ReplicaMap, target: ReplicaMap) -> int:
        """Pages that are copied on the way from one map to another."""
        return copied_pages(plan_reshard(self.layout, current, to=target))

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(rank for members in self.stages for rank in members)

    @property
    def mirrors(self) -> int:
        return min(self.mirror_count, len(self.workers) - 1)

    def members_of(self, layer: int) -> tuple[int, ...]:
        return next(m for m, stop in zip(self.stages, self.cuts[1:], strict=True) if layer < stop)

    def is_loss(self, replica_set: ReplicaSet) -> bool:
        block = self.layout.layers[replica_set.layer].loss_block
        return block is not None and replica_set.first == block.first_page


def topology_of(num_ranks: int, hosts: Sequence[int]) -> Topology:
    """Hosts assigned round robin from a list of host numbers, three to a rack."""
    paths = [hosts[rank % len(hosts)] for rank in range(num_ranks)]
    return Topology.of({rank: (f"rack{host // 3}", f"host{host}") for rank, host in enumerate(paths)})


@st.composite
def cases(draw: st.DrawFn, max_workers: int = 5, max_pages: int = 13) -> Case:
    sizes = draw(st.lists(st.integers(1, max_workers), min_size=1, max_size=3))
    pages = draw(st.lists(st.integers(0, max_pages), min_size=len(sizes), max_size=len(sizes) + 3))
    inner = draw(st.permutations(range(1, len(pages)))) if len(pages) > 1 else []
    cuts = (0, *sorted(inner[: len(sizes) - 1]), len(pages))
    mesh = Mesh.initial(MeshShape.of_stages(sizes))
    hosts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    return Case(
        layout_of(pages, tied=draw(st.integers(0, 3)) if len(pages) > 1 else 0),
        mesh.stages,
        cuts,
        draw(st.booleans()),
        topology_of(40, hosts),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 5)),
    )


def check(case: Case, replicas: ReplicaMap) -> None:
    """Pages partitioned in ranges; one primary, in the stage of its layer; as many mirrors as asked for; even loads."""
    assert sorted(replicas) == list(range(len(case.layout.layers)))
    load = dict.fromkeys(case.workers, 0)
    for layer, ranges in replicas.items():
        blocks = case.layout.layers[layer].blocks
        wanted = [page for block in blocks if block.kind != "reader" for page in block.pages]
        assert [page for replica_set in ranges for page in range(replica_set.first, replica_set.stop)] == wanted
        members = case.members_of(layer)
        for replica_set in ranges:
            assert replica_set.layer == layer and replica_set.learners == NOBODY
            assert replica_set.stop <= case.layout.layers[layer].block_of(replica_set.first).pages.stop, (
                "an range lies in one block"
            )
            assert replica_set.replicas <= set(case.workers) and replica_set.primary in members
            if case.replicated:
                assert replica_set.replicas >= set(members)
                assert len(replica_set.replicas) == max(len(members), case.mirrors + 1)
            else:
                assert len(replica_set.mirrors) == case.mirrors
            if not case.is_loss(replica_set):
                load[replica_set.primary] += replica_set.num_pages
    for members in case.stages:
        loads = [load[rank] for rank in members]
        assert max(loads) - min(loads) <= 1, "primaries are even within one page"


def pages_of(replica_set: ReplicaSet) -> list[tuple[int, int]]:
    return [(replica_set.layer, page) for page in range(replica_set.first, replica_set.stop)]


def refines(new: ReplicaMap, old: ReplicaMap) -> bool:
    """True if every range of `new` lies in one of `old`."""
    return all(
        any(was.first <= replica_set.first and replica_set.stop <= was.stop for was in old[replica_set.layer])
        for replica_set in all_replica_sets(new)
    )


# ---- given to a placement


def test_a_placement_with_explicit_replicas_hands_them_out():
    layout, mesh = layout_of([3, 4, 5]), Mesh.initial(MeshShape.of_stages([2, 1]))
    first = place(mesh, layout, Shardings().with_zero(2), 4)
    case = Case(layout, mesh.stages, first.layer_cuts, False, mesh.topology, 1, 0)
    replicas = case.place()
    placement = replace(first, replicas=replicas)
    assert placement != first and placement == replace(first, replicas=case.place()) and hash(placement) == hash(first)
    assert placement.replica_map(layout) == replicas
    assert placement.replica_map(layout, [1]) == {layer: replicas[layer] for layer in placement.layers_of_stage(1)}
    assert all(not replica_set.mirrors for replica_set in all_replica_sets(first.replica_map(layout)))


# ---- a new mesh


@given(cases())
@settings(deadline=None, max_examples=150)
def test_placed_map(case: Case):
    replicas = case.place()
    check(case, replicas)
    placed = case.sharding.without_mirrors(case.layout)
    assert refines(replicas, placed)
    primary = {
        (replica_set.layer, page): replica_set.primary
        for replica_set in all_replica_sets(placed)
        for page in range(replica_set.first, replica_set.stop)
    }
    for replica_set in all_replica_sets(replicas):
        assert {primary[replica_set.layer, page] for page in range(replica_set.first, replica_set.stop)} == {
            replica_set.primary
        }
    if case.replicated or not case.mirrors:
        assert [replica_set.key for replica_set in all_replica_sets(replicas)] == [
            replica_set.key for replica_set in all_replica_sets(placed)
        ]
    assert case.rebalance(replicas) == replicas, "nothing is to be done"
    assert from_rows(to_rows(replicas)) == replicas


@given(cases(max_workers=12, max_pages=60))
@settings(deadline=None, max_examples=100)
def test_placed_mirrors_are_even_and_on_few_peers(case: Case):
    case = replace(case, replicated=False)
    replicas = case.place()
    peers, mirrored = defaultdict(set), Counter()
    ranges = Counter()
    for replica_set in all_replica_sets(replicas):
        peers[replica_set.primary] |= set(replica_set.mirrors)
        block = case.layout.layers[replica_set.layer].block_of(replica_set.first)
        ranges[replica_set.layer, block.first_page, replica_set.primary] += 1
        if not case.is_loss(replica_set):
            mirrored.update(dict.fromkeys(replica_set.mirrors, replica_set.num_pages))
    scatter = max(case.scatter or 4, case.mirror_count)
    assert all(len(some) <= scatter for some in peers.values())
    assert all(count <= scatter for count in ranges.values())
    if all(len(members) > case.mirrors for members in case.stages):
        for members in case.stages:
            loads = [mirrored[rank] for rank in members]
            assert max(loads) - min(loads) <= max(1, case.mirrors)
        for replica_set in all_replica_sets(replicas):
            assert replica_set.replicas <= set(case.members_of(replica_set.layer)), "mirrors stay in the stage"


@given(cases(max_workers=9, max_pages=40), st.sampled_from([1, 4]), st.sampled_from([0, 4]), st.data())
@settings(deadline=None, max_examples=150)
def test_the_page_ranges_at_some_workers_are_those_of_the_whole_map(
    case: Case, least_pages: int, least_joined: int, data
):
    ranks = data.draw(st.sets(st.sampled_from(case.workers)))
    least = {"least_pages": least_pages, "least_joined": least_joined}
    whole = place_replicas(case.layout, case.sharding, **least)
    wanted = {layer: tuple(it for it in ranges if it.replicas & ranks) for layer, ranges in whole.items()}
    assert replicas_at(case.layout, case.sharding, ranks, **least) == wanted


def test_placed_mirrors_per_layer_and_in_turn():
    ranks = tuple(range(10))
    case = Case(layout_of([57] * 8), (ranks,), (0, 8), False, Topology.single_host(ranks), 1, 4)
    replicas = case.place()
    for ranges in replicas.values():
        mirrored = Counter()
        for replica_set in ranges:
            if not case.is_loss(replica_set):
                mirrored[replica_set.mirrors[0]] += replica_set.num_pages
        assert max(mirrored.values()) - min(mirrored.values()) <= 2
    first = [
        next(replica_set for replica_set in replicas[layer] if replica_set.primary == 3).mirrors for layer in range(8)
    ]
    assert len(set(first)) > 1, "peers take turns from layer to layer"


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.integers(1, 4))
@settings(deadline=None)
def test_copysets_are_permutations_that_leave_the_host(hosts: list[int], width: int):
    numbers = [host for host, size in enumerate(hosts) for _ in range(size)]
    assume(width < len(numbers))
    topology = Topology.of({rank: (f"host{host}",) for rank, host in enumerate(numbers)})
    found = copysets(range(len(numbers)), topology, width)
    for turn in range(width):
        assert sorted(peers[turn] for peers in found.values()) == list(range(len(numbers)))
    for rank, peers in found.items():
        assert len({rank, *peers}) == width + 1
    inside = sum(topology.distance(rank, peers[0]) == 0 for rank, peers in found.items())
    if width == 1:
        assert inside == max(0, 2 * max(hosts) - len(numbers)), "as few as even loads allow"


def test_copysets_go_to_another_rack_first():
    ranks = range(32)
    topology = regular_topology(32, per_host=4, hosts_per_rack=4)
    for rank, peers in copysets(ranks, topology, 4).items():
        assert all(topology.distance(rank, peer) == 2 for peer in peers)


def test_copyset_width():
    assert [copyset_width(0, 1, peers) for peers in (1, 3, 4, 99)] == [1, 3, 4, 4]
    assert (copyset_width(7, 1, 99), copyset_width(2, 3, 99), copyset_width(7, 0, 99)) == (7, 3, 0)


def test_a_small_stage_mirrors_to_the_nearest():
    stages = ((0, 1, 2), (3,), (4,), (5, 6, 7))
    case = Case(layout_of([12, 12, 12, 12]), stages, (0, 1, 2, 3, 4), False, Topology.single_host(range(8)), 1, 0)
    replicas = case.place()
    check(case, replicas)
    assert [replica_set.mirrors[0] for replica_set in replicas[1]] == [4, 4, 0, 1], (
        "in both neighbours, where fewest are"
    )
    assert {replica_set.mirrors[0] for replica_set in replicas[2]} <= {3, 5, 6, 7}
    two = replace(case, stages=((0, 1, 2), (3,)), cuts=(0, 3, 4), mirror_count=2, replicated=True).place()
    assert {replica_set.replicas for layer in range(3) for replica_set in two[layer]} == {frozenset({0, 1, 2})}
    assert all(len(replica_set.mirrors) == 2 and replica_set.primary == 3 for replica_set in two[3])


# ---- losses


@given(cases(), st.data())
@settings(deadline=None, max_examples=150)
def test_mirror_count_losses_are_survived_where_they_lie(case: Case, data: st.DataObject):
    replicas = case.place()
    lost = data.draw(st.sets(st.sampled_from(case.workers), max_size=case.mirrors))
    promoted, dead = promote(replicas, lost)
    assert dead == ()
    for before, after in zip(all_replica_sets(replicas), all_replica_sets(promoted), strict=True):
        assert before.key == after.key and after.replicas == before.replicas - lost
        assert after.primary == before.primary or before.primary in lost
    assert promote(replicas, lost) == (promoted, dead)


@given(cases())
@settings(deadline=None, max_examples=100)
def test_promotion_is_even(case: Case):
    case = replace(case, replicated=True)
    replicas = case.place()
    for members in case.stages:
        if len(members) > 1:
            promoted, _ = promote(replicas, members[:1])
            load = primary_pages(promoted)
            sizes = [
                replica_set.num_pages for replica_set in all_replica_sets(replicas) if replica_set.primary == members[0]
            ]
            loads = [load.get(rank, 0) for rank in members[1:]]
            assert max(loads) - min(loads) <= max([1, *sizes]) + 1, "even within a range (and the loss page)"


# ---- refilling


@st.composite
def histories(draw: st.DrawFn) -> tuple[Case, list[tuple[str, list[int]]]]:
    kinds = st.sampled_from(["lose", "leave", "join", "move", "cuts", "interrupted"])
    numbers = st.lists(st.integers(0, 99), min_size=5, max_size=5)
    return draw(cases()), draw(st.lists(st.tuples(kinds, numbers), max_size=6))


def after_event(case: Case, kind: str, numbers: Sequence[int], newcomer: int) -> tuple[Case, set[int]]:
    """The next case, and the lost workers. An event that would empty a stage moves a worker there, or is left out."""
    stages, lost = [list(members) for members in case.stages], set()
    stage = numbers[0] % len(stages)
    if kind == "join":
        stages[stage] += range(newcomer, newcomer + 1 + numbers[1] % 3)
    elif kind == "move":
        if len(stages[stage]) > 1:
            stages[numbers[1] % len(stages)].append(stages[stage].pop(numbers[2] % len(stages[stage])))
    elif kind == "cuts" and len(stages) > 1:
        at = 1 + numbers[1] % (len(stages) - 1)
        before, stop = case.cuts[at - 1], case.cuts[at + 1]
        cut = before + 1 + numbers[2] % (stop - before - 1)
        return replace(case, cuts=(*case.cuts[:at], cut, *case.cuts[at + 1 :])), lost
    elif kind in ("lose", "leave", "interrupted"):
        count = 1 + numbers[1] % max(1, case.mirrors)
        for number in numbers[2 : 2 + count]:
            lost.add(case.workers[number % len(case.workers)])
        stages = [[rank for rank in members if rank not in lost] for members in stages]
        for s, members in enumerate(stages):
            if not members:
                giver = max(range(len(stages)), key=lambda g: len(stages[g]))
                if len(stages[giver]) < 2:
                    return case, set()
                stages[s].append(stages[giver].pop())
    return replace(case, stages=tuple(map(tuple, stages))), lost


@given(histories())
@settings(deadline=None, max_examples=200)
def test_any_history(history: tuple[Case, list[tuple[str, list[int]]]]):
    case, events = history
    replicas, newcomer = case.place(), 20
    for kind, numbers in events:
        survived = case.mirrors
        after, gone = after_event(case, kind, numbers, newcomer)
        newcomer += 3
        assume(newcomer < 40)
        current = replicas
        if kind == "interrupted":  # a join was under way
            stages = (*after.stages[:-1], (*after.stages[-1], newcomer))
            case = replace(case, stages=(*case.stages[:-1], (*case.stages[-1], newcomer)))
            current = with_learners(replicas, case.rebalance(replicas))
            after, newcomer = replace(after, stages=stages), newcomer + 1
        if gone and kind != "leave":
            current, dead = promote(current, gone)
            if dead:
                assert len(gone) > survived
                return
        target = after.rebalance(current)
        check(after, target)
        assert refines(target, current), "ranges are never merged"
        assert after.rebalance(target) == target
        learning = with_learners(current, target)
        check_way(after, current, learning, target)
        case, replicas = after, adopt(learning, target)


@given(histories())
@settings(deadline=None, max_examples=200)
def test_what_changes_share_is_what_it_would_be_anew(history: tuple[Case, list[tuple[str, list[int]]]]):
    """A plan on maps of which everything is known already, and one that works all out, page range by page range."""
    case, events = history
    replicas, newcomer = case.place(), 20
    for kind, numbers in events:
        case, gone = after_event(case, kind, numbers, newcomer)
        newcomer += 3
        lost = gone if kind != "leave" else ()
        plan = plan_reshard(case.layout, replicas, lost=lost, to=case.sharding)
        unknown = {layer: tuple(ranges) for layer, ranges in replicas.items()}
        with mock.patch.object(replica_rebalance, "_is_settled", return_value=False):
            anew = plan_reshard(case.layout, unknown, lost=lost, to=case.sharding)
        assert (plan.during, plan.after, plan.lost) == (anew.during, anew.after, anew.lost)
        assert (plan.copies, plan.least_elements) == (anew.copies, anew.least_elements)
        assert to_rows(plan.during) == to_rows(anew.during)
        if plan.lost:
            return
        for layer, ranges in replicas.items():
            assert plan.after[layer] is ranges or plan.after[layer] != ranges, "equal layers are one object"
        replicas = plan.adopted()


def check_way(case: Case, current: ReplicaMap, learning: ReplicaMap, target: ReplicaMap) -> None:
    """From the current map over learners to the target: each missing copy once, from its primary."""
    held = {
        (replica_set.layer, page): replica_set
        for replica_set in all_replica_sets(current)
        for page in range(replica_set.first, replica_set.stop)
    }
    wanted = Counter()
    for replica_set in all_replica_sets(target):
        for page in range(replica_set.first, replica_set.stop):
            wanted.update(
                (replica_set.layer, page, rank)
                for rank in replica_set.replicas - held[replica_set.layer, page].replicas
            )
    plan = plan_reshard(case.layout, current, to=case.sharding)
    assert (plan.during, plan.after, plan.lost) == (learning, target, ())
    got = Counter(
        (layer, page, c.destination) for c in plan.copies for layer, a, b in [c.pages] for page in range(a, b)
    )
    assert got == wanted
    assert all(copy.source == held[copy.pages[0], copy.pages[1]].primary for copy in plan.copies)
    assert plan.least_elements <= plan.moved_elements <= 64 * wanted.total() == 64 * case.copies(current, target)
    for now, replica_set in zip(all_replica_sets(learning), all_replica_sets(target), strict=True):
        assert now.key == replica_set.key and now.replicas == held[replica_set.layer, replica_set.first].replicas
    assert from_rows(to_rows(learning)) == learning


@st.composite
def arbitrary_maps(draw: st.DrawFn) -> tuple[Case, ReplicaMap]:
    """Any small map at all, some replicas of which are no members."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    mesh = Mesh.initial(MeshShape.of_stages(sizes))
    pages = draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=2))
    cuts = (0, *range(len(pages) - len(sizes) + 1, len(pages) + 1))
    count, replicated = draw(st.integers(0, 2)), draw(st.integers(0, 4)) == 0
    case = Case(layout_of(pages), mesh.stages, cuts, replicated, topology_of(8, [0, 1]), count, 0)
    ranks = st.sets(st.sampled_from([*case.workers, 6, 7]), min_size=1, max_size=draw(st.integers(1, 4)))
    replicas = {}
    for layer, of_layer in enumerate(case.layout.layers):
        ranges = []
        for block in of_layer.blocks:
            inner = draw(st.sets(st.sampled_from(block.pages)))
            stops = sorted(inner - {block.first_page} | {block.pages.stop})
            for first, stop in zip([block.first_page, *stops], stops, strict=False):
                held = frozenset(draw(ranks))
                ranges.append(ReplicaSet(layer, first, stop, draw(st.sampled_from(sorted(held))), held))
        replicas[layer] = tuple(ranges)
    return case, replicas


def fewest_copies(case: Case, replicas: ReplicaMap) -> int:
    """Copies of pages that must be made, over all ways to choose even primaries and replicas."""
    total = 0
    for stage, members in enumerate(case.stages):
        layers = range(case.cuts[stage], case.cuts[stage + 1])
        ranges = [(replica_set, case.is_loss(replica_set)) for layer in layers for replica_set in replicas[layer]]
        pages = [(replica_set.replicas, loss) for replica_set, loss in ranges for _ in range(replica_set.num_pages)]

        def cost(held: Collection[int], primary: int, members: tuple[int, ...] = members) -> int:
            base = set(members) if case.replicated else {primary}
            others = [rank for rank in case.workers if rank not in base]
            more = itertools.combinations(others, max(0, case.mirrors + 1 - len(base)))
            return min(len((base | set(some)) - set(held)) for some in more)

        costs = [[cost(held, rank) for rank in members] for held, loss in pages if not loss]
        total += sum(min(cost(held, rank) for rank in members) for held, loss in pages if loss)
        floor, extra = divmod(len(costs), len(members))
        # By dynamic programming over pages: loads of the members so far -> fewest copies.
        best = {(0,) * len(members): 0}
        for of_page in costs:
            step: dict[tuple[int, ...], int] = {}
            for loads, copies in best.items():
                for position, number in enumerate(of_page):
                    more = (*loads[:position], loads[position] + 1, *loads[position + 1 :])
                    if loads[position] < floor + (extra > 0):
                        step[more] = min(step.get(more, copies + number), copies + number)
            best = step
        total += min(copies for loads, copies in best.items() if min(loads) >= floor)
    return total


@given(arbitrary_maps())
@settings(deadline=None, max_examples=400)
def test_no_fewer_copies_would_do(drawn: tuple[Case, ReplicaMap]):
    case, replicas = drawn
    target = case.rebalance(replicas)
    check(case, target)
    assert refines(target, replicas)
    assert case.copies(replicas, target) == fewest_copies(case, replicas)
    assert case.rebalance(target) == target


CHAINS = [  # workers, replicas of each page with the primary first, copies that must be made
    (3, [(0, 1), (0, 1), (1, 2)], 0),  # 0 to 1, 1 to 2
    (4, [(0,), (0, 1), (0, 1), (1,), (2, 3), (2,)], 0),  # 0 to 1, which may have two when 2 has given one to 3
    (2, [(0, 1), (6, 0), (0,), (0,)], 1),  # 6 is no member: its page goes to 0, which has too many itself
    (3, [(0, 1), (0, 1), (0, 1), (0, 1), (1,)], 1),  # 2 gets nothing for nothing
]


@pytest.mark.parametrize(("num_workers", "replicas_of_page", "copies"), CHAINS)
def test_pages_change_hands_along_a_chain(num_workers: int, replicas_of_page: list[tuple[int, ...]], copies: int):
    ranks = tuple(range(num_workers))
    count = len(replicas_of_page)
    case = Case(layout_of([count]), (ranks,), (0, 1), False, Topology.single_host(ranks), 0, 0)
    ranges = [ReplicaSet(0, i, i + 1, held[0], frozenset(held)) for i, held in enumerate(replicas_of_page)]
    replicas = {0: (*ranges, ReplicaSet(0, count, count + 1, 0, frozenset({0})))}
    target = case.rebalance(replicas)
    check(case, target)
    assert case.copies(replicas, target) == fewest_copies(case, replicas) == copies


def test_a_loss_moves_what_was_lost_and_nothing_else():
    ranks = tuple(range(8))
    case = Case(layout_of([100] * 5), (ranks,), (0, 5), False, Topology.single_host(range(9)), 1, 4)
    replicas = case.place()
    held = pages_held(replicas, 5)
    promoted, _ = promote(replicas, [5])
    left = replace(case, stages=(tuple(rank for rank in ranks if rank != 5),))
    target = left.rebalance(promoted)
    assert left.copies(promoted, target) == held, "the copies that were lost"
    assert sum(map(len, target.values())) <= sum(map(len, replicas.values())) + 8, "few ranges are split"
    joined = replace(left, stages=((*left.stages[0], 8),))
    wider = joined.rebalance(target)
    assert joined.copies(target, wider) == primary_pages(wider)[8] in (62, 63), "a newcomer gets its share"
    for layer in range(5):
        own = sum(replica_set.num_pages for replica_set in wider[layer] if replica_set.primary == 8)
        assert 8 <= own <= 17, "of every layer"


def test_a_newcomer_takes_of_every_layer_as_much():
    case = Case(layout_of([40] * 3), ((0,),), (0, 3), False, Topology.single_host(range(2)), 1, 0)
    target = replace(case, stages=((0, 1),)).rebalance(case.place())
    for layer in range(3):
        assert (
            sum(
                replica_set.num_pages
                for replica_set in target[layer]
                if replica_set.primary == 1 and not case.is_loss(replica_set)
            )
            == 20
        )


@pytest.mark.parametrize("replicated", [False, True])
def test_moved_layers_are_spread_over_all(replicated: bool):
    stages = ((0, 1, 2, 3), (4, 5, 6, 7))
    case = Case(layout_of([40] * 4), stages, (0, 3, 4), replicated, Topology.single_host(range(8)), 1, 0)
    current = case.place()
    target = replace(case, cuts=(0, 1, 4)).rebalance(current)
    plan = plan_reshard(case.layout, current, to=target)
    assert copied_pages(plan) == 80 * (4 if replicated else 1)
    if not replicated:
        pairs = {(copy.source, copy.destination) for copy in plan.copies}
        assert pairs == {(0, 4), (1, 5), (2, 6), (3, 7)}, "worker to worker"
    for layer in (1, 2):
        assert primary_pages({layer: target[layer]}) == {4: 10, 5: 10, 6: 10, 7: 10}


def test_mirrors_are_made_in_another_domain():
    ranks = tuple(range(8))
    topology = regular_topology(9, per_host=2)
    case = Case(layout_of([64] * 4), (ranks,), (0, 4), False, topology, 1, 0)
    promoted, _ = promote(case.place(), [3])
    target = replace(case, stages=(tuple(rank for rank in ranks if rank != 3),)).rebalance(promoted)
    for replica_set in all_replica_sets(target):
        assert topology.distance(replica_set.primary, replica_set.mirrors[0]) > 0, replica_set


def test_a_plan_under_way_goes_on():
    """Another worker is lost while a newcomer is a learner: the newcomer stays a learner of the same pages."""
    ranks = tuple(range(6))
    case = Case(layout_of([60] * 4), (ranks,), (0, 4), False, Topology.single_host(range(9)), 1, 0)
    joined = replace(case, stages=((*ranks, 8),))
    current = case.place()
    learning = with_learners(current, joined.rebalance(current))
    assert joined.rebalance(learning) == joined.rebalance(current)
    promoted, dead = promote(learning, [2])
    target = replace(joined, stages=((0, 1, 3, 4, 5, 8),)).rebalance(promoted)
    pages = {
        (replica_set.layer, page): replica_set
        for replica_set in all_replica_sets(target)
        for page in range(replica_set.first, replica_set.stop)
    }
    begun = [
        (replica_set.layer, page)
        for replica_set in all_replica_sets(promoted)
        if 8 in replica_set.learners
        for page in range(replica_set.first, replica_set.stop)
    ]
    goes_on = [page for page in begun if 8 in pages[page].replicas]
    assert not dead and len(begun) > 30 and len(goes_on) > 0.9 * len(begun), "but for what is no longer too much"


# ---- how many losses at once


@given(cases(), st.integers(1, 3))
@settings(deadline=None, max_examples=150)
def test_unsurvived_counts_by_brute_force(case: Case, losses: int):
    replicas = case.place()
    sets = list(itertools.combinations(case.workers, losses))
    bad = sum(any(replica_set.replicas <= set(lost) for replica_set in all_replica_sets(replicas)) for lost in sets)
    assert unsurvived(replicas, case.workers, losses) == (bad, len(sets))
    if losses == 2:
        assert unsurvived_text(replicas, case.workers) == (
            f"{bad} of {len(sets)} pairs of simultaneous losses lose some page"
        )
    if losses <= case.mirrors:
        assert bad == 0
