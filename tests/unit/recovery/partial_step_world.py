"""A step carried out by symbolic workers: who has computed, sent, received and added up what, without numbers.

Workers do whatever is ready, in any order, layer by layer; messages arrive in any order; workers die. A sum that went
into its own worker's trees may not be sent any more: reading it again is an error. It is what a plan is tried on.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elaswave_spmd.determinism.reduction_tree import Node, Reduction, maximal_nodes
from elaswave_spmd.recovery.messages import PartialStep, Recompute
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import ReplicaMap, ReplicaSet


def executor_view(plan: Sequence[Recompute], stage: int, rank: int) -> tuple[Recompute, ...]:
    """One worker's lines on one stage, by micro-batch."""
    return tuple(line for line in plan if (line.stage, line.worker) == (stage, rank))


def peer_of(plan: Sequence[Recompute], stage: int, microbatch: int) -> int | None:
    """The worker that runs a micro-batch on a stage in this step; None if none does: its input is kept, not sent."""
    return next((line.worker for line in plan if (line.stage, line.microbatch) == (stage, microbatch)), None)


Page = tuple[int, int]
"""(owner layer, page)."""
Boundary = tuple[str, int, int]
"""("A" or "G", layer, micro-batch)."""
STEP = 8


def runs_of(placement: Placement) -> ReplicaMap:
    assert placement.replicas is not None
    return placement.replicas


def uses_of_page(layout: ModelLayout) -> dict[Page, frozenset[int]]:
    """Owned (or loss) page -> the layers that contribute to it. Written page by page, from the words of the layout."""
    found: dict[Page, set[int]] = {}
    for layer in layout.layers:
        for block in layer.blocks:
            for at, page in enumerate(block.pages):
                owner = (block.source[0], block.source[1] + at) if block.source else (layer.index, page)
                found.setdefault(owner, set()).add(layer.index)
    return {page: frozenset(uses) for page, uses in found.items()}


@dataclass
class Sum:
    """A local sum: of which layer's gradient, and which pages of it were given to this worker's own trees."""

    layer: int
    node: Node
    consumed: set[Page] = field(default_factory=set)


@dataclass
class Task:
    """The rest of one micro-batch.

    Args:
        layers: those whose backward is still ahead, last one first.
        started: the backward has begun.
        weights: layers whose weight gradients are put off, last one first. They come after all of `layers`.
    """

    forward: bool
    backward: int
    layers: list[int]
    started: bool = False
    weights: list[int] = field(default_factory=list)

    @property
    def is_put_off(self) -> bool:
        """Nothing but weight gradients is left, of all layers."""
        return self.started and not self.layers and bool(self.weights) and not self.forward


