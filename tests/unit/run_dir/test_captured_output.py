"""What workers print while a live view is shown: nothing is lost, and it takes no room once it is read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elaswave_spmd.run_dir.captured_output import CapturedOutput


@pytest.fixture
def captured() -> Iterator[CapturedOutput]:
    found = CapturedOutput()
    yield found
    found.close()
    found.close()


def test_lines_come_whole_and_the_rest_at_the_end(captured: CapturedOutput) -> None:
    os.write(captured.fileno(), b"one\ntwo\nthr")
    assert captured.lines() == ["one", "two"]
    os.write(captured.fileno(), b"ee\nfour \xff")
    assert captured.lines() == ["three"]
    assert captured.lines(rest=True) == ["four \ufffd"]
    assert captured.lines(rest=True) == []


def test_lines_of_several_processes_are_not_mixed(captured: CapturedOutput) -> None:
    # In one write each: print() makes two of them where PYTHONUNBUFFERED is set.
    code = r"import os; [os.write(1, b'x' * 50 + b'\n') for i in range(500)]"
    some = [subprocess.Popen([sys.executable, "-c", code], stdout=captured.fileno()) for _ in range(2)]
    assert [process.wait() for process in some] == [0, 0]
    assert captured.lines(rest=True) == ["x" * 50] * 1000


def test_much_is_read_in_parts(captured: CapturedOutput) -> None:
    os.write(captured.fileno(), b"0123456789\n" * 100_000)
    first = captured.lines()
    assert 0 < len(first) < 100_000
    assert len(first) + len(captured.lines(rest=True)) == 100_000


def test_a_line_without_an_end_is_cut(captured: CapturedOutput) -> None:
    os.write(captured.fileno(), b"99 %\r" * 60_000)
    found = [*captured.lines(), *captured.lines()]
    assert found and captured.lines(rest=True) == []


@pytest.mark.skipif(sys.platform != "linux", reason="fallocate is Linux's")
def test_what_has_been_read_takes_no_room(captured: CapturedOutput) -> None:
    for _ in range(50):
        os.write(captured.fileno(), b"0123456789abcde\n" * 16384)
        captured.lines(rest=True)
    stat = os.fstat(captured.fileno())
    assert stat.st_size == 50 << 18
    if stat.st_blocks * 512 >= stat.st_size:
        pytest.skip("the file system of temporary files gives no room back")
    assert stat.st_blocks * 512 <= 1 << 18


def test_a_stream_that_is_no_terminal_is_not_captured(captured: CapturedOutput) -> None:
    assert all(os.isatty(stream) for stream in captured.streams)
