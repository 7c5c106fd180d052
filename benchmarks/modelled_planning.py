"""Time of planning, from an event to a decision, on 1,000 to 100,000 workers; the cluster is modelled.

    python -m benchmarks.modelled_planning [--repeats 5] [--json PATH] [--quick]

Each repeat has a process of its own, so that nothing cached from an earlier plan helps. "decision" is everything that
changes: micro-batches, layers, number of stages, frequencies by class of workers, bytes that move, each chosen with the
others in view; "placement" makes the value that is sent; "order" is that of one worker's actions, made on demand. Only
time and memory are measured: devices, and costs of layers (those of Llama 405B), are modelled.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from benchmarks.harness import Result, parser, say
from benchmarks.modelled import publish
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.dvfs import FrequencyRange
from elaswave_spmd.scheduling.pipeline import turns
from elaswave_spmd.scheduling.rebalance import PlanSettings, plan_change
from elaswave_spmd.simulator import Change, healthy, llama
from elaswave_spmd.simulator.report import Cell, Table

_STAGES, _MICROBATCHES, _STEPS = 20, 16, 10_000
SIZES = (1_000, 10_000, 100_000)
EVENTS = {"one fails": 1, "ten fail": 10, "one in a hundred fails": 0}  # 0: workers / 100
_LIMIT_S = 1800.0


def once(workers: int, event: str) -> dict[str, float]:
    """Measures the seconds and memory of one plan, in this process."""
    costs = llama("405B", tokens=8192, flops=3200e12)
    mesh = Mesh.initial(MeshShape.of(dp=workers // _STAGES, pp=_STAGES))
    placement = healthy(mesh, costs, workers // _STAGES * _MICROBATCHES)
    number = EVENTS[event] or workers // 100
    change = Change(tuple(range(7, workers, workers // number))[:number]).check(mesh)
    before = _peak_mib()
    began = perf_counter()
    stages = change.stages(mesh)
    limits = FrequencyRange(0.8, 1.1)
    decision = plan_change(placement, change.costs(costs), _STEPS, PlanSettings(frequencies=limits), stages=stages)
    decided, peak = perf_counter(), _peak_mib()
    last = decision.last.assignment
    placed = last.placement()
    made = perf_counter()
    order = turns(placed, placed.microbatches_of(last.stages[-1][-1]))
    ended = perf_counter()
    if not order or decision.last.move.bytes < 0:
        raise RuntimeError(f"no plan: {decision}")
    return {
        "decision_s": decided - began,
        "placement_s": made - decided,
        "order_s": ended - made,
        "planning_mib": peak - before,
        "peak_mib": peak,
    }


def _peak_mib() -> float:
    scale = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def fresh(workers: int, event: str) -> dict[str, float]:
    """Runs `once` in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.modelled_planning", "--one", str(workers), "--event", event]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def growth(table: Sequence[tuple[int, float]]) -> float | None:
    """The exponent between the last two sizes: 1 if ten times the workers take ten times as long."""
    if len(table) < 2:
        return None
    (a, before), (b, after) = table[-2:]
    return math.log(after / before) / math.log(b / a)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    words = parser(__doc__)
    words.add_argument("--repeats", type=int, default=5)
    words.add_argument("--one", type=int, metavar="WORKERS", help="one plan, in this process, as JSON")
    words.add_argument("--event", choices=tuple(EVENTS), default="one fails")
    args = words.parse_args(argv)
    if args.one:
        print(json.dumps(once(args.one, args.event)))
        return 0
    sizes, repeats = (SIZES[:1], 1) if args.quick else (SIZES, args.repeats)
    result = Result("modelled_planning", {"repeats": repeats, "stages": _STAGES, "quick": args.quick})
    rows: list[tuple[Cell, ...]] = []
    runs: list[dict[str, object]] = []
    for event in EVENTS:
        sofar: list[tuple[int, float]] = []
        for workers in sizes:
            say(f"{workers:,} workers, {event}")
            found = [fresh(workers, event) for _ in range(repeats)]
            runs += [{"workers": workers, "event": event, **run} for run in found]
            middle = {name: statistics.median(run[name] for run in found) for name in found[0]}
            sofar.append((workers, middle["decision_s"]))
            rows.append((workers, event, *middle.values(), growth(sofar)))
    result.data["runs"] = runs
    columns = ("workers", "event", "decision s", "placement s", "order s", "planning MiB", "peak MiB", "growth")
    notes = (
        f"median of {repeats} fresh processes, one core",
        f"{_STAGES} stages, {_MICROBATCHES} micro-batches a worker, 128 layers",
        "planning MiB: by which the peak of the process grew; peak MiB: all of it, interpreter and mesh included",
        "growth: exponent of the decision's seconds from the size before",
    )
    title = "Planning time, measured, for a modelled cluster"
    publish(result, Table(title, columns, tuple(rows), notes))
    result.finish(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