class Worker:
    """One worker, as a careful executor of plans would behave."""

    def __init__(self, rank: int, world: World) -> None:
        self.rank, self.world = rank, world
        self.layers = range(0)
        self.assigned: set[int] = set()
        self.tasks: dict[int, Task] = {}
        self.saved: set[int] = set()
        self.computed: set[int] = set()
        self.inputs: set[Boundary] = set()
        self.outputs: set[Boundary] = set()
        self.open: dict[int, dict[Node, Sum]] = {}
        self.sums: list[Sum] = []
        self.final: dict[int, tuple[Node, ...]] = {}
        self.trees: dict[tuple[Page, int], Reduction] = {}
        self.reduced: set[Page] = set()
        self.early: list[tuple[Page, int, Node]] = []
        self.asked = False
        self.forward_since: set[int] = set()  # StepReport
        self.backward_since: dict[int, int] = {}  # StepReport: micro-batch -> how
        self.splits: dict[int, bool] = {}  # micro-batch -> its backward, which has begun, is in two parts
        self.put_off: frozenset[int] = frozenset()  # by the last StepReport
        self.placement: Placement
        self.plan: Sequence[Recompute] | None = None

    # ---- the mesh changes

    def place(self, placement: Placement, plan: Sequence[Recompute] | None) -> None:
        stage = placement.mesh.stage_of(self.rank)
        same, self.layers = self.layers == placement.layers_of_stage(stage), placement.layers_of_stage(stage)
        self.placement, self.plan = placement, plan
        if plan is None:
            self.assigned = set(placement.microbatches_of(self.rank))
            self.tasks = {u: Task(True, 2, list(reversed(self.layers))) for u in self.assigned}
        else:
            self._take_lines(executor_view(plan, stage, self.rank), same)
        self._hand_over()
        for boundary in sorted(self.outputs):
            self._send_boundary(boundary)
        self.asked, self.forward_since, self.backward_since = False, set(), {}
        self._emit_what_is_final()

    def _take_lines(self, lines: Sequence[Recompute], same: bool) -> None:
        old, self.tasks = self.tasks, {}
        if not same:
            self.assigned, self.computed, self.saved = set(), set(), set()
            old, self.forward_since, self.backward_since = {}, set(), {}
        for line in lines:
            u, before = line.microbatch, old.get(line.microbatch)
            task = Task(line.forward and u not in self.forward_since, line.backward, list(reversed(self.layers)))
            done = self.backward_since.get(u, 0)
            if before and before.is_put_off:
                assert not line.forward or u not in self.put_off, f"{line} whose output is kept"
                task = Task(False, 2, [], True, before.weights) if line.backward > 1 else Task(False, 0, [])
            elif line.backward <= done or (line.backward == 3 and done == 2):
                task = Task(task.forward, 0, [])  # if its forward was done before, the output is wanted again
            elif line.backward == 3:
                raise AssertionError(f"{line} that was not put off")
            elif before and before.started and before.layers and before.backward >= line.backward:
                task = Task(task.forward, before.backward, before.layers, True, before.weights)
            else:
                task.forward |= line.forward and u not in self.saved
                assert task.forward or u in self.saved, f"{line} without its forward"
            self.computed -= {u} if task.layers else set()
            if task.forward or task.layers or task.weights:
                self.tasks[u] = task
        self.assigned |= {line.microbatch for line in lines}

    def _hand_over(self) -> None:
        """Trees, sums and reduced gradients go to the workers that need them in the new map."""
        for (page, use), tree in list(self.trees.items()):
            if self.world.primary(self.placement, page) != self.rank:
                del self.trees[page, use]
                for node in tree.held:
                    self.world.send(self.rank, self.world.primary(self.placement, page), ("node", page, use, node))
        for held in self.sums:
            self._offer(held)
        early, self.early = self.early, []
        for page, use, node in early:
            self.node_received(page, use, node)
        for page in self.reduced:
            self._send_entry(page)

    # ---- computing

    def ready(self) -> list[int]:
        return [u for u, task in self.tasks.items() if self._can_forward(u, task) or self._can_backward(u, task)]

    def _can_forward(self, u: int, task: Task) -> bool:
        return task.forward and (self.layers.start == 0 or ("A", self.layers.start, u) in self.inputs)

    def _can_backward(self, u: int, task: Task) -> bool:
        gradient = self.layers.stop == self.world.num_layers or ("G", self.layers.stop - 1, u) in self.inputs
        return bool(task.weights) or (bool(task.layers) and (task.started or (u in self.saved and gradient)))

    def run(self, u: int) -> None:
        """One action of a micro-batch: its forward, or the backward of one layer."""
        task = self.tasks[u]
        if self._can_backward(u, task):
            self._backward(u, task)
        else:
            task.forward = False
            self._use_up(("A", self.layers.start, u))
            if task.layers and not task.started:
                self.saved.add(u)
            self.forward_since.add(u)
            self._give(("A", self.layers.stop, u))
        if not task.forward and not task.layers and not task.weights:
            del self.tasks[u]

    def _backward(self, u: int, task: Task) -> None:
        if not task.layers:
            self._weights(u, task)
            return
        if not task.started:
            task.started = True
            self.splits[u] = task.backward == 2 and self.world.draw.random() < 0.5
        self._use_up(("G", self.layers.stop - 1, u))
        layer = task.layers.pop(0)
        if self.splits.get(u):
            task.weights.append(layer)
        elif task.backward == 2:
            self._contribute(layer, u)
        if not task.layers:
            self.saved.discard(u)
            if not task.weights:
                self.computed.add(u)
                self.backward_since[u] = task.backward
            self._give(("G", layer - 1, u))

    def _weights(self, u: int, task: Task) -> None:
        """The second part of a backward, of all layers: nothing comes between them."""
        while task.weights:
            self._contribute(task.weights.pop(0), u)
        self.computed.add(u)
        self.backward_since[u] = 2

    def _use_up(self, boundary: Boundary) -> None:
        if not self.asked:  # what comes after StepReport may be of the new epoch already, and is not sent again
            self.inputs.discard(boundary)

    def _give(self, boundary: Boundary) -> None:
        self.outputs.add(boundary)
        self._send_boundary(boundary)

    def _send_boundary(self, boundary: Boundary) -> None:
        kind, layer, microbatch = boundary
        edges = self.placement.layer_cuts[1:-1]
        edge = layer if kind == "A" else layer + 1
        if edge not in edges:
            return
        stage = edges.index(edge) + (kind == "A")
        if self.plan is None:
            self.world.send(self.rank, self.placement.worker_of_microbatch(stage, microbatch), boundary)
        elif (peer := peer_of(self.plan, stage, microbatch)) is not None:
            self.world.send(self.rank, peer, boundary)

    # ---- adding up

    def _contribute(self, layer: int, u: int) -> None:
        mine = self.open.setdefault(layer, {})
        if any(s.layer == layer and s.node[0] <= u < s.node[1] for s in (*self.sums, *mine.values())):
            self._emit(Sum(layer, (u, u + 1)))  # again: it goes alone
            return
        node, tree = (u, u + 1), Reduction(self.placement.num_microbatches, set(mine))
        added = tree.add(node)
        assert added is not None
        for merge in added.merges:
            for half in (merge.left, merge.right):
                mine.pop(half, None)  # the new leaf is not in there yet
            node = merge.into
        mine[node] = Sum(layer, node)
        if node in self.final[layer]:
            self._emit(mine.pop(node))

    def _emit_what_is_final(self) -> None:
        """Send from now on the largest nodes that its sums and lines make; those that are there already go."""
        for layer in {*self.open, *self.layers}:
            mine = self.open.setdefault(layer, {})
            microbatches = {u for lo, hi in mine for u in range(lo, hi)}
            if layer in self.layers:
                coming = {
                    u for u, task in self.tasks.items() if task.backward == 2 and layer in (*task.layers, *task.weights)
                }
                microbatches |= coming - {u for s in self.sums if s.layer == layer for u in range(*s.node)}
            self.final[layer] = maximal_nodes(microbatches, self.placement.num_microbatches)
            for node in [n for n in mine if n in self.final[layer]]:
                self._emit(mine.pop(node))

    def _emit(self, held: Sum) -> None:
        self.sums.append(held)
        self._offer(held)

    def _offer(self, held: Sum) -> None:
        for page, uses in self.world.uses.items():
            if held.layer not in uses or page in held.consumed:
                continue
            primary = self.world.primary(self.placement, page)
            if primary == self.rank:
                held.consumed.add(page)
                self._add(page, held.layer, held.node)
            else:
                self.world.send(self.rank, primary, ("node", page, held.layer, held.node))

    def node_received(self, page: Page, use: int, node: Node) -> None:
        if self.world.primary(self.placement, page) == self.rank:
            self._add(page, use, node)
        else:
            self.early.append((page, use, node))

    def _add(self, page: Page, use: int, node: Node) -> None:
        if page in self.reduced:
            return
        self.trees.setdefault((page, use), Reduction(self.placement.num_microbatches)).add(node)
        if all((page, each) in self.trees and self.trees[page, each].done for each in self.world.uses[page]):
            self.entry_known(page)

    def entry_known(self, page: Page) -> None:
        """A primary passes the entry on, also one that comes from the primary of an older epoch."""
        if page not in self.reduced and self.world.primary(self.placement, page) == self.rank:
            self._send_entry(page)
        self.reduced.add(page)
        for use in self.world.uses[page]:
            self.trees.pop((page, use), None)

    def _send_entry(self, page: Page) -> None:
        for replica in self.world.run_of(self.placement, page).replicas - {self.rank}:
            self.world.send(self.rank, replica, ("entry", page))

    # ---- StepReport

    def status(self) -> PartialStep:
        for u in [u for u, task in self.tasks.items() if task.started]:
            while u in self.tasks and self.tasks[u].layers:
                self.run(u)  # it answers between two actions
        self.asked, self.forward_since, self.backward_since = True, set(), {}
        forwarded = {u for u in self.saved if u in self.tasks and self.tasks[u].backward == 2}
        self.put_off = frozenset(u for u, task in self.tasks.items() if task.is_put_off)
        nodes: dict[int, list[Node]] = {}
        for held in (*self.sums, *(s for mine in self.open.values() for s in mine.values())):
            if all(p in self.reduced or (p, held.layer) in self.trees for p in held.consumed):
                nodes.setdefault(held.layer, []).append(held.node)
        trees, reduced = [], []
        for run in (run for runs in runs_of(self.placement).values() for run in runs):
            missing = [p for p in pages_of(run) if p not in self.reduced]
            if not missing:
                reduced.append(run.key)
            elif run.primary == self.rank:
                for use in sorted(self.world.uses[missing[0]]):
                    own = set(self.open.get(use, ()))
                    common = [
                        {n for k, tree in self.trees.items() if k == (p, use) for n in tree.held} for p in missing
                    ]
                    if found := set.intersection(*common) | own:
                        trees.append((*run.key, use, tuple(sorted(found))))
        return PartialStep(
            STEP,
            tuple(sorted(self.assigned)),
            tuple(sorted(self.computed)),
            tuple(sorted(forwarded)),
            tuple(sorted((layer, u) for kind, layer, u in self.outputs if kind == "A")),
            tuple(sorted((layer, u) for kind, layer, u in self.outputs if kind == "G")),
            {layer: tuple(sorted(found)) for layer, found in nodes.items()},
            tuple(trees),
            tuple(reduced),
            tuple(sorted(self.put_off)),
        )


