"""Every error that a user may meet: what happened with the value, the rule, what exists, the fix.

`UserError` is bad input, found before the first step; the command line turns it into one clear screen and exit code 2.
`RunError` is something that happened to a run that had started; exit code 1.
"""

from __future__ import annotations

import difflib
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = str(Path(__file__).parent)
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_FRAME = re.compile(r'  File "([^"]+)", line ([0-9]+), in (.*)')


class UserError(ValueError):
    """Bad input from a user.

    The first line says what happened, with the offending value and where it came from; the rule and the fix follow:

        mesh.dp=abc is not a whole number
          rule:   mesh.dp is a whole number, 1 or more
          fix:    give mesh.dp=VALUE, or leave it out

    Args:
        what: what happened, with the value, as a clause without a final stop: "cannot read schedule.profile=x.json (No
            such file or directory)".
        rule: the rule that was broken, as a clause without a final stop; empty if `what` contains it already.
        where: where the value came from (an override such as "mesh.dp=abc", a file, a parameter's name). It is printed
            unless `what` names it.
        exists: what would have been accepted.
        fix: what to do about it.
    """

    def __init__(self, what: str, *, rule: str = "", where: str = "", exists: str = "", fix: str = "") -> None:
        self.what = what
        self.rule = rule
        self.where = where
        self.exists = exists
        self.fix = fix
        lines = [what]
        if where and where not in what:
            lines.append(f"  from:   {where}")
        rest = {"rule": rule, "exists": exists, "fix": fix}
        lines += [f"  {name + ':':7} {text}" for name, text in rest.items() if text]
        super().__init__("\n".join(lines))

    def fields(self) -> dict[str, str]:
        """The arguments that are not empty, as text: `type(error)(**error.fields())` makes it again elsewhere."""
        fields = {"what": self.what, "rule": self.rule, "where": self.where, "exists": self.exists, "fix": self.fix}
        return {name: text for name, text in fields.items() if text}


class MeshError(UserError):
    """A mesh that contradicts itself, or a mesh and a model that do not fit."""


class SpecError(UserError):
    """A partition spec that cannot apply to its array."""


class LayoutError(UserError):
    """State that cannot be laid out in pages as asked."""


class ModelError(UserError):
    """A model that breaks the layer contract."""


class DataError(UserError):
    """Data that is missing, empty, unreadable or too short."""


class ConfigError(UserError):
    """A setting of the wrong type, range or combination."""


class PlanError(UserError):
    """A plan (micro-batches, stages, actions) that cannot exist as asked."""


class CheckpointError(UserError):
    """A durable checkpoint that is unfinished, torn or corrupted, or a run that has no good one."""


class ControlError(UserError):
    """A request (`ctl`) that a run refuses, or a run that takes no requests."""


class RunError(RuntimeError):
    """A started run that cannot go on. The message is one screen for the user; details are in the run directory.

    Attributes:
        run_dir: the run's directory, in what `elaswave_spmd.train` raises; None: the run has left none.
    """

    run_dir: Path | None = None

    @property
    def headline(self) -> str:
        """The message in one line, for logs."""
        return next(iter(str(self).splitlines()), "")


class FilesError(RunError):
    """The run's files cannot be written: the disk is full, or the directory was removed.

    Attributes:
        why: the reason in the words of the operating system.
    """

    def __init__(self, path: object, error: OSError) -> None:
        self.why = error.strerror or str(error)
        super().__init__(f"the run's files cannot be written: {path} ({self.why})")


class LinksError(RunError):
    """A process cannot receive any more: mostly its machine lacks something, such as memory."""


class StoppedBySignal(RunError):  # noqa: N818  (asked for, not an error)
    """A user or a batch system asked the run to end. What became of its state is said."""


class RunInterrupted(KeyboardInterrupt):
    """`elaswave_spmd.train` was asked to end: by Ctrl-C, a notebook's stop button, SIGTERM or SIGHUP.

    Attributes:
        run_dir: the run's directory, with its state; None: no step was done, and nothing is left.
    """

    def __init__(self, message: str, run_dir: Path | None) -> None:
        self.run_dir = run_dir
        super().__init__(message)


