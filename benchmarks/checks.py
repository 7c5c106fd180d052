"""The cost of checking micro-batches and sums by a second worker (`verify.rate`), against the same run without checks.

    python -m benchmarks.checks [--meshes dp4,dp2_pp2] [--rates 0.01,0.1,1] [--pairs 5] [--steps 60] [--quick]
        [--json PATH]

A pair is two whole runs of `train.py`, one after the other, every other pair with the checks first: tokens/s of
summary.json (without the first step), with checks over without. Bytes are payloads sent by all workers in a step, by a
traced run of each kind that is not timed; gradients that checkers of sums add up are among them. Results of checks of
micro-batches have no payload, and are 1.5 kB a layer and check. Checks of sums are counted by page range. The share of
idle checks is of those of micro-batches that a worker made while its next action had no input. All runs of a mesh must
end with the same weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, estimate, parser, say

_TRAIN = Path(__file__).parents[1] / "train.py"
_SETTINGS = (
    *("model=gpt_tiny", "sharding=zero1", "train.validate_every=0", "run.tensorboard=false"),
    *("schedule.microbatches=false", "schedule.layers=false", "timeouts.suspect=4"),
)
_COLUMNS = (
    "mesh",
    "rate",
    "tok/s, with / without [95 %]",
    "MiB sent a step",
    "without",
    "checks a step",
    "of them idle",
    "of sums a step",
)


def run(folder: Path, name: str, *overrides: str) -> dict[str, Any]:
    """One run: its summary."""
    where = folder / name
    command = [
        sys.executable,
        str(_TRAIN),
        *_SETTINGS,
        *overrides,
        f"data.cache={folder / 'cache'}",
        f"run.dir={where}",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads((where / "summary.json").read_text(encoding="utf-8"))


@cache
def mib_sent(folder: Path, mesh: str, rate: float, steps: int) -> float:
    """Payloads that all workers send in a step, in MiB."""
    name = f"traced_{mesh}_{rate}"
    run(folder, name, f"mesh={mesh}", f"verify.rate={rate}", f"train.steps={steps}", "run.trace=true")
    events = json.loads((folder / name / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    return sum(event.get("args", {}).get("bytes", 0) for event in events) / steps / 2**20


def row(folder: Path, mesh: str, rate: float, pairs: int, steps: int) -> tuple[list[str], list[float]]:
    """A line of the table, and the ratios that its first number is the median of."""
    ratios: list[float] = []
    checked: dict[str, Any] = {}
    for pair in range(pairs):
        speed, weights = {}, set()
        for with_checks in (pair % 2 == 0, pair % 2 == 1):
            name = f"{mesh}_{rate}_{pair}_{with_checks}"
            rate_now = rate if with_checks else 0
            summary = run(folder, name, f"mesh={mesh}", f"train.steps={steps}", f"verify.rate={rate_now}")
            speed[with_checks] = summary["tokens_per_second"]
            weights.add(summary["weights_sha256"])
            checked = summary["checks"] if with_checks else checked
        if len(weights) > 1:
            raise SystemExit(f"{mesh} at rate {rate}: checks have changed the weights")
        ratios.append(speed[True] / speed[False])
        say(f"{mesh} at rate {rate}: {ratios[-1]:.3f}")
    idle = checked["idle_share"]
    sent = [f"{mib_sent(folder, mesh, some, steps=10):.2f}" for some in (rate, 0)]
    shown = [str(estimate([[ratio] for ratio in ratios])), *sent, f"{checked['made'] / steps:.2f}"]
    idle_share = "-" if idle is None else f"{100 * idle:.0f} %"
    return [mesh, f"{rate:g}", *shown, idle_share, f"{checked['sums'] / steps:.2f}"], ratios


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--meshes", default="dp4,dp2_pp2")
    options.add_argument("--rates", default="0.01,0.1,1")
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--steps", type=int, default=60)
    given = options.parse_args()
    pairs, steps = (1, 10) if given.quick else (given.pairs, given.steps)
    result = Result("checks", {"pairs": pairs, "steps": steps, "settings": _SETTINGS})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for mesh in given.meshes.split(","):
            for rate in map(float, given.rates.split(",")):
                line, ratios = row(Path(folder), mesh, rate, pairs, steps)
                rows.append(line)
                result.data[f"{mesh} at {rate:g}"] = ratios
    result.table("Cost of checks, gpt_tiny, zero1", _COLUMNS, rows)
    return result.finish(given.json)


if __name__ == "__main__":
    sys.exit(main())
