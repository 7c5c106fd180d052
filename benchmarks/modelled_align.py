"""Modelled: bytes against load, if micro-batches are cut at borders of the reduction tree after a loss.

    python -m benchmarks.modelled_align [--json PATH] [--quick]

On an even mesh each worker adds up all of its micro-batches and sends one sum of each layer. Without one worker the
cuts are anywhere, and a worker sends a sum for each maximal node of the tree that it has. `schedule.align` lets loads
exceed the least possible by a share, for fewer sums. The first columns are of the assignment by itself; the step is the
planned one, which the planner takes with the aligned cuts only if it is not longer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from benchmarks.harness import Result, parser, say
from benchmarks.modelled import finish, publish
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.microbatch_assignment import assign_microbatches, first_microbatches, least_load
from elaswave_spmd.scheduling.rebalance import PlanSettings, plan_change
from elaswave_spmd.scheduling.step_time import Assignment
from elaswave_spmd.simulator import Change, healthy, llama
from elaswave_spmd.simulator.report import Cell, Table

_SHARES = (0.0, 0.02, 0.05, 0.1)
_MESHES = ((8, 4, 16), (8, 4, 64), (16, 2, 32), (64, 1, 64), (200, 1, 64))  # replicas, stages, micro-batches a worker
_LINKS = (25e9, 2.5e9)
_LOST = 5


def of_mesh(dp: int, pp: int, each: int, share: float, costs: CostModel) -> tuple[float, float, list[float]]:
    """One mesh without one worker: largest load over the least, sums a worker sends, and seconds of a step by link."""
    mesh = Mesh.initial(MeshShape.of(dp=dp, pp=pp))
    placement = healthy(mesh, costs, dp * each)
    stages = Change((_LOST,)).stages(mesh)
    old = Assignment.of(placement)
    starts = first_microbatches(stages, old.stages, old.microbatch_counts)
    speeds = [np.ones(len(members)) for members in stages]
    found = assign_microbatches(dp * each, speeds, starts=starts, align=share)
    load = max(mine / least_load(dp * each, v) for mine, v in zip(found.loads, speeds, strict=True))
    sums = found.num_tree_nodes / sum(map(len, stages))
    steps = []
    for bandwidth in _LINKS:
        there = costs.with_links(None, bandwidth)
        steps.append(
            plan_change(placement, there, 0, PlanSettings(align=share, stage_counts=()), stages=stages).now.time.seconds
        )
    return load, sums, steps


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    args = parser(__doc__).parse_args(argv)
    result = Result("modelled_align", {"quick": args.quick, "lost": _LOST, "links": list(_LINKS)})
    costs = llama("7B", tokens=4096)
    rows: list[tuple[Cell, ...]] = []
    for dp, pp, each in _MESHES[: 1 if args.quick else None]:
        say(f"dp{dp}_pp{pp}, {each} micro-batches a worker")
        found = [of_mesh(dp, pp, each, share, costs) for share in _SHARES]
        plain = found[0][2]
        for share, (load, sums, steps) in zip(_SHARES, found, strict=True):
            ratios = [mine / without for mine, without in zip(steps, plain, strict=True)]
            rows.append((f"dp{dp}_pp{pp}", each, f"{share:.0%}", load, sums, *ratios))
    columns = ("mesh", "micro-batches", "align", "largest load", "sums", *(f"step, {b / 1e9:g} GB/s" for b in _LINKS))
    notes = (
        "Llama 7B, 4,096 tokens a micro-batch, one worker lost",
        "largest load: over the least possible one",
        "sums: those of a layer that a worker sends in a step, where an even mesh has one; bytes grow with them",
        "step: planned seconds over those without aligned cuts",
    )
    publish(result, Table("Modelled: bytes against load", columns, tuple(rows), notes))
    finish(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
