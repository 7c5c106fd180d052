"""Emulated: one run of 16 workers, two of them killed and one slowed down: its changes over time, as table and picture.

    python -m benchmarks.timeline [--picture PATH.png] [--quick] [--json PATH]

`python train.py mesh=dp4_pp4` on the emulated accelerator (benchmarks/emulated_runs.py: real processes, links and
bytes; layer programs sleep), beside the same run with nothing happening to it. Two workers of one stage are killed,
each in the middle of a step, later another one runs at half speed. Reported is every change: its reason and the step
after which it came, from events.jsonl; and step times, medians between the changes, beside the simulated time of the
placement at the end. The picture is drawn from trace.json (run.trace=true); it needs matplotlib (the extra `plots`).
That the losses and the weights of both runs are the same, bit for bit, is checked.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.emulated_runs import FOLLOWING, Run, costs_of, emulated, placed, run, simulated_step
from benchmarks.harness import Result, parser, say
from benchmarks.processes import new_directory, stop_on_signals
from benchmarks.recovery import different_losses
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.simulator import healthy

MESH, MICROBATCHES, STEPS = "dp4_pp4", 32, 60
KILLS, SLOWED, SLOW_STEP = {8: 3, 12: 2}, 9, 28  # step -> rank; the second kill comes when all pages have mirrors again
_CHANGES = ("fail", "rebalance", "slow", "recover", "frequency")
_REASONS = {"rebalance": "copies are complete", "frequency": "hints, or as before a change"}
_FIRST_WORKER = 2  # process number of worker 0 in a trace
_COLOURS = {"forward": "tab:blue", "backward": "tab:orange", "weights": "tab:green"}
_FOLLOWING: Mapping[str, object] = {
    **FOLLOWING,
    "schedule__frequency": "simulated",
    "schedule__f_min": 0.8,
}


def measure(steps: int, cache: Path) -> tuple[Run, Run]:
    """Runs the training twice: disturbed and undisturbed."""
    mesh = Mesh.initial(MeshShape.parse(MESH))
    costs = costs_of(len(mesh.stages))
    events: dict[str, object] = {
        "chaos__events": "["
        + ", ".join(f"{{step: {step}, kind: kill, rank: {rank}, point: backward}}" for step, rank in KILLS.items())
        + "]",
        "emulated__slow": f"[{{rank: {SLOWED}, speed: 0.5, step: {SLOW_STEP}}}]",
        "run__trace": "true",
    }
    disturbed = run(emulated(mesh, MICROBATCHES, steps, **_FOLLOWING, **events), costs, cache, min(KILLS) - 2)
    return disturbed, run(emulated(mesh, MICROBATCHES, steps), costs, cache, min(KILLS) - 2)


def changes(found: Run) -> list[list[str]]:
    """The lines of the table: (after step, change, median step in ms until the next change)."""
    reported = [event for event in found.events if event["event"] in _CHANGES]
    steps = list(accumulate((event.get("after_step", event.get("step", 0)) for event in reported), max))
    lines = [["0", "start", "", MESH, _median(found, 3, min(steps, default=len(found.metrics)))]]
    for i, (event, step) in enumerate(zip(reported, steps, strict=True)):
        stop = steps[i + 1] if i + 1 < len(reported) else len(found.metrics)
        what = event["event"]
        reason = str(event.get("reason") or _REASONS.get(what, ""))
        where = ""
        if "layer_cuts" in event:
            where = placed(event["stages"], event["layer_cuts"])
        lines.append([str(step), what, reason, where, _median(found, step + 2, stop)])
    return lines


def _median(found: Run, first: int, last: int) -> str:
    seconds = found.seconds(first, last)
    return f"{1e3 * statistics.median(seconds):.0f}" if seconds else "-"


def expected(found: Run) -> tuple[str, float]:
    """The placement at the end, and the seconds of its step, simulated with the costs that the run measured."""
    mesh = Mesh.initial(MeshShape.parse(MESH))
    assignment = found.assignment(healthy(mesh, costs_of(len(mesh.stages)), MICROBATCHES))
    assert found.costs is not None
    costs = found.costs  # at the normal frequency: paces leave the step as long
    return placed(assignment.stages, assignment.layer_cuts), simulated_step(assignment, costs)


def draw(found: Run, path: Path) -> None:
    """Draws the run: workers as rows, time to the right, with lines where the mesh or its frequencies changed."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    lines: list[tuple[float, str]] = []
    for event in found.trace:
        if event["ph"] == "X" and event["cat"] in _COLOURS:
            key = event["pid"] - _FIRST_WORKER, event["cat"]
            bars.setdefault(key, []).append((event["ts"] / 1e6, event["dur"] / 1e6))
        if event["ph"] == "i" and event.get("s") == "g" and event["name"] in _CHANGES:
            lines.append((event["ts"] / 1e6, event["name"]))
    windows = _windows(lines, max(begin + length for some in bars.values() for begin, length in some))
    figure = Figure(figsize=(14, 3.6 * len(windows)), layout="constrained")
    tracks: Any = figure.subplots(len(windows), 1)
    for axes, (title, left, right) in zip(tracks, windows, strict=True):
        for (rank, kind), some in bars.items():
            shown = [(begin, length) for begin, length in some if begin + length > left and begin < right]
            axes.broken_barh(shown, (rank - 0.4, 0.8), facecolors=_COLOURS[kind], linewidth=0)
        for at, name in lines:
            if left < at < right:
                axes.axvline(at, color="black", linewidth=0.8)
                axes.text(at, -0.8, f" {name}", fontsize=8, va="bottom")
        ranks = sorted({rank for rank, _ in bars})
        axes.set(title=title, xlim=(left, right), ylim=(max(ranks) + 0.6, -1.2), ylabel="worker", yticks=ranks)
        axes.tick_params(axis="y", labelsize=7)
    tracks[-1].set_xlabel("seconds of the run")
    figure.savefig(path, dpi=90)