class WorkerError(RunError):
    """A worker ended by itself.

    `rank` is its id, `report` its whole traceback, or its exit status, `state` what became of the state of its run. The
    message shows the frames of the user's code only, if there are any.
    """

    def __init__(self, rank: int, report: str, state: str = "") -> None:
        self.rank = rank
        self.report = report
        super().__init__("\n".join([f"worker {rank} failed:", shorten_report(report), *([state] if state else [])]))

    @property
    def headline(self) -> str:
        """The worker's rank, and the exception itself without its traceback."""
        return f"worker {self.rank} failed: {exception_line(self.report)}"


def exception_line(report: str) -> str:
    """The line of a worker's report that names the exception: "RuntimeError: mat1 and mat2 shapes differ".

    In a traceback it is the first line after the frames, which are indented. The message's other lines and the notes of
    the exception, such as the layer that raised it, come after it. Without a traceback it is the last line.
    """
    lines = [line for line in report.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    after_frames = (line for line in lines[starts[-1] + 1 :] if not line.startswith(" ")) if starts else iter(())
    return next(after_frames, lines[-1] if lines else "no report").strip()


def headline_of(error: BaseException) -> str:
    """Why a run ended, in one line: `interrupted` and by what, a RunError's headline, otherwise type and first line."""
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted"
    if isinstance(error, RunError):
        return error.headline
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".removesuffix(": ")


def closest(word: str, words: Iterable[str]) -> str:
    """The one of `words` that is most like `word`, or "" if none is: what a misspelt name may stand for."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)), "")


def add_note(error: Exception, note: str) -> None:
    """Add a line to an exception, which its report ends with. As its method of this name, which Python 3.10 lacks."""
    vars(error).setdefault("__notes__", []).append(note)


def exit_as_error(error: SystemExit, note: str) -> RuntimeError:
    """The error that stands for a sys.exit() of the user's code: threads and workers tell of it as of any other."""
    made = RuntimeError(f"sys.exit({error.code!r}) was called").with_traceback(error.__traceback__)
    add_note(made, note)
    return made


def place_in_user_code(error: BaseException) -> str | None:
    """The innermost line of the user's own code that an exception came through, or None if it came through none.

    For example "my_file.py:12, in __init__: self.out = nn.Linear(d_model, 0 / 0)".
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    if not frames:
        return None
    last = frames[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}" + (f": {last.line}" if last.line else "")


def _is_user_error(line: str) -> bool:
    """True for the line of a traceback that names an error about bad input."""
    found = re.match(rf"{re.escape(__name__)}\.(\w+): ", line)
    kind = globals().get(found[1]) if found else None
    return isinstance(kind, type) and issubclass(kind, UserError)


def shorten_report(report: str) -> str:
    """A worker's traceback with the user's frames and at most two frames around them.

    Of this package and of libraries, the frame that called the user's code stays, and the one that raised the
    exception. Of a report without a frame of the user's the message stays if it is about bad input: it says where. Any
    other one is about a mistake of ours, so all of it stays.
    """
    lines = report.splitlines()
    frames = [(number, found[1]) for number, line in enumerate(lines) if (found := _FRAME.match(line))]
    users = [position for position, (_, path) in enumerate(frames) if is_user_code(path)]
    if not users:
        told = next((number for number, line in enumerate(lines) if _is_user_error(line)), None)
        return report if told is None else "\n".join([*lines[told:], _left_out(len(frames))])
    kept = {*users, max(users[0] - 1, 0), len(frames) - 1}
    shown, left_out, position = [], 0, -1
    for number, line in enumerate(lines):
        if position + 1 < len(frames) and number == frames[position + 1][0]:
            position += 1
            left_out += position not in kept
        if not line.startswith("  ") or position < 0 or position in kept:
            shown.append(line)
    if left_out:
        shown.append(_left_out(left_out))
    return "\n".join(shown)


def _left_out(frames: int) -> str:
    return f"({frames} frames of elaswave_spmd and of libraries are left out; events.jsonl has all of them)"


def is_user_code(path: str) -> bool:
    """True if a source file belongs neither to this package nor to Python or an installed library."""
    return not (path.startswith((_PACKAGE, "<", *_LIBRARIES)) or "site-packages" in path)
