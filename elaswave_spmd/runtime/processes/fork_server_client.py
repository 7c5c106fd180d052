"""The controller's end of the fork server, the process that makes, signals, reaps and reports the workers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from elaswave_spmd.by_value import ByValue
from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.forks import call_in_forks
from elaswave_spmd.ready import is_any_ready
from elaswave_spmd.runtime.processes import fork_server
from elaswave_spmd.runtime.processes.adoption import AdoptedProcess, Orphans, ask_for_orphans
from elaswave_spmd.runtime.processes.child import GROUP_SIGNALS
from elaswave_spmd.runtime.processes.fork_server import num_threads
from elaswave_spmd.runtime.processes.forked_process import ForkedProcess, fork_process
from elaswave_spmd.runtime.processes.import_path import interpreter_environment

# Without the third one, every worker would import it in its first backward.
PRELOAD = ("numpy", "torch", "torch.fx.experimental.symbolic_shapes", "zmq")
"""Modules that the fork server imports by default."""

Method = Literal["fork", "spawn"]
_READY_TIMEOUT_S = 300.0
_ORDER_TIMEOUT_S = 60.0
_LOOK_S = 0.1  # between two looks at whether an answer may still be waited for


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker's process has ended and is reaped, with an exit `code` or by a `signal`; the other one is None."""

    rank: int
    pid: int
    code: int | None
    signal: int | None

    def __str__(self) -> str:
        if self.signal is None:
            return f"worker {self.rank} (pid {self.pid}) ended with exit code {self.code}"
        try:
            name = signal.Signals(self.signal).name
        except ValueError:
            name = "unknown signal"
        return f"worker {self.rank} (pid {self.pid}) was ended by signal {self.signal} ({name})"


class NoAnswerError(RunError):
    """The fork server did not answer in time: it hangs."""


class NotStartedError(RunError):
    """A worker could not be started, for a lack of processes, memory, descriptors or disk. All others go on."""


@dataclass(frozen=True)
class ForkServerSpec:
    """How a fork server and its workers are made, and when they end by themselves.

    Args:
        preload: modules that the fork server imports, so that workers need not. With "spawn" nothing is preloaded.
        method: "fork" (milliseconds per worker), or "spawn" (a fresh interpreter for each worker, for devices whose
            processes must not be forked).
        env: environment variables to add for the fork server and all workers.
        scratch: directories (of sockets) that are deleted when the last worker has ended.
        orphan_grace_s: how many seconds workers may go on after the controller has died, before they are killed.
        adopt_s: how many of these seconds workers wait for another controller, which takes them over with
            `ForkServerClient.adopt`; None if they do not wait for one.
        here: True if this process has only imported modules so far. Then the fork server may be a fork of it, which
            need not import them again. It is a new interpreter nevertheless if this process has threads, and with `env`
            or "spawn".
        given: the classes, functions and objects that all workers get by value (elaswave_spmd/by_value.py), through a
            descriptor that the fork server inherits; None if there are none.
        streams: descriptor (1 for standard output, 2 for standard error) -> the descriptor that takes its place in the
            fork server and all workers. A stream that is not listed is the one of this process.

    Raises:
        ConfigError: the method is unknown.
    """

    preload: Sequence[str] = PRELOAD
    method: Method = "fork"
    env: Mapping[str, str] = field(default_factory=dict)
    scratch: Sequence[str] = ()
    orphan_grace_s: float = 10.0
    adopt_s: float | None = None
    here: bool = False
    given: ByValue | None = None
    streams: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method not in ("fork", "spawn"):
            raise ConfigError(f"method={self.method} is no way of making workers", where="method", exists="fork, spawn")


