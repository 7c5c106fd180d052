"""An output that takes nothing keeps nobody waiting, and gets its lines in order when it takes some again."""

from __future__ import annotations

import fcntl
import os
import pty
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO, cast

import pytest
from rich.console import Console

from elaswave_spmd.ready import is_any_ready
from elaswave_spmd.run_dir import patient_stream
from elaswave_spmd.run_dir.patient_stream import PatientStream, end, patient
from elaswave_spmd.run_dir.screen_region import ScreenRegion
from tests.descriptors import OF_SELECT, beyond_select
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="files are opened again on Linux only")
LINES = [f"line {n} é" for n in range(2000)]


class Pipe:
    """A pipe that takes 4 KiB. What is written to `stream` would be waited for."""

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        self.stream: TextIO = os.fdopen(writing, "w", encoding="utf-8")

    def read(self) -> str:
        """What is in the pipe; waits for something."""
        return os.read(self._reading, 1 << 20).decode()

    def read_to_end(self) -> str:
        """Everything, until all that write have closed it."""
        with os.fdopen(self._reading, encoding="utf-8") as reading:
            return reading.read()

    def leave(self) -> None:
        os.close(self._reading)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.stream.close()


def test_nobody_waits_and_all_lines_come_in_order(pipe: Pipe) -> None:
    stream = patient(pipe.stream)
    assert isinstance(stream, PatientStream)
    for line in LINES:
        print(line, file=stream)  # more than the pipe takes: another stream would wait here for ever
    assert not stream.send()
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_to_end()))
    reader.start()
    end(stream)
    assert stream.closed
    end(stream)
    pipe.stream.close()
    reader.join()
    assert found == ["".join(line + "\n" for line in LINES)]


def test_the_file_that_is_shared_with_others_waits_as_before(pipe: Pipe) -> None:
    stream = patient(pipe.stream)
    assert os.get_blocking(pipe.stream.fileno()) and not os.get_blocking(stream.fileno())
    stream.close()


def test_lines_for_which_there_is_no_room_are_counted(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient_stream, "_MOST", 10_000)
    stream = PatientStream(pipe.stream)
    for line in LINES:
        print(line, file=stream)
    text = pipe.read()
    while not stream.send():
        text += pipe.read()
    print("the last", file=stream)
    stream.close()
    pipe.stream.close()
    *shown, note, last = (text + pipe.read_to_end()).splitlines()
    assert shown == LINES[: len(shown)] and last == "the last"
    assert note == f"({len(LINES) - len(shown)} lines are left out: the output took none)"


def test_what_is_not_taken_at_the_end_is_given_up(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient_stream, "_PATIENCE_S", 0.01)
    stream = PatientStream(pipe.stream)
    print("x" * 10_000, file=stream)
    stream.drain()
    assert not stream.send()
    stream.close()


def test_an_output_that_nobody_reads_any_more_is_told(pipe: Pipe) -> None:
    stream = PatientStream(pipe.stream)
    pipe.leave()
    with pytest.raises(BrokenPipeError):
        print("a line", file=stream)
    stream.close()


def test_a_terminal_that_is_stopped_gets_its_lines_when_it_goes_on() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        stream = patient(terminal)
        assert stream.isatty()
        termios.tcflow(theirs, termios.TCOOFF)
        print("a line", file=stream)
        assert isinstance(stream, PatientStream) and not stream.send()
        termios.tcflow(theirs, termios.TCOON)
        end(stream)
        found = b""
        while len(found) < len(b"a line\r\n"):  # the kernel may hand on the line and its end one after the other
            found += os.read(ours, 100)
        assert found == b"a line\r\n" and not terminal.closed
    os.close(ours)


def test_a_file_needs_no_patience(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        assert patient(file) is file
        end(file)
        assert not file.closed


def test_an_output_whose_descriptor_is_large_is_waited_for_as_well(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a controller to whose ports strangers hold a thousand connections when it opens its output."""
    monkeypatch.setattr(patient_stream, "_PATIENCE_S", 0.01)
    with beyond_select():
        stream = PatientStream(pipe.stream)
        assert stream.fileno() >= OF_SELECT
        region = ScreenRegion(Console(file=cast(TextIO, stream)))
        assert region.takes_output
        print("x" * 10_000, file=stream)
        stream.drain()
        assert not stream.send() and not region.takes_output
        while not stream.send():
            pipe.read()
        pipe.read()
        assert is_any_ready(writable=[stream], timeout_s=PATIENCE_S) and region.takes_output
        stream.close()
