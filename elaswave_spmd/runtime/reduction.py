"""The canonical reduction of gradients: local tree nodes go to the primaries, entries from there to the mirrors.

A worker adds up its own units as far as the tree allows. A node that it cannot complete alone is cut by page runs and
sent to each run's primary. The primary adds nodes until it has the root: the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from elaswave_spmd.recovery.messages import NodeSum
from elaswave_spmd.runtime.buffers import GradientBuffer, GradientPool
from elaswave_spmd.scheduling.placement import HolderMap, HolderRun, RunKey
from elaswave_spmd.scheduling.tree import Node, Reduction, maximal_nodes, parent_and_sibling
from elaswave_spmd.sharding.pages import LOSS, READER, ModelLayout

Send = Callable[[int, NodeSum, Tensor], None]
EntryDone = Callable[[int, HolderRun, Tensor], None]


@dataclass(frozen=True)
class Route:
    """Pages [first, stop) of a layer's gradient buffer go to the holders of `run`: the same pages, or their source."""

    layer: int
    first: int
    stop: int
    run: HolderRun


def routes(layout: ModelLayout, holder_runs: HolderMap, layer: int) -> tuple[Route, ...]:
    """Where the gradient pages of one layer go. A reader block's pages go to the holders of the pages it reads."""
    found = [Route(layer, run.first, run.stop, run) for run in holder_runs[layer]]
    for block in layout.layers[layer].reader_blocks:
        assert block.source is not None
        owner, source = block.source
        shift = block.first_page - source
        inside = range(source, source + block.num_pages)
        found += [
            Route(layer, run.first + shift, run.stop + shift, run) for run in holder_runs[owner] if run.first in inside
        ]
    return tuple(found)


@dataclass
class _Tree:
    """One tree: which nodes are held, and their sums, `num_elements` in all. `owned` sums may be overwritten."""

    reduction: Reduction
    sums: dict[Node, Tensor] = field(default_factory=dict)
    owned: set[Node] = field(default_factory=set)
    num_elements: int = 0

    def add(self, node: Node, value: Tensor, *, owned: bool) -> None:
        """Files a node's sum and makes the additions that it allows; what is already covered is ignored."""
        added = self.reduction.add(node)
        if added is None:
            return
        for old in added.superseded:
            del self.sums[old]
        self.sums[node] = value
        if owned:
            self.owned.add(node)
        for merge in added.merges:
            left, right = self.sums.pop(merge.left), self.sums.pop(merge.right)
            self.sums[merge.into] = add_sums(left, right, merge.left in self.owned, merge.right in self.owned)
            self.owned -= {merge.left, merge.right}
            self.owned.add(merge.into)
        self.num_elements += value.numel() * (1 - len(added.superseded) - len(added.merges))


def add_sums(left: Tensor, right: Tensor, left_owned: bool, right_owned: bool) -> Tensor:
    """left + right, into one of them where it may be overwritten (addition commutes bit for bit)."""
    if left_owned:
        return left.add_(right)
    return right.add_(left) if right_owned else left + right


class _PrimaryRun:
    """The trees of one run at its primary: one per use of the parameters (two for a tied one), in layer order."""

    def __init__(self, uses: Sequence[int], num_units: int) -> None:
        self._trees = {use: _Tree(Reduction(num_units)) for use in sorted(uses)}
        self._root = (0, num_units)
        self.done = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the sums held."""
        return sum(4 * tree.num_elements for tree in self._trees.values())

    def add(self, use: int, node: Node, value: Tensor, *, owned: bool) -> Tensor | None:
        """The entry, once every use's tree has its root; None before, and again after."""
        self._trees[use].add(node, value, owned=owned)
        if self.done or not all(tree.reduction.done for tree in self._trees.values()):
            return None
        self.done = True
        first, *rest = self._trees.values()
        entry, owned = first.sums.pop(self._root), self._root in first.owned
        for tree in rest:
            entry = add_sums(entry, tree.sums.pop(self._root), owned, self._root in tree.owned)
            owned = True
        self._trees.clear()
        return entry


