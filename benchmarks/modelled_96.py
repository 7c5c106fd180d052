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
_PAPER = {"reroute": "1.35", "drop replica": "1.60"}  # the ratios that the ElasWave paper reports
_BEFORE = ("case", "mesh", "step before s", "ours before s")
_OTHERS = ("reroute", "drop replica", "templates", "restart")


def scenario(quick: bool) -> Events:
    """The scenario; with `quick` one draw and two rows per model."""
    found = load("llama96")
    assert isinstance(found, Events)
    return replace(found, draws=1, cases=tuple(replace(c, lose=(1, 8)) for c in found.cases)) if quick else found


def means(table: Table) -> Table:
    """The geometric means, over the rows of a model and over all, of the ratios of ours to other policies."""
    models = list(dict.fromkeys(str(row[0]).split(",")[0] for row in table.rows))
    rows: list[tuple[Cell, ...]] = []
    for model in (*models, ""):
        chosen_rows = [row for row in table.rows if not model or str(row[0]).split(",")[0] == model]
        found: list[Cell] = [model or "all"]
        for name in _OTHERS:
            ours, other = (table.columns.index(column) for column in ("ours", name))
            # Ratios are over one step before the loss, so that they are to each other as steps after it.
            values = [float(row[ours] or 0) / float(row[other] or math.inf) for row in chosen_rows]
            found += [math.exp(sum(map(math.log, values)) / len(values)), min(values), max(values)]
        rows.append(tuple(found))
    paper: list[Cell] = ["the paper of ElasWave"]
    for name in _OTHERS:
        paper += [_PAPER.get(name), None, None]
    columns = [f"ours / {name}{what}" for name in _OTHERS for what in ("", ", least", ", most")]
    notes = (
        "seconds of a step after the loss, the other policy's over ours, geometric mean over the rows above",
        "ours and reroute run backwards in two parts; reroute has the staggered optimizer of ReCycle besides, and is "
        "never faster than before the loss, when it runs plain 1F1B",
        "drop replica gives up all devices of a pipeline that has lost one; restart: its steady step, without the time "
        "that it takes",
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
    publish(result, chosen(whole, (*_BEFORE, *_POLICIES, "ours / reroute", "ours / drop replica"), title, notes))
    publish(result, means(whole))
    finish(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
