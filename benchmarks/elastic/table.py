"""The table of the benchmark: one line for each system at each rate."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.elastic.runs import Run
from benchmarks.elastic.score import Score

COLUMNS = (
    "failures per 100 steps",
    "system",
    "struck / missed",
    "time to step {steps}, s",
    "undisturbed, s",
    "longest pause, s",
    "samples twice / never",
    "steps computed again",
    "loss against undisturbed",
    "processes left",
    "launch, s",
)


def row(runs: Sequence[Run], calm: Run) -> list[str]:
    """A line of the table: one system at one rate, over all launches."""
    scores = [run.score for run in runs]
    struck = [s for run in runs for s in run.observed.struck]
    there = [s.seconds for s in scores if s.seconds is not None]
    unfinished = sorted(s.steps for s in scores if s.seconds is None)
    reached = [f"{statistics.median(there):.1f}"] if there else []
    reached += [f"step {step} only" for step in unfinished]
    return [
        f"{runs[0].rate:g}",
        runs[0].system,
        f"{sum(bool(s.pids) for s in struck)} / {sum(not s.pids for s in struck)}",
        ", ".join(reached),
        f"{calm.score.seconds:.1f}",
        f"{max(s.pause_s for s in scores):.2f}",
        f"{sum(s.twice for s in scores)} / {sum(s.never for s in scores)}",
        str(sum(s.again for s in scores)),
        _difference(scores),
        str(sum(run.observed.left for run in runs)),
        f"{statistics.median(s.launch_s for s in scores):.1f}",
    ]


def rows_of(runs: Sequence[Run], missing: Mapping[str, str]) -> list[list[str]]:
    """The table: by rate, then by system; at the end the systems that were not run, with the reason."""
    calm = {run.system: run for run in runs if not run.rate and run.score.seconds is not None}
    groups: dict[tuple[float, str], list[Run]] = {}
    for run in runs:
        if run.rate and run.system in calm:
            groups.setdefault((run.rate, run.system), []).append(run)
    found = [row(some, calm[name]) for (_, name), some in groups.items()]
    return found + [["-", name, f"not run: {why}", *[""] * (len(COLUMNS) - 3)] for name, why in missing.items()]


def _difference(scores: Sequence[Score]) -> str:
    """The losses of several runs against those of the undisturbed ones, in words."""
    known = [s.loss_difference for s in scores if s.loss_difference is not None]
    if not known:
        return "-"
    if max(known):
        return f"{max(known):.1e}"
    if all(s.equal_bits for s in scores):
        return "equal bits"
    return f"equal bits to step {min(s.steps for s in scores if not s.equal_bits)}"
