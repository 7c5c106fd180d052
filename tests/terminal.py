"""A terminal that tests look at: a command in a pseudo-terminal, whose output a terminal emulator (pyte) interprets.

So what is asserted is what a person would see: the lines of the screen, and those that have left it at the top.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyte

from tests.waiting import PATIENCE_S

_HISTORY = 10_000  # lines above the screen that are kept


class Terminal:
    """A terminal of a size, and the command that runs in it.

    Attributes:
        process: the command.
        output: all that it has written, as it came.
    """

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int, columns: int, rows: int) -> None:
        self.process = process
        self.output = b""
        self._descriptor = descriptor
        self._screen = pyte.HistoryScreen(columns, rows, history=_HISTORY, ratio=0.5)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def screen(self) -> pyte.Screen:
        """The emulator's screen, with colours and cursor."""
        return self._screen

    @property
    def lines(self) -> list[str]:
        """The lines of the screen, without blanks at their ends."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def scrolled(self) -> list[str]:
        """The lines that have left the screen at its top."""
        columns = range(self._screen.columns)
        return ["".join(line[x].data for x in columns).rstrip() for line in self._screen.history.top]

    @property
    def text(self) -> str:
        """Everything that a person can scroll through."""
        return "\n".join([*self.scrolled, *self.lines])

    def resize(self, columns: int, rows: int) -> None:
        """Give the window another size. Lines are cut or moved as the emulator does it, which wraps no line anew."""
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen.resize(rows, columns)

    def read(self, seconds: float = 0.05) -> bool:
        """Take what the command has written within a time. False: it has closed the terminal."""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._descriptor, 1 << 16)
        except OSError:  # nobody has the other end open any more
            return False
        self.output += data
        self._stream.feed(data)
        return bool(data)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Read until a condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.read() or condition(), f"the command has ended:\n{self.text}"
            assert time.monotonic() < deadline, f"the condition does not hold:\n{self.text}"

    def wait(self) -> int:
        """Read until the command ends. Returns its exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self.read() or self.process.poll() is None:
            assert time.monotonic() < deadline, f"the command does not end:\n{self.text}"
        return self.process.wait()

    def type(self, text: bytes) -> None:
        """What a person types; b"\\x03" is Ctrl-C."""
        os.write(self._descriptor, text)


@contextmanager
def in_terminal(
    command: Sequence[str], folder: Path, *, columns: int = 100, rows: int = 30, env: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Run a command in a terminal of its own, in a session of its own; what is left of it is killed at the end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", **(env or {})}
    for name in ("COLUMNS", "LINES", "PYTHONWARNINGS", "NO_COLOR", "FORCE_COLOR"):
        if name not in (env or {}):
            environment.pop(name, None)

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours, columns, rows)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)
