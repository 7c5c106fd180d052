"""`train --supervise`: a small process that starts a run's controller, and starts it again when it dies.

The next controller adopts the workers that still live (docs/protocol.md, A1 to A12). If there are none, it goes on from
the newest checkpoint. A controller has *died* if it was ended by a signal, or with an exit code that the command line
never uses. With any other exit code it has ended on purpose, and the supervisor ends with the same code.

The controller is in a session of its own, so that signals of the terminal reach only the supervisor, which passes each
of them on once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elaswave_spmd.conf.resume import words_resuming
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.regular_files import read_regular

VARIABLE = "ELASWAVE_SPMD_SUPERVISOR"
"""The environment variable with the descriptor on which a supervised command writes the directory of its run."""
ADOPT_S = 120
"""`timeouts.adopt` in seconds, for a supervised command that does not set it."""

_STOPPED_S = 10.0  # how long a controller may be stopped (SIGSTOP) before another one takes its place
_POLL_S = 0.05
_REST_S = 5.0  # how long to wait, after the last controller has ended, for processes of earlier ones to end
_PR_SET_CHILD_SUBREAPER = 36
_OWN_EXIT_CODES = (0, 1, 2, *(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)))
_SUMMARY, _METRICS, _EPOCHS = "summary.json", "metrics.jsonl", "epochs.jsonl"


@dataclass(frozen=True)
class Deaths:
    """The deaths of controllers since a step was committed last.

    Args:
        steps: the number of steps that were committed by the last death.
        in_a_row: the number of deaths since these steps were committed, without another step between them.
    """

    steps: int = 0
    in_a_row: int = 0

    MOST = 3
    """After this number of deaths in a row, the next controller would probably die as well."""

    def one_more(self, steps: int) -> Deaths:
        """The value after one more controller has died, when `steps` steps were committed."""
        return replace(self, in_a_row=self.in_a_row + 1) if steps <= self.steps else Deaths(steps, 1)

    @property
    def are_too_many(self) -> bool:
        """True if no other controller should be started."""
        return self.in_a_row >= self.MOST


@dataclass(frozen=True)
class Ended:
    """The end of a controller's process: an exit code or, below 0, a signal."""

    code: int

    @property
    def is_death(self) -> bool:
        """True if the controller did not end on purpose."""
        return self.code not in _OWN_EXIT_CODES

    def __str__(self) -> str:
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-self.code).name}"
        return f"was ended by signal {-self.code}"


def supervised_by(environment: MutableMapping[str, str]) -> int | None:
    """The descriptor to write to if a supervisor has started this process, else None. Removes it from `environment`."""
    number = environment.pop(VARIABLE, None)
    return int(number) if number is not None and number.isdigit() else None


def with_adoption(words: Sequence[str]) -> list[str]:
    """The arguments of a supervised command, with `timeouts.adopt` added unless they set it.

    By this setting its workers wait for the next controller.
    """
    named = any(word.lstrip("+").startswith("timeouts.adopt=") for word in words)
    return [*words, *([] if named else [f"timeouts.adopt={ADOPT_S}"])]


def end_orphans(run_dir: Path) -> None:
    """End the workers of a run whose result is written. They still wait for another controller, which will not come."""
    from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient  # imported only if needed

    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        lines = (json.loads(line) for line in read_regular(run_dir / _EPOCHS).splitlines() if b'"scratch"' in line)
        for scratch in [line["scratch"] for line in lines if "scratch" in line][-1:]:
            if (taken := ForkServerClient.adopt(scratch, 0.0)) is not None:
                taken[0].stop(grace_s=0.0)


def supervise(words: Sequence[str]) -> int:
    """Run the command of this process with a supervisor.

    Args:
        words: the arguments of the command, without the flag.

    Returns:
        The exit code of the last controller. If it died and no other one was started: 128 + the signal that had asked
        the run to end, or 1.

    Raises:
        ConfigError: this process was not started by a command line, so its command cannot be started again.
    """
    whole, typed = sys.orig_argv, sys.argv[1:]
    if whole[len(whole) - len(typed) :] != typed:
        raise ConfigError(
            "--supervise is given to a process that no command line has started",
            rule="a supervisor starts the command of its own process again",
            where="--supervise",
            fix="python train.py --supervise ..., or python -m elaswave_spmd train --supervise ...",
        )
    return _Supervisor([sys.executable, *whole[1 : len(whole) - len(typed)]], list(words)).run()


