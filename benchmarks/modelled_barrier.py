"""Modelled: what a later barrier would gain, if a stage began its next step as soon as its own parameters are final.

    python -m benchmarks.modelled_barrier [--draws 4] [--json PATH] [--quick]

Today no stage updates before all stages have voted, since clipping needs the norm over all of them. The plans of
`modelled_96` are executed in virtual time for several steps in both ways: all workers wait for all, or each stage for
itself, as with clipping switched off, or rolled back where it turns out to be needed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from benchmarks.harness import Result, parser, say
from benchmarks.modelled import finish, publish
from benchmarks.modelled_96 import scenario
from elaswave_spmd.simulator.engine import SHARED, execute
from elaswave_spmd.simulator.policies import Case, Ours
from elaswave_spmd.simulator.report import Cell, Table
from elaswave_spmd.simulator.tables import cases_of
from elaswave_spmd.simulator.work import Work

_STEPS = 5  # the first one fills the pipeline in both ways, and does not count


def seconds(case: Case) -> tuple[float, float]:
    """Seconds of a step after the loss: with the barrier, and the mean of steps that begin by stage."""
    decision = Ours().answer(case).decision
    assert decision is not None, case.change
    work = Work.from_assignment(decision.last.assignment)
    barrier_s = execute(work, case.after, wires=SHARED).step_s
    by_stage = execute(work, case.after, wires=SHARED, steps=_STEPS, by_stage=True).seconds[1:]
    return barrier_s, fmean(by_stage)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    words = parser(__doc__)
    words.add_argument("--draws", type=int, default=4, help="of lost devices, for each row")
    args = words.parse_args(argv)
    asked = scenario(args.quick)
    asked = replace(asked, draws=min(asked.draws, args.draws))
    result = Result("modelled_barrier", {"scenario": "llama96", "draws": asked.draws, "quick": args.quick})
    rows: list[tuple[Cell, ...]] = []
    gains: list[float] = []
    for row in asked.cases:
        for label, cases in cases_of(asked, row):
            say(label)
            found = [seconds(case) for case in cases]
            gain = [barrier_s / by_stage_s for barrier_s, by_stage_s in found]
            gains += gain
            rows.append((label, row.mesh, *(fmean(column) for column in zip(*found, strict=True)), max(gain)))
    rows.append(("all", None, None, None, math.exp(fmean(map(math.log, gains)))))
    notes = (
        asked.about.rstrip("."),
        f"means over {asked.draws} draws, and {_STEPS - 1} steps by stage",
        "gain: step with the barrier over steps by stage, the largest of the draws; of all, the geometric mean",
    )
    columns = ("case", "mesh", "barrier s", "by stage s", "gain")
    publish(result, Table("Modelled, 96 devices: gain of a later barrier", columns, tuple(rows), notes))
    finish(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
