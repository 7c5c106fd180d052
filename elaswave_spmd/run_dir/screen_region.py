"""The lowest lines of a terminal, which are drawn again and again, while lines that are printed above them stay.

The state of the terminal is never changed (its cursor stays visible, and lines wrap as before). So nothing has to be
restored, even if this process is killed. No thread is started.
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
    """The region. Between drawings the cursor is at the end of its last line. Only one thread may draw."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._widths: list[int] = []  # the widths of the lines on the screen, in cells

    @property
    def size(self) -> tuple[int, int]:
        """The most cells of a line, and the most lines. The last column and one row of the terminal stay free."""
        width, height = self._console.size
        return max(1, width - 1), max(1, height - 1)

    @property
    def takes_output(self) -> bool:
        """False while the terminal is stopped (Ctrl-S) or too slow, since a drawing would be old when it is shown."""
        file = self._console.file
        if isinstance(file, PatientStream) and not file.send():
            return False
        try:
            descriptor = file.fileno()
        except (io.UnsupportedOperation, ValueError):
            return True
        return is_any_ready(writable=[descriptor], timeout_s=0.0)

    def draw(self, above: Sequence[Text], lines: Sequence[Text]) -> None:
        """Print lines that stay above the region, and draw the region again below them.

        Args:
            above: the lines to print, of any width.
            lines: the lines of the region. Each is cut at the width of the terminal.
        """
        width, _ = self.size
        cut = [_cut(line, width) for line in lines]
        output = [self._to_begin()]
        # Lines that stay may be as wide as the terminal. Clearing to the end of the line after such a line would erase
        # its last character, so the whole region is cleared before.
        if above:
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
        """The control sequence that moves the cursor to the beginning of the region.

        If the window has become narrower, the terminal has wrapped lines that are now too long, so rows are counted.
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
    """The text with a question mark for each character that a file's encoding does not have.

    Texts that a model generates may have any characters.
    """
    encoding = getattr(file, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def _cut(line: Text, width: int) -> Text:
    if line.cell_len <= width:
        return line
    line = line.copy()
    line.truncate(width, overflow="crop")
    return line