class _Supervisor:
    """One supervisor: it starts one controller after another.

    Args:
        program: the command that is started, without the arguments of the run.
        words: the arguments of the run.
    """

    def __init__(self, program: Sequence[str], words: list[str]) -> None:
        self._program = program
        self._words = words
        self._signals: deque[int] = deque()  # filled by handlers
        self._is_asked = False  # a signal has asked the run to end
        self._asked_by = int(signal.SIGTERM)  # the number of this signal
        self._is_last = False  # the controller that was asked to end has died; the next one only saves the state
        self._run_dir = ""

    def run(self) -> int:
        """Run until the run has ended, or its controllers die without committing steps. Returns the exit code."""
        # The fork server of a controller that has died becomes a child of this process, and is reaped here.
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT)
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda came, _: self._signals.append(came))
        deaths, words = Deaths(), self._words
        while True:
            ended = self._one_life(words)
            if not ended.is_death:
                self._wait_for_the_rest()
                return ended.code
            if self._run_dir and (Path(self._run_dir) / _SUMMARY).exists():
                end_orphans(Path(self._run_dir))
                self._wait_for_the_rest()
                return 0  # the controller died after the result was written
            if why_not := self._why_not_again(deaths := deaths.one_more(self._steps())):
                self._say(f"the controller {ended}; {why_not}")
                return 128 + self._asked_by if self._is_asked else 1
            to_save = ", to save the state and end" if self._is_asked else ""
            self._say(f"the controller {ended}; another one takes its place{to_save}")
            if self._is_asked:
                self._is_last = True
                self._signals.append(self._asked_by)
            words = words_resuming(self._words, self._run_dir)

    def _why_not_again(self, deaths: Deaths) -> str:
        """Why no other controller is started, in words; empty if one is."""
        waits = f"; workers that still live save their state and end, after timeouts.adopt ({ADOPT_S} s by default)"
        if self._is_last:
            return f"it had been asked to end, and is not started again{waits}"
        if not self._run_dir:
            return "its run had not begun yet, so there is nothing to go on with"
        if deaths.are_too_many:
            return (
                f"that was death {deaths.in_a_row} in a row without a step in between (step {deaths.steps}), and it is "
                f"not started again{waits}. Resume the run with train.resume={self._run_dir}"
            )
        return ""

    def _one_life(self, words: Sequence[str]) -> Ended:
        """One controller, from its start to its end."""
        read, write = os.pipe()
        environment = {**os.environ, VARIABLE: str(write)}
        process = subprocess.Popen([*self._program, *words], env=environment, pass_fds=[write], start_new_session=True)
        os.close(write)
        os.set_blocking(read, False)
        try:
            return self._wait(process, read)
        finally:
            os.close(read)

    def _wait(self, process: subprocess.Popen[bytes], read: int) -> Ended:
        stopped_at: float | None = None
        written = b""  # lines with the run's directory
        while True:
            with contextlib.suppress(BlockingIOError):
                written += os.read(read, 65536)
            # A controller that was started only to save gets the signal once it has begun, which it shows by writing
            # its directory. Before that the signal would kill it. A user's second signal is passed on at once.
            while self._signals and (not self._is_last or written or len(self._signals) > 1):
                self._pass_on(self._signals.popleft(), process.pid)
            pid, status = self._next_change()
            if pid == process.pid and os.WIFSTOPPED(status):
                stopped_at = time.monotonic()
            elif pid == process.pid and os.WIFCONTINUED(status):
                stopped_at = None
            elif pid == process.pid:
                with contextlib.suppress(BlockingIOError):
                    written += os.read(read, 65536)
                *lines, _ = written.decode("utf-8", "surrogateescape").split("\n")
                self._run_dir = lines[-1] if lines else self._run_dir
                process.returncode = os.waitstatus_to_exitcode(status)  # reaped here
                return Ended(process.returncode)
            elif not pid:
                if stopped_at is not None and time.monotonic() > stopped_at + _STOPPED_S:
                    self._say(
                        f"the controller (process {process.pid}) has stood still for {_STOPPED_S:g} s: it is killed"
                    )
                    # It must be dead before the next controller starts: it holds the lock of the run, and could still
                    # write its files.
                    os.kill(process.pid, signal.SIGKILL)
                    stopped_at = None
                time.sleep(_POLL_S)

    def _next_change(self) -> tuple[int, int]:
        """(pid, status) of a child that has ended, was stopped or was continued; (0, 0) if there is none."""
        try:
            return os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        except ChildProcessError:
            return 0, 0

    def _wait_for_the_rest(self) -> None:
        """Wait until no processes of dead controllers are left. This mostly takes milliseconds, and has a limit."""
        deadline = time.monotonic() + _REST_S
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if not os.waitpid(-1, os.WNOHANG)[0]:
                    time.sleep(_POLL_S)

    def _pass_on(self, number: int, pid: int) -> None:
        """Pass a signal on to the controller. Ctrl-Z stops the controller's whole group, and then this process."""
        if number == signal.SIGTSTP:
            self._signal_group(pid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._signal_group(pid, signal.SIGCONT)
        elif number != signal.SIGCONT:
            self._is_asked, self._asked_by = True, number
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @staticmethod
    def _signal_group(pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)

    def _steps(self) -> int:
        """The number of steps that the run has committed."""
        try:
            return read_regular(Path(self._run_dir) / _METRICS).count(b"\n") if self._run_dir else 0
        except OSError:
            return 0

    @staticmethod
    def _say(text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is closed
            print(f"supervisor: {text}", file=sys.stderr, flush=True)
