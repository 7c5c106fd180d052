"""The directory of a command's sockets: it goes with its last process, or with the next command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elaswave_spmd.runtime.processes.scratch import Scratch
from elaswave_spmd.runtime.transport.links import socket_directory
from tests.waiting import eventually

# A command, or with an argument its fork server; and a process that is forked from it, as a worker is.
_HOLD = """
import os, sys
from elaswave_spmd.runtime.processes.scratch import Scratch, hold_scratch
scratch = Scratch() if len(sys.argv) < 2 else None
print(scratch.path if scratch else hold_scratch(sys.argv[1]), flush=True)
if os.fork():
    os.wait()
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of all directories of sockets. Short, as their paths have to be."""
    folder = Path(tempfile.mkdtemp(prefix="ew", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@contextmanager
def holder(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that holds a directory until its standard input ends; and the directory, if it has made it."""
    command = [sys.executable, "-c", _HOLD, *words]
    # At the end of the `with` its standard input is closed, which ends the forked one.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def clear_up() -> None:
    """The next command begins, and ends."""
    Scratch().remove()


def test_the_next_command_removes_what_nobody_holds_any_more() -> None:
    with holder() as (command, folder), holder(folder) as (fork_server, _):
        clear_up()
        assert Path(folder).is_dir()
        for killed in (command, fork_server):
            killed.kill()
            killed.wait()
            clear_up()
            assert Path(folder).is_dir(), "a forked process holds it too"

    def removed() -> bool:
        clear_up()
        return not Path(folder).exists()

    eventually(removed)


def test_directories_of_other_kinds_are_left_alone(base: Path) -> None:
    other = Path(socket_directory())
    mine = Scratch()
    clear_up()
    assert {*base.iterdir()} == {other, Path(mine.path)}, "one without an owner, and that of this process"
    before = len(os.listdir("/proc/self/fd"))
    mine.remove()
    assert {*base.iterdir()} == {other} and len(os.listdir("/proc/self/fd")) == before - 1