def _windows(lines: Sequence[tuple[float, str]], last: float) -> list[tuple[str, float, float]]:
    """Title, begin and end of what is drawn, in seconds of the run.

    Args:
        lines: time and name of each change.
        last: the end of the last action.
    """
    kills = [at for at, name in lines if name == "fail"]
    slow = min((at for at, name in lines if name == "slow"), default=last)
    moved = max((at for at, name in lines if name == "rebalance" and at < slow), default=kills[-1])
    first, second = KILLS.values()
    colours = "blue: forward, orange: backward, green: weight gradients"
    return [
        (f"{MESH}, {MICROBATCHES} micro-batches a step (emulated; {colours})", kills[0] - 3.0, kills[0] - 0.2),
        (f"Worker {first} is killed in a step", kills[0] - 0.5, kills[0] + 3.5),
        (f"Worker {second} too, and layers have moved", moved, moved + 3.0),
        (f"The last steps: worker {SLOWED} at half speed, hints set", last - 3.0, last),
    ]


COLUMNS = ("after step", "what", "why", "workers; layers of stages", "median step until the next, ms")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 1 if a bit differs."""
    options = parser(__doc__)
    options.add_argument("--picture", help="where the timeline is drawn")
    args = options.parse_args(argv)
    stop_on_signals()
    steps = 40 if args.quick else STEPS
    result = Result("timeline", {"mesh": MESH, "microbatches": MICROBATCHES, "steps": steps, "quick": args.quick})
    with new_directory("timeline-data-") as cache:
        disturbed, quiet = measure(steps, cache)
    problems = different_losses([disturbed.losses, quiet.losses])
    if disturbed.weights != quiet.weights:
        problems.append("the weights at the end differ")
    result.table("16 workers, two killed, one slowed down (emulated accelerator)", COLUMNS, changes(disturbed))
    where, step_s = expected(disturbed)
    took = statistics.median(disturbed.seconds(steps - 5, steps - 1))
    say(f"the last steps: {1e3 * took:.0f} ms; simulated for {where}: {1e3 * step_s:.0f} ms")
    say(f"undisturbed: {1e3 * statistics.median(quiet.seconds(4, steps - 1)):.0f} ms; bits: {problems or 'equal'}")
    result.data = {"problems": problems, "last_ms": 1e3 * took, "simulated_ms": 1e3 * step_s, "placed": where}
    if args.picture:
        draw(disturbed, Path(args.picture))
    return result.finish(args.json, problems)


if __name__ == "__main__":
    sys.exit(main())
