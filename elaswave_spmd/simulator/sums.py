"""The traffic of a step besides activations: partial sums, reduced gradients to mirrors, new parameters to the stage.

The bytes are those of `step_time.traffic_bytes`, but sent message by message. The partial sum of a tree node is sent
when the gradients of its last micro-batch are there. Each worker is the primary of an equal part of its stage's pages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from elaswave_spmd.determinism.reduction_tree import maximal_nodes
from elaswave_spmd.scheduling.cost_model import CostModel, MemoryRule
from elaswave_spmd.scheduling.placement import CONTIGUOUS
from elaswave_spmd.simulator.links import Clock, Link
from elaswave_spmd.simulator.work import Work


class Sums:
    """The reductions and publications of one step after another.

    Args:
        work: the work of each step.
        costs: the sizes of the layers.
        rule: the shardings, and the number of mirrors.
        microbatch_order: `Placement.microbatch_order`. Unless it is CONTIGUOUS, every gradient is sent by itself.
        links: rank -> the worker's outgoing link.
        clock: the virtual time.
        known: called with the step when all replicas have the reduced gradients of all layers.
    """

    def __init__(
        self,
        work: Work,
        costs: CostModel,
        rule: MemoryRule,
        microbatch_order: str,
        links: Mapping[int, Link],
        clock: Clock,
        known: Callable[[int], None],
    ) -> None:
        self._work = work
        self._costs = costs
        self._rule = rule
        self._links = links
        self._clock = clock
        self._known = known
        self._node_of: dict[tuple[int, int], int] = {}  # (stage, micro-batch) -> number of the tree node
        self._microbatches_of: list[int] = []  # of each tree node
        self._nodes = [0] * work.num_stages  # the number of tree nodes of each stage
        self._num_workers = sum(map(len, work.stages))
        for stage, owners in enumerate(work.owners):
            self._split(stage, owners, microbatch_order)
        self._missing: dict[tuple[int, int], int] = {}  # (step, node) -> micro-batches without gradients
        self._nodes_left: dict[tuple[int, int], int] = {}  # (step, layer) -> nodes that have not arrived
        self._sends_left: dict[tuple[int, int], int] = {}  # (step, layer) -> messages to mirrors that have not arrived
        self._layers_left: dict[int, int] = {}  # step -> layers that are not reduced everywhere
        self._stage_of = [s for s in range(work.num_stages) for _ in range(*work.layer_cuts[s : s + 2])]

    def _split(self, stage: int, owners: Sequence[int], microbatch_order: str) -> None:
        microbatches: defaultdict[int, list[int]] = defaultdict(list)
        for microbatch, rank in enumerate(owners):
            microbatches[rank].append(microbatch)
        for mine in microbatches.values():
            # A worker with contiguous micro-batches adds them up as far as the tree allows. In another order each
            # gradient is sent by itself.
            nodes = maximal_nodes(mine, len(owners)) if microbatch_order == CONTIGUOUS else [(u, u + 1) for u in mine]
            for node in nodes:
                for microbatch in range(*node):
                    self._node_of[stage, microbatch] = len(self._microbatches_of)
                self._microbatches_of.append(node[1] - node[0])
            self._nodes[stage] += len(nodes)

    def gradients_begin(
        self, step: int, rank: int, stage: int, microbatch: int, ends: Sequence[tuple[int, float]]
    ) -> None:
        """Notes that a worker begins to make a micro-batch's gradients, in a whole backward or in its second part.

        Args:
            ends: (layer, time at which the gradients of the layer will be there).
        """
        key = step, self._node_of[stage, microbatch]
        left = self._missing.get(key, self._microbatches_of[key[1]]) - 1
        self._missing[key] = left
        if not left:
            for layer, time in ends:
                self._clock.at(time, self._node_done, step, rank, stage, layer)

    def _node_done(self, step: int, rank: int, stage: int, layer: int) -> None:
        size = len(self._work.stages[stage])
        if size == 1:
            self._node_arrived(step, stage, layer)
            return
        # A worker is the primary of 1 / size of the pages itself, and sends the rest.
        num_bytes = self._costs.layers[layer].gradient_bytes * (size - 1) / size
        self._links[rank].send(num_bytes, self._node_arrived, step, stage, layer)

    def _node_arrived(self, step: int, stage: int, layer: int) -> None:
        left = self._nodes_left.get((step, layer), self._nodes[stage]) - 1
        self._nodes_left[step, layer] = left
        if left:
            return
        members = self._work.stages[stage]
        mirrors = self._rule.mirrors(len(members), self._num_workers)
        if not mirrors:
            self._layer_known(step)
            return
        self._sends_left[step, layer] = len(members)
        for rank in members:
            num_bytes = self._costs.layers[layer].gradient_bytes / len(members) * mirrors
            self._links[rank].send(num_bytes, self._gradient_arrived, step, layer)

    def _gradient_arrived(self, step: int, layer: int) -> None:
        self._sends_left[step, layer] -= 1
        if not self._sends_left[step, layer]:
            self._layer_known(step)

    def _layer_known(self, step: int) -> None:
        self._layers_left[step] = self._layers_left.get(step, len(self._stage_of)) - 1
        if not self._layers_left[step]:
            self._known(step)

    def publish(self) -> dict[int, float]:
        """Sends the parameters of a step that is applied now.

        Links are idle at this moment, since all reduced gradients have arrived. The returned times do not take into
        account that urgent messages of the next step may go first.

        Returns:
            Layer -> the time at which all workers of its stage have its parameters.
        """
        found: dict[int, float] = {}
        for stage, members in enumerate(self._work.stages):
            size, time = len(members), self._clock.now
            # Mirrors apply the step themselves, so parameters are sent only to the other members.
            mirrors = self._rule.mirrors(size, self._num_workers)
            receivers = size - 1 - mirrors if size > 1 and self._rule.state_is_sharded else 0
            for layer in range(*self._work.layer_cuts[stage : stage + 2]):
                num_bytes = self._costs.layers[layer].value_bytes / size * receivers
                if num_bytes:
                    for rank in members:
                        self._links[rank].send(num_bytes, _arrived)
                    time += num_bytes / self._costs.bandwidth
                    found[layer] = time + self._costs.latency_s
        return found


def _arrived() -> None:
    """Do nothing: no action waits for this message, as `publish` has computed when it arrives."""
