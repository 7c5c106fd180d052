"""The charts of a report, made with Bokeh. This is the only file that imports it.

Bokeh is in the extra `report` of this package. Its JavaScript is put into the page, so that nothing is loaded from a
network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.report.columns import KIND_COLORS, Columns, timeline_columns
from elaswave_spmd.report.history import CAUSES, MARKED
from elaswave_spmd.report.timeline import Timeline
from elaswave_spmd.run_dir.display import TOKENS

try:
    from bokeh.embed import json_item
    from bokeh.models import BasicTicker, ColumnDataSource, DataRange1d, FixedTicker, HoverTool, Range1d
    from bokeh.plotting import figure
    from bokeh.resources import Resources
except ImportError as error:
    raise ConfigError(
        f"the page of a report needs Bokeh, which cannot be imported ({error})",
        rule="the charts are in the extra `report`",
        fix="pip install 'elaswave-spmd[report]'",
    ) from error

_MARK_STYLES = {
    "fail": ("x", "#d55e00"),
    "corrupt": ("asterisk", "#cc0066"),
    "leave": ("inverted_triangle", "#8a6d00"),
    "join": ("triangle", "#009e73"),
    "move": ("diamond", "#0072b2"),
    "link": ("square", "#7f7f7f"),
    "rollback": ("hex", "#aa4499"),
    "restart": ("star", "#aa4499"),
    "resume": ("circle", "#7f7f7f"),
}
"""Kind of incident -> shape and colour of its mark. All shapes differ, so that colours are not needed."""
_TEXT = "#222222"
_TALL, _FLAT = 320, 240


@dataclass(frozen=True)
class Chart:
    """One chart of the page.

    Args:
        name: the name of its element in the page.
        title, about: what the chart shows; screen readers read it out.
        item: the chart as Bokeh's JSON.
    """

    name: str
    title: str
    about: str
    item: str


def bokeh_script() -> str:
    """The text of one script with the parts of Bokeh that the browser needs, without widgets, tables and formulas."""
    return "\n".join(Resources(mode="inline", components=["bokeh"], log_level="error").js_raw)


def make_charts(columns: Mapping[str, Columns], timeline: Timeline | None, *, unit: str, live: bool) -> list[Chart]:
    """All charts. The timeline is among them only if it has something to show.

    Args:
        columns: the result of `columns_of`.
        unit: the unit of the throughput, "tokens" or "samples".
        live: True if the columns will change. Then the legends have all kinds of incidents.
    """
    found = [
        _chart("loss", "Loss", "Training and validation loss by step", _loss(_sources(columns), unit, live)),
        _chart(
            "speed",
            "Throughput",
            f"{unit.capitalize()} per second by step, over 20 steps at most",
            _speed(_sources(columns), unit, live),
        ),
        _chart("workers", "Workers", "The stage of each worker by step, in colours", _workers(_sources(columns))),
        _chart("lost", "Time lost", "Seconds lost by cause", _lost(_sources(columns))),
        _chart("moved", "Bytes moved", "MiB of state copied after each incident", _moved(_sources(columns))),
    ]
    if timeline is not None and timeline.slices:
        about = "What each worker did: forward, backward, weight gradients, waiting"
        found.append(_chart("timeline", "Timeline", about, _timeline(timeline)))
    return found


def _sources(columns: Mapping[str, Columns]) -> dict[str, Any]:
    """The columns as sources of one chart. Each chart is drawn by itself, and needs sources of its own."""
    return {name: ColumnDataSource({**table}, name=name) for name, table in columns.items()}


def _chart(name: str, title: str, about: str, plot: Any) -> Chart:
    return Chart(name, title, about, json.dumps(json_item(plot)))


def _plot(x: str, y: str, height: int, **ranges: Any) -> Any:
    plot: Any = figure(
        height=height,
        sizing_mode="stretch_width",
        min_width=200,
        tools="xbox_zoom,xpan,reset,save",
        toolbar_location="right",
        output_backend="canvas",
        x_axis_label=x,
        y_axis_label=y,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color="#bbbbbb",
        **ranges,
    )
    plot.toolbar.logo = None
    plot.toolbar.active_drag = None  # a finger that scrolls the page must not zoom
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.axis_label_text_color = _TEXT
    plot.axis.major_label_text_color = _TEXT
    plot.grid.grid_line_color = "#dddddd"
    return plot


def _with_legend(plot: Any) -> Any:
    legend = plot.legend[0]
    legend.orientation = "horizontal"
    legend.ncols = 3
    legend.click_policy = "hide"
    legend.background_fill_color = None
    legend.border_line_color = None
    legend.label_text_color = _TEXT
    legend.label_text_font_size = "12px"
    legend.spacing, legend.padding, legend.margin = 6, 2, 2
    plot.add_layout(legend, "above")
    return plot


def _add_marks(plot: Any, sources: Mapping[str, Any], column: str, live: bool) -> None:
    """Add a vertical line and a mark on the curve for each incident. The pointer on a mark shows its text."""
    renderers = []
    for kind in MARKED:
        source = sources[f"marks_{kind}"]
        shape, color = _MARK_STYLES[kind]
        label = {"legend_label": kind} if live or len(source.data["step"]) else {}
        plot.vspan("step", source=source, line_color=color, line_alpha=0.35, line_width=1)
        renderers.append(
            plot.scatter("step", column, source=source, marker=shape, size=11, color=color, line_width=2, **label)
        )
    plot.add_tools(HoverTool(renderers=renderers, tooltips=[("step", "@step"), ("", "@text")]))


def _loss(sources: Mapping[str, Any], unit: str, live: bool) -> Any:
    label = "loss (nats per token)" if unit == TOKENS else "loss"
    plot = _plot("step", label, _TALL, x_range=DataRange1d(range_padding=0.02))
    line = plot.line(
        "step", "loss", source=sources["loss"], line_color="#0072b2", line_width=1.5, legend_label="training"
    )
    dots = plot.scatter(
        "step", "loss", source=sources["validation"], size=6, color="#333333", fill_alpha=0.0, legend_label="validation"
    )
    plot.add_tools(
        HoverTool(renderers=[line], tooltips=[("step", "@step"), ("loss", "@loss{0.0000}")], mode="vline"),
        HoverTool(renderers=[dots], tooltips=[("step", "@step"), ("validation loss", "@loss{0.0000}")]),
    )
    _add_marks(plot, sources, "loss", live)
    return _with_legend(plot)


def _speed(sources: Mapping[str, Any], unit: str, live: bool) -> Any:
    plot = _plot(
        "step", f"{unit} per second", _FLAT, x_range=DataRange1d(range_padding=0.02), y_range=DataRange1d(start=0)
    )
    line = plot.line("step", "speed", source=sources["speed"], line_color="#0072b2", line_width=1.5)
    tips = [("step", "@step"), (f"{unit}/s", "@speed{0,0}")]
    plot.add_tools(HoverTool(renderers=[line], tooltips=tips, mode="vline"))
    _add_marks(plot, sources, "speed", live)
    return _with_legend(plot) if plot.legend else plot


def _workers(sources: Mapping[str, Any]) -> Any:
    source = sources["workers"]
    highest = max(source.data["rank"], default=0)
    height = min(700, max(_FLAT, 80 + 18 * (highest + 1)))
    plot = _plot("step", "worker", height, x_range=DataRange1d(range_padding=0.02), y_range=DataRange1d(flipped=True))
    boxes = plot.quad(
        "left", "right", "top", "bottom", source=source, fill_color="color", line_color="#ffffff", line_width=0.5
    )
    plot.yaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0, desired_num_ticks=12)
    plot.add_tools(HoverTool(renderers=[boxes], tooltips=[("worker", "@rank"), ("stage", "@stage")]))
    return plot


def _lost(sources: Mapping[str, Any]) -> Any:
    plot = _plot("seconds", "", _FLAT, y_range=[*reversed(CAUSES)], x_range=DataRange1d(start=0))
    bars = plot.hbar("cause", right="seconds", height=0.7, source=sources["lost"], color="#d55e00")
    plot.add_tools(
        HoverTool(renderers=[bars], tooltips=[("cause", "@cause"), ("seconds", "@seconds{0.00}"), ("times", "@times")])
    )
    return plot


def _moved(sources: Mapping[str, Any]) -> Any:
    plot = _plot("step", "MiB", _FLAT, x_range=DataRange1d(range_padding=0.02), y_range=DataRange1d(start=0))
    source = sources["moved"]
    bars = plot.segment("step", 0, "step", "mib", source=source, line_width=4, color="#0072b2", legend_label="copied")
    dots = plot.scatter(
        "step",
        "bound",
        source=source,
        marker="dash",
        size=14,
        line_width=2,
        color="#222222",
        legend_label="lower bound",
    )
    tips = [("step", "@step"), ("copied", "@mib{0.00} MiB"), ("lower bound", "@bound{0.00} MiB"), ("", "@text")]
    plot.add_tools(HoverTool(renderers=[bars, dots], tooltips=tips))
    return _with_legend(plot)


def _timeline(timeline: Timeline) -> Any:
    ranks = sorted({piece.rank for piece in timeline.slices})
    end = max(piece.ended_ms for piece in timeline.slices)
    height = min(700, max(_FLAT, 100 + 26 * len(ranks)))
    plot = _plot("milliseconds", "worker", height, x_range=Range1d(start=0, end=end), y_range=DataRange1d(flipped=True))
    words = {"F": "forward", "B": "backward", "W": "weight gradients", "I": "waiting"}
    for kind, color in KIND_COLORS.items():
        source = ColumnDataSource({**timeline_columns(timeline, kind)})
        boxes = plot.quad(
            "left", "right", "top", "bottom", source=source, color=color, line_width=0, legend_label=words[kind]
        )
        plot.add_tools(
            HoverTool(renderers=[boxes], tooltips=[("", "@name"), ("from", "@left ms"), ("to", "@right ms")])
        )
    if len(ranks) <= 24:
        plot.yaxis.ticker = FixedTicker(ticks=ranks)
    return _with_legend(plot)
