"""Many small runs under fire: workers and controllers are killed, stopped and asked to leave, at awkward moments.

    python -m benchmarks.soak [--kills N] [--seed N] [--per-run N] [--minutes N] [--set WORD ...] [--keep DIR]
        [--json PATH]
    python -m benchmarks.soak --seed N --run K [--per-run N]          one run again, as the line of a failure says
    python -m benchmarks.soak --hosts       agents in network namespaces: links cut, hosts stopped, agents killed

`python train.py` with a small model on the source text of Python's library, on five meshes, over Unix sockets and
TCP, at all ZeRO levels; two runs of three replace what they lose, the others shrink. Faults are drawn from the seed:
SIGKILL, two within 50 ms, SIGSTOP with and without SIGCONT, SIGTERM, the same to the controller with a resume; at
random, and while workers start, restart or join, a checkpoint is written, or a validation is under way. Such moments
are seen in the run itself. A restart or a join may take further faults to bring about, which count as well.

Each run is held to the undisturbed one on one worker: loss_hex and grad_norm_hex of every step, every validation loss,
and weights_sha256 are equal; each step is once in metrics.jsonl; events.jsonl tells each loss, and nothing that the run
mended though no fault asked for it (a standstill, a refused message, a lost link); exit code 0. Afterwards no process
is left, whatever its parent is, no socket, temporary file or unfinished file, and the controller has no more
descriptors open than before with as many workers. Exit code 1 if any of it does not hold.

No fault takes the last worker of a run, which nothing but a checkpoint survives.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Result, parser, say
from benchmarks.namespaces import why_not
from benchmarks.processes import new_directory, stop_on_signals
from benchmarks.soak_hosts import FAULTS as HOST_FAULTS
from benchmarks.soak_hosts import MESHES as HOST_MESHES
from benchmarks.soak_hosts import HostReport, run_hosts
from benchmarks.soak_plans import KINDS, MOMENTS, draw
from benchmarks.soak_runs import SETTINGS, Place, Report, run_plan

_KILLS, _QUICK_KILLS = 1000, 40
_PER_RUN, _QUICK_PER_RUN = 12, 8
_HOST_STEPS = 300
_SHOWN = 60  # characters of an error, in a table
_TOLD = ("fail", "leave", "join", "restart")
_STEPS_PER_FAULT, _STEPS_MORE = 30, 60


def main() -> int:
    """Command line. Returns the exit code: 1 if anything did not hold."""
    options = parser(__doc__)
    options.add_argument("--kills", type=int, help=f"faults ({_KILLS}; with --quick {_QUICK_KILLS})")
    options.add_argument("--seed", type=int, default=1, help="that plans are drawn from (1)")
    options.add_argument("--minutes", type=float, help="begin no further run after so long")
    options.add_argument("--run", type=int, help="only the run of this number")
    options.add_argument("--per-run", type=int, help=f"faults of a plan ({_PER_RUN}; with --quick {_QUICK_PER_RUN})")
    options.add_argument("--hosts", action="store_true", help="faults of hosts instead: agents in network namespaces")
    options.add_argument(
        "--set", nargs="+", default=[], metavar="WORD", help="more settings of all runs, as of train.py"
    )
    options.add_argument("--keep", type=Path, help="where to keep the files of runs with problems")
    args = options.parse_args()
    stop_on_signals()
    if args.hosts:
        return hosts(args.json, args.keep, quick=args.quick)
    kills = args.kills or (_QUICK_KILLS if args.quick else _KILLS)
    per_run = args.per_run or (_QUICK_PER_RUN if args.quick else _PER_RUN)
    steps = _STEPS_PER_FAULT * per_run + _STEPS_MORE
    settings = {"commit": _commit(), "seed": args.seed, "kills": kills, "per_run": per_run, "steps": steps}
    result = Result("soak", settings | {"settings": (*SETTINGS, *args.set)})
    reports: list[Report] = []
    with new_directory("k-") as directory:
        place = Place(directory, steps, tuple(args.set))
        say(f"the undisturbed run of {steps} steps on one worker")
        standard = place.undisturbed()
        number = args.run or 0
        until = float("inf") if args.minutes is None else time.monotonic() + 60 * args.minutes
        while sum(len(report.strikes) for report in reports) < kills and time.monotonic() < until:
            plan = draw(args.seed, number, per_run)
            say(str(plan))
            report = run_plan(plan, place, standard, args.keep)
            reports.append(report)
            say(_line(report, sum(len(r.strikes) for r in reports)))
            for problem in report.problems:
                say(f"  PROBLEM: {problem}")
            if args.run is not None:
                break
            number += 1
    _tables(result, reports)
    problems = [f"--seed {r.plan.seed} --run {r.plan.number}: {p}" for r in reports for p in r.problems]
    missed = sum((report.missed for report in reports), Counter[str]())
    result.data = {
        "faults": sum(len(report.strikes) for report in reports),
        "runs": len(reports),
        "not_reached": sum(report.not_reached for report in reports),
        "moments_missed": dict(missed),
        "looks_at_descriptors": sum(report.looks for report in reports),
        "problems": problems,
    }
    return result.finish(args.json, problems)


def hosts(path: Path | None, keep: Path | None, *, quick: bool) -> int:
    """Runs over three hosts, each with one fault of a host. Returns the exit code: 1 if anything did not hold."""
    if reason := why_not():
        print(f"skipped: {reason}")
        return 0
    result = Result("soak_hosts", {"commit": _commit(), "steps": _HOST_STEPS, "settings": SETTINGS})
    reports: list[HostReport] = []
    with new_directory("k-") as directory:
        place = Place(directory, _HOST_STEPS)
        standard = place.undisturbed()
        for mesh, fault in itertools.product(list(HOST_MESHES)[: 1 if quick else None], HOST_FAULTS):
            say(f"{mesh}: {fault}")
            report = run_hosts(mesh, fault, place, standard, keep)
            reports.append(report)
            held = "PROBLEMS" if report.problems else "equal"
            say(f"  {held} in {report.seconds:.0f} s; the agent ended with {report.agent_end}")
            for problem in report.problems:
                say(f"  PROBLEM: {problem}")
    rows = []
    for r in reports:
        end = textwrap.shorten(r.agent_end, _SHOWN, placeholder=" ...")
        told = (r.told["fail"], r.told["join"])
        rows.append([r.mesh, r.fault, "no" if r.problems else "yes", *told, end, round(r.seconds)])
    columns = ("mesh", "host", "all held", "losses told", "joins", "its agent ended with", "seconds")
    result.table("One of three hosts, two workers on each", columns, rows)
    problems = [f"{r.mesh}, {r.fault}: {problem}" for r in reports for problem in r.problems]
    result.data = {"runs": len(reports), "problems": problems}
    return result.finish(path, problems)


def _line(report: Report, total: int) -> str:
    told = ", ".join(
        f"{report.told[kind]} {kind}" for kind in ("fail", "leave", "join", "restart") if report.told[kind]
    )
    return (
        f"  {'equal' if not report.problems else 'PROBLEMS'}: {len(report.strikes)} faults in {report.seconds:.0f} s "
        f"({told}, {report.resumed} resumed; {report.not_reached} not reached); {total} so far"
    )


def _tables(result: Result, reports: Sequence[Report]) -> None:
    strikes = [strike for report in reports for strike in report.strikes]
    good = sum(not report.problems for report in reports)
    cells = Counter((strike.kind, strike.moment) for strike in strikes)
    rows = [
        [kind, *(cells[kind, moment] or "-" for moment in MOMENTS), sum(cells[kind, m] for m in MOMENTS)]
        for kind in KINDS
    ]
    rows.append(["all", *(sum(cells[k, m] for k in KINDS) for m in MOMENTS), len(strikes)])
    title = f"{len(strikes)} faults in {len(reports)} runs; in {good} runs all that must hold did"
    result.table(title, ("fault", *MOMENTS, "all"), rows)
    by_mesh: dict[str, list[Report]] = {}
    for report in sorted(reports, key=lambda report: report.plan.label):
        by_mesh.setdefault(report.plan.label, []).append(report)
    columns = ("mesh", "runs", "all held", "faults", "losses told", "leaves", "joins", "restarts", "resumed", "seconds")
    result.table("The same runs by mesh", columns, [_row(label, found) for label, found in by_mesh.items()])


def _row(label: str, reports: Sequence[Report]) -> list[object]:
    told = sum((report.told for report in reports), Counter[str]())
    return [
        label,
        len(reports),
        sum(not report.problems for report in reports),
        sum(len(report.strikes) for report in reports),
        *(told[kind] for kind in _TOLD),
        sum(report.resumed for report in reports),
        round(sum(report.seconds for report in reports)),
    ]


def _commit() -> str:
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
