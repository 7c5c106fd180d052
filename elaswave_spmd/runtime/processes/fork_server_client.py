"""The controller's handle of the fork server, the process that makes, signals, reaps and reports the workers."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.runtime.processes import fork_server
from elaswave_spmd.runtime.processes.child import GROUP_SIGNALS
from elaswave_spmd.runtime.processes.fork_server import num_threads

PRELOAD = ("numpy", "torch", "torch.fx.experimental.symbolic_shapes", "zmq")  # the third: for the first backward
Method = Literal["fork", "spawn"]
_READY_TIMEOUT_S = 300.0
_ORDER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker's process has ended and is reaped: with `code`, or by `signal`; the other one is None."""

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


class ForkServerClient:
    """Makes worker processes; make one with `start`. For one thread; `fileno` and `poll` fit into a select loop.

    Whatever happens to the controller, nothing is left behind: a killed controller closes the life pipe, on which
    workers end by themselves within `orphan_grace_s` or are killed; a killed fork server takes its children along.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes] | Forked,
        orders: socket.socket,
        notices: int,
        life: int,
        scratch: Sequence[str],
        orphan_grace_s: float,
    ) -> None:
        self._process, self._orders, self._notices, self._life = process, orders, notices, life
        self._scratch = scratch
        self._answers = b""
        self._lines = b""
        self._orphan_grace_s = orphan_grace_s
        self._ready = self._stopped = False
        self.num_threads = 0  # of the fork server, known once ready

    @classmethod
    def start(
        cls,
        target: str,
        *,
        preload: Sequence[str] = PRELOAD,
        method: Method = "fork",
        orphan_grace_s: float = 10.0,
        scratch: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        here: bool = False,
    ) -> ForkServerClient:
        """Launch the fork server and return at once; it imports `preload` meanwhile.

        Args:
            target: "module:function", called in each worker with its spec plus `rank` and `life_fd`.
            preload: modules that the fork server imports, so that workers need not. With "spawn" nothing is preloaded.
            method: "fork" (milliseconds per worker) or "spawn" (a fresh interpreter each, for devices that cannot).
            orphan_grace_s: how long workers may go on after the controller has died, before they are killed.
            scratch: directories (of sockets) that are deleted when the last worker has ended.
            env: environment variables added for the fork server and all workers.
            here: this process has done nothing yet but import: the fork server may be a fork of it, and need not import
            that
                again. With threads, with `env` and with "spawn" it is an interpreter of its own all the same.
        """
        if method not in ("fork", "spawn"):
            raise ConfigError("unknown way of making workers", got=method, where="method", exists="fork, spawn")
        ours, theirs = socket.socketpair()
        notices, notices_theirs = os.pipe()
        life_theirs, life = os.pipe()
        fds = theirs.fileno(), notices_theirs, life_theirs
        # A Ctrl-C must not meet the new process before it ignores SIGINT: the blocked state is inherited.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, *GROUP_SIGNALS])
        try:
            if here and method == "fork" and not env and num_threads() == 1:
                process = fork(lambda: fork_server.run(*fds[:2]), fds)
            else:
                process = _interpreter(method, env or {}, fds)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        os.close(notices_theirs)
        os.close(life_theirs)
        os.set_blocking(notices, False)
        folders = [str(Path(path).absolute()) for path in scratch]
        client = cls(process, ours, notices, life, folders, orphan_grace_s)
        client._send(
            {
                "sys_path": [path or os.getcwd() for path in sys.path],
                "preload": list(preload) if method == "fork" else [],
                "method": method,
                "target": target,
                "life_fd": life_theirs,
                "orphan_grace_s": orphan_grace_s,
                "scratch": client._scratch,
            }
        )
        return client

    @property
    def pid(self) -> int:
        """Process id of the fork server itself."""
        return self._process.pid

    def ready(self, timeout_s: float = _READY_TIMEOUT_S) -> None:
        """Wait until everything is imported. RunError with the traceback when an import failed."""
        if self._stopped:
            raise RunError("the fork server was stopped")
        if self._ready:
            return
        answer = self._receive(timeout_s)
        if "error" in answer:
            self._abandon()
            raise RunError(answer["error"])
        self.num_threads = int(answer["threads"])
        self._ready = True

    def spawn(self, rank: int, spec: Mapping[str, Any]) -> int:
        """Make the worker `rank`; its process id. `spec` must be plain JSON data. Waits until the fork server is
        ready.
        """
        self.ready()
        return int(self._ask({"spawn": rank, "spec": dict(spec)})["pid"])

    def signal(self, rank: int, number: int) -> bool:
        """Send a signal to worker `rank`; False when it has ended already."""
        self.ready()
        return bool(self._ask({"signal": int(number), "rank": rank})["sent"])

    def set_orphan_grace(self, seconds: float) -> None:
        """How long workers may go on after this process, where that was not known at `start`. Waits until ready."""
        self.ready()
        self._ask({"orphan_grace_s": seconds})
        self._orphan_grace_s = seconds

    def fileno(self) -> int:
        """Readable when `poll` has something to say."""
        return self._notices

    def poll(self) -> list[Exited]:
        """The workers that have ended since the last call; never blocks. RunError when the fork server itself has
        died.
        """
        exits, ended = self._read_exits()
        if ended and not exits:
            raise self._died()
        return exits

    def _read_exits(self) -> tuple[list[Exited], bool]:
        """What the fork server has reported, and whether it has closed its end."""
        ended = False
        try:
            while data := os.read(self._notices, 65536):
                self._lines += data
            ended = True
        except BlockingIOError:
            pass
        *lines, self._lines = self._lines.split(b"\n")
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
            self._send({"stop": grace_s})
            self._receive(grace_s + _ORDER_TIMEOUT_S)
            self._process.wait(_ORDER_TIMEOUT_S)
        except (RunError, subprocess.TimeoutExpired):
            pass  # it has died, or hangs: then the kernel ends its children with it
        exits, _ = self._read_exits()
        self._abandon()
        return exits

    def release(self) -> None:
        """End as if this process had died: workers see the end of the life pipe and have `orphan_grace_s` to end by
        themselves. Returns when no process is left; idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._orders.close()
        os.close(self._life)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs: killed now, and its children with it
            self._process.wait(self._orphan_grace_s + _ORDER_TIMEOUT_S)
        self._bury()

    def __enter__(self) -> ForkServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _abandon(self) -> None:
        """Kill the fork server if it still runs, and close our ends."""
        self._stopped = True
        self._orders.close()
        os.close(self._life)
        self._bury()

    def _bury(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._notices)
        for path in self._scratch:
            shutil.rmtree(path, ignore_errors=True)

    def _died(self) -> RunError:
        code = self._process.wait()
        how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        return RunError(
            f"the fork server (pid {self.pid}), parent of all workers, ended {how}; its workers ended with it"
        )

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        self._send(order)
        answer = self._receive(_ORDER_TIMEOUT_S)
        if "error" in answer:
            raise RunError(f"the fork server could not do what was asked:\n{answer['error']}")
        return answer

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._orders.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._died() from error

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._answers:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._orders], [], [], left)[0]:
                raise RunError(f"the fork server (pid {self.pid}) did not answer within {timeout_s:g} s")
            try:
                data = self._orders.recv(65536)
            except ConnectionError:
                data = b""
            if not data:
                raise self._died()
            self._answers += data
        line, _, self._answers = self._answers.partition(b"\n")
        return json.loads(line)


