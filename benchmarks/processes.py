"""Programs that a benchmark starts: each in a session of its own, and none of its processes is left afterwards.

Some of them start processes in further sessions (torchrun its workers). So each program gets a mark in its environment,
which the processes that it starts inherit. At the end all processes with the mark are killed, whatever their parent is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

_MARK = "ELASWAVE_BENCHMARK"
_PATIENCE_S = 180.0
_LOOK_S = 0.02
_END_S = 30.0


def stop_on_signals() -> None:
    """Makes SIGTERM and SIGHUP end this process as Ctrl-C does: the programs that it has started are ended first.

    This works for a process in the background, too, where SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def take_stdout() -> TextIO:
    """Takes this process's stdout for its answers alone: what libraries print goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


class Process(Protocol):
    """A process that was started: a `subprocess.Popen`, or a fork that looks like one."""

    pid: int
    returncode: int | Any

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


@dataclass
class Program:
    """A running program. `log`: the file of its output."""

    process: Process
    log: Path
    mark: str

    def wait(self, condition: Callable[[], object], patience_s: float = _PATIENCE_S) -> None:
        """Waits until the condition holds.

        Raises:
            RuntimeError: the program ended before, or it takes too long; with the end of its output.
        """
        deadline = time.monotonic() + patience_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it ended or takes too long:\n{self._tail()}")
            time.sleep(_LOOK_S)

    def finish(self, patience_s: float) -> None:
        """Waits until the program has ended.

        Raises:
            RuntimeError: it failed; with the end of its output.
            subprocess.TimeoutExpired: it takes longer.
        """
        if self.process.wait(patience_s):
            raise RuntimeError(f"the program failed:\n{self._tail()}")

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def workers(self) -> list[int]:
        """The workers of a run of this project, in the order of their start: children of its fork server."""
        parents = processes_with(self.mark)
        fork_servers = {pid for pid, parent in parents.items() if parent == self.process.pid}
        return sorted((pid for pid, parent in parents.items() if parent in fork_servers), key=start_order)


def environment_of(directory: Path, mark: str) -> dict[str, str]:
    """The environment of a program whose temporary files go to `directory`."""
    name, _, value = mark.partition("=")
    own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(directory), "XDG_RUNTIME_DIR": str(directory), name: value}
    return {**os.environ, **own}


@contextlib.contextmanager
def program(command: Sequence[str], directory: Path, environment: Mapping[str, str] | None = None) -> Iterator[Program]:
    """Starts a program, and ends all its processes at exit. Its temporary files go to `directory`, too."""
    directory.mkdir(parents=True, exist_ok=True)
    log, mark = directory / "output", f"{_MARK}={secrets.token_hex(8)}"
    process = None
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment_of(directory, mark), **(environment or {})},
                start_new_session=True,
            )
        yield Program(process, log, mark)
    finally:
        with _uninterrupted():
            end_marked(mark)
            if process is not None:
                process.wait()


def end_marked(mark: str) -> None:
    """Kills all processes with this mark, and waits until they are gone.

    Raises:
        RuntimeError: a process cannot be killed.
    """
    deadline = time.monotonic() + _END_S
    while left := list(processes_with(mark)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {left} were killed and are still there")
        time.sleep(_LOOK_S)


def processes_with(mark: str) -> dict[int, int]:
    """Process id -> parent's id of all living processes with a mark NAME=VALUE in their environment (Linux).

    Whatever their session and their parent are; without those that have ended and are not waited for yet.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        # It may have just ended, or be somebody else's.
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX" and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = int(parent)
    return found


def command_lines() -> dict[int, tuple[str, ...]]:
    """Process id -> words of the command line, of all living processes that may be looked at (Linux)."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # no process, or it has just ended
            if entry.name.isdigit() and (words := (entry / "cmdline").read_bytes()):
                found[int(entry.name)] = tuple(words.decode(errors="replace").split("\0"))
    return found


def in_use(path: Path) -> bool:
    """True if a living process has the file open or mapped (Linux)."""
    sought = f" {path}\n".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
            if sought in (entry / "maps").read_bytes():
                return True
            if any(os.readlink(link) == str(path) for link in (entry / "fd").iterdir()):
                return True
    return False


@contextlib.contextmanager
def new_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A temporary directory with a short path, below `parent` or the system's directory for such files."""
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignores further Ctrl-C until the block has ended."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def start_order(pid: int) -> tuple[int, int]:
    """A key that sorts processes by the time of their start; process ids alone begin anew at the largest one."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0, pid
    return int(after_name[19]), pid  # clock ticks since the machine was started
