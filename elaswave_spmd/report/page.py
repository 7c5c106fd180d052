"""The page of a report: one HTML file that refers to no other file.

All texts from a run's files are escaped. In addition, the page's content security policy allows a browser to run only
the scripts whose hashes it has, and to load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from elaswave_spmd.mesh.mesh import shortened_workers
from elaswave_spmd.report.columns import STAGE_COLORS, columns_of
from elaswave_spmd.report.decimate import MOST_POINTS
from elaswave_spmd.report.history import History, Incident, Plan, history_of
from elaswave_spmd.report.recorded import RecordedRun
from elaswave_spmd.report.timeline import Timeline, read_timeline
from elaswave_spmd.run_dir.display import TOKENS, summary_rows
from elaswave_spmd.run_dir.listener import GENERATED

_FOLDER = Path(__file__).parent
_MOST_ROWS = 500
_SAMPLED_ROWS = 20  # the number of rows in the table beside a curve
_MOST_SHOWN_RANKS = 16
_LONG = 20  # a cell with more characters gets more room

Row = Sequence[str]


def page_of(run: RecordedRun, *, live: bool = False) -> str:
    """The whole page as HTML.

    Args:
        live: True for a page that asks its server for changes, and has no timeline.
    """
    from elaswave_spmd.report.charts import bokeh_script, make_charts

    history = history_of(run)
    timeline = None if live else _timeline(run, history)
    charts = make_charts(columns_of(run, history), timeline, unit=_unit(run), live=live)
    scripts = [bokeh_script(), (_FOLDER / "page.js").read_text(encoding="utf-8")]
    data = {"live": live, "charts": {chart.name: json.loads(chart.item) for chart in charts}}
    figures = {
        chart.name: f'<figure><div class="chart" id="chart-{chart.name}" tabindex="0" role="img" '
        f'aria-label="{_text(chart.about)}; the table below has the numbers"></div>'
        f"<figcaption>{_text(chart.about)}.</figcaption></figure>"
        for chart in charts
    }
    title = f"{_start(run, 'model')} on {_start(run, 'mesh')}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts, live=live)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f'<title>{_text(title)} - report of a run</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{(_FOLDER / 'page.css').read_text(encoding='utf-8')}</style>\n</head>\n<body>\n"
        f"{_skip_links()}<header><h1>{_text(title)}</h1><p>{_text(str(run.path))}</p>"
        '<p id="status" role="status"></p></header>\n<main>\n'
        f"{_body(run, history, figures, timeline)}</main>\n"
        f'<script type="application/json" id="data">{_json_in_html(data)}</script>\n'
        + "".join(f"<script>{_script(script)}</script>\n" for script in scripts)
        + "</body>\n</html>\n"
    )


def fragments_of(run: RecordedRun, history: History) -> dict[str, str]:
    """The parts of the page that change while a run goes on, as HTML by the id of their element."""
    return {
        "facts": _facts(run, history),
        "table-loss": _loss_table(run, history),
        "legend-workers": _stage_colors(history),
        "table-workers": _workers_table(history),
        "table-lost": _lost_table(history),
        "table-incidents": _incidents_table(history.incidents),
        "table-plans": _plans_table(history),
        "table-texts": _texts_table(run),
    }


def _body(run: RecordedRun, history: History, figures: dict[str, str], timeline: Timeline | None) -> str:
    parts = {name: f'<div id="{name}">{part}</div>' for name, part in fragments_of(run, history).items()}
    downsampled = ""
    if len(run.metrics) > MOST_POINTS:
        drawn = f"{MOST_POINTS:,} points are drawn: the lowest and the highest of each part."
        downsampled = f"<p>Of {len(run.metrics):,} steps {drawn}</p>"
    shown = figures.get("timeline", "") + (f"<p>{_text(timeline.note)}</p>" if timeline is not None else "")
    sections = [
        (
            "summary",
            "Summary",
            "<noscript><p>The charts need JavaScript; the tables do not.</p></noscript>" + parts["facts"],
        ),
        (
            "loss",
            "Loss",
            figures["loss"] + downsampled + _details("Numbers of loss and throughput", parts["table-loss"]),
        ),
        ("speed", "Throughput", figures["speed"]),
        ("incidents", "What happened", parts["table-incidents"]),
        (
            "workers",
            "Workers over time",
            parts["legend-workers"] + figures["workers"] + _details("Numbers of workers", parts["table-workers"]),
        ),
        ("lost", "Time lost", figures["lost"] + parts["table-lost"]),
        ("plans", "Plans", parts["table-plans"]),
        ("texts", "Generated text", parts["table-texts"]),
        ("moved", "Bytes moved", figures["moved"] + "<p>Copies travel beside training; no step waits for them.</p>"),
        ("timeline", "Pipeline timeline", shown or "<p>The report that is made after the run's end has it.</p>"),
        ("settings", "Settings", _details("config.yaml", f"<pre tabindex='0'>{_text(run.config)}</pre>")),
    ]
    return "".join(
        f'<section id="{name}" aria-label="{title}"><h2>{title}</h2>{body}</section>\n'
        for name, title, body in sections
    )


def _skip_links() -> str:
    names = {
        "summary": "Summary",
        "loss": "Loss",
        "incidents": "What happened",
        "workers": "Workers",
        "lost": "Time lost",
    }
    names |= {"plans": "Plans", "timeline": "Timeline", "settings": "Settings"}
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in names.items())
    return (
        f'<a class="skip" href="#summary">Skip to the summary</a>\n<nav aria-label="Sections"><ul>{links}</ul></nav>\n'
    )


def _facts(run: RecordedRun, history: History) -> str:
    total = _start(run, "total_steps", newest=True)  # a run that is resumed may be given more steps
    rows = [("state", history.state), ("steps", f"{history.last_step:,} of {total}")]
    if run.metrics:
        rows.append(("loss", f"{run.metrics[-1].loss:.4f}"))
        rows.append(("workers", str(run.metrics[-1].workers)))
        rows.append(("time in steps", _seconds(sum(line.seconds for line in run.metrics))))
    if history.validations:
        rows.append(("validation loss", f"{history.validations[-1][1]:.4f}"))
    rows.append(("time lost", _seconds(sum(lost.seconds for lost in history.lost))))
    for kind in sorted({incident.kind for incident in history.incidents}):
        rows.append((kind, str(sum(incident.kind == kind for incident in history.incidents))))
    known = {name for name, _ in rows}
    rows += [(name, value) for name, value in summary_rows(run.summary or {}, _unit(run)) if name not in known]
    body = "".join(
        f"<div{_class('wide', value)}><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in rows
    )
    return f"<dl>{body}</dl>"


def _loss_table(run: RecordedRun, history: History) -> str:
    lines, validated = run.metrics, dict(history.validations)
    sampled, every = _sampled(range(len(lines)))
    also, every_validated = _sampled([number for number, line in enumerate(lines) if line.step in validated])
    rows = [
        (
            f"{line.step:,}",
            f"{line.loss:.4f}",
            f"{validated[line.step]:.4f}" if line.step in validated else "",
            f"{line.tokens / line.seconds:,.0f}" if line.seconds else "",
            str(line.workers),
        )
        for line in (lines[number] for number in sorted({*sampled, *also}))
    ]
    note = f"One step in {every:,}" if every > 1 else ""
    if note and also:
        note += ", and " + (f"one validation in {every_validated:,}" if every_validated > 1 else "all validations")
    note += "." if note else ""
    return _table("Loss and throughput", ("step", "loss", "validation", f"{_unit(run)}/s", "workers"), rows, note)


def _sampled(numbers: Sequence[int]) -> tuple[list[int], int]:
    """About `_SAMPLED_ROWS` of these numbers, with the last one; and n, if each n-th is among them."""
    every = max(1, -(-len(numbers) // _SAMPLED_ROWS))
    return [*numbers[::every], *numbers[-1:]], every


def _stage_colors(history: History) -> str:
    """The legend of the colours of stages."""
    colors = (f'<li><span class="swatch" data-color="{n}"></span>stage {n}</li>' for n in range(_stages(history)))
    return f'<ul class="legend">{"".join(colors)}</ul>'


def _workers_table(history: History) -> str:
    rows = [(str(p.rank), str(p.stage), f"{p.first:,}", f"{p.last:,}") for p in history.placed]
    return _table("Stage of each worker", ("worker", "stage", "from step", "to step"), rows)


def _lost_table(history: History) -> str:
    rows = [(lost.cause, str(lost.times), _seconds(lost.seconds), _seconds(lost.again)) for lost in history.lost]
    note = "Time of a step beyond the median of the undisturbed steps before it."
    return _table("Time lost by cause", ("cause", "times", "time", "of it for work done again"), rows, note)


def _incidents_table(incidents: Sequence[Incident]) -> str:
    rows = [
        (
            f"{i.step:,}",
            _seconds(i.seconds),
            i.kind,
            i.text,
            _ms(i.detect_ms),
            _ms(i.edit_ms),
            _ms(i.penalty_ms),
            str(i.redone or ""),
            f"{i.bytes_moved:,}" if i.bytes_moved else "",
        )
        for i in incidents
    ]
    columns = (
        "step",
        "time",
        "kind",
        "what",
        "seen after",
        "new plan after",
        "penalty",
        "micro-batches again",
        "bytes moved",
    )
    return _table("What happened", columns, rows)


def _plans_table(history: History) -> str:
    first = history.first_plan
    rows: list[Row] = [(f"{history.first_step:,}", "start", "", _plan_text(first))] if first is not None else []
    rows += [
        (f"{i.step:,}", i.kind, _plan_text(i.before), _plan_text(i.after))
        for i in history.incidents
        if i.after is not None
    ]
    return _table("The plan before and after each incident", ("step", "kind", "before", "after"), rows)


def _texts_table(run: RecordedRun) -> str:
    """The table of texts that the model generated, newest first."""
    found = [event for event in run.events if event.get("event") == GENERATED]
    rows = [(f"{event.get('step')}", str(event.get("text", ""))) for event in reversed(found)]
    begins = {str(event.get("prompt")) for event in found}
    note = f"What the model goes on with after {' or '.join(map(repr, sorted(begins)))}." if found else ""
    return _table("Generated text", ("after step", "text"), rows, note)


def _plan_text(plan: Plan | None) -> str:
    if plan is None:
        return "not told by this run's events"
    lines = [plan.mesh]
    for stage, ranks in enumerate(plan.stages):
        layers = (
            f"{plan.layer_cuts[stage]}-{plan.layer_cuts[stage + 1] - 1}" if stage + 1 < len(plan.layer_cuts) else "?"
        )
        counts = plan.microbatches[stage] if stage < len(plan.microbatches) else ()
        few = len(counts) <= _MOST_SHOWN_RANKS
        shown = "+".join(map(str, counts)) if few else f"{min(counts)} to {max(counts)} each"
        lines.append(f"stage {stage}: {shortened_workers(ranks)}; layers {layers}; micro-batches {shown}")
    return "\n".join(lines)


def _table(caption: str, columns: Row, rows: Sequence[Row], note: str = "") -> str:
    """A table with its own scroll bar on narrow screens, which also works by keyboard."""
    if not rows:
        return f"<p>{_text(caption)}: nothing so far.</p>"
    if len(rows) > _MOST_ROWS:
        note = f"{note} The first {_MOST_ROWS:,} of {len(rows):,} rows.".strip()
    head = "".join(f'<th scope="col">{_text(column)}</th>' for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td{_class('long', cell)}>{_text(cell)}</td>" for cell in row) + "</tr>"
        for row in rows[:_MOST_ROWS]
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(caption)}"><table><caption>{_text(caption)}'
        f"</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        + (f"<p>{_text(note)}</p>" if note else "")
    )


def _class(name: str, text: str) -> str:
    """The class attribute for an element whose text is long and needs more room; else ""."""
    return f' class="{name}"' if len(text) > _LONG else ""


def _details(title: str, body: str) -> str:
    return f"<details><summary>{_text(title)}</summary>{body}</details>"


def _timeline(run: RecordedRun, history: History) -> Timeline:
    seconds = sorted(line.seconds for line in run.metrics[1:])
    usual = seconds[len(seconds) // 2] if seconds else 1.0
    first = next((incident.seconds for incident in history.incidents if incident.after is not None), None)
    return read_timeline(run.path, first, usual)


def _stages(history: History) -> int:
    return min(len(STAGE_COLORS), max((p.stage + 1 for p in history.placed), default=0))


def _start(run: RecordedRun, name: str, default: str = "not started", *, newest: bool = False) -> str:
    """A field of the first event `start`, or of the newest one."""
    events = reversed(run.events) if newest else run.events
    start = next((event for event in events if event.get("event") == "start"), {})
    return str(start.get(name, default))


def _unit(run: RecordedRun) -> str:
    return _start(run, "unit", TOKENS)


def _seconds(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds < 100
        else f"{seconds / 60:,.1f} min"
        if seconds < 6000
        else f"{seconds / 3600:,.1f} h"
    )


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f} ms"


def _text(text: str) -> str:
    """A text of any origin, escaped for element contents and attributes. A path may have bytes that are not UTF-8."""
    return html.escape(text.encode("utf-8", "backslashreplace").decode(), quote=True)


def _json_in_html(value: object) -> str:
    """The value as JSON that cannot end the script element it is in."""
    return json.dumps(value, ensure_ascii=True).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _script(text: str) -> str:
    """The text of a script of ours or of Bokeh for the page. It has nothing from a run, so it is not escaped."""
    assert "</script" not in text.lower() and "<!--" not in text
    return text


def _policy(scripts: Iterable[str], *, live: bool) -> str:
    """The content security policy: only these scripts may run, and only a live page may load anything."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
