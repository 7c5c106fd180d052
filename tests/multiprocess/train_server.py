"""`python train.py` without the two seconds of processor time in which Python imports torch.

A test session starts hundreds of runs. `TrainServer` starts one process that imports what every run imports, and
nothing else; for each run it forks. The child has a session, a folder, an environment, arguments and output of its own,
and runs train.py as a new interpreter would. The command starts its workers in the same way (the fork server).

What a fork cannot have of its own: the seed of hashes (sets of texts have the same order in all forks of a server),
and what variables of the environment mean to libraries while they are imported.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TextIO

from elaswave_spmd.runtime.processes.fork_server_client import PRELOAD

ROOT = Path(__file__).parents[2]
# With what fork servers import (PRELOAD): theirs are forks of the command.
IMPORTED = (
    "hydra.main",
    "elaswave_spmd.cli",
    "elaswave_spmd.controller.startup",
    "elaswave_spmd.worker.process",
    "elaswave_spmd.models",
    *PRELOAD,
)
_MARK = "ELASWAVE_TEST"
_NAMESPACES, _USER_NAMESPACE = 0x40000000 | 0x00020000 | 0x04000000, 0x10000000  # net, mnt, uts; linux/sched.h
_MOST = 1 << 20  # bytes of a request


def new_mark() -> str:
    """A variable NAME=VALUE, for the environment of all processes of one command: `processes_with` finds them by it."""
    return f"{_MARK}={uuid.uuid4()}"


class ForkedCommand:
    """A command that a `TrainServer` has started, as `subprocess.Popen[str]` shows one."""

    def __init__(self, words: Sequence[str], status: TextIO, stdout: IO[str] | None, stderr: IO[str] | None) -> None:
        self.args = words
        self.returncode: int | Any = None  # as in Popen: None while it lives
        self.stdout = stdout
        self.stderr = stderr
        self._status = status
        self._read: tuple[list[bytes], list[bytes]] = ([], [])
        self.pid = int(self._told("started"))

    def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it); None while it lives."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the command itself has ended.

        Raises:
            subprocess.TimeoutExpired: it takes longer than `timeout` seconds.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._end()
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits until the command has ended and all that it has started has closed its output.

        Returns:
            What was written to stdout and to stderr, without what has been read before; "" for one that is None.

        Raises:
            subprocess.TimeoutExpired: it takes longer than `timeout` seconds. It may be called again.
        """
        deadline = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        files = zip((self.stdout, self.stderr), self._read, strict=True)
        parts = {file: read for file, read in files if file is not None and not file.closed}
        while parts:
            ready = select.select([*parts], [], [], left())[0]
            if not ready:
                so_far = [b"".join(read) for read in self._read]
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0, *so_far)
            for file in ready:
                if data := os.read(file.fileno(), 1 << 16):
                    parts[file].append(data)
                else:
                    file.close()
                    del parts[file]
        self.wait(left())
        out, err = (b"".join(read).decode().replace("\r\n", "\n").replace("\r", "\n") for read in self._read)
        return out, err

    def send_signal(self, sig: int) -> None:
        """Sends the command a signal, if it lives."""
        if self.poll() is None:
            try:
                os.kill(self.pid, sig)
            except ProcessLookupError:  # it has just ended
                self.wait()

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self) -> None:
        self.returncode = int(self._told("ended"))
        self._status.close()

    def _told(self, what: str) -> str:
        line = self._status.readline()
        kind, _, value = line.strip().partition(" ")
        if not line:
            self._status.close()
            raise AssertionError(f"the train server has ended: it does not say that {self.args} has {what}")
        assert kind == what, f"{self.args} has not {what}, but: {line}"
        return value


Command = subprocess.Popen[str] | ForkedCommand


