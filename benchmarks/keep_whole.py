"""Runs with weight gradients put off against runs with whole backwards (`schedule.split_backward`).

    python -m benchmarks.keep_whole [--meshes pp2,pp4] [--launches 3] [--pairs 6] [--steps 4] [--quick] [--json PATH]

The deep model of benchmarks/steady_state.py. Both sides are the whole product, alive at the same time; a gate lets one
train while the other one's workers wait, every other pair with the other side first. Seconds of a step and processor
time of all workers, put off over whole: above 1 it does not pay. A launch gives the ratio of the sums over its blocks.
Both sides must have the same loss, bit for bit.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import Result, parser, say
from benchmarks.steady_launch import ENDLESS, OURS, Case, SideSpec, Used, in_turns, ratio_cells, settings_of, started
from elaswave_spmd.conf.schema import ALWAYS, NEVER

_MESHES = {"pp2": {"pp": 2}, "pp3": {"pp": 3}, "pp4": {"pp": 4}}
_MICROBATCHES = 8
_COLUMNS = (
    "mesh",
    "seconds of a step, put off / whole [95 %]",
    "processor time of a step, put off / whole [95 %]",
    "processor seconds of a step, put off",
    "whole",
)


def launch(mesh: str, pairs: int, steps: int) -> dict[str, Used]:
    """One launch of both sides."""
    case = Case("deep", mesh, _MESHES[mesh], "zero0", OURS)

    def side_of(name: str, directory: Path) -> SideSpec:
        settings = settings_of(case, _MICROBATCHES, ENDLESS, directory)
        settings["schedule"] = {"microbatches": False, "layers": False, "split_backward": name}
        return SideSpec(OURS, settings, case.workers)

    with started(mesh, (ALWAYS, NEVER), side_of) as sides:
        return in_turns(sides, pairs, steps)


def main() -> int:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--meshes", default="pp2,pp4", help=f"of {', '.join(_MESHES)}")
    options.add_argument("--launches", type=int)
    options.add_argument("--pairs", type=int, help="per launch")
    options.add_argument("--steps", type=int, default=4, help="per block")
    given = options.parse_args()
    launches, pairs = given.launches or (1 if given.quick else 3), given.pairs or (2 if given.quick else 6)
    result = Result("keep_whole", {"launches": launches, "pairs": pairs, "steps": given.steps})
    rows = []
    for mesh in given.meshes.split(","):
        found = []
        for number in range(launches):
            found.append(launch(mesh, pairs, given.steps))
            say(f"{mesh}, launch {number + 1}: {found[-1]}")
        rows.append([mesh, *ratio_cells(found, ALWAYS, NEVER)])
        result.data[mesh] = [{name: asdict(used) for name, used in one.items()} for one in found]
    result.table("Weight gradients put off against whole backwards, deep", _COLUMNS, rows)
    return result.finish(given.json)


if __name__ == "__main__":
    sys.exit(main())
