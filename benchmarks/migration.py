"""What it costs a run that a layer moves to another stage: live, or with training standing still; two layouts of state.

    python -m benchmarks.migration [--quick] [--moves N] [--widths N ...] [--json PATH]

`python train.py mesh=dp2_pp2` on the emulated accelerator: programs sleep, everything else is real (processes, links,
the bytes of the layer's state, the update of the optimizer). The second stage's layers take longer, so the run moves a
layer to the first, once its times are measured. All moves are the same one; kinds of run take turns.

- live: state is copied while training goes on, and the layer is computed elsewhere from a later step on.
- blocking (schedule.moves=blocking): training stands still while state is copied.
- contiguous (schedule.pages=contiguous): a stage's state is cut in one piece per worker, as common implementations of
  ZeRO do; so a layer that comes or goes shifts the boundary between all of them. Else each layer is dealt over all.

Stall: what the steps from the decision until all copies are where they belong took beyond the median undisturbed step,
that before the change of the layers or that after it; times of metrics.jsonl, from one commit to the next as the
controller sees them. Layers of several widths (model.d_model), whose programs sleep in proportion to it; contiguous
state with the first width only. That all losses are the same, bit for bit, is checked.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, estimate, parser, say
from benchmarks.processes import new_directory, program, stop_on_signals
from benchmarks.recovery import different_losses
from benchmarks.recovery_runs import json_lines

STEPS, _WARM_STEPS, _LAST_STEPS = 26, 3, 8
LAYERS, WIDTHS = 6, (256, 512)
_COSTS = (0.2, 1, 1, 1, 1, 2, 2, 0.2)
LIVE, BLOCKING = "live", "blocking"
INTERLEAVED, CONTIGUOUS = "interleaved", "contiguous"
Case = tuple[int, str, str]
"""model.d_model, schedule.moves, schedule.pages."""
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


def cases_of(widths: Sequence[int]) -> tuple[Case, ...]:
    """Kinds of run, in the order in which they take turns."""
    return tuple(
        (width, moves, pages)
        for width in widths
        for pages in (INTERLEAVED, CONTIGUOUS)
        for moves in (LIVE, BLOCKING)
        if pages == INTERLEAVED or width == widths[0]
    )


def words(directory: Path, cache: Path, width: int, moves: str, pages: str) -> list[str]:
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
        "schedule.moves": moves,
        "schedule.pages": pages,
        "data.cache": cache,
        "run.dir": directory / "run",
        "run.tensorboard": "false",
    }
    return ["train.py", *(f"{name}={value}" for name, value in settings.items())]


def move(cache: Path, width: int, moves: str, pages: str) -> Move:
    """One run, with one move in it.

    Raises:
        RuntimeError: the run failed, or no layer has moved.
    """
    with new_directory("migration-") as directory:
        with program([sys.executable, *words(directory, cache, width, moves, pages)], directory) as run:
            run.finish(_PATIENCE_S)
        return of_run(json_lines(directory / "run" / "metrics.jsonl"), json_lines(directory / "run" / "events.jsonl"))


def of_run(metrics: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> Move:
    """What the move in a run cost."""
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


def rows(found: Mapping[Case, Sequence[Move]]) -> list[list[str]]:
    """The table; ratios to the blocking move with interleaved pages of the same turn."""
    said = []
    for case, moves in found.items():
        ratios = [a.stall / b.stall for a, b in zip(moves, found[case[0], BLOCKING, INTERLEAVED], strict=True)]
        said.append(
            [
                *map(str, case),
                str(len(moves)),
                f"{statistics.median(m.before for m in moves):.0f} to {statistics.median(m.after for m in moves):.0f}",
                f"{statistics.median(m.mib for m in moves):.1f}",
                f"{statistics.median(m.stall for m in moves):.1f}",
                f"{min(m.stall for m in moves):.1f} - {max(m.stall for m in moves):.1f}",
                f"{statistics.median(m.worst for m in moves):.1f}",
                f"{statistics.median(m.pause for m in moves):.1f}",
                f"{statistics.median(m.steps for m in moves):.0f}",
                str(estimate([ratios])),
            ]
        )
    return said


def main() -> int:
    """Command line. Returns the exit code: 1 if a move changed a loss."""
    options = parser(__doc__)
    options.add_argument("--moves", type=int, help="of each kind (7; with --quick 1)")
    options.add_argument("--widths", type=int, nargs="+", help="model.d_model; with --quick the first one only")
    args = options.parse_args()
    stop_on_signals()
    count = args.moves or (1 if args.quick else 7)
    cases = cases_of(args.widths or WIDTHS[: 1 if args.quick else None])
    result = Result("migration", {"layers": LAYERS, "costs": list(_COSTS), "moves": count})
    found: dict[Case, list[Move]] = {case: [] for case in cases}
    with new_directory("migration-data-") as cache:
        for number in range(count):
            for case in cases:
                found[case].append(move(cache, *case))
                say(f"{number + 1}/{count} width {', '.join(map(str, case))}: stall {found[case][-1].stall:.1f} ms")
    problems = [
        line
        for width in {case[0] for case in cases}
        for line in different_losses(m.losses for case, moves in found.items() if case[0] == width for m in moves)
    ]
    columns = [
        "d_model",
        "move",
        "pages",
        "moves",
        "step ms",
        "MiB copied",
        "stall ms",
        "least - most",
        "worst step ms",
    ]
    columns += ["pauses ms", "steps", "stall / blocking, interleaved, of that width [95 %]"]
    result.table("A layer moves from one stage to another (emulated accelerator)", columns, rows(found))
    result.data = {
        "problems": problems,
        "moves": {"/".join(map(str, c)): [vars(m) for m in ms] for c, ms in found.items()},
    }
    return result.finish(args.json, problems)


if __name__ == "__main__":
    sys.exit(main())
