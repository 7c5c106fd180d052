"""How long reshard plans take: the replica map of a mesh, and the plan after a change, on one core and without torch.

    python -m benchmarks.planning [--workers 10000] [--repeats 5] [--json PATH]

Stages of 100 workers with the pages of a 7 B-parameter model, 128 layers, ZeRO-1 and one mirror of each page. "map" is
the replica map of the healthy mesh; "plan" is `plan_reshard`, and "copies" lists its copies and adds up its bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.sharding import P, ReshardPlan, StateSharding, plan_reshard
from elaswave_spmd.sharding.layout import LayerUse, ModelLayout, ParameterInfo, lay_out
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.sharding.replicas import ReplicaMap

_LAYERS = 128
_ELEMENTS = 7_000_000_000 // _LAYERS
_STAGE = 100
_BYTES = 12


def layout_of(workers: int) -> ModelLayout:
    """Layers of equal size, in pages of such a size that every worker of a stage has some of each."""
    pages = 4 * min(_STAGE, workers)
    size = -(-_ELEMENTS // pages // 64) * 64
    uses = [LayerUse(f"layer{i}", (ParameterInfo(f"layer{i}.weight", (_ELEMENTS,)),)) for i in range(_LAYERS)]
    return lay_out(uses, page_size=size)


def sharding_of(workers: int) -> StateSharding:
    """The healthy mesh."""
    stages = max(1, workers // _STAGE)
    mesh = Mesh.initial(MeshShape.of(dp=min(_STAGE, workers), pp=stages))
    cuts = tuple(_LAYERS * stage // stages for stage in range(stages + 1))
    return StateSharding(mesh, cuts, P("dp"), mirror_count=1)


def cases(sharding: StateSharding) -> dict[str, tuple[tuple[int, ...], StateSharding]]:
    """Changes of a mesh: the workers that are lost, and the mesh and specs to go to."""
    mesh = sharding.mesh
    lost = tuple(range(3, mesh.num_workers, 1000))
    left = mesh.with_stages([rank for rank in members if rank not in lost] for members in mesh.stages)
    first, *others = mesh.stages
    joined = mesh.with_stages([(*first, *range(mesh.num_workers, mesh.num_workers + len(first) // 10)), *others])
    cuts = tuple(cut + (0 < i < mesh.num_stages and i % 2) for i, cut in enumerate(sharding.layer_cuts))
    found = {
        "one worker of a thousand is lost": (lost, replace(sharding, mesh=left)),
        "a tenth joins a stage": ((), replace(sharding, mesh=joined)),
        "every other stage hands a layer over": ((), replace(sharding, layer_cuts=cuts)),
    }
    return {name: it for name, it in found.items() if it[1] != sharding}


def measure(
    layout: ModelLayout, before: Callable[[], ReplicaMap], lost: tuple[int, ...], to: StateSharding
) -> dict[str, float]:
    """Seconds of one case, and the plan's figures."""
    begin = perf_counter()
    replicas = before()
    mapped = perf_counter()
    plan: ReshardPlan = plan_reshard(layout, replicas, lost=lost, to=to)
    planned = perf_counter()
    moved = _BYTES * plan.moved_elements
    added = perf_counter()
    return {
        "map_s": mapped - begin,
        "plan_s": planned - mapped,
        "copies_s": added - planned,
        "copies": len(plan.copies),
        "bytes": moved,
        "lower_bound": _BYTES * plan.least_elements,
    }


def main() -> None:
    """Measure every case, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    layout, sharding = layout_of(args.workers), sharding_of(args.workers)
    rows = []
    print(f"{args.workers:,} workers, median of {args.repeats}")
    print(f"{'case':<38}{'map ms':>9}{'plan ms':>9}{'copies ms':>11}{'copies':>12}{'bytes / bound':>15}")
    for name, (lost, to) in cases(sharding).items():
        runs = [measure(layout, lambda: place_replicas(layout, sharding), lost, to) for _ in range(args.repeats)]
        row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        rows.append({"case": name, **row, "plan_s_each": [run["plan_s"] for run in runs]})
        ratio = row["bytes"] / row["lower_bound"] if row["lower_bound"] else 1.0
        times = f"{row['map_s'] * 1e3:>9.1f}{row['plan_s'] * 1e3:>9.1f}{row['copies_s'] * 1e3:>11.1f}"
        print(f"{name:<38}{times}{row['copies']:>12,.0f}{ratio:>15.3f}")
    if args.json:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        args.json.write_text(json.dumps({"workers": args.workers, **machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
