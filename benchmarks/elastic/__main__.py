"""Elastic training under failures: this project, torchft, torchrun with DCP, Ray Train's elastic trainer.

    python -m benchmarks.elastic [--systems TEXT,TEXT] [--rates 1,5,20] [--steps N] [--limit S] [--launches N]
                                 [--seed N] [--keep DIR] [--picture PATH.svg] [--json PATH] [--quick]

Four workers train the same small GPT on the same samples in the same order. A trace of failures, drawn by the causes of
Llama 3's log at so many failures per hundred steps, is played to each system by real signals. Systems alternate: first
each one undisturbed, then each one at the first rate, and so on. docs/elastic_benchmark.md has the rules, what is not
measured, and how to add a system. Systems have environments of their own, which are made at the first time; one that
cannot be made is named with the reason.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.elastic.contestants import named
from benchmarks.elastic.judge import HEALTH_CHECK_S
from benchmarks.elastic.picture import draw_picture
from benchmarks.elastic.runs import GLOBAL_BATCH, Plan, measure
from benchmarks.elastic.table import COLUMNS, rows_of
from benchmarks.elastic.trace import draw, printed
from benchmarks.harness import Result, parser, say
from benchmarks.processes import stop_on_signals


def main() -> int:
    """Command line. Returns the exit code: 1 if a run failed, or systems did not train the same."""
    options = parser(__doc__)
    options.add_argument("--systems", default="", help="only systems whose names contain one of these, with commas")
    options.add_argument("--rates", default="1,5,20", help="failures per hundred steps (1,5,20)")
    options.add_argument("--steps", type=int, help="of each run (100; with --quick 20)")
    options.add_argument("--limit", type=float, default=600.0, help="seconds of a run, from its first step on (600)")
    options.add_argument("--launches", type=int, default=1, help="runs of each system at each rate, other traces (1)")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--keep", type=Path, metavar="DIR", help="keep lines and output of each run there")
    options.add_argument("--picture", type=Path, metavar="PATH.svg", help="where steps over time are drawn")
    args = options.parse_args()
    stop_on_signals()
    rates = tuple(float(rate) for rate in args.rates.split(","))
    plan = Plan(args.steps or (20 if args.quick else 100), rates, args.launches, args.seed, args.limit, args.keep)
    asked = named(args.systems)
    missing = {system.name: reason for system in asked if (reason := system.prepare())}
    for name, reason in missing.items():
        say(f"{name} is not run: {reason}")
    systems = [system for system in asked if system.name not in missing]
    for rate in rates:
        trace = draw(plan.seed, rate, plan.steps, plan.machines)
        say(f"{rate:g} failures per 100 steps:\n{printed(trace, plan.machines)}")
    settings = {"steps": plan.steps, "rates": rates, "seed": plan.seed, "limit_s": plan.limit_s}
    settings |= {"launches": plan.launches, **vars(plan.machines), "global_batch": GLOBAL_BATCH}
    settings |= {"health_check_s": HEALTH_CHECK_S, "systems": {system.name: system.settings for system in systems}}
    result = Result("elastic", settings)
    runs, problems = measure(systems, plan)
    columns = [column.format(steps=plan.steps) for column in COLUMNS]
    title = f"{plan.machines.workers} workers, {plan.steps} steps, failures by Llama 3's log"
    result.table(title, columns, rows_of(runs, missing))
    result.data = {"runs": [run.plain for run in runs], "missing": missing, "problems": problems}
    if args.picture:
        args.picture.write_text(draw_picture(result.data["runs"], plan.steps), encoding="utf-8")
    return result.finish(args.json, problems) or int(not runs)


if __name__ == "__main__":
    sys.exit(main())
