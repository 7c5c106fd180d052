"""The same bits whatever happens to the workers: `python -m benchmarks.bits --faults`.

{kill, stop, term, join, replace} x points of a step x meshes x ZeRO levels, dropout on, 7 micro-batches (uneven on each
of these meshes), fp32 and bf16, real processes and real signals. A choice of 50 that has every kind on every mesh
twice; `--full` runs all. Compared exactly with the undisturbed runs of the same dtype on one worker and on the same
mesh: the columns loss_hex and grad_norm_hex, weights_sha256, every validation loss. A run also fails if the fault did
not happen, if events.jsonl does not report it, or if it reports what the run mended though no fault asked for it.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bits import Case, Findings, Identity, Outcome, Runner, attempt, read_outcome, settings_of
from benchmarks.harness import Result, say
from benchmarks.soak_checks import mended

STEPS = 40
MESHES = {"dp4": 4, "dp2_pp2": 4, "pp3": 3, "dp3_pp2": 6, "[3,2]": 5}
POINTS = ("forward", "backward", "reduce", "norm", "apply", "publish")
ZEROS = ("zero0", "zero1", "zero2", "zero3")
DTYPES = ("fp32", "bf16")
# kind -> (kind of the chaos event, settings, events that must be reported)
KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "kill": ("kill", {}, ("fail",)),
    "stop": ("stop", {}, ("fail",)),
    "term": ("term", {}, ("leave",)),
    "join": ("join", {}, ("join",)),
    "replace": ("kill", {"elastic": {"replace": True}}, ("fail", "join")),
}


@dataclass(frozen=True)
class Fault:
    """One run, and the fault that is injected in it."""

    mesh: str
    kind: str
    point: str
    zero: str
    dtype: str
    rank: int
    step: int

    def __str__(self) -> str:
        return f"{self.mesh} {self.zero} {self.dtype}: {self.kind} {self.rank} at {self.point} of step {self.step}"


def fields_of(mesh: str, zero: str, dtype: str, run_dir: Path) -> dict[str, Any]:
    """The settings of an undisturbed run, in the form of `Settings.from_dict`."""
    case = Case(Identity("gpt, dropout 0.1", dtype, "uneven, 7 micro-batches"), mesh, zero)
    fields = settings_of(case, run_dir)
    fields["train"] |= {"steps": STEPS}
    return fields | {"timeouts": {"suspect": 1.0}}


def disturbed(fault: Fault, run_dir: Path) -> dict[str, Any]:
    """The same settings with the fault."""
    kind, settings, _ = KINDS[fault.kind]
    event = {"step": fault.step, "kind": kind, "rank": fault.rank, "point": fault.point}
    return fields_of(fault.mesh, fault.zero, fault.dtype, run_dir) | settings | {"chaos": {"events": [event]}}


def chosen(quick: bool, full: bool) -> list[Fault]:
    """The faults to inject. Their ranks and steps rotate."""
    found = []
    if full:
        product = list(itertools.product(MESHES, KINDS, POINTS, ZEROS))
    else:
        # Each pair (mesh, kind) twice; points and levels rotate, so that they meet all meshes and all kinds.
        product = [
            (mesh, kind, POINTS[(m + k + 3 * again) % len(POINTS)], ZEROS[(m + 2 * k + again + k // 2) % len(ZEROS)])
            for again in range(2)
            for m, mesh in enumerate(MESHES)
            for k, kind in enumerate(KINDS)
        ]
        product = [p for p in product[: len(product) // 2] if p[0] in ("dp4", "[3,2]")] if quick else product
    for number, (mesh, kind, point, zero) in enumerate(product):
        dtype = DTYPES[number * len(DTYPES) // len(product)] if not quick else DTYPES[0]
        found.append(Fault(mesh, kind, point, zero, dtype, number % MESHES[mesh], 3 + number % 4))
    return found


def run_fault(runner: Runner, fault: Fault) -> Outcome:
    """Runs one fault and reads its outcome.

    Raises:
        RunError: the run failed.
        ValueError: the fault is not among the run's events, or something is that the run mended unasked.
    """

    def read(run_dir: Path) -> Outcome:
        lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        reported = {line["event"] for line in lines if fault.rank in line.get("ranks", ()) or line["event"] == "join"}
        if missing := set(KINDS[fault.kind][2]) - reported:
            raise ValueError(f"events.jsonl does not report: {', '.join(sorted(missing))}")
        if unasked := mended(lines):
            raise ValueError("; ".join(unasked))
        return read_outcome(run_dir, STEPS)

    return runner.run_as(disturbed(fault, runner.run_dir), read)


def undisturbed(runner: Runner, mesh: str, dtype: str) -> Outcome:
    """Runs without any fault."""
    return runner.run_as(fields_of(mesh, ZEROS[-1], dtype, runner.run_dir), lambda path: read_outcome(path, STEPS))


def run_all(faults: Sequence[Fault], directory: Path) -> tuple[Findings, Findings]:
    """Runs all. Returns the cells by mesh and kind, and by point and ZeRO level."""
    by_kind, by_point, runner = Findings(), Findings(), Runner(directory)
    standards: dict[tuple[str, str], Outcome] = {}
    try:
        for number, fault in enumerate(faults):
            for mesh in ("single", fault.mesh):
                if (mesh, fault.dtype) not in standards:
                    standards[mesh, fault.dtype] = undisturbed(runner, mesh, fault.dtype)
            against = {
                "one worker": standards["single", fault.dtype],
                f"undisturbed {fault.mesh}": standards[fault.mesh, fault.dtype],
            }
            found = attempt(run_fault, runner, fault)
            by_kind.judge(fault.mesh, fault.kind, str(fault), found, against)
            by_point.judge(fault.point, fault.zero, str(fault), found, against)
            say(f"{number + 1}/{len(faults)} {fault}")
    finally:
        runner.close()
    return by_kind, by_point


def faults(path: Path | None, only: str, *, quick: bool, full: bool) -> int:
    """Runs all faults, prints and writes the result. Returns the exit code: 1 if a run failed or a bit differs.

    Args:
        path: of the JSON file to write, or None.
        only: run only faults whose name contains this.
    """
    some = [fault for fault in chosen(quick, full) if only in str(fault)]
    result = Result("bits_faults", {"steps": STEPS, "model": "gpt, dropout 0.1", "batch": "uneven, 7 micro-batches"})
    directory = Path(tempfile.mkdtemp(prefix="bits-"))
    try:
        by_kind, by_point = run_all(some, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    total, equal = sum(by_kind.runs.values()), sum(by_kind.equal.values())
    title = f"{equal} of {total} runs with a fault have the bits of undisturbed runs, {STEPS} steps each"
    rows = [[mesh, *(by_kind.cell(mesh, kind) for kind in KINDS)] for mesh in MESHES]
    result.table(title, ("mesh", *KINDS), rows)
    rows = [[point, *(by_point.cell(point, zero) for zero in ZEROS)] for point in POINTS]
    result.table("The same runs by the point of the step and the ZeRO level", ("point", *ZEROS), rows)
    result.data = {"runs": total, "equal": equal, "problems": by_kind.problems, "faults": [str(f) for f in some]}
    result.finish(path)
    for problem in by_kind.problems:
        print(problem)
    return 1 if by_kind.problems or not total else 0
