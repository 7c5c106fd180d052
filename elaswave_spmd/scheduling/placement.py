"""A placement: what runs where, for one mesh epoch, as an immutable value (principle 1).

It holds counts, one number per stage or worker; owner maps and micro-batch lists are functions of it, made on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import lt

from elaswave_spmd.errors import PlanError
from elaswave_spmd.mesh import Mesh
from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.scheduling.partition import balance_layers
from elaswave_spmd.sharding import Shardings, StateSharding
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import ReplicaMap

CONTIGUOUS, TIME_MAJOR = "contiguous", "time-major"


@dataclass(frozen=True)
class Placement:
    """Layers on stages, micro-batches on workers, pages on replicas.

    Args:
        mesh: the workers, by stage.
        num_microbatches: micro-batches of a step (constant for a run).
        layer_cuts: stage s runs layers [layer_cuts[s], layer_cuts[s + 1]).
        microbatch_counts: per stage, the micro-batches of each worker, in stage order; each stage's counts add up to
        num_microbatches. shardings: which of parameters, gradients and optimizer state lie on dp.
        replicas: who holds which pages, all layers; None: as dealt to a new mesh.
    """

    mesh: Mesh
    num_microbatches: int
    layer_cuts: tuple[int, ...]
    microbatch_counts: tuple[tuple[int, ...], ...]
    shardings: Shardings
    replicas: ReplicaMap | None = field(default=None, hash=False, compare=True)

    def __post_init__(self) -> None:
        cuts, stages = self.layer_cuts, self.mesh.stages
        assert len(cuts) == len(stages) + 1 and cuts[0] == 0 and all(map(lt, cuts, cuts[1:]))
        for members, counts in zip(stages, self.microbatch_counts, strict=True):
            assert len(members) == len(counts) and sum(counts) == self.num_microbatches, (members, counts)

    @cached_property
    def dealing(self) -> str:
        """Time-major when gradients are sharded: leaves are sent when done, so no worker keeps full-size sums."""
        return TIME_MAJOR if self.shardings.grads.axes else CONTIGUOUS

    @property
    def num_stages(self) -> int:
        return len(self.mesh.stages)

    def layers_of_stage(self, stage: int) -> range:
        return range(self.layer_cuts[stage], self.layer_cuts[stage + 1])

    def stage_of_layer(self, layer: int) -> int:
        return next(s for s in range(self.num_stages) if layer < self.layer_cuts[s + 1])

    def _workers_of_microbatches(self, stage: int) -> tuple[int, ...]:
        if stage not in self._dealt:
            self._dealt[stage] = deal_microbatches(self.mesh.stages[stage], self.microbatch_counts[stage], self.dealing)
        return self._dealt[stage]

    @cached_property
    def _dealt(self) -> dict[int, tuple[int, ...]]:
        return {}  # by stage, worked out when first asked for

    def worker_of_microbatch(self, stage: int, microbatch: int) -> int:
        return self._workers_of_microbatches(stage)[microbatch]

    def microbatches_of(self, rank: int) -> tuple[int, ...]:
        """The micro-batches of one worker, ascending."""
        stage, position = self.mesh.coordinate(rank)
        counts = self.microbatch_counts[stage]
        if self.dealing == CONTIGUOUS:
            first = sum(counts[:position])
            return tuple(range(first, first + counts[position]))
        if counts == even_counts(self.num_microbatches, len(counts)):
            return tuple(range(position, self.num_microbatches, len(counts)))
        return tuple(u for u, worker in enumerate(self._workers_of_microbatches(stage)) if worker == rank)

    def replica_map(self, layout: ModelLayout, stages: Iterable[int] | None = None) -> ReplicaMap:
        """Layer -> the runs of its state pages (and of its loss page), in page order; of some stages, or of all.

        Those of `replicas`; without it the pages as dealt to a new mesh, sharded ones without mirrors.
        """
        if self.replicas is None:
            return self.state_sharding().without_mirrors(layout, stages)
        wanted = range(self.num_stages) if stages is None else stages
        return {layer: self.replicas[layer] for stage in wanted for layer in self.layers_of_stage(stage)}

    def state_sharding(self, mirror_count: int = 0, scatter: int = 0) -> StateSharding:
        """The mesh and specs of the optimizer state, with so many mirrors of each page."""
        return StateSharding(self.mesh, self.layer_cuts, self.shardings.optim, mirror_count, scatter)

    def __str__(self) -> str:
        lines = [
            f"placement of mesh epoch {self.mesh.epoch}: {self.num_microbatches} micro-batches, dealt {self.dealing}"
        ]
        for s, (members, counts) in enumerate(zip(self.mesh.stages, self.microbatch_counts, strict=True)):
            layers = self.layers_of_stage(s)
            lines.append(
                f"  stage {s}: layers {layers.start}..{layers.stop - 1}, workers {list(members)}, "
                f"micro-batches {list(counts)}"
            )
        return "\n".join(lines)


def deal_microbatches(members: Sequence[int], counts: Sequence[int], dealing: str) -> tuple[int, ...]:
    """The worker of every micro-batch of a stage.

    contiguous: the first counts[0] micro-batches to the first member, and so on. time-major: one micro-batch to each
    member in turn, round after round, members that have had their count left out.
    """
    if dealing == CONTIGUOUS:
        return tuple(m for m, count in zip(members, counts, strict=True) for _ in range(count))
    rounds = range(max(counts, default=0))
    return tuple(m for r in rounds for m, count in zip(members, counts, strict=True) if r < count)


def place(
    mesh: Mesh,
    layout: ModelLayout,
    shardings: Shardings,
    num_microbatches: int,
    *,
    layer_costs: Sequence[float] | None = None,
) -> Placement:
    """The healthy placement of a mesh: layers balanced over stages, micro-batches dealt evenly.

    Args:
        layer_costs: relative compute cost of each layer; by default its number of elements, at least 1.

    Raises:
        PlanError: more stages than layers, or no micro-batch.
    """
    num_layers, num_stages = len(layout.layers), len(mesh.stages)
    if num_stages > num_layers:
        raise PlanError(
            "every stage has at least one layer",
            got=f"{num_stages} stages",
            where="mesh",
            exists=f"{num_layers} layers (model.layers plus embedding and head)",
            fix=f"use at most pp{num_layers}, or a larger model.layers",
        )
    if num_microbatches < 1:
        raise PlanError(
            "a step has at least one micro-batch",
            got=num_microbatches,
            where="train.global_batch / train.microbatch_size",
        )
    costs = list(layer_costs) if layer_costs else [max(1.0, float(ly.num_value_elements)) for ly in layout.layers]
    cuts = balance_layers(costs, [len(members) for members in mesh.stages])
    counts = tuple(even_counts(num_microbatches, len(members)) for members in mesh.stages)
    return Placement(mesh, num_microbatches, cuts, counts, shardings)
