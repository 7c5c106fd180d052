"""Modelled: 96 devices, Llama shapes, 1 to 8 lost: ours against the policies of ReCycle, TorchFT and others.

    python -m benchmarks.modelled_96 [--json PATH] [--quick]

The scenario `llama96` of the simulator, as Markdown. Parallel sizes are ours, as nobody published theirs; the policies
are modelled after their papers (elaswave_spmd/simulator/reroute.py, policies.py, templates.py say how).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness import Result, parser, say
from benchmarks.modelled import chosen, finish, publish
from elaswave_spmd.simulator.report import Cell, Table
from elaswave_spmd.simulator.scenario import Events, load
from elaswave_spmd.simulator.tables import run_scenario

_POLICIES = ("ours", "reroute", "reroute, whole backward", "drop replica", "templates", "restart")
_AGAINST = {"ours / reroute": "1.35", "ours / drop replica": "1.60"}  # as the ElasWave paper reports it


def scenario(quick: bool) -> Events:
    """The scenario; with `quick` one draw and two rows per model."""
    found = load("llama96")
    assert isinstance(found, Events)
    return replace(found, draws=1, cases=tuple(replace(c, lose=(1, 8)) for c in found.cases)) if quick else found


def means(table: Table) -> Table:
    """The geometric means, over the rows of a model, of the ratios to the two policies that the paper compares with."""
    rows: list[tuple[Cell, ...]] = []
    for model in dict.fromkeys(str(row[0]).split(",")[0] for row in table.rows):
        found: list[Cell] = [model]
        for name in _AGAINST:
            at = table.columns.index(name)
            values = [float(row[at] or 0) for row in table.rows if str(row[0]).split(",")[0] == model]
            found += [math.exp(sum(map(math.log, values)) / len(values)), min(values), max(values)]
        rows.append(tuple(found))
    paper: list[Cell] = ["the paper of ElasWave"]
    for value in _AGAINST.values():
        paper += [value, None, None]
    columns = [f"{name}{what}" for name in _AGAINST for what in ("", ", least", ", most")]
    notes = (
        "geometric mean over the rows above",
        "ours and reroute run backwards in two parts; reroute has the staggered optimizer of ReCycle besides, and is "
        "never faster than before the loss, when it runs plain 1F1B",
        "drop replica gives up all devices of a pipeline that has lost one",
    )
    title = "Modelled, 96 devices: ratio of throughputs after the loss"
    return Table(title, ("model", *columns), (*rows, tuple(paper)), notes)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    args = parser(__doc__).parse_args(argv)
    asked = scenario(args.quick)
    result = Result("modelled_96", {"scenario": "llama96", "draws": asked.draws, "quick": args.quick})
    whole = run_scenario("llama96", asked, say).tables[0]
    notes = (asked.about.rstrip("."), *whole.notes)
    title = "Modelled, 96 devices: throughput after the loss over the aggregate speed left"
    publish(result, chosen(whole, ("case", "mesh", *_POLICIES, *_AGAINST), title, notes))
    publish(result, means(whole))
    finish(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
