"""The text of an error says what happened first; its headline is one line."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from elaswave_spmd import errors
from elaswave_spmd.errors import (
    ConfigError,
    UserError,
    WorkerError,
    exception_line,
    place_in_user_code,
    shorten_report,
)

PACKAGE = Path(errors.__file__).parent


def test_what_happened_comes_first_then_rule_choices_and_fix() -> None:
    error = ConfigError("mesh.dp=abc is not a number", rule="mesh.dp counts workers", exists="1, 2", fix="mesh.dp=2")
    assert str(error).splitlines() == [
        "mesh.dp=abc is not a number",
        "  rule:   mesh.dp counts workers",
        "  exists: 1, 2",
        "  fix:    mesh.dp=2",
    ]


def test_the_source_is_shown_unless_the_first_line_names_it() -> None:
    assert str(UserError("x.json is empty", where="schedule.profile")).splitlines()[1] == "  from:   schedule.profile"
    assert str(UserError("schedule.profile=x.json is empty", where="schedule.profile")).count("\n") == 0


def test_an_error_is_made_again_from_its_fields() -> None:
    error = ConfigError("a is b", rule="a is c", where="a", fix="a=c")
    again = ConfigError(**error.fields())
    assert str(again) == str(error) and error.fields().keys() == {"what", "rule", "where", "fix"}


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


def caught(call: Callable[[], object]) -> tuple[BaseException, str]:
    """The exception that a call raises, and its report."""
    try:
        call()
    except Exception as error:
        return error, traceback.format_exc()
    raise AssertionError("nothing was raised")


def test_a_report_shows_the_users_frames_and_at_most_two_others() -> None:
    from elaswave_spmd.data.custom import read_sample

    class Rows:
        def __getitem__(self, index: int) -> object:
            return json.loads("{")  # three frames of a library lie below this one

    _, report = caught(lambda: read_sample(Rows(), 7, 4, "my.Rows"))
    shown = shorten_report(report)
    frames = [line for line in shown.splitlines() if line.startswith("  File ")]
    assert len(frames) < report.count("  File ") and sum(__file__ not in frame for frame in frames) <= 2
    assert any(", in __getitem__" in frame for frame in frames) and "frames of elaswave_spmd and of libraries" in shown
    assert exception_line(shown) == exception_line(report) and WorkerError(0, report).report == report
    assert shown in str(WorkerError(0, report))
    if sys.version_info >= (3, 11):
        assert "in sample 7 of my.Rows" in shown


def test_a_report_without_frames_of_the_user_is_shown_whole() -> None:
    ours = "Traceback (most recent call last):\n" + "".join(
        f'  File "{PACKAGE}/worker/{name}.py", line 3, in f\n    f()\n' for name in "abc"
    )
    assert shorten_report(ours + "KeyError: 3") == ours + "KeyError: 3"
    assert shorten_report("exit code 3") == "exit code 3"
    told = "elaswave_spmd.errors.DataError: bad\n  fix:    none"
    assert shorten_report(ours + told).splitlines()[:2] == told.splitlines()
    assert shorten_report(ours + "elaswave_spmd.errors.RunError: it") == ours + "elaswave_spmd.errors.RunError: it"


def test_the_place_of_an_exception_is_the_users_innermost_line() -> None:
    error, _ = caught(lambda: json.loads("{"))
    place = place_in_user_code(error)
    assert place is not None and place.startswith(__file__) and 'json.loads("{")' in place
    assert place_in_user_code(ValueError("never raised")) is None
