"""Output of the modelled benchmarks: tables of the simulator as Markdown, and as JSON for docs/results.md.

Only the model is run here, so the same code gives the same figures on any machine.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Result
from benchmarks.report import markdown
from elaswave_spmd.simulator.report import Cell, Table, shown


def publish(result: Result, table: Table) -> None:
    """Prints a table as Markdown, with its notes after its title, and adds it to the JSON file."""
    assert "odelled" in table.title, table.title
    title = f"{table.title}: {'; '.join(table.notes)}." if table.notes else f"{table.title}."
    rows = [[shown(cell) for cell in row] for row in table.rows]
    result.tables.append({"title": title, "columns": list(table.columns), "rows": rows})
    print(f"{title}\n\n{markdown(table.columns, rows)}\n")


def chosen(table: Table, columns: Sequence[str], title: str, notes: Sequence[str]) -> Table:
    """A table with some of the columns, under another title."""
    places = [table.columns.index(column) for column in columns]
    rows: list[tuple[Cell, ...]] = [tuple(row[i] for i in places) for row in table.rows]
    return Table(title, tuple(columns), tuple(rows), tuple(notes))


def finish(result: Result, path: Path | None) -> None:
    """Writes the JSON file if one was asked for. Only Markdown goes to stdout."""
    if path is not None:
        with contextlib.redirect_stdout(sys.stderr):
            result.finish(path)
