"""docs/live_view.svg: a picture of the live view, taken of a real run in a terminal (`python -m benchmarks.live_view`).

`python -m benchmarks.live_view cost` measures what the view costs the controller.

The run loses a worker and gets another one in its place. What it writes is interpreted by a terminal emulator, and
rich draws the screen of that as SVG.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path

import pyte
from pyte.screens import Char
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tests.terminal import Terminal, in_terminal

ROOT = Path(__file__).parents[1]
SETTINGS = (
    *("mesh=dp3_pp2", "model=gpt_tiny", "model.d_model=64", "train.seq_len=64", "train.global_batch=48"),
    *("train.steps=160", "train.validate_every=40", "checkpoint.every=50", "elastic.replace=true", "elastic.spares=1"),
    *("run.dir=runs/a", "run.tensorboard=false", "chaos.events=[{step: 60, kind: kill, rank: 4, point: backward}]"),
)
COLUMNS, ROWS = 112, 26
_TURNS, _SECONDS = 3, 20.0  # of the measurement
_STEP = 80  # of which the picture is taken, at the earliest


def main() -> int:
    """Run, and write the picture."""
    with tempfile.TemporaryDirectory(prefix="elaswave-view-") as folder:
        command = [sys.executable, str(ROOT / "train.py"), *SETTINGS]
        with in_terminal(command, Path(folder), columns=COLUMNS, rows=ROWS) as terminal:
            terminal.wait_for(lambda: _is_worth_a_picture(terminal))
            text = picture(terminal.screen)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), legacy_windows=False)
    console.print(text)
    path = ROOT / "docs" / "live_view.svg"
    svg = console.export_svg(title="python train.py mesh=dp3_pp2")
    # Without fonts of the network: the browser's own monospace font serves.
    path.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL), encoding="utf-8")
    print(path)
    return 0


def _is_worth_a_picture(terminal: Terminal) -> bool:
    steps = [int(step) for step in re.findall(r"^step (\d+)/", "\n".join(terminal.lines), re.MULTILINE)]
    return bool(steps) and max(steps) >= _STEP and "join: " in terminal.text and "━" in "".join(terminal.lines)


def picture(screen: pyte.Screen) -> Text:
    """The characters of a screen with their colours."""
    lines = []
    for row in range(screen.lines):
        cells = [screen.buffer[row][column] for column in range(screen.columns)]
        line = Text()
        for style, run in groupby(cells, key=_style):
            line.append("".join(cell.data for cell in run), style)
        line.rstrip()
        lines.append(line)
    while lines and not lines[-1].plain:
        lines.pop()
    return Text("\n").join(lines)


def _style(cell: Char) -> Style:
    if cell.fg == "default":
        return Style(bold=cell.bold)
    # The emulator has the colours of the first terminals: what is yellow now was brown there.
    return Style(color=cell.fg.replace("brown", "yellow"), bold=cell.bold)


def cost() -> None:
    """Print the processor time that the controller takes in a terminal, with the live view and with lines.

    Between two steps of the same run, in turns; the runs go on for as long as both take.
    """
    for display in ("live", "plain") * _TURNS:
        with tempfile.TemporaryDirectory(prefix="elaswave-view-") as folder:
            words = [*SETTINGS[:-1], "train.steps=1000000", "train.validate_every=0", f"run.display={display}"]
            metrics = Path(folder, "runs", "a", "metrics.jsonl")
            command = [sys.executable, str(ROOT / "train.py"), *words]
            with in_terminal(command, Path(folder), columns=COLUMNS, rows=ROWS) as terminal:
                terminal.wait_for(lambda metrics=metrics: _steps(metrics) >= 10)
                began, before, first = time.monotonic(), _cpu_seconds(terminal.process.pid), _steps(metrics)
                terminal.wait_for(lambda began=began: time.monotonic() - began >= _SECONDS)
                seconds, spent = time.monotonic() - began, _cpu_seconds(terminal.process.pid) - before
                steps = _steps(metrics) - first
                terminal.type(b"\x03")
                terminal.wait()
        print(f"{display}: {100 * spent / seconds:.2f} % of a core, {1e3 * spent / steps:.2f} ms a step, {steps} steps")


def _steps(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process with all of its threads, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(cost() if sys.argv[1:] == ["cost"] else main())
