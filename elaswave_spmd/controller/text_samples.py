"""Text that a run's model generates while it is trained: `generate.prompt`.

Text is generated from the run's checkpoints by a process of the controller at the lowest priority, and at its end, from
the weights that it has written, by one at the usual priority: nobody trains any more, and the end waits for it. Workers
take no part in it, and nothing else waits for a text.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from elaswave_spmd.conf.schema import GenerateSettings
from elaswave_spmd.forks import call_in_forks, drop_input
from elaswave_spmd.run_dir.checkpoint_shard import checkpoint_path
from elaswave_spmd.run_dir.display import RunInfo
from elaswave_spmd.run_dir.listener import GENERATED, NOT_GENERATED, News
from elaswave_spmd.run_dir.metrics import MetricsLine
from elaswave_spmd.runtime.processes.import_path import interpreter_environment
from elaswave_spmd.weights.generate_process import AT_USUAL_PRIORITY

_PROCESS = (sys.executable, "-m", "elaswave_spmd.weights.generate_process")
_POLL_S = 0.02


@dataclass(frozen=True)
class _Request:
    """Weights from which text is to be generated: those after a step."""

    step: int
    path: Path
    is_last: bool = False


class TextSampler:
    """Has a text generated from each checkpoint of a run (`run_dir.listener.RunListener`).

    One for a command, however often its run begins again. All methods are for the controller's thread. A thread of this
    object's own waits for the process that generates, which is started for the first text. While one text is being
    made only the newest checkpoint waits.

    Args:
        command: that starts the process.
    """

    def __init__(self, settings: GenerateSettings, command: Sequence[str] = _PROCESS) -> None:
        self._settings = settings
        self._command = command
        self._run_dir: Path | None = None
        self._asked = 0  # the newest step whose weights were asked for
        self._changed = threading.Condition()  # guards all that follows; held for moments only
        self._next: _Request | None = None
        self._making: _Request | None = None
        self._news: deque[News] = deque()
        self._left_out: list[int] = []  # steps whose checkpoint was no longer the newest when its turn came
        self._void: _Request | None = None  # its text is not told, as the run has gone back
        self._is_over = False
        self._is_cut_short = False
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] | None = None  # what the process says when it fails
        self._thread: threading.Thread | None = None
        call_in_forks(self._let_go)

    # ---- what a RunListener hears

    def started(self, info: RunInfo) -> None:
        """The run begins to train, or begins again."""
        self._run_dir = Path(info.run_dir)

    def step(self, line: MetricsLine) -> None:
        """A step is committed."""

    def event(self, kind: str, at: float, text: str, fields: Mapping[str, object]) -> None:
        """Something has happened. Of a checkpoint that is on the disk a text is made."""
        if kind == "checkpoint" and self._run_dir is not None:
            step = fields["step"]
            assert isinstance(step, int), fields
            self._ask(_Request(step, checkpoint_path(self._run_dir, step)))

    def validation(self, step: int, loss: float, num_microbatches: int, metrics: Mapping[str, float]) -> None:
        """The loss of a validation is known."""

    def finished(self, summary: Mapping[str, object]) -> None:
        """The run has finished, and its weights are written."""
        if self._run_dir is not None:
            step = summary["steps"]
            assert isinstance(step, int), summary
            self._ask(_Request(step, self._run_dir, is_last=True))

    def pop_news(self) -> Sequence[News]:
        """The texts since the last call, as events."""
        return [self._news.popleft() for _ in range(len(self._news))]

    # ---- the order of a run's lives

    def given_up(self, step: int) -> None:
        """The run goes back: texts of later steps are not told."""
        with self._changed:
            self._asked = min(self._asked, step)
            if self._making is not None and self._making.step > step:
                self._void = self._making
            if self._next is not None and self._next.step > step:
                self._next = None
            self._left_out = [left_out for left_out in self._left_out if left_out <= step]

    def wait(self, until: float) -> bool:
        """Wait for the texts that were asked for. Returns False if `until` (of `time.monotonic`) came first."""
        # In short turns, so that the handler of a signal can end the waiting.
        while time.monotonic() < until and not self._is_cut_short:
            with self._changed:
                if self._next is None and self._making is None:
                    return True
                self._changed.wait(_POLL_S)
        return False

    def stop_waiting(self, _: int = 0) -> None:
        """Do not wait for texts any more. May be called by the handler of a signal."""
        self._is_cut_short = True

    def close(self) -> None:
        """End the process. What is not made by then is told as such; closing again is allowed."""
        with self._changed:
            for request in (self._making, self._next):
                if request is not None and request is not self._void:
                    self._tell_not(request.step, "the run has ended before it was made")
            self._is_over, self._next, self._making = True, None, None
            self._changed.notify_all()
            process = self._process
        if process is not None:
            process.kill()
        if self._thread is not None:
            self._thread.join()

    # ---- requests

    def _ask(self, request: _Request) -> None:
        with self._changed:
            if self._is_over or request.step <= self._asked:
                return
            self._asked = request.step
            if self._next is not None:
                self._left_out.append(self._next.step)
            self._next = request
            self._changed.notify_all()
        if self._thread is None:
            # A daemon: it ends with its process, and that with this one.
            self._thread = threading.Thread(target=self._make_all, name="generate", daemon=True)
            self._thread.start()

    def _tell_not(self, step: int, reason: str) -> None:
        message = f"no text of step {step}: {reason}"
        fields = {"event": NOT_GENERATED, "step": step, "reason": reason, **self._pop_left_out(), "message": message}
        self._news.append(fields)

    def _tell(self, step: int, text: str, seconds: float) -> None:
        settings = self._settings
        fields = {
            "event": GENERATED,
            "step": step,
            "prompt": settings.prompt,
            "text": text,
            "temperature": settings.temperature,
            "seed": settings.seed,
            "seconds": seconds,
            **self._pop_left_out(),
            "message": f"step {step}: {in_one_line(text)}",
        }
        self._news.append(fields)

    def _pop_left_out(self) -> dict[str, list[int]]:
        left_out, self._left_out = self._left_out, []
        return {"left_out": left_out} if left_out else {}

    # ---- the thread

    def _make_all(self) -> None:
        try:
            while True:
                with self._changed:
                    while self._next is None and not self._is_over:
                        self._changed.wait()
                    if self._next is None:
                        return
                    request, self._next = self._next, None
                    self._making = request
                answer = self._answer_of(request)
                with self._changed:
                    self._making = None
                    self._changed.notify_all()
                    if self._is_over or request is self._void:
                        continue
                    if "text" in answer:
                        self._tell(request.step, answer["text"], answer["seconds"])
                    elif answer.get("gone"):
                        self._tell_not(request.step, "its checkpoint was removed, since there are newer ones")
                    else:
                        self._tell_not(request.step, answer["error"])
        finally:
            self._reap()

    def _answer_of(self, request: _Request) -> dict[str, Any]:
        """The answer of the process. It is started, if there is none."""
        try:
            if request.is_last:
                self._reap()  # it would have to wait until other programs leave it a processor
            process = self._started(request)
            assert process.stdin is not None and process.stdout is not None
            settings = self._settings
            asked = {"path": str(request.path), "prompt": settings.prompt, "tokens": settings.tokens}
            asked |= {"temperature": settings.temperature, "seed": settings.seed}
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError as error:
            line = ""
            reason = error.strerror or str(error)
        else:
            reason = ""
        if line.endswith("\n"):
            try:
                return json.loads(line)
            except ValueError:  # it was written by a library
                return {"error": f"the process that generates text has answered {line[:80]!r}"}
        said = self._reap()
        return {"error": f"the process that generates text has ended ({reason or said or 'it was killed'})"}

    def _started(self, request: _Request) -> subprocess.Popen[str]:
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
            started = subprocess.Popen(
                [*self._command, *([AT_USUAL_PRIORITY] if request.is_last else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
                env=interpreter_environment({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}),
                start_new_session=True,  # Ctrl-C is for the run, which ends this process
            )
            with self._changed:
                self._process = started
                if self._is_over:  # `close` came in between
                    started.kill()
        return self._process

    def _let_go(self) -> None:
        """Close the process's input in one that is forked from this one: its end tells that this one has ended."""
        drop_input(self._process)  # without the lock, which the thread may have held at the fork

    def _reap(self) -> str:
        """Wait for the end of the process, which comes. Returns the last line that it has said."""
        with self._changed:
            process, self._process = self._process, None
        errors, self._errors = self._errors, None
        if process is None or errors is None:
            return ""
        process.kill()
        process.communicate()
        with errors:
            errors.seek(0)
            lines = errors.read().decode("utf-8", "replace").splitlines()
        return lines[-1].strip() if lines else ""


def in_one_line(text: str) -> str:
    """A text as a line of a terminal: white space is one blank, and what cannot be printed is a dot."""
    return "".join(character if character.isprintable() else "·" for character in " ".join(text.split()))