class GradientReducer:
    """The reduction of one step after another on one worker.

    Args:
        layers: the layers that this worker runs.
        units: the units that it computes.
        sharded: gradients are sharded: nodes leave as soon as they are done and their buffers are not kept.
        add_in_place: autograd may add a unit's gradient straight into its sibling's buffer (fp32 compute).
        send: (primary, message, fp32 payload); the payload must not change until the step is decided.
        entry_done: called with (step, run, entry) for each entry completed of a run that this worker is primary of. The
            step may be one that this worker has not begun.
    """

    def __init__(
        self,
        rank: int,
        layout: ModelLayout,
        holder_runs: HolderMap,
        layers: Sequence[int],
        units: Sequence[int],
        num_units: int,
        *,
        sharded: bool,
        add_in_place: bool,
        send: Send,
        entry_done: EntryDone,
    ) -> None:
        self.rank, self.num_units = rank, num_units
        self._layout, self._sharded, self._add_in_place = layout, sharded, add_in_place
        self._send, self._entry_done = send, entry_done
        self._routes = {layer: routes(layout, holder_runs, layer) for layer in layers}
        self._final = frozenset(maximal_nodes(units, num_units))
        self._pools = {layer: GradientPool(layout.layers[layer]) for layer in layers}
        self._primary = [run for runs in holder_runs.values() for run in runs if run.primary == rank]
        self._uses = {run.key: uses_of(layout, run) for run in self._primary}
        self._run_at = {(route_use, page): run for run in self._primary for route_use, page in self._starts(run)}
        self._steps: dict[int, dict[RunKey, _PrimaryRun]] = {}
        self._local: dict[int, tuple[Reduction, dict[Node, GradientBuffer]]] = {}
        self.decided = 0
        self._sum_bytes = self._peak_sum_bytes = 0

    def _starts(self, run: HolderRun) -> list[tuple[int, int]]:
        """The (use, first page) under which nodes for this run arrive."""
        found = [(run.layer, run.first)]
        for (owner, source), blocks in self._layout.readers.items():
            for layer, block in blocks:
                if owner == run.layer and source <= run.first < source + block.num_pages:
                    found.append((layer, run.first - source + block.first_page))
        return found

    # ---- this worker's own units

    def begin_unit(self, layer: int, unit: int) -> tuple[GradientBuffer, bool]:
        """The buffer for the unit's gradient of this layer; True: add to it, False: overwrite it."""
        leaf = (unit, unit + 1)
        _, buffers = self._local.setdefault(layer, (Reduction(self.num_units), {}))
        above = parent_and_sibling(leaf, self.num_units)
        sibling = buffers.get(above[1]) if above and self._add_in_place and leaf not in self._final else None
        buffer = buffers[leaf] = sibling or self._pools[layer].acquire()
        return buffer, sibling is not None

    def end_unit(self, step: int, layer: int, unit: int) -> None:
        """The unit's gradient is in its buffer: add up what the tree allows, and let finished nodes go."""
        reduction, buffers = self._local[layer]
        node = (unit, unit + 1)
        added = reduction.add(node)
        assert added is not None, f"unit {unit} of layer {layer} was computed twice in step {step}"
        for merge in added.merges:
            left, right = buffers.pop(merge.left), buffers.pop(merge.right)
            if left is not right:
                left.flat.add_(right.flat)
                self._pools[layer].release(right)
            buffers[merge.into] = left
            node = merge.into
        if node in self._final:
            self._emit(step, layer, node, buffers.pop(node))

    def _emit(self, step: int, layer: int, node: Node, buffer: GradientBuffer) -> None:
        if self._sharded:
            self._pools[layer].forget(buffer)
        for route in self._routes[layer]:
            part = buffer.pages(route.first, route.stop)
            if route.run.primary != self.rank:
                message = NodeSum(step, layer, route.first, route.stop, *node)
                self._send(route.run.primary, message, part)
                continue
            # Sharded gradients: keep this worker's part only, so that the whole buffer goes when it is sent.
            value = part.clone() if self._sharded and len(self._routes[layer]) > 1 else part
            self._add(step, route.run, layer, node, value, owned=True)

    # ---- everybody's nodes, at the primary

    def node_received(self, message: NodeSum, payload: Tensor) -> None:
        """A node from another worker; ignored when its step is decided already."""
        if message.step <= self.decided:
            return
        run = self._run_at[message.layer, message.first]
        self._add(message.step, run, message.layer, (message.lo, message.hi), payload, owned=False)

    def _add(self, step: int, run: HolderRun, use: int, node: Node, value: Tensor, *, owned: bool) -> None:
        runs = self._steps.setdefault(step, {})
        if run.key not in runs:
            runs[run.key] = _PrimaryRun(self._uses[run.key], self.num_units)
        trees = runs[run.key]
        if trees.done:
            return
        before = trees.num_bytes
        entry = trees.add(use, node, value, owned=owned)
        self._sum_bytes += (trees.num_bytes if entry is None else 4 * entry.numel()) - before
        self._peak_sum_bytes = max(self._peak_sum_bytes, self._sum_bytes)
        if entry is not None:
            self._entry_done(step, run, entry)

    def step_decided(self, step: int) -> None:
        """Everybody has what it needs of this step: its buffers may be used again."""
        self.decided = step
        self._steps.pop(step, None)
        self._sum_bytes = sum(run.num_bytes for later in self._steps.values() for run in later.values())
        self._local.clear()
        for pool in self._pools.values():
            pool.release_all()

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients kept within a step, at the peak.

        Replicated gradients: the full-size buffers of all open nodes. Sharded: the sums of this worker's own pages; on
        top comes one layer's buffer at a time, on its way from the layer's backward to the primaries.
        """
        return self._peak_sum_bytes if self._sharded else sum(pool.num_bytes for pool in self._pools.values())


def uses_of(layout: ModelLayout, run: HolderRun) -> tuple[int, ...]:
    """The layers whose gradients add up to the entry of a run, in layer order."""
    block = layout.layers[run.layer].block_of(run.first)
    assert block.kind != READER
    readers = layout.readers.get((run.layer, block.first_page), ()) if block.kind != LOSS else ()
    return tuple(sorted({run.layer, *(layer for layer, _ in readers)}))
