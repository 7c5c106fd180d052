"""What the loss of a worker costs: ours against torchft and against torchrun with checkpoints.

    python -m benchmarks.recovery [--quick] [--kills N] [--only TEXT] [--seed N] [--json PATH]

Four workers, data parallel, the same small model, samples and optimizer. Each kill is a SIGKILL from outside, of a
worker and at a moment that are drawn, in a run of its own; the systems take turns. Told from the kill on: until the
loss is seen, until all survivors know, until the new mesh is sent, until the first and the last survivor have applied a
step without the lost worker, and that less one undisturbed step; median and 90th percentile. torchft runs with a
lighthouse whose timeouts are named in the row (heartbeat timeout, join timeout, tick; heartbeat of a replica), and
re-divides its batch; it is left out where torchft-nightly is not installed (`pip install -e ".[bench]"`). torchrun
restarts all workers from the newest checkpoint of torch.distributed.checkpoint, with the workaround for stale addresses
in its store.

Of ours it is also checked that no kill changed a bit: the losses of all runs are compared step by step.
"""

from __future__ import annotations

import importlib.util
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Result, parser, say
from benchmarks.recovery_runs import SIZES, SYSTEMS, WORKERS, Kill

_OURS = "this project"


def measure(systems: Sequence[str], kills: int, seed: int, cache: Path) -> tuple[dict[str, list[Kill]], list[str]]:
    """`kills` of each system, in turns. Returns what they cost, and what went wrong, in words."""
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


def different_losses(kills: Sequence[Kill]) -> list[str]:
    """Steps whose loss is not the same in all runs, in words."""
    seen: dict[int, str] = {}
    said = []
    for kill in kills:
        said += [f"step {s}: {x} and {seen[s]}" for s, x in kill.losses.items() if seen.setdefault(s, x) != x]
    return said


def spread(values: Sequence[float | None]) -> str:
    """Median / 90th percentile, or a dash where a system does not say."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "-"
    at = min(len(known) - 1, round(0.9 * (len(known) - 1)))
    return f"{_shown(statistics.median(known))} / {_shown(known[at])}"


def _shown(ms: float) -> str:
    return f"{ms:.1f}" if abs(ms) < 100 else f"{ms:,.0f}"


def row(name: str, kills: Sequence[Kill]) -> list[str]:
    """A line of the table."""
    return [
        name,
        str(len(kills)),
        f"{statistics.median(k.step for k in kills):.0f}",
        spread([k.detect for k in kills]),
        spread([k.known for k in kills]),
        spread([k.edit for k in kills]),
        spread([k.first for k in kills]),
        spread([k.all for k in kills]),
        spread([k.all - k.step for k in kills]),
        f"{statistics.median(k.steps_lost for k in kills):g} / {max(k.steps_lost for k in kills)}",
        ", ".join(str(n) for n in sorted({k.samples for k in kills})),
    ]


def main() -> int:
    """Command line. Returns the exit code: 1 if a run failed, or a kill changed a bit of ours."""
    options = parser(__doc__)
    options.add_argument("--kills", type=int, help="of each system (10; with --quick 2)")
    options.add_argument("--only", default="", help="only systems whose name contains this")
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args()
    kills = args.kills or (2 if args.quick else 10)
    systems = [name for name in SYSTEMS if args.only in name]
    if importlib.util.find_spec("torchft") is None:
        say("torchft-nightly is not installed: it is left out")
        systems = [name for name in systems if "torchft" not in name]
    result = Result("recovery", {"workers": WORKERS, "kills": kills, "seed": args.seed, **SIZES})
    cache = Path(tempfile.mkdtemp(prefix="recovery-data-"))
    try:
        found, problems = measure(systems, kills, args.seed, cache)
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    problems += [f"bits: {said}" for said in different_losses(found.get(_OURS, []))]
    columns = ["system", "kills", "step", "seen", "all know", "seen to PLACE", "first commit", "all commit"]
    columns += ["all commit - step", "steps lost, median / most", "samples per step after"]
    rows = [row(name, some) for name, some in found.items() if some]
    result.table("From the kill on, ms, median / 90th percentile", columns, rows)
    if parts := [kill.parts for kill in found.get(_OURS, [])]:
        named = {name: spread([part[name] for part in parts]) for name in parts[0]}
        result.table("This project: from each moment to the next, ms", list(named), [list(named.values())])
    result.data = {"problems": problems, "kills": {name: [vars(k) for k in some] for name, some in found.items()}}
    result.finish(args.json)
    for problem in problems:
        print(problem)
    return 1 if problems or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
