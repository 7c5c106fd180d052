"""What the modelled figures share: tables of the simulator as Markdown, and as JSON for docs/results.md.

Nothing here runs but the model, so that the same code gives the same figures on any machine.
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
    """Prints a table as Markdown, its notes behind its title, and keeps it for the JSON file."""
    assert "odelled" in table.title, table.title
    title = f"{table.title}: {'; '.join(table.notes)}." if table.notes else f"{table.title}."
    rows = [[shown(cell) for cell in row] for row in table.rows]
    result.tables.append({"title": title, "columns": list(table.columns), "rows": rows})
    print(f"{title}\n\n{markdown(table.columns, rows)}\n")


def chosen(table: Table, columns: Sequence[str], title: str, notes: Sequence[str]) -> Table:
    """Some columns of a table, under another title."""
    places = [table.columns.index(column) for column in columns]
    rows: list[tuple[Cell, ...]] = [tuple(row[i] for i in places) for row in table.rows]
    return Table(title, tuple(columns), tuple(rows), tuple(notes))


def finish(result: Result, path: Path | None) -> None:
    """Writes the JSON file where one was asked for; stdout has nothing but Markdown."""
    if path is not None:
        with contextlib.redirect_stdout(sys.stderr):
            result.finish(path)
