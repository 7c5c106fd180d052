"""The cost of losing a worker: this project against torchft, and against torchrun with checkpoints.

    python -m benchmarks.recovery [--quick] [--kills N] [--only TEXT] [--seed N] [--json PATH]

Four workers, data parallel, the same small model, samples and optimizer. Each kill is a SIGKILL from outside, of a
worker and at a moment that are drawn, in a run of its own; the systems alternate. Reported is the time from the kill
until the first and the last survivor have applied a step without the lost worker, and that less one undisturbed step;
median and 90th percentile. For this project also in pieces: until the controller has noticed the loss, until all
survivors have answered, from there until they have the new configuration, and the rest of the step. All write times of
CLOCK_MONOTONIC; the pieces come from events.jsonl (docs/run_files.md). Micro-batches are not assigned by speed
(schedule.microbatches=false).

torchft runs with a lighthouse whose timeouts are named in the row (heartbeat timeout, join timeout, tick; heartbeat of
a replica), and divides its batch again; it is installed in an environment of its own in the cache directory
(benchmarks/peers.py), and left out if that fails. torchrun restarts all workers from the newest checkpoint of
torch.distributed.checkpoint, with the workaround for stale addresses in its store.

It is also checked that no kill changed a bit of this project's runs: their losses are compared step by step.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks import peers
from benchmarks.harness import Result, parser, say
from benchmarks.processes import new_directory, stop_on_signals
from benchmarks.recovery_runs import SIZES, SYSTEMS, WORKERS, Kill

_OURS = "this project"


def measure(systems: Sequence[str], kills: int, seed: int, cache: Path) -> tuple[dict[str, list[Kill]], list[str]]:
    """Measures `kills` kills of each system, in turns. Returns their costs, and what went wrong, in words."""
    found: dict[str, list[Kill]] = {name: [] for name in systems}
    problems, draw = [], random.Random(seed)
    for number in range(kills):
        for name in systems:
            run, detail = SYSTEMS[name]
            try:
                found[name].append(run(draw.randrange(2**32), cache, detail))
                say(f"{number + 1}/{kills} {name}: {found[name][-1].all:.0f} ms until all commit")
            except (RuntimeError, OSError) as error:
                problems.append(f"{name}, kill {number + 1}: {error}")
                say(problems[-1])
    return found, problems


def different_losses(runs: Iterable[Mapping[int, str]]) -> list[str]:
    """The steps whose loss is not the same in all runs, in words. `runs`: loss_hex by step of each run."""
    seen: dict[int, str] = {}
    differing = []
    for losses in runs:
        differing += [f"step {s}: {x} and {seen[s]}" for s, x in losses.items() if seen.setdefault(s, x) != x]
    return differing


def spread(values: Sequence[float]) -> str:
    """The text "median / 90th percentile"."""
    return f"{_shown(statistics.median(values))} / {_shown(_percentile_90(values))}"


def _percentile_90(values: Sequence[float]) -> float:
    return sorted(values)[round(0.9 * (len(values) - 1))]


def _shown(ms: float) -> str:
    return f"{ms:.1f}" if abs(ms) < 100 else f"{ms:,.0f}"


def row(name: str, kills: Sequence[Kill], ours: Sequence[Kill]) -> list[str]:
    """One line of the table."""
    took = statistics.median(k.all for k in kills)
    return [
        name,
        str(len(kills)),
        f"{statistics.median(k.step for k in kills):.0f}",
        spread([k.first for k in kills]),
        spread([k.all for k in kills]),
        spread([k.all - k.step for k in kills]),
        f"{took / statistics.median(k.all for k in ours):.1f}" if ours else "-",
        f"{statistics.median(k.steps_lost for k in kills):g} / {max(k.steps_lost for k in kills)}",
        ", ".join(str(n) for n in sorted({k.samples for k in kills})),
    ]


def shown_parts(events: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """The pieces of several events: name, median, 90th percentile and maximum of each, in ms."""
    found = {name: [event[name] for event in events] for name in events[0]}
    return [
        [name, _shown(statistics.median(ms)), _shown(_percentile_90(ms)), _shown(max(ms))] for name, ms in found.items()
    ]


def main() -> int:
    """Command line. Returns the exit code: 1 if a run failed, or a kill changed a bit of ours."""
    options = parser(__doc__)
    options.add_argument("--kills", type=int, help="of each system (10; with --quick 2)")
    options.add_argument("--only", default="", help="only systems whose name contains this")
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args()
    stop_on_signals()
    kills = args.kills or (2 if args.quick else 10)
    systems = [name for name in SYSTEMS if args.only in name]
    problems = []
    if any("torchft" in name for name in systems) and (reason := peers.make()):
        problems.append(f"torchft is left out: {reason}")
        say(problems[-1])
        systems = [name for name in systems if "torchft" not in name]
    settings = {"workers": WORKERS, "kills": kills, "seed": args.seed, "torchft": peers.TORCHFT, **SIZES}
    result = Result("recovery", settings)
    with new_directory("recovery-data-") as cache:
        found, failed = measure(systems, kills, args.seed, cache)
    ours = found.get(_OURS, [])
    problems += failed + [f"bits: {difference}" for difference in different_losses(kill.losses for kill in ours)]
    columns = ["system", "kills", "step", "first commit", "all commit", "all commit - step", "all commit / ours"]
    columns += ["steps lost, median / max", "samples per step after"]
    rows = [row(name, some, ours) for name, some in found.items() if some]
    result.table("From the kill on, ms, median / 90th percentile", columns, rows)
    if ours:
        title = "This project: a kill in pieces, ms"
        result.table(title, ["piece", "median", "90th percentile", "max"], shown_parts([kill.parts for kill in ours]))
    result.data = {"problems": problems, "kills": {name: [vars(k) for k in some] for name, some in found.items()}}
    return result.finish(args.json, problems) or int(not rows)


if __name__ == "__main__":
    sys.exit(main())
