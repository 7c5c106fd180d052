"""`python -m elaswave_spmd simulate scenario=NAME`: policies on one cost model, in virtual time. Nothing runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.simulator import arguments, report, scenario, tables
from elaswave_spmd.simulator.trace import Timeline

_WIDTH = 200  # where there is no terminal: a line of a log is one line

USAGE = """usage: {program} simulate scenario=NAME [out=FOLDER] [trace=CASE] [json=true]

  scenario=NAME    {names}; or a YAML file, of which those are examples:
                   {folder}
  out=FOLDER       write JSON, an HTML page with the figures in it, the figures as PNG, and a timeline of one case
                   for ui.perfetto.dev
  trace=CASE       the case of the timeline; the first one where none is named
  json=true        print one line of JSON, no tables

Everything is modelled: virtual time on a cost model that the scenario states. Figures need matplotlib:
{pip}
"""


def main(argv: Sequence[str], program: str) -> int:
    """Simulates, prints, writes. Returns the exit code.

    Raises:
        ConfigError: arguments or a scenario that cannot be.
        PlanError: an event, a model or a fleet that cannot be; a folder that cannot be written.
    """
    if {"-h", "--help"} & set(argv):
        names = ", ".join(scenario.names())
        print(USAGE.format(program=program, names=names, folder=scenario.FOLDER, pip=report.PIP_LINE), end="")
        return 0
    known = {"scenario": None, "out": "", "trace": "", "json": "false"}
    values = arguments.read(argv, known, "simulate")
    as_json = arguments.flag(values, "json")
    name = values["scenario"]
    chosen = scenario.load(name)
    if values["trace"] and not values["out"]:
        rule, fix = "a timeline is written to a folder", f"out=FOLDER trace='{values['trace']}'"
        raise ConfigError(rule, got="no out", where=f"trace={values['trace']}", fix=fix)
    stem, errors = Path(name).stem, Console(stderr=True)
    with errors.status("") as status:
        timeline = tables.timeline_of(chosen, values["trace"]) if values["out"] else None
        found = tables.run_scenario(stem, chosen, lambda what: status.update(f"simulating: {what}"))
    written = _written(found, timeline, Path(values["out"]).expanduser()) if values["out"] else []
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
    """Prints the tables."""
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
