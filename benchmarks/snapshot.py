"""The cost of mirrors in a healthy run: tokens/s with mirror.count=1 and 2 against none.

    python -m benchmarks.snapshot [--quick] [--rows TEXT] [--launches N] [--rounds N] [--json PATH]

All sides are the whole product on real processes and differ in `mirror.count` alone; micro-batches are not assigned by
speed (schedule.microbatches=false). A mirror gets the reduced gradient of its pages in every step and makes the same
update as the primary: this is the snapshot, one per step. If parameters are whole on all workers (ZeRO-1, ZeRO-2 in
fp32), it is not sent the new parameters, since it has computed them itself, and it only stores the moments in addition.

How it is timed: as in steady_state. All sides are alive at the same time; a gate lets one run a block of steps while
the others' workers block in a read, then the next one, each round in another order. Ratio: tokens/s with mirrors over
tokens/s without, of the same round; median and 95 % interval over launches and rounds. All sides must have the same
losses, bit for bit.

Bytes on the wire are counted where they are handed to the links, headers included, per step and over all workers; those
of mirroring are the payload of the reduced gradients sent to mirrors. On two workers there is one mirror at most. State
per worker, of the worker with most: as in summary.json (docs/run_files.md). Peak memory: the resident size beyond the
worker's imports at the end.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, estimate, parser, say
from benchmarks.processes import stop_on_signals
from benchmarks.steady_launch import ENDLESS, MODELS, SEQ_LEN, Case, Side, SideSpec, settings_of, started

MODEL = "1M"
NONE = "none"
_BLOCK_S = 0.5
_MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One row: a mesh and batch, and the numbers of mirrors that are compared with none."""

    workers: int
    sharding: str
    tokens: int
    counts: tuple[int, ...]

    @property
    def title(self) -> str:
        return f"dp{self.workers} {self.sharding}, {self.tokens // 1024}k tokens"

    @property
    def sides(self) -> dict[str, int]:
        """The sides: name -> mirror.count."""
        return {NONE: 0, **{f"mirror.count={count}": count for count in self.counts}}

    def side(self, name: str, directory: Path) -> SideSpec:
        """One of `sides`, which writes its files to this directory."""
        case = Case(MODEL, self.title, {"dp": self.workers}, self.sharding, "")
        microbatches = self.tokens // (MODELS[MODEL]["microbatch"] * SEQ_LEN)
        own = {"mirror": {"count": self.sides[name]}, "schedule": {"microbatches": False, "layers": False}}
        return SideSpec("counted", settings_of(case, microbatches, ENDLESS, directory) | own, self.workers)


ROWS = tuple(
    Row(workers, sharding, tokens, counts)
    for tokens in (32 * 1024, 2 * 1024)
    for workers, sharding, counts in ((2, "zero1", (1,)), (4, "zero1", (1, 2)))
)


def measure(row: Row, launches: int, rounds: int) -> dict[str, Any]:
    """Measures one row: seconds per step by side, launch and round, bytes sent per step, state and peak memory."""
    found: dict[str, Any] = {"seconds": {name: [] for name in row.sides}}
    draw, steps = random.Random(0), 0
    for number in range(launches):
        with started(row.title, list(row.sides), row.side) as sides:
            slowest = _warm_up(row, sides)
            steps = steps or math.ceil(_BLOCK_S / slowest)
            before = {name: _counters(side) for name, side in sides.items()}
            times: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(rounds):
                for name in draw.sample(list(sides), len(sides)):
                    times[name].append(sides[name].team.block(steps) / steps)
            for name, values in times.items():
                found["seconds"][name].append(values)
            found["sides"] = {
                name: _held(side) | _sent(before[name], _counters(side), steps * rounds) for name, side in sides.items()
            }
        ratios = {name: statistics.median(times[NONE]) / statistics.median(times[name]) for name in times}
        say(f"{row.title}: launch {number + 1}/{launches}, { ({name: round(r, 3) for name, r in ratios.items()}) }")
    return found | {"steps_per_block": steps}


def _warm_up(row: Row, sides: Mapping[str, Side]) -> float:
    """Runs the first steps, and checks that losses are equal. Returns the seconds of a step of the slowest side."""
    steps = 1 if row.tokens > 8192 else 4
    for side in sides.values():
        side.team.block(steps)
    slowest = max(side.team.block(steps) / steps for side in sides.values())
    losses = {name: side.team.members[0].loss.hex() for name, side in sides.items()}
    if len(set(losses.values())) != 1:
        raise RuntimeError(f"{row.title}: mirrors change the loss: {losses}")
    return slowest


def _counters(side: Side) -> dict[str, int]:
    return {name: sum(member.more[name] for member in side.team.members) for name in ("sent", "mirrored")}


def _sent(before: Mapping[str, int], after: Mapping[str, int], steps: int) -> dict[str, float]:
    return {name: (after[name] - before[name]) / steps for name in before}


def _held(side: Side) -> dict[str, float]:
    """The bytes of state and memory of the worker that has most."""
    members = side.team.members
    return {
        "state": max(sum(member.more["state"].values()) for member in members),
        "mirrors": max(member.more["state"]["mirrors"] for member in members),
        "rss": max(member.growth for member in members),
    }


def lines(row: Row, found: dict[str, Any]) -> list[list[str]]:
    """The lines of the table. Also writes the ratios into `found`."""
    seconds, shown = found["seconds"], []
    found["ratios"] = {}
    for name in row.sides:
        ratio = estimate(
            [[b / a for a, b in zip(*both, strict=True)] for both in zip(seconds[name], seconds[NONE], strict=True)]
        )
        found["ratios"][name] = ratio
        side = found["sides"][name]
        shown.append(
            [
                row.title,
                name,
                f"{row.tokens / statistics.median(s for launch in seconds[name] for s in launch):,.0f}",
                "1" if name == NONE else str(ratio),
                "" if name == NONE else f"{ratio.num_pairs} / {ratio.num_launches}",
                *(f"{side[part] / _MIB:,.2f}" for part in ("sent", "mirrored", "state", "mirrors")),
                f"{side['rss'] / _MIB:,.1f}",
            ]
        )
    return shown


def main() -> None:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--rows", default="", help="only rows whose title contains this, words with commas")
    options.add_argument("--launches", type=int)
    options.add_argument("--rounds", type=int, help="per launch")
    args = options.parse_args()
    stop_on_signals()
    launches = args.launches or (1 if args.quick else 3)
    words = [word for word in args.rows.split(",") if word]
    chosen = [row for row in ROWS if all(word in row.title for word in words)]
    settings = {"launches": launches, "model": MODEL, **MODELS[MODEL], "seq_len": SEQ_LEN}
    result = Result("snapshot", settings)
    table: list[list[str]] = []
    for row in chosen:
        # A step of a large batch takes seconds, and its ratios differ less.
        rounds = args.rounds or (2 if args.quick else 5 if row.tokens > 8192 else 8)
        found = measure(row, launches, rounds)
        table += lines(row, found)
        result.data[row.title] = found
    columns = ["row", "mirrors", "tok/s", "tok/s with / without [95 %]", "rounds / launches", "MiB sent a step"]
    columns += ["of it for mirrors", "state MiB a worker", "of it mirrors", "peak rss MiB a worker"]
    result.table("Speed, traffic and memory with mirrors", columns, table)
    result.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
