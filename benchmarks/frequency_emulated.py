"""Emulated: frequency hints on real processes. Does a step take as long with them as without?

    python -m benchmarks.frequency_emulated [--quick] [--json PATH]

Each case is one run of `python train.py` on the emulated accelerator (benchmarks/emulated_runs.py: real processes,
links and bytes; layer programs sleep, longer at a lower frequency). Workers are killed in a step; micro-batches and
layers are assigned again, state is moved, and when no other change is left workers are sent their paces
(schedule.frequency=simulated, from 0.5 to 1 of the normal frequency, up to eight changes of 5 ms a step, which the
emulated devices take). Step times are medians of this one run, before and after. Energy is modelled
(scheduling.dvfs.PowerModel); benchmarks/frequency.py has the rest of the model.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.emulated_runs import FOLLOWING, LAYERS, WARM_STEPS, costs_of, emulated, run
from benchmarks.harness import Result, parser, say
from benchmarks.processes import new_directory, stop_on_signals
from elaswave_spmd.mesh import Mesh, MeshShape

_KILL_STEP = 6
_UNDER_WAY = 4  # steps after the order that may have run with some of both
CASES: Mapping[str, tuple[str, tuple[int, ...], int]] = {
    "1 of 8 lost": ("dp4_pp2", (6,), 16),
    "1 of 16 lost": ("dp4_pp4", (6,), 16),
    "2 of 16 lost": ("dp4_pp4", (3, 6), 32),
}


def measure(mesh_name: str, lost: Sequence[int], microbatches: int, steps: int, cache: Path) -> dict[str, Any]:
    """Measures one run: its steps before and after the first hints on its last mesh. Later hints follow measured times.

    Raises:
        RuntimeError: no hints once the mesh had changed for the last time, or no step before or after them.
    """
    mesh = Mesh.initial(MeshShape.parse(mesh_name))
    strikes = f"[{{step: {_KILL_STEP}, kind: kill, rank: [{','.join(map(str, lost))}], point: backward}}]"
    more: dict[str, object] = {**FOLLOWING, "schedule__frequency": "simulated", "chaos__events": strikes}
    done = run(emulated(mesh, microbatches, steps, **more), costs_of(len(mesh.stages)), cache, WARM_STEPS + 2)
    last_change = done.last_change
    hints = [e for e in done.events if e["event"] == "frequency" and "modelled_energy" in e and e["step"] > last_change]
    if not hints:
        raise RuntimeError(f"no hints after the last change of the mesh: {[e['event'] for e in done.events]}")
    first, last = hints[0], hints[-1]
    before = done.seconds(last_change + 2, first["step"])
    after = done.seconds(first["step"] + _UNDER_WAY, steps - 1)
    if not before or not after:
        raise RuntimeError(f"no steps to compare: hints after steps {[e['step'] for e in hints]} of {steps}")
    return {
        "mesh": mesh_name,
        "workers": done.metrics[-1]["workers"],
        "steps": [len(before), len(after)],
        "seconds_before": statistics.median(before),
        "seconds_after": statistics.median(after),
        "modelled_seconds_before": first["modelled_seconds_before"],
        "modelled_energy": [first["modelled_energy_before"], last["modelled_energy"]],
        "paces": last["paces"],
        "busy": done.busy,
    }


def row_of(name: str, found: dict[str, Any]) -> list[str]:
    """One line of the table."""
    before, after = found["seconds_before"], found["seconds_after"]
    energy = found["modelled_energy"]
    paces = [[frequency for _, frequency in pace] for pace in found["paces"].values()]
    return [
        f"{name}, {found['mesh']}",
        f"{found['workers']}",
        f"{1e3 * before:.0f} ({found['steps'][0]} steps)",
        f"{1e3 * after:.0f} ({found['steps'][1]} steps)",
        f"{after / before:.3f}",
        f"{1e3 * found['modelled_seconds_before']:.0f}",
        f"{sum(min(pace) < 1 for pace in paces)}, down to {min(map(min, paces)):.2f}",
        f"{max(len(pace) - (pace[0] == pace[-1]) for pace in paces)}",
        f"{100 * (1 - energy[1] / energy[0]):.1f} %",
    ]


COLUMNS = (
    "case",
    "workers left",
    "step before, ms",
    "step with hints, ms",
    "ratio",
    "modelled step, ms",
    "slowed down",
    "most changes in a step",
    "modelled energy saved",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    args = parser(__doc__).parse_args(argv)
    stop_on_signals()
    names, steps = (list(CASES)[:1], 40) if args.quick else (list(CASES), 80)
    result = Result("frequency_emulated", {"layers of a stage": LAYERS, "steps": steps, "quick": args.quick})
    found = {}
    with new_directory("frequency-data-") as cache:
        for name in names:
            found[name] = measure(*CASES[name], steps, cache)
            say(", ".join(row_of(name, found[name])))
    result.data["cases"] = found
    title = "Frequency hints on the emulated accelerator: median step of one run each; energy modelled"
    result.table(title, COLUMNS, [row_of(name, of_case) for name, of_case in found.items()])
    result.finish(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
