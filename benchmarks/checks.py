"""The cost of checking micro-batches and sums by a second worker (`verify.rate`), against the same run without checks.

    python -m benchmarks.checks [--meshes dp4,dp2_pp2] [--rates 0.01,0.1,1] [--launches 4] [--pairs 6] [--quick]
        [--json PATH]

Both sides are the whole product, alive at the same time; a gate lets one train while the other one's workers wait
(benchmarks/steady_state.py). A pair is a block of each, every other pair with the checks first. A block has steps
enough for some checks at the lowest rate, and a launch gives one ratio, of the sums over its blocks: a median of blocks
would leave out checks that few blocks have. Beside tokens/s stands the processor time of all workers, without over
with, which a busy machine disturbs less.

Bytes are payloads sent by all workers in a step, by a traced run of each kind that is not timed; gradients that
checkers of sums add up are among them. Results of checks of micro-batches have no payload, and are 1.5 kB a layer and
check. Checks of sums are counted by page range. The share of idle checks is of those of micro-batches that a worker
made while its next action had no input. The traced runs must end with the same weights.
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
from benchmarks.steady_launch import ENDLESS, OURS, Case, SideSpec, in_turns, settings_of, started

_TRAIN = Path(__file__).parents[1] / "train.py"
_SETTINGS = (
    *("model=gpt_tiny", "sharding=zero1", "train.validate_every=0", "run.tensorboard=false", "run.trace=true"),
    *("schedule.microbatches=false", "schedule.layers=false", "timeouts.suspect=4"),
)
_MESHES = {"dp4": {"dp": 4}, "dp3": {"dp": 3}, "dp2": {"dp": 2}, "dp2_pp2": {"dp": 2, "pp": 2}}
_WITH, _WITHOUT = "with", "without"
_MICROBATCHES = 8
_TRACED_STEPS = 60
_COLUMNS = (
    "mesh",
    "rate",
    "tok/s, with / without [95 %]",
    "processor time, without / with [95 %]",
    "MiB sent a step",
    "without",
    "checks a step",
    "of them idle",
    "of sums a step",
)


def launch(mesh: str, rate: float, pairs: int, steps: int) -> tuple[float, float]:
    """One launch of both sides: speed, and processor time, with checks in relation to without; below 1 is a cost."""
    case = Case("1M", mesh, _MESHES[mesh], "zero1", OURS)

    def side_of(name: str, directory: Path) -> SideSpec:
        settings = settings_of(case, _MICROBATCHES, ENDLESS, directory)
        settings["mirror"] = {"count": 1}
        settings["verify"] = {"rate": rate if name == _WITH else 0.0}
        settings["schedule"] = {"microbatches": False, "layers": False, "split_backward": "always"}
        return SideSpec(OURS, settings, case.workers)

    with started(f"{mesh} at rate {rate:g}", (_WITH, _WITHOUT), side_of) as sides:
        used = in_turns(sides, pairs, steps)
    mine, other = used[_WITH], used[_WITHOUT]
    return other.seconds / mine.seconds, other.processor / mine.processor


@cache
def traced(folder: Path, mesh: str, rate: float) -> tuple[float, dict[str, Any]]:
    """MiB of payloads that all workers send in a step, and the summary, of a run that is not timed."""
    where = folder / f"traced_{mesh}_{rate}"
    given = (f"mesh={mesh}", f"verify.rate={rate}", f"train.steps={_TRACED_STEPS}")
    command = [sys.executable, str(_TRAIN), *_SETTINGS, *given, f"data.cache={folder / 'cache'}", f"run.dir={where}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    events = json.loads((where / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    sent = sum(event.get("args", {}).get("bytes", 0) for event in events)
    return sent / _TRACED_STEPS / 2**20, json.loads((where / "summary.json").read_text(encoding="utf-8"))


def row(folder: Path, mesh: str, rate: float, ratios: list[tuple[float, float]]) -> list[str]:
    """A line of the table, from the ratios of all launches."""
    (sent, summary), (sent_without, summary_without) = traced(folder, mesh, rate), traced(folder, mesh, 0.0)
    if summary["weights_sha256"] != summary_without["weights_sha256"]:
        raise SystemExit(f"{mesh} at rate {rate}: checks have changed the weights")
    checks = summary["checks"]
    idle = checks["idle_share"]
    return [
        mesh,
        f"{rate:g}",
        *(str(estimate([[ratio[number]] for ratio in ratios])) for number in (0, 1)),
        f"{sent:.2f}",
        f"{sent_without:.2f}",
        f"{checks['made'] / _TRACED_STEPS:.2f}",
        "-" if idle is None else f"{100 * idle:.0f} %",
        f"{checks['sums'] / _TRACED_STEPS:.2f}",
    ]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--meshes", default="dp4,dp2_pp2", help=f"of {', '.join(_MESHES)}")
    options.add_argument("--rates", default="0.01,0.1,1")
    options.add_argument("--launches", type=int)
    options.add_argument("--pairs", type=int, help="per launch")
    options.add_argument("--steps", type=int, help="per block")
    given = options.parse_args()
    launches = given.launches or (1 if given.quick else 4)
    pairs, steps = given.pairs or (2 if given.quick else 6), given.steps or (5 if given.quick else 50)
    result = Result("checks", {"launches": launches, "pairs": pairs, "steps": steps, "settings": _SETTINGS})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for mesh in given.meshes.split(","):
            for rate in map(float, given.rates.split(",")):
                ratios = []
                for number in range(launches):
                    ratios.append(launch(mesh, rate, pairs, steps))
                    say(f"{mesh} at rate {rate:g}, launch {number + 1}: {ratios[-1][0]:.3f}, {ratios[-1][1]:.3f}")
                rows.append(row(Path(folder), mesh, rate, ratios))
                result.data[f"{mesh} at {rate:g}"] = ratios
    result.table("Cost of checks, gpt_tiny, zero1", _COLUMNS, rows)
    return result.finish(given.json)


if __name__ == "__main__":
    sys.exit(main())
