"""The picture of the benchmark: steps over time of each system, one panel for each rate, with the failures.

    python -m benchmarks.elastic.picture elastic.json elastic.svg

The drawing is plain SVG: no library, and the same text for the same runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

_COLORS = ("#0072b2", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 330, 240, 46, 46, 34
_LEGEND = 22


def draw_picture(runs: Sequence[Mapping[str, Any]], steps: int) -> str:
    """The SVG of the first launch of each system at each rate but 0.

    Args:
        runs: as the JSON file has them.
    """
    shown = [run for run in runs if run["failures_per_100_steps"] and not run["launch"] and run["progress"]]
    rates = sorted({run["failures_per_100_steps"] for run in shown})
    names = list(dict.fromkeys(run["system"] for run in shown))
    colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)}
    width = _LEFT + max(1, len(rates)) * (_WIDTH + _GAP)
    height = _TOP + _HEIGHT + 40 + _LEGEND * ((len(names) + 2) // 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="12">',
        "<title>Steps over time under failures</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, rate in enumerate(rates):
        own = [run for run in shown if run["failures_per_100_steps"] == rate]
        parts += _panel(own, rate, steps, _LEFT + i * (_WIDTH + _GAP), colors)
    for i, name in enumerate(names):
        x, y = _LEFT + i % 3 * 260, _TOP + _HEIGHT + 52 + i // 3 * _LEGEND
        parts.append(f'<path d="M{x} {y - 4}h22" stroke="{colors[name]}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 28}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    runs: Sequence[Mapping[str, Any]], rate: float, steps: int, left: int, colors: Mapping[str, str]
) -> list[str]:
    longest = max(max(run["ended"], run["progress"][-1][0]) for run in runs) or 1.0

    def x(seconds: float) -> float:
        return round(left + _WIDTH * max(0.0, seconds) / longest, 1)

    def y(step: float) -> float:
        return round(_TOP + _HEIGHT * (1 - min(step, steps) / steps), 1)

    bottom = _TOP + _HEIGHT
    parts = [
        f'<text x="{left}" y="{_TOP - 14}" font-weight="bold">failures per 100 steps: {rate:g}</text>',
        f'<path d="M{left} {_TOP}V{bottom}H{left + _WIDTH}" fill="none" stroke="#555"/>',
        f'<text x="{left - 6}" y="{bottom + 4}" text-anchor="end">0</text>',
        f'<text x="{left - 6}" y="{_TOP + 4}" text-anchor="end">{steps}</text>',
        f'<text x="{left}" y="{bottom + 18}">0</text>',
        f'<text x="{left + _WIDTH}" y="{bottom + 18}" text-anchor="end">{longest:.0f} s</text>',
    ]
    for run in runs:
        color, moments = colors[run["system"]], run["progress"]
        line = f"M{x(moments[0][0])} {y(moments[0][1])}" + "".join(f"H{x(at)}V{y(step)}" for at, step in moments[1:])
        ended = f"H{x(run['ended'])}" if moments[-1][1] < steps else ""
        parts.append(f'<path d="{line}{ended}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        for failure in run["failures"]:
            if failure["processes"]:
                at, step = failure["seconds"], max(s for t, s in moments if t <= failure["seconds"])
                parts.append(f'<circle cx="{x(at)}" cy="{y(step)}" r="2.6" fill="{color}"/>')
    return parts


def main(words: Sequence[str]) -> int:
    """Draws the runs of a JSON file again. Returns the exit code."""
    if len(words) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    found = json.loads(Path(words[0]).read_text())
    Path(words[1]).write_text(draw_picture(found["data"]["runs"], found["settings"]["steps"]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
