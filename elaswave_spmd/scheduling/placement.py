"""Placements: which stage runs which layers, which worker which micro-batches, and which worker holds which pages.

A `Placement` is an immutable value for one mesh epoch. It stores only a few numbers for each stage and worker. The
replica map of a new mesh and the lists of micro-batches are computed from these on demand, so that a placement of
100,000 workers is small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice
from operator import lt

import numpy as np

from elaswave_spmd.errors import PlanError, SpecError
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.scheduling.partition import balance_layers
from elaswave_spmd.sharding import P, Shardings, StateSharding, TileMap
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replica_placement import least_pages, place_replicas
from elaswave_spmd.sharding.replicas import ReplicaMap

CONTIGUOUS, TIME_MAJOR = "contiguous", "time-major"
"""The two orders in which the micro-batches of a stage are assigned to its workers; see `workers_of_microbatches`."""

ByHost = Sequence[Sequence[int]]
"""For each host, the positions in a stage of the stage's workers on this host."""


@dataclass(frozen=True)
class Placement:
    """The layers of stages, the micro-batches of workers, and the replicas of pages.

    Args:
        mesh: the workers, by stage.
        num_microbatches: the number of micro-batches of a step; constant over a run.
        layer_cuts: stage s runs layers [layer_cuts[s], layer_cuts[s + 1]).
        microbatch_counts: for each stage, the number of micro-batches of each worker, in the order of positions. The
            counts of a stage add up to num_microbatches.
        shardings: which of parameters, gradients and optimizer state are sharded over dp.
        replicas: the replica map; None for a new mesh without mirrors.
        by_groups: True if stages exchange through process groups (`runtime.collectives=group`). Then, in time-major
            order, hosts get micro-batches in blocks that are nodes of the reduction tree, since the workers of a host
            add up their gradients first. And each layer's pages are cut over the workers by themselves, however few.
    """

    mesh: Mesh
    num_microbatches: int
    layer_cuts: tuple[int, ...]
    microbatch_counts: tuple[tuple[int, ...], ...]
    shardings: Shardings
    replicas: ReplicaMap | None = field(default=None, hash=False, compare=True)
    by_groups: bool = False

    def __post_init__(self) -> None:
        cuts, stages = self.layer_cuts, self.mesh.stages
        assert len(cuts) == len(stages) + 1 and cuts[0] == 0 and all(map(lt, cuts, cuts[1:]))
        for members, counts in zip(stages, self.microbatch_counts, strict=True):
            assert len(members) == len(counts) and sum(counts) == self.num_microbatches, (members, counts)

    @cached_property
    def microbatch_order(self) -> str:
        """TIME_MAJOR if gradients are sharded over the workers of a stage, else CONTIGUOUS.

        With contiguous micro-batches a worker adds up most of its gradients before it sends them. With sharded
        gradients this would be of no use: each micro-batch's gradient is sent as soon as it is computed, so that no
        worker keeps sums of full size.
        """
        return TIME_MAJOR if self.shardings.grads.splits_workers else CONTIGUOUS

    @property
    def num_stages(self) -> int:
        return len(self.mesh.stages)

    def layers_of_stage(self, stage: int) -> range:
        return range(self.layer_cuts[stage], self.layer_cuts[stage + 1])

    def stage_of_layer(self, layer: int) -> int:
        return next(s for s in range(self.num_stages) if layer < self.layer_cuts[s + 1])

    def workers_of_microbatches(self, stage: int) -> tuple[int, ...]:
        """The worker of every micro-batch of a stage, by micro-batch."""
        if stage not in self._workers:
            self._workers[stage] = workers_of_microbatches(
                self.mesh.stages[stage], self.microbatch_counts[stage], self.microbatch_order, self._hosts_of(stage)
            )
        return self._workers[stage]

    def _hosts_of(self, stage: int) -> ByHost:
        """The positions of a stage's workers by host, if micro-batches are assigned by host; else ()."""
        if not self.by_groups or self.microbatch_order == CONTIGUOUS:
            return ()
        members = self.mesh.stages[stage]
        positions, hosts = {rank: at for at, rank in enumerate(members)}, self.mesh.topology.by_host(members)
        return tuple(tuple(positions[rank] for rank in host) for host in hosts) if len(hosts) > 1 else ()

    @cached_property
    def _workers(self) -> dict[int, tuple[int, ...]]:
        return {}  # by stage, filled on first use

    def worker_of_microbatch(self, stage: int, microbatch: int) -> int:
        return self.workers_of_microbatches(stage)[microbatch]

    def microbatches_of(self, rank: int) -> tuple[int, ...]:
        """The micro-batches of one worker, ascending."""
        stage, position = self.mesh.coordinate(rank)
        if stage not in self._microbatches:
            counts, hosts = self.microbatch_counts[stage], self._hosts_of(stage)
            self._microbatches[stage] = microbatches_of_workers(counts, self.microbatch_order, hosts)
        return tuple(self._microbatches[stage][position])

    @cached_property
    def _microbatches(self) -> dict[int, Sequence[Sequence[int]]]:
        return {}  # by stage and position, filled on first use

    def replica_map(self, layout: ModelLayout, stages: Iterable[int] | None = None) -> ReplicaMap:
        """Layer -> the replica sets of its state pages (and of its loss page), in page order.

        This is `replicas`. If that is None, it is the map of a new mesh in which sharded pages have no mirrors.

        Args:
            layout: the pages of each layer.
            stages: the stages whose layers are wanted; None for all.
        """
        if self.replicas is None:
            return self.state_sharding().without_mirrors(layout, stages, least_joined=self.least_joined(layout))
        wanted = range(self.num_stages) if stages is None else stages
        return {layer: self.replicas[layer] for stage in wanted for layer in self.layers_of_stage(stage)}

    def with_new_replicas(self, layout: ModelLayout, mirror_count: int, scatter: int) -> Placement:
        """This placement with the replicas of a new mesh, as a run begins with them."""
        sharding, joined = self.state_sharding(mirror_count, scatter), self.least_joined(layout)
        replicas = place_replicas(layout, sharding, least_pages=least_pages(layout), least_joined=joined)
        return replace(self, replicas=replicas)

    def least_joined(self, layout: ModelLayout) -> int:
        """The pages for each worker of a stage below which layers are cut together with their neighbours; 0: none are.

        This saves messages, as each page range is a message. A process group does not send range by range, and it
        gathers a layer's parameters in shares of one size, the largest one. So with groups it is 0: no layers are cut
        together.
        """
        return 0 if self.by_groups else least_pages(layout)

    def state_sharding(self, mirror_count: int = 0, scatter: int = 0) -> StateSharding:
        """The mesh and specs of the optimizer state, with this many mirrors of each page."""
        return StateSharding(self.mesh, self.layer_cuts, self.shardings.optim, mirror_count, scatter)

    def __str__(self) -> str:
        lines = [
            f"placement of mesh epoch {self.mesh.epoch}: {self.num_microbatches} micro-batches, {self.microbatch_order}"
        ]
        for s, (members, counts) in enumerate(zip(self.mesh.stages, self.microbatch_counts, strict=True)):
            layers = self.layers_of_stage(s)
            lines.append(
                f"  stage {s}: layers {layers.start}..{layers.stop - 1}, workers {list(members)}, "
                f"micro-batches {list(counts)}"
            )
        return "\n".join(lines)


