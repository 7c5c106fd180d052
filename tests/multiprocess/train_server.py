"""`python train.py` without the two seconds of processor time in which Python imports torch.

A test session starts hundreds of runs. `TrainServer` starts one process that imports what every run imports, and
nothing else; for each run it forks. The child has a session, a folder, an environment, arguments and output of its own,
and runs train.py as a new interpreter would. The command starts its workers in the same way (the fork server).
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

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
_MOST = 1 << 20  # bytes of a request


class TrainServer:
    """The process that forks, and this process's end of its socket. For one thread, and one run at a time."""

    def __init__(self) -> None:
        self.mark = f"ELASWAVE_TEST={uuid.uuid4()}"
        """Variable in the environment of the server and of all that its runs start."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.multiprocess.train_server", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._marked({**os.environ, "OPENBLAS_NUM_THREADS": "1"}),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self.pid = self._process.pid

    def _marked(self, environment: dict[str, str]) -> dict[str, str]:
        name, _, value = self.mark.partition("=")
        marked = {**environment, name: value}
        marked.pop("PYTHONWARNINGS", None)
        return marked

    def run(
        self,
        script: Path,
        folder: Path,
        arguments: Sequence[str],
        environment: dict[str, str],
        timeout_s: float,
        *,
        merged: bool = False,
    ) -> tuple[int, str, str]:
        """Runs a script to its end, which is when all that it has started has ended.

        Args:
            merged: stdout and stderr are one, as in a terminal: what was written to either is what stdout has.

        Returns:
            Its exit code (negative: the signal that ended it), and what was written to stdout and to stderr.

        Raises:
            TimeoutError: it takes longer than `timeout_s`.
        """
        request = json.dumps([str(script), str(folder), list(arguments), self._marked(environment)])
        pipes = [os.pipe() for _ in range(1 if merged else 2)]
        ends = [theirs for _, theirs in pipes]
        socket.send_fds(self._socket, [request.encode()], ends * 2 if merged else ends)
        for theirs in ends:
            os.close(theirs)
        out, *err = self._read_all([ours for ours, _ in pipes], timeout_s)
        return int(self._socket.recv(_MOST)), out, "".join(err)

    def _read_all(self, pipes: Sequence[int], timeout_s: float) -> list[str]:
        """Reads each pipe until all its writers have ended."""
        deadline, read = time.monotonic() + timeout_s, {pipe: b"" for pipe in pipes}
        left = set(pipes)
        try:
            while left:
                ready = select.select(list(left), [], [], max(0.0, deadline - time.monotonic()))[0]
                if not ready:
                    raise TimeoutError(f"the run does not end within {timeout_s:g} s; so far: {read}")
                for pipe in ready:
                    data = os.read(pipe, 1 << 16)
                    read[pipe] += data
                    if not data:
                        left.discard(pipe)
        finally:
            for pipe in pipes:
                os.close(pipe)
        return [read[pipe].decode() for pipe in pipes]

    def stop(self) -> None:
        """Ends the server. A run that is going on ends as if its terminal were closed."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def serve(connection: socket.socket) -> None:
    """The life of the server: forks for each request, until nobody sends any."""
    for name in IMPORTED:
        importlib.import_module(name)
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, _MOST, 2)
        if not request:
            return
        script, folder, arguments, environment = json.loads(request)
        child = os.fork()
        if child == 0:
            connection.close()
            _become(folder, environment, descriptors)
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")
            return
        for descriptor in descriptors:
            os.close(descriptor)
        _, status = os.waitpid(child, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(folder: str, environment: dict[str, str], descriptors: Sequence[int]) -> None:
    """Has this process look like a command that was just started there."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve(socket.socket(fileno=int(sys.argv[1])))
