"""The lowest lines of a terminal, which are drawn again and again; what is printed above them stays.

The state of the terminal is never changed (its cursor stays visible, lines wrap as before), so that nothing has to be
put back, also if this process is killed. Nothing here starts a thread.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.text import Text

from elaswave_spmd.ready import is_any_ready
from elaswave_spmd.run_dir.patient_stream import PatientStream


class ScreenRegion:
    """The region, with the cursor at the end of its last line. One thread draws."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._widths: list[int] = []  # of the lines that are drawn, in cells

    @property
    def size(self) -> tuple[int, int]:
        """The most cells of a line and the most lines: the last column and one row stay free."""
        width, height = self._console.size
        return max(1, width - 1), max(1, height - 1)

    @property
    def takes_output(self) -> bool:
        """False while a terminal is stopped (Ctrl-S) or too slow: what is drawn would wait, and be old then."""
        file = self._console.file
        if isinstance(file, PatientStream) and not file.send():
            return False
        try:
            descriptor = file.fileno()
        except (io.UnsupportedOperation, ValueError):
            return True
        return is_any_ready(writable=[descriptor], timeout_s=0.0)

    def draw(self, above: Sequence[Text], lines: Sequence[Text]) -> None:
        """Print lines that stay above the region, and the region anew.

        Args:
            lines: of the region; each is cut at the width of the terminal.
        """
        width, _ = self.size
        cut = [_cut(line, width) for line in lines]
        output = [self._to_begin()]
        if above:  # what stays may be as wide as the terminal, which clearing after it would damage
            output += ["\x1b[J", *(self._rendered(line) + "\n" for line in above)]
        output += ["\x1b[K\n".join(map(self._rendered, cut)), "\x1b[J"]
        self._write("".join(output))
        self._widths = [line.cell_len for line in cut]

    def leave(self, above: Sequence[Text], lines: Sequence[Text]) -> None:
        """Draw for the last time: the region's lines stay, and the cursor goes to the line after them."""
        self.draw(above, lines)
        self._write("\n" if lines else "")
        self._widths = []

    def _to_begin(self) -> str:
        """The movement of the cursor to the begin of the region.

        Terminals wrap lines that have become too long, when their window becomes narrower.
        """
        width = max(1, self._console.width)
        rows = sum(max(1, -(-cells // width)) for cells in self._widths)
        return "\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "")

    def _rendered(self, line: Text) -> str:
        with self._console.capture() as capture:
            self._console.print(line, end="", soft_wrap=True)
        return capture.get()

    def _write(self, output: str) -> None:
        self._console.file.write(encodable(output, self._console.file))
        self._console.file.flush()


def encodable(text: str, file: IO[str]) -> str:
    """The text with a question mark for each character that a file's encoding lacks, as of a model's text."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def _cut(line: Text, width: int) -> Text:
    if line.cell_len <= width:
        return line
    line = line.copy()
    line.truncate(width, overflow="crop")
    return line
