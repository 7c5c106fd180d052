"""The cost of a change in bytes of state: the copies of its reshard plan, added up link by link.

A search over stages and cuts looks at thousands of candidates and estimates the state that each would move by a closed
form (`stage_search.MoveEstimates`). The few placements that may really be chosen are planned here, by the function that
moves the state of a run: `sharding.plan_reshard`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.sharding import ReshardPlan, StateSharding, plan_reshard
from elaswave_spmd.sharding.layout import LOSS, STATE, LayerLayout, LayerUse, ModelLayout, ParameterInfo, lay_out
from elaswave_spmd.sharding.replica_placement import least_pages, place_replicas
from elaswave_spmd.sharding.replicas import ReplicaMap, ReplicaSet
from elaswave_spmd.sharding.reshard import MASTER_BYTES

_ELEMENT_BYTES = 12
"""State of one element with AdamW: fp32 master parameter and two moments."""

_SMALL = 1000
"""Up to so many workers a plan is made for the whole mesh, which takes less than a second."""

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
        plan: the plan itself; None: nothing changes, or it was made for a part of a large mesh.
    """

    bytes: float = 0.0
    bound_bytes: float = 0.0
    seconds: float = 0.0
    promotions: int = 0
    copies: int = 0
    from_checkpoint: bool = False
    plan: ReshardPlan | None = field(default=None, repr=False, compare=False)

    def text(self) -> str:
        """The plan line by line; empty without one."""
        return self.plan.text(_ELEMENT_BYTES) if self.plan else ""

    def __str__(self) -> str:
        size = f"{self.bytes:,.0f} B"
        if self.from_checkpoint:
            return f"{size} are read from the checkpoint, since pages have lost all replicas, {self.seconds:.4g} s"
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
    """

    before: StateSharding
    layout: ModelLayout
    costs: CostModel
    replicas: ReplicaMap | None = None

    def at_once(self, stages: Stages, cuts: Cuts) -> Move:
        """The figures of the plan right after the event, which makes lost replicas again where their layers are now."""
        changed = self._changed_stages(stages, cuts)
        if not changed:
            return NO_MOVE
        if len(changed) < len(stages) and self.before.mesh.num_workers > _SMALL:
            found = self._part_at_once(changed, stages, cuts)
            if not found.from_checkpoint:  # else all stages go back to the checkpoint, the unchanged ones as well
                return found
        return self._figures(*self._plan_at_once(stages, cuts))

    def _part_at_once(self, changed: Sequence[int], stages: Stages, cuts: Cuts) -> Move:
        """The figures of the plan for these stages alone."""
        spans = tuple(pairwise(cuts))
        part_cuts = tuple(accumulate((spans[s][1] - spans[s][0] for s in changed), initial=0))
        part_stages = tuple(stages[s] for s in changed)
        part = self._only(changed)
        return replace(part._figures(*part._plan_at_once(part_stages, part_cuts)), plan=None)  # it has other numbers

    def afterwards(self, now: tuple[Stages, Cuts], then: tuple[Stages, Cuts]) -> Move:
        """The figures of the plan to the stages and cuts `then`, when the plan to those of `now` is carried out."""
        first, _ = self._plan_at_once(*now)
        return self._figures(plan_reshard(self.layout, first.after, to=self._sharding(*then)))

    def _plan_at_once(self, stages: Stages, cuts: Cuts) -> tuple[ReshardPlan, bool]:
        """The plan, and True if pages are lost: then all workers read theirs from a checkpoint, as a resumed run."""
        target, replicas = self._sharding(stages, cuts), self._replicas
        lost = [rank for rank in self.before.mesh.members if rank not in target.mesh]
        plan = plan_reshard(self.layout, replicas, lost=lost, to=target)
        if not plan.lost:
            return plan, False
        return plan_reshard(self.layout, _checkpoint_of(self.layout), to=place_replicas(self.layout, target)), True

    @cached_property
    def _replicas(self) -> ReplicaMap:
        if self.replicas is not None:
            return self.replicas
        return place_replicas(self.layout, self.before, least_pages=least_pages(self.layout))

    def _sharding(self, stages: Stages, cuts: Cuts) -> StateSharding:
        return replace(self.before, mesh=self.before.mesh.with_stages(stages), layer_cuts=tuple(cuts))

    def _changed_stages(self, stages: Stages, cuts: Cuts) -> list[int]:
        """The stages with other workers or layers, or all of them if a plan for these alone might be another one.

        The state of a stage whose workers and layers stay does not move. So for a mesh of 100,000 workers of which one
        stage has changed, the plan for that stage alone has the bytes of the plan for all. This holds as long as
        mirrors lie within their stage.
        """
        old = self.before
        numbers = list(range(len(stages)))
        smallest = min(map(len, (*old.stages, *stages)))
        if len(old.stages) != len(stages) or (self.replicas is None and smallest <= old.mirror_count):
            return numbers
        rows = zip(numbers, old.stages, stages, pairwise(old.layer_cuts), pairwise(cuts), strict=True)
        changed = [s for s, was, now, layers, new_layers in rows if (was, layers) != (tuple(now), new_layers)]
        return changed if self.replicas is None or not changed else numbers

    def _only(self, numbers: Sequence[int]) -> StateMoves:
        """These stages alone, with their layers, which are numbered anew."""
        layers = [layer for s in numbers for layer in self.before.layers_of_stage(s)]
        cuts = tuple(accumulate((len(self.before.layers_of_stage(s)) for s in numbers), initial=0))
        mesh = self.before.mesh.with_stages(self.before.stages[s] for s in numbers)
        pages = tuple(replace(self.layout.layers[layer], index=i) for i, layer in enumerate(layers))
        costs = replace(self.costs, layers=tuple(self.costs.layers[layer] for layer in layers))
        before = replace(self.before, mesh=mesh, layer_cuts=cuts)
        return StateMoves(before, replace(self.layout, layers=pages), costs)

    def _figures(self, plan: ReshardPlan, from_checkpoint: bool = False) -> Move:
        """The bytes of a plan's copies. All links carry their part at the same time."""
        element_bytes = {
            (layer.index, frozen): each
            for cost, layer in zip(self.costs.layers, self.layout.layers, strict=True)
            for frozen, each in enumerate(_element_bytes(cost.state_bytes, layer))
        }
        num_copies = 0
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
            seconds=busiest / self.costs.bandwidth + self.costs.latency_s if busiest else 0.0,
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
