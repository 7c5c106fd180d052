"""Time of planning: meshes, tile maps and reshard plans, on one core and without torch.

    python -m benchmarks.planning [--workers 10000] [--repeats 5] [--json PATH]

Each row makes everything again, except meshes. "plan" is construction, tile maps of both sides, number of transfers,
bytes and lower bound; "worker" is one worker's own transfers, in and out; "all" expands every transfer, where there
are fewer than 5 million.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from elaswave_spmd.mesh import Mesh, MeshShape, Topology
from elaswave_spmd.sharding import P, ReshardPlan, plan_reshard

_MOST = 5_000_000


def cases(workers: int) -> dict[str, Callable[[], ReshardPlan]]:
    """Changes of a mesh of `workers` workers in stages of 100."""
    shape = MeshShape.of(dp=min(100, workers), pp=max(1, workers // 100))
    mesh = Mesh.initial(shape, Topology.regular(range(shape.num_workers)))
    lost = mesh.without(range(3, mesh.num_workers, 1000))
    flat = Mesh.initial(MeshShape.of(dp=workers))
    grown = flat.with_members(0, range(workers, workers + max(1, workers // 10)))
    vector, matrix = (7_000_000_007,), (50_257, 12_288)
    both = P(("pp", "dp"))
    return {
        "ragged loss, rows over all workers": lambda: plan_reshard(vector, 4, src=(mesh, both), dst=(lost, both)),
        "ragged loss, rows x columns": lambda: plan_reshard(
            matrix, 4, src=(mesh, P("pp", "dp")), dst=(lost, P("pp", "dp"))
        ),
        "transpose of the mesh": lambda: plan_reshard(matrix, 4, src=(mesh, P("pp", "dp")), dst=(mesh, P("dp", "pp"))),
        "one stage, a tenth joins, sharded": lambda: plan_reshard(vector, 4, src=(flat, P("dp")), dst=(grown, P("dp"))),
        "one stage, a tenth joins, replicated": lambda: plan_reshard(vector, 4, src=(flat, P()), dst=(grown, P())),
        "gather everything everywhere": lambda: plan_reshard(vector, 4, src=(mesh, both), dst=(mesh, P())),
    }


def measure(make: Callable[[], ReshardPlan]) -> dict[str, float]:
    """Measures one case. Returns its seconds and the plan's figures."""
    begin = perf_counter()
    plan = make()
    total, bound = plan.bytes, plan.lower_bound
    planned = perf_counter()
    plan.incoming(plan.dst.mesh.members[-1])
    plan.outgoing(plan.src.mesh.members[0])
    expanded = perf_counter()
    figures = {"plan_s": planned - begin, "worker_s": expanded - planned}
    if plan.num_transfers < _MOST:
        count = sum(len(chunk) for chunk in plan.chunks())
        figures["all_s"] = perf_counter() - expanded
        if count != plan.num_transfers:
            raise RuntimeError(f"{count} transfers expanded, {plan.num_transfers} planned")
    return {**figures, "transfers": plan.num_transfers, "bytes": total, "lower_bound": bound}


def main() -> None:
    """Measure every case, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    rows = []
    print(f"{args.workers:,} workers, median of {args.repeats}")
    print(f"{'case':<38}{'plan ms':>9}{'worker ms':>11}{'all ms':>9}{'transfers':>14}{'bytes / bound':>15}")
    for name, make in cases(args.workers).items():
        runs = [measure(make) for _ in range(args.repeats)]
        row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        rows.append({"case": name, **row, "plan_s_each": [run["plan_s"] for run in runs]})
        ratio = row["bytes"] / row["lower_bound"] if row["lower_bound"] else 1.0
        everything = f"{row['all_s'] * 1e3:.1f}" if "all_s" in row else "-"
        times = f"{row['plan_s'] * 1e3:>9.1f}{row['worker_s'] * 1e3:>11.2f}{everything:>9}"
        print(f"{name:<38}{times}{row['transfers']:>14,.0f}{ratio:>15.3f}")
    if args.json:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        args.json.write_text(json.dumps({"workers": args.workers, **machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
