"""Simulated against emulated: the duration of a step in virtual time, and on real processes whose programs sleep.

    python -m benchmarks.simulated [--quick] [--only TEXT] [--json PATH]

Ten meshes, healthy and ragged, one with a worker at half speed; on each one run of `python train.py` on the emulated
accelerator (benchmarks/emulated_runs.py: real processes, links and bytes; layer programs sleep), whose placement stays
as it is. Emulated: the median of the means of five blocks of steps, from metrics.jsonl. Simulated:
elaswave_spmd.simulator on the same placement, with reduction, mirrors, votes and publication, once
with the configured times of programs, which are known in advance, and once with those that the run measured for its
layers (costs.json; a sleep lasts a little longer than configured) and its links; "as configured", links have 1 GB/s
and 0.1 ms. The simulation leaves out what processes compute beside their programs' sleep: 16 processes share two cores
when a step ends, which takes each of them a few ms. So a forward through a stage takes 48 ms here and a backward 96 ms:
TIMES as long as elsewhere.

Then, with nothing emulated: two workers that compute a gpt (d_model 256, one thread each, two cores), as a pipeline and
data parallel, and the same step simulated with the layer times that the run measured (benchmarks/simulated_real.py).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.emulated_runs import LAYERS, WARM_STEPS, Run, blocks, costs_of, emulated, placed, run, simulated_step
from benchmarks.harness import Result, parser, say
from benchmarks.processes import new_directory, stop_on_signals
from benchmarks.simulated_real import REAL_COLUMNS, real_rows
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.simulator import healthy

BLOCKS, BLOCK_STEPS, SETTLE_STEPS = 5, 4, 9
TIMES = 2.0
_STILL = {"schedule__every": 2, "schedule__window": 3, "schedule__min_gain": 0.9, "schedule__lasting": 0}
_FOLLOWS = {
    "schedule__every": 2,
    "schedule__window": 3,
    "schedule__patience": 1,
    "schedule__lasting": 0,
    "schedule__layers": "false",
}


@dataclass(frozen=True)
class Example:
    """A mesh, the micro-batches of a step, and a worker that runs at half speed from the first step on, or -1."""

    mesh: str
    microbatches: int
    slow: int = -1

    @property
    def placement(self) -> Placement:
        """The placement that the run begins with."""
        mesh = Mesh.initial(MeshShape.parse(self.mesh))
        return healthy(mesh, costs_of(len(mesh.stages), TIMES), self.microbatches)


EXAMPLES = (
    Example("dp8", 64),
    Example("dp4_pp2", 32),
    Example("dp8_pp2", 64),
    Example("dp2_pp4", 16),
    Example("dp4_pp4", 32),
    Example("stages4-3", 32),
    Example("stages7-8", 64),
    Example("stages4-3-4-4", 32),
    Example("stages3-4-2", 32),
    Example("dp4_pp2", 32, slow=5),
)


def emulate(example: Example, cache: Path, steps: int) -> Run:
    """Runs the example; `steps` steps are measured after it has settled."""
    placement, settles = example.placement, example.slow >= 0
    slow: dict[str, object] = {"emulated__slow": f"[{{rank: {example.slow}, speed: 0.5}}]"} if settles else {}
    number = WARM_STEPS + SETTLE_STEPS * settles + steps + 1
    settings = emulated(
        placement.mesh, example.microbatches, number, TIMES, **(_FOLLOWS if settles else _STILL), **slow
    )
    return run(settings, costs_of(len(placement.mesh.stages), TIMES), cache, WARM_STEPS + 3)


def compare(example: Example, cache: Path, block: int) -> dict[str, Any]:
    """Compares the emulated and the simulated step of one mesh. block: steps of a block."""
    done = emulate(example, cache, BLOCKS * block)
    first = WARM_STEPS + SETTLE_STEPS * (example.slow >= 0) + 1
    if done.last_change + 1 >= first:
        raise RuntimeError(f"{example}: the placement changed after step {done.last_change}")
    means = blocks(done.seconds(first, first + BLOCKS * block - 1), BLOCKS)
    assignment = done.assignment(example.placement)
    configured = costs_of(assignment.num_stages, TIMES).with_speeds({example.slow: 0.5} if example.slow >= 0 else {})
    return {
        "mesh": example.mesh + (f", worker {example.slow} at half speed" if example.slow >= 0 else ""),
        "microbatches": example.microbatches,
        "placed": placed(assignment.stages, assignment.layer_cuts),
        "emulated_s": statistics.median(means),
        "least_s": min(means),
        "most_s": max(means),
        "configured_s": simulated_step(assignment, configured),
        "measured_s": simulated_step(assignment, done.costs or configured),
        "busy": done.busy,
    }


def off(found: dict[str, Any], name: str) -> float:
    """The relative error of the simulated step."""
    return found[name] / found["emulated_s"] - 1


def row_of(found: dict[str, Any]) -> list[str]:
    """One line of the table."""
    return [
        found["mesh"],
        f"{found['microbatches']}",
        found["placed"],
        f"{1e3 * found['emulated_s']:.0f}",
        f"{1e3 * found['least_s']:.0f} - {1e3 * found['most_s']:.0f}",
        f"{1e3 * found['configured_s']:.0f}",
        f"{100 * off(found, 'configured_s'):+.1f} %",
        f"{1e3 * found['measured_s']:.0f}",
        f"{100 * off(found, 'measured_s'):+.1f} %",
        f"{found['busy']:.2f}",
    ]


COLUMNS = ("mesh", "micro-batches", "workers; layers of stages", "emulated step, ms", "min - max")
COLUMNS += ("simulated, as configured, ms", "off by", "simulated, as measured, ms", "off by", "cores busy")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    options = parser(__doc__)
    options.add_argument("--only", default="", help="only meshes whose name contains this")
    args = options.parse_args(argv)
    stop_on_signals()
    block = 2 if args.quick else BLOCK_STEPS
    examples = [example for example in EXAMPLES if args.only in example.mesh]
    if args.quick:
        examples = [example for example in examples if example.mesh in ("dp4_pp2", "stages4-3")][:2]
    if not examples:
        options.error(f"--only {args.only} names none of {', '.join(example.mesh for example in EXAMPLES)}")
    result = Result(
        "simulated", {"layers of a stage": LAYERS, "blocks": BLOCKS, "steps of a block": block, "quick": args.quick}
    )
    found = []
    with new_directory("simulated-data-") as cache:
        for example in examples:
            found.append(compare(example, cache, block))
            say(", ".join(row_of(found[-1])))
        real = real_rows(cache, block)
    result.data["meshes"] = found
    title = "Steps on the emulated accelerator, and the same steps simulated"
    result.table(title, COLUMNS, [row_of(of_mesh) for of_mesh in found])
    for name, what in (("configured_s", "as configured"), ("measured_s", "as measured")):
        worst = max(abs(off(of_mesh, name)) for of_mesh in found)
        print(f"simulated {what}: off by at most {100 * worst:.1f} % of the emulated step")
    result.table("Steps of a real gpt on two workers, and the same steps simulated", REAL_COLUMNS, real)
    result.finish(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