class World:
    """All workers of a step, and what flies between them."""

    def __init__(self, layout: ModelLayout, placement: Placement, draw: random.Random) -> None:
        self.layout, self.draw = layout, draw
        self.num_layers, self.uses = len(layout.layers), uses_of_page(layout)
        self.flying: list[tuple[int, int, tuple]] = []
        self.workers: dict[int, Worker] = {}
        self.place(placement, None)

    def run_of(self, placement: Placement, page: Page) -> ReplicaSet:
        return next(run for run in runs_of(placement)[page[0]] if run.first <= page[1] < run.stop)

    def primary(self, placement: Placement, page: Page) -> int:
        return self.run_of(placement, page).primary

    def send(self, rank: int, peer: int, message: tuple) -> None:
        self.flying.append((rank, peer, message))

    def place(self, placement: Placement, plan: Sequence[Recompute] | None) -> None:
        """Every member learns of the new mesh at another moment, newcomers first; meanwhile the others go on."""
        known = [rank for rank in placement.mesh.members if rank in self.workers]
        for rank in set(placement.mesh.members) - set(known):
            self.workers[rank] = Worker(rank, self)
            self.workers[rank].place(placement, plan)
        for rank in self.draw.sample(known, len(known)):
            self.advance(self.draw.randrange(4))
            self.workers[rank].place(placement, plan)

    def advance(self, most: int) -> bool:
        """At most so many events, any that can happen. False: nothing can happen any more."""
        for _ in range(most):
            ready = [(worker, u) for worker in self.workers.values() for u in worker.ready()]
            if not ready and not self.flying:
                return False
            if ready and (not self.flying or self.draw.random() < 0.3):
                worker, microbatch = self.draw.choice(ready)
                worker.run(microbatch)
            else:
                _, rank, message = self.flying.pop(self.draw.randrange(len(self.flying)))
                self._deliver(rank, message)
        return True

    def _deliver(self, rank: int, message: tuple) -> None:
        worker = self.workers.get(rank)
        if worker is None:
            return
        match message:
            case ("node", page, use, node):
                worker.node_received(page, use, node)
            case ("entry", page):
                worker.entry_known(page)
            case boundary:
                worker.inputs.add(boundary)

    def kill(self, ranks: Iterable[int]) -> None:
        """Workers are lost with all that they have. Some of what they sent arrives; nothing between others is lost."""
        for rank in ranks:
            del self.workers[rank]
        self.flying = [m for m in self.flying if m[0] in self.workers or self.draw.random() < 0.5]

    def forget(self) -> None:
        """Local sums that were sent are given up here and there, as with sharded gradients."""
        for worker in self.workers.values():
            worker.sums = [held for held in worker.sums if self.draw.random() < 0.7]

    def lacking(self, placement: Placement) -> list[tuple[int, Page]]:
        """(replica, page) without an entry."""
        return [
            (rank, page)
            for page in self.uses
            for rank in self.run_of(placement, page).replicas
            if page not in self.workers[rank].reduced
        ]


def pages_of(run: ReplicaSet) -> list[Page]:
    return [(run.layer, page) for page in range(run.first, run.stop)]