def _interpreter(method: Method, env: Mapping[str, str], fds: tuple[int, int, int]) -> subprocess.Popen[bytes]:
    """A fork server that begins with nothing. fds: of orders, of notices, and the one that workers inherit."""
    environment = {**os.environ, **env}
    if method == "fork":
        # OpenBLAS starts its threads when numpy is imported, and a process with threads must not fork.
        environment["OPENBLAS_NUM_THREADS"] = "1"
    if (root := import_root()) is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "elaswave_spmd.runtime.processes.fork_server", str(fds[0]), str(fds[1])]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=fds)


def import_root() -> str | None:
    """Where this package lies, if a fresh interpreter might not find it: run from a checkout instead of installed."""
    root = str(Path(__file__).resolve().parents[2])
    return None if root in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")} else root


# A child that goes on with what this process has imported, and nothing else of it.
_PERIOD_S = 0.002
_MOST_DESCRIPTORS = 1 << 20


class Forked:
    """Such a child, in the terms of `subprocess.Popen`. For one thread."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or minus the signal, once it has ended; reaps it."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As `poll`, when it has ended. subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(_PERIOD_S)
        return code

    def kill(self) -> None:
        """SIGKILL; nothing where it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def fork(main: Callable[[], object], keep: Collection[int]) -> Forked:
    """Run `main` in a child that has nothing open but the descriptors `keep`, output, and an empty input.

    To be called while this process has one thread. The child ends with `main`, or with code 1 where it raises. Signals
    are as after an exec: what this process handles is at its default there, what it ignores or blocks stays so.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Forked(pid)
    code = 1
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        for before, after in pairwise(sorted({2, *keep, _MOST_DESCRIPTORS})):
            os.closerange(before + 1, after)
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # never back to where this process was
