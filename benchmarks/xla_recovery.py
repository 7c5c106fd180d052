"""The cost of losing a worker on PyTorch/XLA, beside the CPU: the same runs, the same kills.

    python -m benchmarks.xla_recovery [--quick] [--launches N] [--json PATH]

In the environment of `make test-xla`; `python tests/xla/environment.py` prints the path of its Python. `python train.py
mesh=dp4` of a small gpt, on islands of one device and on the CPU in turns, torch of the same version; in each run one
worker is killed (SIGKILL) in the middle of a backward, and later a second one. Reported from events.jsonl for each:
detect, edit, and the penalty, the disturbed step beyond the median undisturbed one and beyond the micro-batches that
had to be computed again. It is checked that all losses are those of the undisturbed run on the same device, bit for
bit, and how many programs the survivors compiled.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, parser, say
from benchmarks.processes import new_directory, program, stop_on_signals
from benchmarks.recovery import different_losses
from benchmarks.recovery_runs import json_lines
from benchmarks.xla import lacks_xla
from elaswave_spmd.run_dir import read_summary

DEVICES = ("xla", "cpu")
STEPS, KILLS = 40, {14: 1, 27: 3}  # step -> rank
_PATIENCE_S = 400.0
_WARM_STEPS = 4
_SETTINGS: dict[str, object] = {
    "mesh": "dp4",
    "sharding": "zero1",
    "model.layers": 2,
    "model.d_model": 64,
    "model.heads": 2,
    "train.seq_len": 64,
    "train.microbatch_size": 2,
    "train.global_batch": 32,
    "train.steps": STEPS,
    "train.validate_every": 0,
    "schedule.microbatches": "false",
    "schedule.layers": "false",
    "run.tensorboard": "false",
}
COLUMNS = ("device", "kills", "step ms", "detect ms", "edit ms", "micro-batches redone", "penalty ms", "min - max")
COLUMNS += ("penalty / step", "compiled before, each", "compiled later")


@dataclass(frozen=True)
class Found:
    """The result of one run.

    Args:
        step_s: its median undisturbed step, with all workers.
        fails, recovered: the events, in pairs.
        compiled: number of programs by worker, before it was ready and later; empty on the CPU.
    """

    step_s: float
    losses: dict[int, str]
    fails: list[dict[str, Any]]
    recovered: list[dict[str, Any]]
    compiled: dict[str, list[int]]


def launch(device: str, kills: bool, cache: Path) -> Found:
    """Runs the training once, to its end.

    Raises:
        RuntimeError: it failed; with the end of its output.
    """
    with new_directory("xla-recovery-") as directory:
        into, strikes = directory / "run", []
        if kills:
            strikes = [f"{{step: {step}, kind: kill, rank: {rank}, point: backward}}" for step, rank in KILLS.items()]
        words = _SETTINGS | {"runtime.device": device, "data.cache": cache, "run.dir": into}
        words["chaos.events"] = f"[{', '.join(strikes)}]"
        train = str(Path(__file__).parents[1] / "train.py")
        with program([sys.executable, train, *(f"{name}={value}" for name, value in words.items())], directory) as run:
            run.finish(_PATIENCE_S)
        metrics, events = json_lines(into / "metrics.jsonl"), json_lines(into / "events.jsonl")
        summary = read_summary(into)
    of_kind = {kind: [e for e in events if e["event"] == kind] for kind in ("fail", "recovered")}
    return Found(
        statistics.median(line["seconds"] for line in metrics[_WARM_STEPS : min(KILLS) - 2]),
        {line["step"]: line["loss_hex"] for line in metrics},
        of_kind["fail"],
        of_kind["recovered"],
        summary["programs_compiled_per_worker"],
    )


def row_of(device: str, runs: Sequence[Found]) -> list[str]:
    """One line of the table."""
    fails = [event for run in runs for event in run.fails]
    penalties = [event["penalty_ms"] for run in runs for event in run.recovered]
    step_ms = 1e3 * statistics.median(run.step_s for run in runs)
    numbers = [number for run in runs for number in run.compiled.values()]

    def middle(name: str) -> float:
        return statistics.median(event[name] for event in fails if event[name] is not None)

    return [
        device,
        str(len(fails)),
        f"{step_ms:.0f}",
        f"{middle('detect_ms'):.1f}",
        f"{middle('edit_ms'):.1f}",
        f"{middle('microbatches_redone'):.0f}",
        f"{statistics.median(penalties):.0f}",
        f"{min(penalties):.0f} - {max(penalties):.0f}",
        f"{statistics.median(penalties) / step_ms:.2f}",
        "-".join(map(str, sorted({before for before, _ in numbers}))) or "0",
        str(sum(later for _, later in numbers)),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 1 if a bit differs."""
    options = parser(__doc__)
    options.add_argument("--launches", type=int, help="of each device (5; with --quick 1)")
    args = options.parse_args(argv)
    if lacks_xla():
        return 2
    stop_on_signals()
    launches = args.launches or (1 if args.quick else 5)
    result = Result("xla_recovery", {**_SETTINGS, "kills": KILLS, "launches": launches, "quick": args.quick})
    found: dict[str, list[Found]] = {device: [] for device in DEVICES}
    with new_directory("xla-recovery-data-") as cache:
        still = {device: launch(device, False, cache) for device in DEVICES}
        for number in range(launches):
            for device in DEVICES:
                run = launch(device, True, cache)
                found[device].append(run)
                say(f"{number + 1}/{launches} {device}: {[round(e['penalty_ms']) for e in run.recovered]} ms")
    title = "A worker killed in the middle of a backward: the step that it was in, on XLA islands and on the CPU"
    result.table(title, COLUMNS, [row_of(device, runs) for device, runs in found.items()])
    problems = [
        f"{device}, {line}"
        for device, runs in found.items()
        for line in different_losses(each.losses for each in (still[device], *runs))
    ]
    for problem in problems:
        print(problem)
    print("all losses are those of the undisturbed runs" if not problems else f"{len(problems)} differ")
    result.data = {"problems": problems}
    result.finish(args.json)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
