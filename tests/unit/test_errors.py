"""Headlines of errors: one line that says what happened."""

from __future__ import annotations

import sys
import traceback

import pytest

from elaswave_spmd.errors import WorkerError, exception_line


def report_of(error: BaseException) -> str:
    """The traceback that a worker would report."""
    try:
        raise error
    except BaseException:
        return traceback.format_exc()


def test_the_headline_of_a_worker_error_is_its_exception() -> None:
    assert WorkerError(3, report_of(ValueError("no such row"))).headline == "worker 3 failed: ValueError: no such row"


def test_further_lines_of_the_message_are_left_out() -> None:
    report = report_of(RuntimeError("out of memory\n  tried: 4 GiB\nadvice"))
    assert exception_line(report) == "RuntimeError: out of memory"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tracebacks print notes from Python 3.11 on")
def test_notes_are_left_out() -> None:
    error = ValueError("no such row")
    vars(error)["__notes__"] = ["in layer 'block0' (forward), input float32[2, 3, 4]"]
    report = report_of(error)
    assert report.splitlines()[-1].startswith("in layer") and exception_line(report) == "ValueError: no such row"


def test_of_chained_exceptions_the_last_one_counts() -> None:
    error = ValueError("second")
    error.__cause__ = KeyError("first")
    assert exception_line(report_of(error)) == "ValueError: second"


@pytest.mark.parametrize(("report", "line"), [("killed\nby signal 9", "by signal 9"), ("", "no report")])
def test_without_a_traceback_it_is_the_last_line(report: str, line: str) -> None:
    assert exception_line(report) == line
