"""The result of a scenario as tables, figures and JSON. Nothing is computed here."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from elaswave_spmd.errors import PlanError

PIP_LINE = "pip install 'elaswave-spmd[plots]'"

Cell = str | float | int | None


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header.

    Args:
        title: the title of the table.
        columns: the header.
        rows: each has a cell for each of `columns`. Numbers are as they were computed, and are rounded when shown.
        notes: lines below the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.title


@dataclass(frozen=True)
class Figure:
    """A figure with groups of bars, or with lines.

    Args:
        name: the last part of the name of its file.
        title: the title of the figure.
        x, y: the labels of the axes.
        ticks: the labels of the groups of bars, or the x values of the points of lines.
        series: name -> a value for each tick, or None for no value.
        lines: True for lines.
    """

    name: str
    title: str
    x: str
    y: str
    ticks: tuple[str | float, ...]
    series: Mapping[str, Sequence[float | None]] = field(hash=False)
    lines: bool = False


@dataclass(frozen=True)
class Report:
    """All tables and figures of a scenario.

    Args:
        name: the name of the scenario.
        title: its title.
        about: a text on what was modelled, and how.
        tables, figures: the results.
    """

    name: str
    title: str
    about: str
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The tables as plain data. Numbers that are not finite become None."""
        tables = []
        for table in self.tables:
            rows = [dict(zip(table.columns, map(_plain, row), strict=True)) for row in table.rows]
            tables.append({"title": table.title, "notes": list(table.notes), "rows": rows})
        return {"scenario": self.name, "title": self.title, "about": self.about, "tables": tables}

    def write(self, folder: Path) -> list[Path]:
        """Writes JSON, a self-contained HTML page and, if matplotlib is installed, the figures as PNG.

        Returns:
            The paths of the files.

        Raises:
            PlanError: the folder cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            data = folder / f"{self.name}.json"
            data.write_text(json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
            found, drawn = [data], []
            for figure in self.figures if can_draw() else ():
                path = folder / f"{self.name}_{figure.name}.png"
                path.write_bytes(draw(figure, "png"))
                drawn.append(draw(figure, "svg").decode())
                found.append(path)
            page = folder / f"{self.name}.html"
            page.write_text(self._page(drawn), encoding="utf-8")
        except OSError as error:
            what = f"cannot write figures to out={folder} ({error.strerror or error})"
            raise PlanError(what, fix="a folder that can be written") from None
        return [*found, page]

    def _page(self, drawn: Sequence[str]) -> str:
        out = StringIO()
        out.write("<!doctype html><html lang='en'><meta charset='utf-8'>")
        out.write(f"<title>{html.escape(self.title)}</title><style>{_STYLE}</style>")
        out.write(f"<h1>{html.escape(self.title)}</h1><p>{html.escape(self.about)}</p>")
        for table in self.tables:
            out.write(f"<h2>{html.escape(table.title)}</h2><table><tr>")
            out.writelines(f"<th>{html.escape(name)}</th>" for name in table.columns)
            for row in table.rows:
                out.write("</tr><tr>")
                out.writelines(f"<td>{html.escape(shown(cell))}</td>" for cell in row)
            out.write("</tr></table>")
            out.writelines(f"<p>{html.escape(note)}</p>" for note in table.notes)
        for svg in drawn:
            out.write(f"<figure>{svg[svg.index('<svg') :]}</figure>")
        if not drawn and self.figures:
            out.write(f"<p>Figures need matplotlib: {html.escape(PIP_LINE)}</p>")
        out.write("</html>\n")
        return out.getvalue()


_STYLE = (
    "body{font-family:sans-serif;max-width:70em;margin:2em auto;padding:0 1em}table{border-collapse:collapse}"
    "td,th{padding:.2em .7em;border-bottom:1px solid #ccc;text-align:right}"
    "td:first-child,th:first-child{text-align:left}"
    "figure{margin:1em 0}svg{max-width:100%;height:auto}"
)


def shown(cell: Cell) -> str:
    """A cell as text."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        text = f"{cell:.3f}" if abs(cell) < 100 else f"{cell:,.0f}"
        return text if math.isfinite(cell) else "-"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


def _plain(cell: Cell) -> Cell:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def can_draw() -> bool:
    """True if matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return True


def draw(figure: Figure, form: str) -> bytes:
    """A figure as "png" or "svg". Needs matplotlib."""
    from matplotlib.figure import Figure as Canvas  # pyright: ignore[reportMissingImports]

    bars = len(figure.ticks) * max(3, len(figure.series))
    canvas: Any = Canvas(figsize=(8.0 if figure.lines else min(24.0, max(7.0, 0.28 * bars)), 4.2), layout="constrained")
    axes = canvas.subplots()
    axes.set(title=figure.title, xlabel=figure.x, ylabel=figure.y)
    axes.grid(axis="y", alpha=0.3)
    if figure.lines:
        for name, values in figure.series.items():
            points = [(x, y) for x, y in zip(figure.ticks, values, strict=True) if y is not None]
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        numbers = [float(tick) for tick in figure.ticks]
        if max(numbers) > 10 * min(numbers) > 0:
            axes.set_xscale("log")
    else:
        width = 0.8 / len(figure.series)
        for i, (name, values) in enumerate(figure.series.items()):
            places = [x + width * (i - (len(figure.series) - 1) / 2) for x in range(len(figure.ticks))]
            axes.bar(places, [value or 0.0 for value in values], width, label=name)
        axes.set_xticks(range(len(figure.ticks)), [_folded(str(tick)) for tick in figure.ticks], fontsize=8)
    canvas.legend(loc="outside right upper", fontsize=8)
    out = BytesIO()
    canvas.savefig(out, format=form, dpi=130)
    return out.getvalue()


def _folded(text: str, width: int = 14) -> str:
    """The text with its words on several lines of about `width` characters, for labels under bars."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
