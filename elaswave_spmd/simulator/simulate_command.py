"""The command `simulate`: policies on one cost model, in virtual time. No worker runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from elaswave_spmd.conf.compose import own_arguments, own_flag
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.simulator import report, scenario, tables
from elaswave_spmd.simulator.simulate import scenario_of
from elaswave_spmd.simulator.trace import Timeline

_OWN = {"scenario": "", "out": "", "trace": "", "json": "false"}
_WIDTH = 200  # the width of the tables if the output is no terminal

USAGE = """usage: {program} simulate scenario=NAME [out=FOLDER] [trace=CASE] [json=true] [sharding=zero1] ...

  scenario=NAME    {names}; or a YAML file, of which those are examples:
                   {folder}
  out=FOLDER       write JSON, an HTML page with the figures in it, the figures as PNG, and a timeline of one case
                   for ui.perfetto.dev
  trace=CASE       the case of the timeline; the first one where none is named
  json=true        print one line of JSON, no tables

Settings of train that take the place of the scenario's own: sharding=zero0 to zero3, train.steps (steps that are left,
which a move has to pay for), seed.

Everything is modelled: virtual time on a cost model that the scenario states. Figures need matplotlib:
{pip}
"""


def main(argv: Sequence[str], program: str) -> int:
    """Simulate, print and write. Returns the exit code.

    Raises:
        ConfigError: an argument, a setting or the scenario is invalid.
        PlanError: an event, a model or a fleet is invalid, or the folder cannot be written.
    """
    if {"-h", "--help"} & set(argv):
        names = ", ".join(scenario.names())
        print(USAGE.format(program=program, names=names, folder=scenario.FOLDER, pip=report.PIP_LINE), end="")
        return 0
    own, words = own_arguments(argv, _OWN, "simulate")
    as_json = own_flag(own, "json")
    chosen = scenario_of(own["scenario"], words)
    if own["trace"] and not own["out"]:
        what, fix = f"trace={own['trace']} is given without out", f"out=FOLDER trace='{own['trace']}'"
        raise ConfigError(what, rule="a timeline is written to a folder", where=f"trace={own['trace']}", fix=fix)
    stem, errors = Path(own["scenario"]).stem, Console(stderr=True)
    with errors.status("") as status:
        timeline = tables.timeline_of(chosen, own["trace"]) if own["out"] else None
        found = tables.run_scenario(stem, chosen, lambda piece: status.update(f"simulating: {piece}"))
    written = _written(found, timeline, Path(os.path.expanduser(own["out"]))) if own["out"] else []
    if as_json:
        print(json.dumps(found.as_json(), allow_nan=False))
    else:
        show(found, Console() if sys.stdout.isatty() else Console(width=_WIDTH))
        for path in written:
            print(path)
    if written and found.figures and not report.can_draw():
        print(f"figures need matplotlib, so there are none: {report.PIP_LINE}", file=sys.stderr)
    return 0


def _written(found: report.Report, timeline: Timeline | None, folder: Path) -> list[Path]:
    paths = found.write(folder)
    return paths if timeline is None else [*paths, timeline.write(folder / f"{found.name}_trace.json")]


def show(found: report.Report, console: Console) -> None:
    """Print the tables."""
    console.print(found.title, style="bold", markup=False, highlight=False)
    console.print(found.about, markup=False, highlight=False)
    for table in found.tables:
        shown = RichTable(title=table.title, title_justify="left")
        for i, column in enumerate(table.columns):
            shown.add_column(column, justify="right" if i else "left")
        for row in table.rows:
            shown.add_row(*(report.shown(cell) for cell in row))
        console.print()
        console.print(shown)
        for note in table.notes:
            console.print(f"  {note}", markup=False, highlight=False)
