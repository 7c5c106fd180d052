"""The cost to a run of moving a layer to another stage while it trains.

    python -m benchmarks.migration [--quick] [--moves N] [--widths N ...] [--json PATH]

`python train.py mesh=dp2_pp2` on the emulated accelerator: programs sleep, everything else is real (processes, links,
the bytes of the layer's state, the update of the optimizer). The second stage's layers take longer, so the run moves a
layer to the first, once its times are measured. State is copied while training goes on, and the layer is computed
elsewhere from a later step on. All moves are the same one; widths take turns. docs/results.md also has two alternatives
that were removed after this comparison: moves for which training stands still, and state cut in one piece per worker.

The stall is the time that the steps from the decision until all copies are in place took beyond the median undisturbed
step: that before the layers changed, or that after it. Step times come from metrics.jsonl, from one commit to the next
as the controller sees them. Widths are model.d_model, and programs sleep in proportion to it. The benchmark fails if
runs of one width have different losses, bit for bit.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, parser, say
from benchmarks.processes import new_directory, program, stop_on_signals
from benchmarks.recovery import different_losses
from benchmarks.recovery_runs import json_lines

STEPS, _WARM_STEPS, _LAST_STEPS = 26, 3, 8
LAYERS, WIDTHS = 6, (256, 512)
_COSTS = (0.2, 1, 1, 1, 1, 2, 2, 0.2)
_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Move:
    """One move of a layer. Times in ms.

    Args:
        before, after: the median step before it, and when it is over.
        stall: of all steps from the decision until state had settled, beyond the usual.
        worst: of the step that was disturbed most.
        pause: how long all members waited between two steps, for one change of the mesh epoch after the other.
        steps: from the decision until state had settled.
        mib: of state copied.
    """

    before: float
    after: float
    stall: float
    worst: float
    pause: float
    steps: int
    mib: float
    losses: Mapping[int, str]


def words(directory: Path, cache: Path, width: int) -> list[str]:
    """The command line of one run."""
    settings = {
        "mesh": "dp2_pp2",
        "sharding": "zero1",
        "model.layers": LAYERS,
        "model.d_model": width,
        "model.heads": 8,
        "train.seq_len": 8,
        "train.microbatch_size": 1,
        "train.global_batch": 8,
        "train.steps": STEPS,
        "train.validate_every": 0,
        "runtime.device": "emulated",
        "emulated.forward_ms": 6 * width / 256,
        "emulated.backward_ms": 12 * width / 256,
        "emulated.layer_costs": f"[{','.join(map(str, _COSTS))}]",
        "schedule.every": 2,
        "schedule.patience": 1,
        "schedule.min_gain": 0.05,
        "schedule.window": 4,
        "schedule.microbatches": "false",
        "data.cache": cache,
        "run.dir": directory / "run",
        "run.tensorboard": "false",
    }
    return ["train.py", *(f"{name}={value}" for name, value in settings.items())]


def move(cache: Path, width: int) -> Move:
    """One run, with one move in it.

    Raises:
        RuntimeError: the run failed, or no layer has moved.
    """
    with new_directory("migration-") as directory:
        with program([sys.executable, *words(directory, cache, width)], directory) as run:
            run.finish(_PATIENCE_S)
        return of_run(json_lines(directory / "run" / "metrics.jsonl"), json_lines(directory / "run" / "events.jsonl"))


def of_run(metrics: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> Move:
    """The costs of the move in a run."""
    told = [event for event in events if event["event"] == "rebalance"]
    if not told or not any("layers by cost" in str(event["reason"]) for event in told):
        raise RuntimeError(f"no layer has moved: {[event['event'] for event in events]}")
    seconds = {line["step"]: line["seconds"] for line in metrics}
    first, last = told[0]["after_step"] + 1, told[-1]["after_step"] + 1
    switched = max(event["after_step"] for event in told if "layers by cost" in str(event["reason"]))
    before = statistics.median(seconds[s] for s in range(_WARM_STEPS + 1, first - 1))
    after = statistics.median(seconds[s] for s in range(STEPS - _LAST_STEPS + 1, STEPS + 1))
    extra = [seconds[s] - (before if s <= switched else after) for s in range(first, last + 1)]
    return Move(
        1e3 * before,
        1e3 * after,
        1e3 * sum(extra),
        1e3 * max(extra),
        1e3 * sum(event["placed_at"] - event["answered_at"] for event in told),
        last - first + 1,
        sum(event["bytes_moved"] for event in told) / 2**20,
        {line["step"]: line["loss_hex"] for line in metrics},
    )


def rows(found: Mapping[int, Sequence[Move]]) -> list[list[str]]:
    """The table: one row for each width."""
    return [
        [
            str(width),
            str(len(moves)),
            f"{statistics.median(m.before for m in moves):.0f} to {statistics.median(m.after for m in moves):.0f}",
            f"{statistics.median(m.mib for m in moves):.1f}",
            f"{statistics.median(m.stall for m in moves):.1f}",
            f"{min(m.stall for m in moves):.1f} - {max(m.stall for m in moves):.1f}",
            f"{statistics.median(m.worst for m in moves):.1f}",
            f"{statistics.median(m.pause for m in moves):.1f}",
            f"{statistics.median(m.steps for m in moves):.0f}",
        ]
        for width, moves in found.items()
    ]


def main() -> int:
    """Command line. Returns the exit code: 1 if a move changed a loss."""
    options = parser(__doc__)
    options.add_argument("--moves", type=int, help="of each width (7; with --quick 1)")
    options.add_argument("--widths", type=int, nargs="+", help="model.d_model; with --quick the first one only")
    args = options.parse_args()
    stop_on_signals()
    count = args.moves or (1 if args.quick else 7)
    widths = args.widths or WIDTHS[: 1 if args.quick else None]
    result = Result("migration", {"layers": LAYERS, "costs": list(_COSTS), "moves": count})
    found: dict[int, list[Move]] = {width: [] for width in widths}
    with new_directory("migration-data-") as cache:
        for number in range(count):
            for width in widths:
                found[width].append(move(cache, width))
                say(f"{number + 1}/{count} width {width}: stall {found[width][-1].stall:.1f} ms")
    problems = [line for moves in found.values() for line in different_losses(m.losses for m in moves)]
    columns = [
        "d_model",
        "moves",
        "step ms",
        "MiB copied",
        "stall ms",
        "least - most",
        "worst step ms",
        "pauses ms",
        "steps",
    ]
    result.table("A layer moves from one stage to another (emulated accelerator)", columns, rows(found))
    result.data = {"problems": problems, "moves": {width: [vars(m) for m in moves] for width, moves in found.items()}}
    return result.finish(args.json, problems)


if __name__ == "__main__":
    sys.exit(main())