def workers_of_microbatches(
    members: Sequence[int], counts: Sequence[int], order: str, hosts: ByHost = ()
) -> tuple[int, ...]:
    """The worker of every micro-batch of a stage, by micro-batch.

    CONTIGUOUS: the first counts[0] micro-batches go to the first member, and so on. TIME_MAJOR: each member gets one
    micro-batch in turn, round after round, until it has its count.

    Args:
        members: the workers of the stage.
        counts: the number of micro-batches of each worker.
        order: CONTIGUOUS or TIME_MAJOR.
        hosts: for time-major order, the positions of members by host, if hosts get micro-batches in blocks; else ().
    """
    if hosts:
        return tuple(members[position] for position in _assigned_by_host(counts, hosts))
    if order == CONTIGUOUS:
        return tuple(m for m, count in zip(members, counts, strict=True) for _ in range(count))
    rounds = range(max(counts, default=0))
    return tuple(m for r in rounds for m, count in zip(members, counts, strict=True) if r < count)


def _assigned_by_host(counts: Sequence[int], hosts: ByHost) -> Iterator[int]:
    """The position of the worker of every micro-batch, if the hosts take turns in getting a block of micro-batches.

    A block is a node of the reduction tree: as many micro-batches as the largest host has workers, rounded down to a
    power of two. The workers of a host take turns in getting the micro-batches of its blocks. In the end each host has
    less than a block left to get; these micro-batches are assigned one by one, to the hosts in turn.
    """
    block = 1 << (max(map(len, hosts)).bit_length() - 1)
    numbers = range(len(hosts))
    totals = [sum(counts[position] for position in host) for host in hosts]
    takers = [iter(workers_of_microbatches(host, [counts[p] for p in host], TIME_MAJOR)) for host in hosts]
    for host in workers_of_microbatches(numbers, [total // block for total in totals], TIME_MAJOR):
        yield from islice(takers[host], block)
    for host in workers_of_microbatches(numbers, [total % block for total in totals], TIME_MAJOR):
        yield next(takers[host])


def microbatches_of_workers(counts: Sequence[int], order: str, hosts: ByHost = ()) -> Sequence[Sequence[int]]:
    """For each position in a stage, the micro-batches of its worker: the inverse of `workers_of_microbatches`."""
    if order == CONTIGUOUS:
        return [range(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)]
    total, width = sum(counts), len(counts)
    if not hosts and tuple(counts) == even_counts(total, width):  # the general case is slow at 10,000 workers
        return [range(position, total, width) for position in range(width)]
    found: list[list[int]] = [[] for _ in counts]
    for microbatch, position in enumerate(workers_of_microbatches(range(width), counts, order, hosts)):
        found[position].append(microbatch)
    return found


def place(
    mesh: Mesh,
    layout: ModelLayout,
    shardings: Shardings,
    num_microbatches: int,
    *,
    layer_costs: Sequence[float] | None = None,
) -> Placement:
    """The placement of a new mesh: layers are balanced over stages, micro-batches are assigned evenly.

    Args:
        mesh: the workers.
        layout: the pages of each layer.
        shardings: the specs of the model.
        num_microbatches: the number of micro-batches of a step.
        layer_costs: the relative compute cost of each layer; None for `ModelLayout.work`, which follows from its
            number of elements.

    Raises:
        PlanError: there are more stages than layers, or no micro-batch.
        SpecError: by the spec of the batch, several workers of a stage get the same micro-batch; or by the spec of the
            layers, several stages run the same layer.
    """
    num_layers, num_stages = len(layout.layers), len(mesh.stages)
    if num_stages > num_layers:
        raise PlanError(
            f"the mesh has {num_stages} stages and the model {num_layers} layers",
            rule="every stage has at least one layer",
            exists=f"{num_layers} layers, an embedding and a head among them if the model has these",
            fix=f"use at most pp{num_layers}, or a model with more layers",
        )
    if num_microbatches < 1:
        raise PlanError(
            f"train.global_batch / train.microbatch_size makes {num_microbatches} micro-batches",
            rule="a step has at least one micro-batch",
        )
    _check_layers(mesh.shape, shardings.layers, num_layers)
    counts = _even_microbatches(mesh.shape, shardings.batch, num_microbatches)
    costs = list(layer_costs) if layer_costs else list(layout.work)
    cuts = balance_layers(costs, [len(members) for members in mesh.stages])
    return Placement(mesh, num_microbatches, cuts, counts, shardings)


def _check_layers(shape: MeshShape, spec: P, num_layers: int) -> None:
    """Check that this spec puts each layer in one stage. Which stage it is depends on the layers' costs, not on tiles.

    Raises:
        SpecError: several stages hold the same layers.
    """
    starts, stops = (bounds[:, 0] for bounds in TileMap(shape, spec, (num_layers,), "layers").bounds)
    first_workers = np.cumsum((0, *shape.stage_sizes[:-1]))
    if int((stops - starts)[first_workers].sum()) > num_layers:
        raise SpecError(
            f"layers={spec} gives all {num_layers} layers to each of {shape.num_stages} stages",
            rule="each layer is run by one stage",
            where="Shardings of the model",
            exists='layers=P("pp"), or a mesh of one stage',
            fix='write Shardings(layers=P("pp"), ...), or leave pp out of the mesh',
        )


def _even_microbatches(shape: MeshShape, spec: P, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    """The number of micro-batches of each worker, by stage: the sizes of the tiles of the global batch.

    Raises:
        SpecError: several workers of a stage get the same micro-batches.
    """
    starts, stops = (bounds[:, 0] for bounds in TileMap(shape, spec, (num_microbatches,), "batch").bounds)
    sizes = iter((stops - starts).tolist())
    counts = tuple(tuple(islice(sizes, size)) for size in shape.stage_sizes)
    for stage, of_stage in enumerate(counts):
        if sum(of_stage) > num_microbatches:
            raise SpecError(
                f"batch={spec} gives all {num_microbatches} micro-batches to each of the {len(of_stage)} workers of "
                f"stage {stage}",
                rule="each micro-batch is computed by one worker of a stage",
                where="Shardings of the model",
                exists='batch=P("dp"), or a mesh with one worker in each stage',
                fix='write Shardings(batch=P("dp"), ...), or leave dp out of the mesh',
            )
    return counts