class TrainServer:
    """The process that forks, and this process's end of its socket."""

    def __init__(self) -> None:
        self.mark = new_mark()
        """Variable in the environment of the server. Each of its commands has another one of the same name."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.multiprocess.train_server", str(theirs.fileno())]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", _MARK: self.mark.partition("=")[2]}
        environment.pop("PYTHONWARNINGS", None)
        with theirs:
            # In a session of its own: Ctrl-C in the terminal of the tests is theirs, and they end their commands.
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid

    def start(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        merged: bool = False,
        output: int | None = None,
        host: int | None = None,
    ) -> ForkedCommand:
        """Starts `python WORDS` in a folder, in a session of its own, without any input.

        Args:
            words: a script and its arguments, or -m, a module and its arguments.
            environment: has a mark of the command's own (`new_mark`).
            merged: stdout and stderr are one, as in a terminal: what was written to either is what stdout has.
            output: a descriptor to which both are written; then the command has none to read here.
            host: id of a process in other namespaces (benchmarks/namespaces.py): the command is in these, too.
        """
        environment = {name: value for name, value in environment.items() if name != "PYTHONWARNINGS"}
        assert len(environment[_MARK]) == len(self.mark.partition("=")[2]), "the mark is written over the server's"
        request = json.dumps([list(words), str(folder), environment, host])
        pipes = [os.pipe() for _ in range(1 if output is not None else 2 if merged else 3)]
        status, *outputs = [*(theirs for _, theirs in pipes), *(() if output is None else (output,))]
        try:
            socket.send_fds(self._socket, [request.encode()], [status, outputs[0], outputs[-1]])
        except OSError as error:
            for ours, _ in pipes:
                os.close(ours)
            raise AssertionError(f"the train server has ended: it cannot start {words}") from error
        finally:
            for _, theirs in pipes:
                os.close(theirs)
        files = [os.fdopen(ours, encoding="utf-8") for ours, _ in pipes]
        stdout, stderr, *_ = [*files[1:], None, None]
        try:
            return ForkedCommand(words, files[0], stdout, stderr)
        except AssertionError:
            for file in files:
                file.close()
            raise

    def stop(self) -> None:
        """Ends the server. Commands that are going on go on, and nobody can tell how they end."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def serve(connection: socket.socket) -> None:
    """The life of the server: forks for each request, and tells how each child ends, until nobody sends any request."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # commands share these objects' memory as long as no collector writes to it
    living: dict[int, tuple[int, int]] = {}  # descriptor of a child -> its process id, and where its end is told
    while True:
        ready = select.select([connection, *living], [], [])[0]
        for descriptor in living.keys() & set(ready):
            child, told = living.pop(descriptor)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            _tell(told, f"ended {code}")
            os.close(descriptor)
        if connection not in ready:
            continue
        request, given, _, _ = socket.recv_fds(connection, _MOST, 3)
        if not request:
            return
        status, *outputs = given
        words, folder, environment, host = json.loads(request)
        child = os.fork()
        if child == 0:
            connection.close()
            for descriptor, (_, told) in living.items():
                os.close(descriptor)
                os.close(told)
            if host is not None:
                _enter(host)
            _become(words, folder, environment, outputs)
            _tell(status, f"started {os.getpid()}")
            _run(words)
            return
        for output in outputs:
            os.close(output)
        living[os.pidfd_open(child)] = child, status


def _run(words: Sequence[str]) -> None:
    """Runs `python WORDS`, and ends this process; returns, or raises, where the interpreter has to say how it ended."""
    code: object = None
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):
            raise
    # What the interpreter does at its end, but for taking apart all modules: that copies the memory that they lie in.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads it any more, of which the interpreter makes an exit code of its own
        sys.exit(code)
    os._exit(code or 0)


def _tell(status: int, line: str) -> None:
    """Writes a line to the status pipe of a command, and closes it. Whoever has started the command may have ended."""
    with suppress(BrokenPipeError):
        os.write(status, f"{line}\n".encode())
    os.close(status)


def _enter(host: int) -> None:
    """Goes to the namespaces of a process, as nsenter does."""
    users = [os.stat(f"/proc/{process}/ns/user").st_ino for process in ("self", host)]
    kinds = _NAMESPACES | (_USER_NAMESPACE if users[0] != users[1] else 0)
    descriptor = os.pidfd_open(host)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, kinds):
        raise OSError(ctypes.get_errno(), f"the namespaces of process {host} cannot be entered")
    os.close(descriptor)


def _become(words: Sequence[str], folder: str, environment: dict[str, str], outputs: Sequence[int]) -> None:
    """Has this process look like `python WORDS` that was just started there."""
    os.setsid()
    os.chdir(folder)
    _show_mark(f"{_MARK}={environment[_MARK]}".encode())
    os.environ.clear()
    os.environ.update(environment)
    for number, descriptor in enumerate(outputs, 1):
        os.dup2(descriptor, number)
    for descriptor in outputs:
        os.close(descriptor)
    _renew_stdout()
    tempfile.tempdir = None  # what it found in the server's environment
    sys.orig_argv = [sys.executable, *words]
    is_module = words[0] == "-m"
    sys.argv = [*words[1:]] if is_module else [*words]
    sys.path[0] = folder if is_module else str(Path(words[0]).parent)


def _renew_stdout() -> None:
    """Makes `sys.stdout` again: the server's remembers that it can be sought in, where the tests' output is a file.

    A change of its encoding or of how it treats errors would ask where in the file it is, which a pipe refuses.
    """
    old = sys.stdout
    assert isinstance(old, io.TextIOWrapper)
    binary = open(1, "wb", buffering=0 if old.write_through else -1, closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(
        binary, old.encoding, old.errors, line_buffering=old.line_buffering, write_through=old.write_through
    )


def _show_mark(mark: bytes) -> None:
    """Has /proc/PID/environ of this process show its own mark: that file is the memory in which exec left the server's.

    Programs that set their title change that memory in the same way.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end of proc(5): the state, field 3, comes first
    shown = ctypes.string_at(start, end - start)
    before = f"{_MARK}={os.environ[_MARK]}".encode()
    at = shown.find(before)
    assert at >= 0 and len(before) == len(mark), (before, mark)
    ctypes.memmove(start + at, mark, len(mark))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve(socket.socket(fileno=int(sys.argv[1])))
