"""What workers print while a live view is shown: nothing is lost, and it takes no room once it is read."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from elaswave_spmd.run_dir import captured_output as module
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


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this Python cannot make files in memory")
def test_no_disk_that_is_full_keeps_workers_from_printing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    made = CapturedOutput()
    os.write(made.fileno(), b"a line\n")
    assert made.lines() == ["a line"]
    made.close()


def test_where_no_file_can_be_in_memory_it_is_a_temporary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    made = CapturedOutput()
    os.write(made.fileno(), b"a line\n")
    assert made.lines() == ["a line"] and os.fstat(made.fileno()).st_nlink == 0
    made.close()


def test_a_worker_that_opens_its_output_anew_empties_it(captured: CapturedOutput) -> None:
    """As `echo text > /dev/stdout` does."""
    os.write(captured.fileno(), b"a line\n")
    assert captured.lines() == ["a line"]
    with open(f"/proc/self/fd/{captured.fileno()}", "w") as again:
        again.write("other\n")
    captured.trim()
    assert captured.lines(rest=True) == []
    os.write(captured.fileno(), b"x\nthe last\n")
    assert captured.lines(rest=True)[-1] == "the last"


LINES = [f"line {n}" for n in range(1000)]


@pytest.mark.parametrize("times", [1, 3])
def test_of_lines_for_which_there_is_no_room_the_last_are_kept(
    captured: CapturedOutput, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr(module, "_MOST", 1000)
    os.write(captured.fileno(), b"begun ")
    assert captured.lines() == []
    for _ in range(times):
        os.write(captured.fileno(), "".join(f"{line}\n" for line in LINES).encode())
        captured.trim()
    note, *shown = captured.lines(rest=True)
    assert shown == LINES[-len(shown) :] and 900 < sum(len(line) + 1 for line in shown) <= 1010
    assert note == f"({len(LINES) * times - len(shown):,} lines of workers are left out: more waited than is kept)"
    os.write(captured.fileno(), b"more\n")
    assert captured.lines() == ["more"]


def test_a_stream_that_is_no_terminal_is_not_captured(captured: CapturedOutput) -> None:
    assert all(os.isatty(stream) for stream in captured.streams)
