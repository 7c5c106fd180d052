"""Modelled, on paper: the bytes of a step's sums and gradients on 8 machines of 8 accelerators, and their time.

    python -m benchmarks.modelled_exchange [--json PATH] [--quick]

The bytes are counted from the product's own plans: replica maps, tree nodes, and the exchanges of every pair of workers
(worker/sum_exchange.py). The seconds are bytes over bandwidths from data sheets, nothing overlapped: an upper bound of
what a backward has to hide. Nothing of it has run on such a cluster.

Three ways for partial sums: links, whose payloads cross host memory and ZeroMQ; one exchange of all with all; and two,
within hosts first. The reduced gradients that go to mirrors, and the parameters, are the same for both exchanges.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.harness import Result, parser, say
from benchmarks.modelled import finish, publish
from elaswave_spmd.mesh import Mesh, MeshShape, Topology
from elaswave_spmd.models import Llama
from elaswave_spmd.scheduling.microbatch_assignment import assign_microbatches
from elaswave_spmd.scheduling.placement import Placement, place
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.simulator.report import Cell, Table
from elaswave_spmd.worker.model_layout import describe
from elaswave_spmd.worker.sum_exchange import Exchange, ExchangePlan, SumExchange

HOSTS, PER_HOST = 8, 8
TOKENS, MICROBATCHES = 1 << 20, 8  # of a step; of a worker
WITHIN, BETWEEN, MEMORY = 450e9, 50e9, 2.1e9
"""Bytes a second of a worker: NVLink 4 and a port of 400 Gbit/s, one way; host memory and ZeroMQ as measured here."""
PEAK, OF_PEAK = 989e12, 0.4  # bf16 operations a second of an H100, and the share that is reached
_BF16 = 2


@dataclass(frozen=True)
class Sent:
    """Bytes that each worker sends in a step, by rank: to workers on its host, and to others."""

    within: np.ndarray
    between: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        """Of each worker."""
        return self.within / WITHIN + self.between / BETWEEN

    @property
    def all(self) -> np.ndarray:
        return self.within + self.between


def layout_of(quick: bool) -> ModelLayout:
    """The pages of Llama 7B; with `quick`, of four of its 32 blocks."""
    with torch.device("meta"):
        return describe(Llama(32_000, 4 if quick else 32, 4096, 32, hidden=11_008)).layout


def placement_of(layout: ModelLayout, zero: int, lost: Sequence[int] = ()) -> Placement:
    """All workers in one stage with equal shares of the micro-batches, as even as the loss of some allows."""
    size = HOSTS * PER_HOST
    topology = Topology.of({rank: (f"host{rank // PER_HOST}",) for rank in range(size)})
    whole = place(
        Mesh.initial(MeshShape.of(dp=size), topology), layout, Shardings().with_zero(zero), size * MICROBATCHES
    )
    members = tuple(rank for rank in range(size) if rank not in lost)
    order = whole.microbatch_order
    counts = assign_microbatches(size * MICROBATCHES, [np.ones(len(members))], microbatch_order=order).counts
    mesh = whole.mesh.with_stages((members,), epoch=1) if lost else whole.mesh
    placement = replace(whole, mesh=mesh, microbatch_counts=counts, by_groups=True)
    return replace(placement, replicas=place_replicas(layout, placement.state_sharding(mirror_count=1)))


def sent_by(plan: ExchangePlan, exchanges: Sequence[Exchange]) -> Sent:
    """The bytes of some exchanges, padding included."""
    host = {rank: rank // PER_HOST for rank in plan.members}
    within, between = np.zeros(HOSTS * PER_HOST), np.zeros(HOSTS * PER_HOST)
    for exchange in exchanges:
        for sender in plan.members:
            sizes, _ = replace(plan, rank=sender).sizes(exchange)
            for receiver, size in zip(plan.members, sizes, strict=True):
                (within if host[sender] == host[receiver] else between)[sender] += 4 * size
    return Sent(within, between)


def plans_of(layout: ModelLayout, placement: Placement) -> Mapping[str, ExchangePlan]:
    """The plan with one exchange of all with all, and the one within hosts first."""
    on_one = replace(placement.mesh, topology=Topology.single_host(placement.mesh.members))
    found = {"direct": replace(placement, mesh=on_one), "within hosts first": placement}
    replicas = placement.replica_map(layout)
    return {way: ExchangePlan.of(placement.mesh.members[0], layout, one, replicas) for way, one in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    args = parser(__doc__).parse_args(argv)
    result = Result("modelled_exchange", {"quick": args.quick, "hosts": HOSTS, "per_host": PER_HOST})
    layout = layout_of(args.quick)
    parameters = sum(layer.num_value_elements for layer in layout.layers)
    compute = 6 * parameters * TOKENS / (HOSTS * PER_HOST) / (PEAK * OF_PEAK)
    rows: list[tuple[Cell, ...]] = []
    for zero in (1, 2):
        for lost in ((), (5,)):
            say(f"ZeRO-{zero}, {len(lost)} lost")
            placement = placement_of(layout, zero, lost)
            size = placement.mesh.num_workers
            # New parameters: a ring, or as many sends as there are others.
            published = _BF16 * parameters * (size - 1) / size
            for way, plan in plans_of(layout, placement).items():
                sums = sent_by(plan, [one for one in plan.order if isinstance(one, SumExchange)])
                rest = sent_by(plan, [one for one in plan.order if not isinstance(one, SumExchange)])
                name = f"ZeRO-{zero}" + (f", {len(lost)} of {HOSTS * PER_HOST} lost" if lost else "")
                if way == "direct":
                    total = float((sums.all + rest.all).max()) + published
                    rows.append((name, "links", total / 1e9, None, None, total / MEMORY, total / MEMORY / compute))
                seconds, gb = sums.seconds + rest.seconds, (sums.within.max() / 1e9, sums.between.max() / 1e9)
                median = float(np.median(seconds[list(plan.members)]))
                rows.append((name, way, *map(float, gb), median, float(seconds.max()), float(seconds.max()) / compute))
    columns = ("sharding", "way", "GB to its host", "GB to others", "median s", "most s", "of compute")
    notes = (
        f"Llama, {parameters / 1e9:.2f} G parameters, {TOKENS:,} tokens a step, {MICROBATCHES} micro-batches a worker",
        f"{HOSTS} machines of {PER_HOST} H100; compute {compute:.2f} s at {OF_PEAK:.0%} of the peak",
        "GB: partial sums that a worker sends, the one with most; by links all that it sends, through host memory",
        "s: of the median worker and the slowest, with reduced gradients to mirrors; by links with parameters, too",
        f"{WITHIN / 1e9:g} GB/s within a machine, {BETWEEN / 1e9:g} GB/s between, {MEMORY / 1e9:g} GB/s by links",
    )
    publish(result, Table("Modelled: exchanges on paper", columns, tuple(rows), notes))
    finish(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
