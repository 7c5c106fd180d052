"""Files in the directory of the sockets, by which a controller that comes back finds its predecessor's processes.

The fork server listens at a socket there from its start, and takes another controller once the connection of the one
before has ended. Every member of the mesh has written its address into a file there. The directory is its user's alone,
and so is the run's journal, which names it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_spmd.ready import is_any_ready

_SOCKET, _ADDRESS = "next", "{}.address"
_HELLO_S = 10.0  # for the other side to say what it has to say
_LONGEST = 1 << 20
_CREDENTIALS = struct.Struct("3i")  # pid, user, group


@dataclass(frozen=True)
class Orphans:
    """The processes that a controller has left behind, as their fork server knows them.

    Args:
        pids: rank -> process id, of the workers that live.
        next_rank: the rank above all that the fork server has started a worker with.
        ended: ranks of the workers that have ended without a controller having handled it.
        seconds: for how many seconds there was no controller.
        made: the ranks of all workers that the fork server has ever made.
    """

    pids: dict[int, int]
    next_rank: int
    ended: tuple[int, ...]
    seconds: float
    made: tuple[int, ...] = ()


# ---- addresses of workers


def write_address(directory: str, rank: int, address: str) -> None:
    """Write the address at which a worker listens into its file, atomically.

    Errors are ignored: if the disk is full, the worker just cannot be adopted.
    """
    path = Path(directory) / _ADDRESS.format(rank)
    new = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(address)
        new.rename(path)


def read_address(directory: str, rank: int) -> str | None:
    """The address at which a worker listens; None if it has no file, as it was not a member of the mesh yet."""
    try:
        return (Path(directory) / _ADDRESS.format(rank)).read_text()
    except OSError:
        return None


# ---- at the fork server


def listen_for_next(directory: str) -> socket.socket:
    """The fork server's socket at which the next controller asks for the workers.

    Raises:
        OSError: the file system has no sockets.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(Path(directory) / _SOCKET))
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener


def accept_next(listener: socket.socket) -> tuple[socket.socket, int, int] | None:
    """Take the controller that has connected. None: it has left again, or says something else.

    Returns:
        The socket of its orders, and two descriptors of its own making: the write end of the pipe on which ended
        workers are reported, and the read end of the pipe whose end tells its own.
    """
    link, _ = listener.accept()
    link.settimeout(_HELLO_S)
    fds: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        data, fds, _, _ = socket.recv_fds(link, 4096, 2)
        if json.loads(data) == {"adopt": True} and len(fds) == 2:
            link.settimeout(None)
            return link, fds[0], fds[1]
    for fd in fds:
        os.close(fd)
    link.close()
    return None


# ---- at the controller that comes back


def ask_for_orphans(directory: str, fds: Sequence[int]) -> tuple[socket.socket, AdoptedProcess, Orphans] | None:
    """Take over a fork server and its workers.

    Args:
        directory: the directory of the sockets, as the journal names it.
        fds: the two descriptors to send, as described in `accept_next`.

    Returns:
        The socket for orders, the process of the fork server, and what it says of its workers; None if there is no fork
        server that has lost its controller.
    """
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(_HELLO_S)
    with contextlib.suppress(OSError, ValueError, KeyError):
        link.connect(str(Path(directory) / _SOCKET))
        pid, *_ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        process = AdoptedProcess(pid)
        socket.send_fds(link, [json.dumps({"adopt": True}).encode()], fds)
        answer = _line(link)
        pids = {int(rank): int(number) for rank, number in answer["pids"].items()}
        link.settimeout(None)
        ended, made = tuple(answer["ended"]), tuple(answer["made"])
        return link, process, Orphans(pids, answer["next_rank"], ended, answer["seconds"], made)
    link.close()
    return None


def _line(link: socket.socket) -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\n"):
        some = link.recv(65536)
        if not some or len(data) > _LONGEST:
            raise ValueError("no answer")
        data += some
    return json.loads(data)


class AdoptedProcess:
    """A process that is not a child of this one, with the few methods of `subprocess.Popen` that its users need.

    Raises:
        OSError: the process has ended already.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """0 once the process has ended, however it did; None before."""
        return 0 if is_any_ready([self._fd], timeout_s=0.0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            is_any_ready([self._fd], timeout_s=left)
        return 0

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
