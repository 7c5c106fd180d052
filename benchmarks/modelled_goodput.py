"""Modelled: goodput over 54 days of failures on 16,384 to a million devices, by policy.

    python -m benchmarks.modelled_goodput [--json PATH] [--quick]

The scenario `goodput` of the simulator, as Markdown: failures at the rate of Llama 3, repair in 24 hours, with
and without spares. elaswave_spmd/simulator/goodput.py describes what each policy models and what it leaves out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness import Result, parser, say
from benchmarks.modelled import finish, publish
from elaswave_spmd.simulator.report import Table
from elaswave_spmd.simulator.scenario import Goodput, load
from elaswave_spmd.simulator.tables import run_scenario


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    args = parser(__doc__).parse_args(argv)
    asked = load("goodput")
    assert isinstance(asked, Goodput)
    if args.quick:
        asked = replace(asked, devices=asked.devices[:1], days=5)
    result = Result("modelled_goodput", {"scenario": "goodput", "seed": asked.seed, "quick": args.quick})
    stated = (
        f"everybody stands still for {asked.regroup_s:g} s after a loss and {asked.join_s:g} s when a worker comes; "
        f"restart {asked.restart_s:g} s, a checkpoint {asked.checkpoint_s:g} s"
    )
    for i, table in enumerate(run_scenario("goodput", asked, say).tables):
        more = (asked.about.strip().rstrip("."), stated) if i == 0 else ()
        publish(result, Table(table.title, table.columns, table.rows, (*more, *table.notes)))
    finish(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
