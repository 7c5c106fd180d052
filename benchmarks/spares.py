"""The time without a full mesh after a loss: a replacement that is started then, against a spare that waits.

    python -m benchmarks.spares [--quick] [--kills N] [--launches N] [--json PATH]

`python train.py` on four workers, the model of `recovery`, with `elastic.replace=true` and with `elastic.spares=1`, in
turns. In each launch one worker after another gets SIGKILL, at a moment that is drawn, when the mesh is full, every
copy is where it belongs, and the next spare is ready. From the kill on are measured: until four workers have been sent
their places again (`placed_at` of the event `join`), and until a step of that mesh has been applied by all four
(`all_applied_at` of the event `recovered`). Medians with a 95 % interval.

Of each spare that waits also the processor time that it takes in a second, from /proc/PID/stat, and the memory that is
its own (private pages, /proc/PID/smaps_rollup). The benchmark fails if a loss of some step differs between launches.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, estimate, parser, say
from benchmarks.processes import Program, new_directory, program, stop_on_signals
from benchmarks.recovery import different_losses
from benchmarks.recovery_runs import SIZES, WORKERS, json_lines, train_words
from elaswave_spmd.controller.admin_client import ask
from elaswave_spmd.errors import ControlError, RunError

MODES: dict[str, dict[str, Any]] = {
    "elastic.replace=true": {"replace": "true"},
    "elastic.spares=1": {"spares": 1},
}
_STEPS_BETWEEN = 15  # undisturbed steps before each kill
_IDLE_S = 2.0  # over which the processor time of a spare is taken


@dataclass
class Launch:
    """The times of one run, in seconds."""

    placed: list[float] = field(default_factory=list)
    committed: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)  # processor seconds of a waiting spare in a second
    private: list[float] = field(default_factory=list)  # MiB
    step: float = 0.0
    losses: dict[int, str] = field(default_factory=dict)


def run(mode: str, kills: int, seed: int, cache: Path, *, compiled: bool) -> Launch:
    """One run with so many kills."""
    draw, found = random.Random(seed), Launch()
    with new_directory("spares-") as directory:
        elastic = {**MODES[mode], "replacements_per_minute": 1000}
        words = train_words(directory, cache, elastic=elastic, runtime={"compile": str(compiled).lower()})
        with program([sys.executable, *words], directory) as training:
            folder = directory / "run"
            for _ in range(kills):
                _quiet(training, folder, spares=MODES[mode].get("spares", 0))
                if "spares" in MODES[mode]:
                    _look_at_spare(folder, found)
                _kill(training, folder, draw, found)
            lines = json_lines(folder / "metrics.jsonl")
    found.losses = {line["step"]: line["loss_hex"] for line in lines}
    found.step = statistics.median(line["seconds"] for line in lines)
    return found


def _quiet(training: Program, folder: Path, *, spares: int) -> None:
    """Waits until nothing changes, and so many spares are ready; then for some steps."""

    def is_quiet() -> bool:
        try:
            status = ask(str(folder), {"command": "status"})
        except (ControlError, RunError):
            return False
        moving = status["starting"] or any(status[name] for name in ("newcomers", "learners", "changing"))
        ready = sum(spare["ready"] for spare in status["spares"])
        return len(status["members"]) == WORKERS and not moving and ready == spares

    training.wait(is_quiet)
    steps = len(json_lines(folder / "metrics.jsonl"))
    training.wait(lambda: len(json_lines(folder / "metrics.jsonl")) >= steps + _STEPS_BETWEEN)


def _look_at_spare(folder: Path, found: Launch) -> None:
    """The processor time and the memory of a spare that waits."""
    pid = ask(str(folder), {"command": "status"})["spares"][0]["pid"]
    before, began = _cpu_s(pid), time.monotonic()
    time.sleep(_IDLE_S)
    found.idle.append((_cpu_s(pid) - before) / (time.monotonic() - began))
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found.private.append(sum(int(ln.split()[1]) for ln in rollup.splitlines() if ln.startswith("Private_")) / 1024)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _kill(training: Program, folder: Path, draw: random.Random, found: Launch) -> None:
    """Kills a member, and waits until a step of a full mesh is committed by all."""
    members = ask(str(folder), {"command": "status"})["members"]
    seen = len(json_lines(folder / "events.jsonl"))
    time.sleep(draw.uniform(0, 0.2))
    killed = time.monotonic()
    os.kill(draw.choice(members)["pid"], signal.SIGKILL)

    def later(kind: str) -> list[dict[str, Any]]:
        return [event for event in json_lines(folder / "events.jsonl")[seen:] if event["event"] == kind]

    training.wait(lambda: bool(later("join")))
    join = later("join")[0]
    training.wait(lambda: any(event["mesh_epoch"] == join["mesh_epoch"] for event in later("recovered")))
    recovered = next(event for event in later("recovered") if event["mesh_epoch"] == join["mesh_epoch"])
    found.placed.append(join["placed_at"] - killed)
    with contextlib.suppress(TypeError):  # null: another epoch came first
        found.committed.append(recovered["all_applied_at"] - killed)


def main() -> int:
    """Command line. Returns the exit code: 1 if a loss changed."""
    options = parser(__doc__)
    options.add_argument("--kills", type=int, help="in one launch (5; with --quick 2)")
    options.add_argument("--launches", type=int, help="fresh runs of each (4; with --quick 1)")
    options.add_argument("--compile", action="store_true", help="with runtime.compile=true")
    args = options.parse_args()
    stop_on_signals()
    kills, launches = args.kills or (2 if args.quick else 5), args.launches or (1 if args.quick else 4)
    result = Result(
        "spares", {**SIZES, "workers": WORKERS, "kills": kills, "launches": launches, "compile": args.compile}
    )
    found: dict[str, list[Launch]] = {mode: [] for mode in MODES}
    with new_directory("spares-data-") as cache:
        for number in range(launches):
            for mode in MODES:
                found[mode].append(run(mode, kills, 100 * number, cache, compiled=args.compile))
                say(f"{number + 1}/{launches} {mode}: {statistics.median(found[mode][-1].placed):.3f} s")
    every = [launch for some in found.values() for launch in some]
    problems = [f"bits: {difference}" for difference in different_losses([launch.losses for launch in every])]
    columns = ["", "kills", "step, ms", "until the full mesh is placed, s", "until all have applied a step of it, s"]
    rows = []
    for mode, some in found.items():
        step = 1e3 * statistics.median(launch.step for launch in some)
        placed = estimate([launch.placed for launch in some])
        committed = estimate([launch.committed for launch in some])
        rows.append([mode, str(placed.num_pairs), f"{step:.0f}", str(placed), str(committed)])
    result.table("From SIGKILL on, median and 95 % interval", columns, rows)
    idle = [share for launch in every for share in launch.idle]
    private = [size for launch in every for size in launch.private]
    # The mean: the kernel counts ticks of 10 ms, of which most waits see none or one.
    row = [f"{1e3 * statistics.mean(idle):.1f}", f"{1e3 * max(idle):.1f}", f"{statistics.median(private):.0f}"]
    columns = ["ms of processor time in a second, mean", "most", "MiB of its own"]
    result.table(f"A spare that waits, {len(idle)} times", columns, [row])
    result.data = {"problems": problems, "launches": {mode: [vars(x) for x in some] for mode, some in found.items()}}
    return result.finish(args.json, problems)


if __name__ == "__main__":
    sys.exit(main())