class ForkServerClient:
    """Makes worker processes. Created by `start` or `adopt`. Not thread-safe; `fileno` and `poll` fit a select loop.

    Invariant: no process outlives the run, except for daemons that a user's code has started. If the controller is
    killed, the life pipe closes, and workers end by themselves within `orphan_grace_s` or are killed. If the fork
    server is killed, the kernel kills its children, but not the processes that a user's code has started in them.

    Args:
        process: the process of the fork server.
        orders: the socket on which it takes orders and answers.
        notices: the read end of the pipe on which it reports workers that have ended.
        life: the write end of the life pipe, by whose closing workers notice that this process has ended.
        scratch: directories that are removed when no worker is left.
        orphan_grace_s: the seconds that workers have to end by themselves after this process has ended.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes] | ForkedProcess | AdoptedProcess,
        orders: socket.socket,
        notices: int,
        life: int,
        scratch: Sequence[str],
        orphan_grace_s: float,
    ) -> None:
        self._process = process
        self._orders = orders
        self._notices = notices
        self._life = life
        self._scratch = scratch
        self._orphan_grace_s = orphan_grace_s
        self._num_orders = 0
        self._num_answered = 0  # the newest order that was answered
        self._num_late = 0  # the newest order whose answer did not come in time
        self._unsent = b""  # the rest of orders that the fork server has not read yet
        self._answer_buffer = b""
        self._notice_buffer = b""
        self._ready = False
        self._stopped = False
        self._is_releasing = False
        self._wait_until = math.inf
        # A process that a user's code forks from this one must close these descriptors. If it kept them open, workers
        # would not notice the end of this process.
        call_in_forks(self.give_back)
        self.num_threads = 0  # of the fork server; known once it is ready

    @classmethod
    def start(cls, target: str, spec: ForkServerSpec) -> ForkServerClient:
        """Launch the fork server and return at once, while it imports the modules that workers need.

        Args:
            target: "module:function", called in each worker with its spec plus `rank` and `life_fd`.
            spec: how the fork server and its workers are made.
        """
        ours, theirs = socket.socketpair()
        notices, notices_theirs = os.pipe()
        life_theirs, life = os.pipe()
        lent = None if spec.given is None else spec.given.lend()
        fds = [theirs.fileno(), notices_theirs, life_theirs, *(() if lent is None else (lent,))]
        may_fork = spec.here and spec.method == "fork" and not spec.env and num_threads() == 1
        process = _start_process(fds, spec, may_fork=may_fork)
        # Only the fork server may keep these descriptors open, so that each side notices when the other one ends.
        theirs.close()
        for fd in fds[1:]:
            os.close(fd)
        os.set_blocking(notices, False)
        folders = [str(Path(path).absolute()) for path in spec.scratch]
        client = cls(process, ours, notices, life, folders, spec.orphan_grace_s)
        setup = {
            "sys_path": [path or os.getcwd() for path in sys.path],
            "preload": list(spec.preload) if spec.method == "fork" else [],
            "method": spec.method,
            "target": target,
            "life_fd": life_theirs,
            "by_value": lent,
            "orphan_grace_s": spec.orphan_grace_s,
            "scratch": client._scratch,
            "adopt_s": spec.adopt_s,
            "captured": [*spec.streams],
        }
        client._send(setup, _ORDER_TIMEOUT_S, time.monotonic() + _ORDER_TIMEOUT_S)
        return client

    @classmethod
    def adopt(cls, scratch: str, orphan_grace_s: float) -> tuple[ForkServerClient, Orphans] | None:
        """Take over the fork server of a controller that has died, with its workers; None if there is none.

        Args:
            scratch: the directory of its sockets.
            orphan_grace_s: the value that it was started with.
        """
        notices, notices_theirs = os.pipe()
        life_theirs, life = os.pipe()
        found = ask_for_orphans(scratch, [notices_theirs, life_theirs])
        os.close(notices_theirs)
        os.close(life_theirs)
        if found is None:
            os.close(notices)
            os.close(life)
            return None
        orders, process, orphans = found
        os.set_blocking(notices, False)
        client = cls(process, orders, notices, life, [scratch], orphan_grace_s)
        client._ready = True
        return client, orphans

    @property
    def pid(self) -> int:
        """Process id of the fork server itself."""
        return self._process.pid

    def wait_at_most_until(self, when: float) -> None:
        """Set a deadline after which no answer is waited for: orders raise, and `stop` kills at once.

        A signal handler may call this, even while another call waits for an answer.

        Args:
            when: the deadline, in seconds of time.monotonic.
        """
        self._wait_until = min(self._wait_until, when)

    def ready(self, timeout_s: float = _READY_TIMEOUT_S) -> None:
        """Wait until the fork server has imported everything.

        Raises:
            RunError: an import failed (with its traceback), or the server was stopped or has died.
            ConfigError: the objects that the run gets by value cannot be unpickled there.
        """
        if self._stopped:
            raise RunError("the fork server was stopped")
        if self._ready:
            return
        answer = self._receive(timeout_s, time.monotonic() + timeout_s)
        if "error" in answer:
            self._abandon()
            raise RunError(answer["error"])
        if "refused" in answer:
            self._abandon()
            raise ConfigError(**answer["refused"])
        self.num_threads = int(answer["threads"])
        self._ready = True

    def spawn(self, rank: int, spec: Mapping[str, Any], limit_s: float | None = None) -> int:
        """Make the worker `rank` and return its process id; waits until the fork server is ready.

        Args:
            spec: plain JSON data for the worker's main function.
            limit_s: the seconds after which the worker counts as not started; should it start later, it is killed. None
                to wait as long as for any order, after which it is a RunError that the fork server does not answer.

        Raises:
            NotStartedError: the system has no process, memory, descriptor or disk left, or `limit_s` is over.
        """
        self.ready()
        self.keep_up()
        # If an earlier order is still not answered, do not wait for the fork server another time.
        if limit_s is not None and self._num_answered < self._num_late:
            raise NotStartedError(f"the fork server (pid {self.pid}) stands still")
        try:
            answer = self._request({"spawn": rank, "spec": dict(spec)}, limit_s)
        except NoAnswerError as error:
            if limit_s is None or time.monotonic() >= self._wait_until:
                raise
            self._num_late = self._num_orders
            self.order_signal(rank, signal.SIGKILL)
            raise NotStartedError(str(error)) from error
        if "not_started" in answer:
            raise NotStartedError(answer["not_started"])
        return int(answer["pid"])

    def signal(self, rank: int, number: int, limit_s: float | None = None) -> bool:
        """Send a signal to worker `rank`; False if it has ended already.

        Args:
            rank: the worker.
            number: the number of the signal.
            limit_s: the seconds to wait for the answer; None for `_ORDER_TIMEOUT_S`.
        """
        self.ready()
        return bool(self._request({"signal": int(number), "rank": rank}, limit_s)["sent"])

    def order_signal(self, rank: int, number: int) -> None:
        """Order a signal to worker `rank` without waiting for an answer, for the case that the fork server hangs.

        The order has no effect if the worker has ended by the time that it is carried out.
        """
        self.ready()
        self._order({"signal": int(number), "rank": rank})

    def keep_up(self) -> None:
        """Send the rest of orders that the fork server has not read yet, and read answers that nobody waits for.

        Call it regularly; it never waits. Without it the fork server could wait for ever for the rest of an order, or
        for room for its answers.
        """
        if self._stopped or not self._ready or (not self._unsent and self._num_answered == self._num_orders):
            return
        with contextlib.suppress(OSError):  # there is no answer yet, or the fork server has died, which `poll` reports
            self._send_some()
            self._answer_buffer += self._orders.recv(65536, socket.MSG_DONTWAIT)
        while b"\n" in self._answer_buffer:
            self._next_answer()

    def set_orphan_grace(self, seconds: float) -> None:
        """Set `orphan_grace_s`, if it was not known at `start`. Waits until the fork server is ready."""
        self.ready()
        self._request({"orphan_grace_s": seconds})
        self._orphan_grace_s = seconds

    def hold(self, lock: Path) -> None:
        """Have the fork server share the lock of a file, with all workers that it forks. Waits until ready."""
        self.ready()
        self._request({"hold": str(lock)})

    def settle(self) -> None:
        """Tell the fork server that all ends of workers before the adoption are handled. Does not wait.

        From now on it would not report them again to a further controller.
        """
        self._order({"settled": True})

    def give_back(self) -> None:
        """Close all descriptors as if this process had died, without waiting. Workers wait for another controller."""
        if not self._stopped:
            self._close_our_ends()
            os.close(self._notices)

    def fileno(self) -> int:
        """The descriptor that is readable when `poll` has something to return."""
        return self._notices

    def poll(self) -> list[Exited]:
        """The workers that have ended since the last call; never blocks.

        Raises:
            RunError: the fork server itself has died.
        """
        exits, ended = self._read_exits()
        if ended and not exits:
            raise self._died()
        return exits

    def _read_exits(self) -> tuple[list[Exited], bool]:
        """The exits that the fork server has reported, and True if it has closed its end."""
        ended = False
        try:
            while data := os.read(self._notices, 65536):
                self._notice_buffer += data
            ended = True
        except BlockingIOError:
            pass
        *lines, self._notice_buffer = self._notice_buffer.split(b"\n")
        notices = map(json.loads, lines)
        return [Exited(it["exited"], it["pid"], it["code"], it["signal"]) for it in notices], ended

    def stop(self, grace_s: float = 2.0) -> list[Exited]:
        """End all workers (SIGTERM, after `grace_s` seconds SIGKILL) and the fork server; idempotent.

        Returns the exits that `poll` has not reported yet. Afterwards no process is left.
        """
        if self._stopped:
            return []
        if not self._ready:
            self._abandon()  # still importing: it has no children
            return []
        try:
            self._request({"stop": grace_s}, grace_s + _ORDER_TIMEOUT_S)
            self._process.wait(max(0.0, min(_ORDER_TIMEOUT_S, self._wait_until - time.monotonic())))
        except (RunError, subprocess.TimeoutExpired):
            pass  # it has died, or it hangs and is killed below, and the kernel kills its children with it
        exits, _ = self._read_exits()
        self._abandon()
        return exits

    def kill(self) -> list[Exited]:
        """Kill the fork server, and thereby all workers, without an order and without waiting; idempotent.

        On Linux the kernel kills the children of a fork server that dies; elsewhere they see the end of the life pipe.

        Returns the exits that `poll` has not reported yet. Workers that end by this call are not among them.
        """
        if self._stopped:
            self.end_release()
            return []
        exits, _ = self._read_exits()
        self._abandon()
        return exits

    def release(self) -> None:
        """End as if this process had died; idempotent. Returns when no process is left.

        Workers see the end of the life pipe and have `orphan_grace_s` to end by themselves.
        """
        while self.releasing(self._orphan_grace_s + _ORDER_TIMEOUT_S):
            self.end_release()  # it hangs: killed now, and its children with it

    def releasing(self, seconds: float) -> bool:
        """Do what `release` does for at most `seconds`. Returns True if processes are left; then call it again."""
        if not self._stopped:
            self._is_releasing = True
            self._close_our_ends()
        if not self._is_releasing:
            return False
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        self.end_release()
        return False

    def end_release(self) -> None:
        """Kill the processes that are left after `releasing`."""
        if self._is_releasing:
            self._is_releasing = False
            self._kill_and_clean_up()

    def __enter__(self) -> ForkServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _abandon(self) -> None:
        """Kill the fork server if it still runs, and close our ends."""
        self._close_our_ends()
        self._kill_and_clean_up()

    def _close_our_ends(self) -> None:
        self._stopped = True
        self._orders.close()
        os.close(self._life)

    def _kill_and_clean_up(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._notices)
        for path in self._scratch:
            shutil.rmtree(path, ignore_errors=True)

    def _died(self) -> RunError:
        """The error for a fork server that has ended by itself."""
        code = self._process.wait()
        how = f" with exit code {code}" if code >= 0 else f" by signal {-code}"
        if isinstance(self._process, AdoptedProcess):
            how = ""  # it was reaped by somebody else, who alone knows
        parent = "parent of all workers on this machine"
        return RunError(f"the fork server (pid {self.pid}), {parent}, ended{how}; its workers ended with it")

    def _request(self, order: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """Send an order and wait for its answer, for at most `timeout_s` or, if None, `_ORDER_TIMEOUT_S`."""
        deadline = time.monotonic() + (limit_s := _ORDER_TIMEOUT_S if timeout_s is None else timeout_s)
        self._num_orders += 1
        self._send(order | {"order": self._num_orders}, limit_s, deadline)
        # Skip late answers to orders that were given up.
        while (answer := self._receive(limit_s, deadline)).get("to") != self._num_orders:
            pass
        if "error" in answer:
            raise RunError(f"the fork server failed to carry out an order:\n{answer['error']}")
        return answer

    def _order(self, order: dict[str, Any]) -> None:
        """Send an order. Wait neither for its answer nor for a fork server that does not read."""
        self._num_orders += 1
        with contextlib.suppress(NoAnswerError):  # the rest of the order is sent before the next one, or by `keep_up`
            self._send(order | {"order": self._num_orders}, 0.0, time.monotonic())
        self.keep_up()

    def _send(self, message: dict[str, Any], timeout_s: float, deadline: float) -> None:
        """Send a line, after the rest of earlier lines.

        The rest of a line that was begun has to come first: otherwise the fork server would take this line for a part
        of it.

        Args:
            message: what is sent as JSON.
            timeout_s: the time that the caller has given, for the error text.
            deadline: when that time is over, in seconds of time.monotonic.
        """
        self._unsent += json.dumps(message).encode() + b"\n"
        try:
            # Try once even if there is no time left: an order to stop must be sent, though its answer is not awaited.
            while not self._send_some():
                self._wait_for([], [self._orders], deadline, timeout_s)
        except OSError as error:
            raise self._died() from error

    def _send_some(self) -> bool:
        """Send as much of `_unsent` as the socket takes now. Returns True if nothing is left.

        Raises:
            OSError: the fork server has died.
        """
        with contextlib.suppress(BlockingIOError):  # the order is large, and the fork server does not read
            while self._unsent:
                self._unsent = self._unsent[self._orders.send(self._unsent, socket.MSG_DONTWAIT) :]
        return not self._unsent

    def _receive(self, timeout_s: float, deadline: float) -> dict[str, Any]:
        """Wait for the next answer until `deadline`, `timeout_s` seconds after the begin."""
        while b"\n" not in self._answer_buffer:
            self._wait_for([self._orders], [], deadline, timeout_s)
            try:
                data = self._orders.recv(65536)
            except ConnectionError:
                data = b""
            if not data:
                raise self._died()
            self._answer_buffer += data
        return self._next_answer()

    def _next_answer(self) -> dict[str, Any]:
        """The next answer, which must be complete in the buffer."""
        line, _, self._answer_buffer = self._answer_buffer.partition(b"\n")
        answer = json.loads(line)
        self._num_answered = max(self._num_answered, answer.get("to", 0))
        return answer

    def _wait_for(
        self, readable: list[socket.socket], writable: list[socket.socket], deadline: float, timeout_s: float
    ) -> None:
        """Wait until a socket is readable or writable.

        Raises:
            NoAnswerError: not until `deadline`, `timeout_s` seconds after the begin, nor `wait_at_most_until`.
        """
        while (left := min(deadline, self._wait_until) - time.monotonic()) > 0:
            if is_any_ready(readable, writable, min(left, _LOOK_S)):
                return
        if is_any_ready(readable, writable, 0.0):
            return
        cut = "until the deadline of this machine" if self._wait_until < deadline else f"within {timeout_s:g} s"
        raise NoAnswerError(f"the fork server (pid {self.pid}) did not answer {cut}")


def _start_process(
    fds: Sequence[int], spec: ForkServerSpec, *, may_fork: bool
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start the fork server, as a fork of this process if it may be one. `fds` as for `_start_interpreter`."""
    # A Ctrl-C must not reach the new process before it ignores SIGINT: the blocked state is inherited.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, *GROUP_SIGNALS])
    try:
        if may_fork:
            return fork_process(lambda: fork_server.run(fds[0], fds[1]), fds, spec.streams)
        return _start_interpreter(fds, spec)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_interpreter(fds: Sequence[int], spec: ForkServerSpec) -> subprocess.Popen[bytes]:
    """Start a fork server in a new interpreter.

    Args:
        fds: the descriptors that it inherits: of the orders, of the notices, of the life pipe that workers inherit, and
            of the objects that they get by value, if they get any.
        spec: how the fork server and its workers are made.
    """
    environment = interpreter_environment(spec.env)
    if spec.method == "fork":
        # OpenBLAS starts its threads when numpy is imported, and a process with threads must not fork.
        environment["OPENBLAS_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "elaswave_spmd.runtime.processes.fork_server", str(fds[0]), str(fds[1])]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=spec.streams.get(1),
        stderr=spec.streams.get(2),
        env=environment,
        pass_fds=fds,
    )
