"""Modelled: the gain of each axis of the plan after a change: micro-batches, layers and stages, frequency.

    python -m benchmarks.modelled_ablation [--json PATH] [--quick]

The scenario `small_events` of the simulator, as Markdown, beside the exact optimum over all groupings of the workers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness import Result, parser, say
from benchmarks.modelled import finish, publish
from elaswave_spmd.simulator.report import Cell, Table
from elaswave_spmd.simulator.scenario import Events, load
from elaswave_spmd.simulator.tables import ABLATION, run_scenario

_NONE = "reroute, whole backward"
_BEST = "best of all groupings"


def joined(ratios: Table, axes: Table) -> Table:
    """The ratios without any axis, then with one axis more each time, then those of the optimum."""
    none, best = (ratios.columns.index(name) for name in (_NONE, _BEST))
    rows: list[tuple[Cell, ...]] = []
    for ratio, axis in zip(ratios.rows, axes.rows, strict=True):
        rows.append((axis[0], ratio[none], *axis[1:], ratio[best]))
    columns = ("case", "no axis", *(policy.name for policy in ABLATION), _BEST)
    notes = (
        *ratios.notes,
        *axes.notes,
        "no axis: micro-batches of lost workers to peers of their stage (0: there is none)",
    )
    title = "Modelled throughput after a change over the aggregate speed left, with one axis after the other"
    return Table(title, columns, tuple(rows), notes)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    args = parser(__doc__).parse_args(argv)
    asked = load("small_events")
    assert isinstance(asked, Events) and asked.optimum
    if args.quick:
        asked = replace(asked, cases=asked.cases[:2])
    result = Result("modelled_ablation", {"scenario": "small_events", "quick": args.quick})
    tables = run_scenario("small_events", asked, say).tables
    axes = next(table for table in tables if len(table.columns) == 1 + len(ABLATION) and "axis" in table.title)
    found = joined(tables[0], axes)
    publish(result, Table(found.title, found.columns, found.rows, (asked.about.strip().rstrip("."), *found.notes)))
    finish(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
