"""The cost of a change in bytes of state: the copies of its reshard plan, added up link by link.

A search over stages and cuts looks at thousands of candidates and estimates the state that each would move by a closed
form (`stage_search.MoveEstimates`). The few placements that may really be chosen are planned here, by the function that
moves the state of a run: `sharding.plan_reshard`. On a large mesh that takes from seconds to
minutes, so there they are estimated as well: whether pages are lost exactly, bytes and seconds nearly.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from elaswave_spmd.scheduling.cost_model import CostModel, MemoryRule
from elaswave_spmd.scheduling.stage_search import MoveEstimates, old_stages_of
from elaswave_spmd.sharding import ReshardPlan, Shardings, StateSharding, plan_reshard
from elaswave_spmd.sharding.layout import LOSS, STATE, LayerLayout, LayerUse, ModelLayout, ParameterInfo, lay_out
from elaswave_spmd.sharding.replica_placement import least_pages, place_replicas, replicas_at
from elaswave_spmd.sharding.replicas import ReplicaMap, ReplicaSet, all_replica_sets
from elaswave_spmd.sharding.reshard import MASTER_BYTES

_ELEMENT_BYTES = 12
"""State of one element with AdamW: fp32 master parameter and two moments."""

_MOST_PLANNED = 512
"""Up to so many workers the figures are those of a plan. On more, whose pages are millions, they are estimated."""

_CHECKPOINT = -1
"""Stands for the checkpoint among the ranks of a replica map: it has all pages."""

Stages = Sequence[Sequence[int]]
"""Ranks of each stage."""

Cuts = Sequence[int]
"""Stage s has layers [cuts[s], cuts[s + 1])."""


@dataclass(frozen=True)
class Move:
    """The figures of a reshard plan.

    Args:
        bytes: state that workers are sent, new mirrors included.
        bound_bytes: a lower bound for every plan to as many replicas (`ReshardPlan.least_elements`).
        seconds: seconds for which the busiest link is occupied.
        promotions: page ranges whose primary is lost; a mirror takes its place without a byte being moved.
        copies: page ranges that are sent, once for each worker that gets them.
        from_checkpoint: some page has lost all its replicas, so every worker reads its pages from a checkpoint.
        is_estimate: no plan was made, as the mesh is large: there is no lower bound, and `copies` counts only those of
            lost replicas.
        plan: the plan itself; None: nothing changes, or this is an estimate.
    """

    bytes: float = 0.0
    bound_bytes: float = 0.0
    seconds: float = 0.0
    promotions: int = 0
    copies: int = 0
    from_checkpoint: bool = False
    is_estimate: bool = False
    plan: ReshardPlan | None = field(default=None, repr=False, compare=False)

    def text(self) -> str:
        """The plan line by line; empty without one."""
        return self.plan.text(_ELEMENT_BYTES) if self.plan else ""

    def __str__(self) -> str:
        size = f"{self.bytes:,.0f} B"
        if self.from_checkpoint:
            return f"{size} are read from the checkpoint, since pages have lost all replicas, {self.seconds:.4g} s"
        if self.is_estimate:
            return f"{size} move, by estimate, {self.seconds:.4g} s on a link"
        return f"{size} move (at least {self.bound_bytes:,.0f} B), {self.seconds:.4g} s on a link"


NO_MOVE = Move()


def layout_of_costs(costs: CostModel, page_size: int = 4096) -> ModelLayout:
    """Pages for a model of which only costs are known: each layer is one array of as many elements as its state has.

    Args:
        page_size: elements of a page, a multiple of 64 (`page.size`).
    """
    uses = []
    for number, layer in enumerate(costs.layers):
        elements = -(-layer.state_bytes // _ELEMENT_BYTES)
        array = ParameterInfo(f"{number}.state", (elements,))
        uses.append(LayerUse(f"{number} {layer.name}", (array,) if elements else ()))
    return lay_out(uses, page_size=page_size)


@dataclass(frozen=True)
class StateMoves:
    """The reshard plans of one event: from where the state was before it to wherever a placement may want it.

    Args:
        before: the mesh and specs before the event.
        layout: the pages of the model.
        costs: the bytes of each layer's state, and the links.
        replicas: the replicas before the event; None: those of a new mesh.
        least_joined: with which a new mesh cuts small layers together (`Placement.least_joined`); 0: each by itself.
    """

    before: StateSharding
    layout: ModelLayout
    costs: CostModel
    replicas: ReplicaMap | None = None
    least_joined: int = 0

    def at_once(self, stages: Stages, cuts: Cuts) -> Move:
        """The figures of the plan right after the event, which makes lost replicas again where their layers are now."""
        if (tuple(map(tuple, stages)), tuple(cuts)) == (self.before.stages, self.before.layer_cuts):
            return NO_MOVE
        if self.before.mesh.num_workers > _MOST_PLANNED:
            return self._estimated_at_once(stages, cuts)
        return self._figures(*self._plan_at_once(stages, cuts))

    def afterwards(self, now: tuple[Stages, Cuts], then: tuple[Stages, Cuts]) -> Move:
        """The figures of the plan to the stages and cuts `then`, when the plan to those of `now` is carried out."""
        if self.before.mesh.num_workers > _MOST_PLANNED:
            (stages, cuts), (new_stages, new_cuts) = now, then
            found = MoveEstimates(self.costs, cuts, old_stages_of(new_stages, stages)).to(new_cuts, self._rule)
            return Move(found.bytes, seconds=found.seconds, is_estimate=True)
        first, _ = self._plan_at_once(*now)
        return self._figures(plan_reshard(self.layout, first.after, to=self._sharding(*then)))

    def _plan_at_once(self, stages: Stages, cuts: Cuts) -> tuple[ReshardPlan, bool]:
        """The plan, and True if pages are lost: then all workers read theirs from a checkpoint, as a resumed run."""
        target, replicas = self._sharding(stages, cuts), self._replicas
        lost = [rank for rank in self.before.mesh.members if rank not in target.mesh]
        plan = plan_reshard(self.layout, replicas, lost=lost, to=target)
        if not plan.lost:
            return plan, False
        return plan_reshard(self.layout, _checkpoint_of(self.layout), to=self._new_replicas(target)), True

    @cached_property
    def _replicas(self) -> ReplicaMap:
        if self.replicas is not None:
            return self.replicas
        return self._new_replicas(self.before)

    def _new_replicas(self, sharding: StateSharding) -> ReplicaMap:
        """The replicas with which a run begins on a mesh."""
        least = least_pages(self.layout)
        return place_replicas(self.layout, sharding, least_pages=least, least_joined=self.least_joined)

    def _sharding(self, stages: Stages, cuts: Cuts) -> StateSharding:
        return replace(self.before, mesh=self.before.mesh.with_stages(stages), layer_cuts=tuple(cuts))

    @property
    def _rule(self) -> MemoryRule:
        return MemoryRule(Shardings(optim=self.before.spec), self.before.mirror_count)

    def _estimated_at_once(self, stages: Stages, cuts: Cuts) -> Move:
        """`at_once` without a plan.

        Replicas that are lost are looked at page by page. What moves with layers, and to newcomers for even shares, is
        counted by the search's closed form; a lost replica may be made again by that, and is not counted twice.
        """
        old, rule = self.before, self._rule
        gone = frozenset(old.mesh.members).difference(*stages)
        promoted = plan_reshard(self.layout, self._replicas_at(gone), lost=gone)
        if promoted.lost:
            return self._estimated_restart(stages, cuts)
        was = old_stages_of(stages, old.stages)
        estimates = MoveEstimates(self.costs, old.layer_cuts, was)
        moved, by_layer = estimates.to(cuts, rule), estimates.table(rule)
        missing = self._missing(promoted, sum(map(len, stages)))
        sent: defaultdict[int, float] = defaultdict(float)  # bytes by worker
        lacking: defaultdict[int, float] = defaultdict(float)  # bytes by layer
        for copy, num_bytes in missing:
            sent[copy.primary] += num_bytes
            lacking[copy.layer] += num_bytes
        made_again, busiest = 0.0, max(sent.values(), default=0.0)
        for stage, (members, (first, stop)) in enumerate(zip(stages, pairwise(cuts), strict=True)):
            again = sum(max(0.0, lacking[layer] - float(by_layer[stage, layer])) for layer in range(first, stop))
            made_again += again
            busiest = max(busiest, again / len(members))
            if newcomers := int((was[stage] < 0).sum()):
                # They get their share as primaries, and what is made again before others do.
                share = sum(layer.state_bytes for layer in self.costs.layers[first:stop]) / len(members)
                busiest = max(busiest, share + min(again / newcomers, old.mirror_count * share))
        return Move(
            bytes=moved.bytes + made_again,
            seconds=max(moved.seconds, self._link_seconds(busiest)),
            promotions=len(promoted.promotions),
            copies=len(missing),
            is_estimate=True,
        )

    def _missing(self, promoted: ReshardPlan, num_workers: int) -> list[tuple[ReplicaSet, float]]:
        """The page ranges of sharded state that lack replicas, and the bytes that it takes to make these again."""
        if self.before.is_replicated:
            return []
        wanted, found = 1 + min(self.before.mirror_count, num_workers - 1), []
        for pages in all_replica_sets(promoted.during):
            if (lacking := wanted - len(pages.replicas)) > 0 and (elements := promoted.elements(pages.key)):
                frozen = promoted.is_frozen(pages.key)
                found.append((pages, lacking * elements * self._element_bytes[pages.layer, frozen]))
        return found

    def _link_seconds(self, num_bytes: float) -> float:
        """Seconds for which a link is occupied that carries so much."""
        return num_bytes / self.costs.bandwidth + self.costs.latency_s if num_bytes else 0.0

    @cached_property
    def _element_bytes(self) -> Mapping[tuple[int, bool], float]:
        """By layer, bytes of one trained element, and of a frozen one."""
        return {
            (layer.index, bool(frozen)): each
            for cost, layer in zip(self.costs.layers, self.layout.layers, strict=True)
            for frozen, each in enumerate(_element_bytes(cost.state_bytes, layer))
        }

    def _replicas_at(self, ranks: frozenset[int]) -> ReplicaMap:
        """The page ranges that have one of these workers as a replica, before the event."""
        if self.replicas is None:
            least = least_pages(self.layout)
            return replicas_at(self.layout, self.before, ranks, least_pages=least, least_joined=self.least_joined)
        return {
            layer: tuple(it for it in of_layer if not it.replicas.isdisjoint(ranks))
            for layer, of_layer in self.replicas.items()
        }

    def _estimated_restart(self, stages: Stages, cuts: Cuts) -> Move:
        """The figures of reading a checkpoint: every worker reads all that it is to hold."""
        old = self.before
        mirrors = min(old.mirror_count, sum(map(len, stages)) - 1)
        total = busiest = 0.0
        for members, (first, stop) in zip(stages, pairwise(cuts), strict=True):
            times = len(members) if old.is_replicated else 1 + mirrors
            num_bytes = times * sum(layer.state_bytes for layer in self.costs.layers[first:stop])
            total, busiest = total + num_bytes, max(busiest, num_bytes / len(members))
        return Move(total, seconds=self._link_seconds(busiest), from_checkpoint=True, is_estimate=True)

    def _figures(self, plan: ReshardPlan, from_checkpoint: bool = False) -> Move:
        """The bytes of a plan's copies. All links carry their part at the same time."""
        element_bytes, num_copies = self._element_bytes, 0
        moved = Counter[tuple[int, bool]]()  # elements by layer, trained or frozen
        sent: defaultdict[int, float] = defaultdict(float)  # bytes by worker; a link carries both ways at once
        received: defaultdict[int, float] = defaultdict(float)
        for copy in plan.copies:
            kind, elements = (copy.pages[0], plan.is_frozen(copy.pages)), plan.elements(copy.pages)
            if not elements:
                continue  # the loss page is no state
            num_copies += 1
            num_bytes = elements * element_bytes[kind]
            moved[kind] += elements
            sent[copy.source] += num_bytes
            received[copy.destination] += num_bytes
        sent.pop(_CHECKPOINT, None)
        busiest = max((*sent.values(), *received.values()), default=0.0)
        return Move(
            bytes=sum(elements * element_bytes[kind] for kind, elements in moved.items()),
            bound_bytes=plan.least_elements * min((each for each in element_bytes.values() if each), default=0.0),
            seconds=self._link_seconds(busiest),
            promotions=len(plan.promotions),
            copies=num_copies,
            from_checkpoint=from_checkpoint,
            plan=plan,
        )


def _element_bytes(state_bytes: int, layer: LayerLayout) -> tuple[float, float]:
    """Bytes of one trained element of a layer, and of a frozen one, which has a master alone."""
    frozen = layer.num_frozen_elements
    masters = min(state_bytes, MASTER_BYTES * frozen)
    return (state_bytes - masters) / ((layer.num_state_elements - frozen) or 1), masters / (frozen or 1)


def _checkpoint_of(layout: ModelLayout) -> ReplicaMap:
    """The replica map of a checkpoint, which has every page."""
    held = frozenset((_CHECKPOINT,))
    return {
        layer.index: tuple(
            ReplicaSet(layer.index, block.first_page, block.first_page + block.num_pages, _CHECKPOINT, held)
            for block in layer.blocks
            if block.kind in (STATE, LOSS)
        )
        for layer in layout.layers
    }
