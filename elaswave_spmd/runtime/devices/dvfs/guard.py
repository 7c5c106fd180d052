"""The guard: a process that sets frequencies for a job, and restores them however the job ends.

    python -m elaswave_spmd.runtime.devices.dvfs.guard BACKEND SOCKET [WHERE]

Orders of the controller are lines of JSON on standard input: {"share": {device: [rank, ...]}}, which workers use which
device, or {"reset": true}. A worker sends its request, {"rank": rank, "frequency": frequency}, to the SOCKET, which
takes datagrams, and is answered by the frequency in force, {"frequency": frequency}: a device has the largest that a
worker on it requests. Standard output has one line that names the devices, and one for each order or request that
failed. Everything is restored when the input ends, since then the job has ended or was killed, and on SIGTERM. Only if
the guard itself gets SIGKILL, nothing is restored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from elaswave_spmd.errors import UserError
from elaswave_spmd.runtime.devices.dvfs.backends import open_backend
from elaswave_spmd.runtime.devices.dvfs.base import FrequencyController

_MOST_BYTES = 4096


def main() -> None:
    """The guard's process: open the backend, carry out orders until the input ends, and restore the frequencies."""
    # SIGINT and SIGHUP go to the whole job. Its controller handles them, and the pipe tells when the job has ended.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    name, path, *where = sys.argv[1:]
    backend: FrequencyController | None = None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests:
            requests.bind(path)
            answer, backend = _open(name, *where)
            _answer(answer)
            if backend is not None:
                _serve(_Shares(backend), requests)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        restored = _errors_as_answers(backend.reset) if backend is not None else {}
        if "error" in restored:
            print(f"frequencies are not restored: {restored['error']}", file=sys.stderr, flush=True)


class _Shares:
    """The frequencies that workers request for the devices that they share.

    Args:
        backend: sets the devices.
    """

    def __init__(self, backend: FrequencyController) -> None:
        self._backend = backend
        self._workers: Mapping[str, list[int]] = {}  # device -> ranks
        self._requested: dict[int, float] = {}  # by rank
        self._in_force: dict[str, float] = {}

    def share(self, workers: Mapping[str, list[int]]) -> None:
        """These workers use these devices. All begin at the normal frequency."""
        self.reset()
        self._workers = workers

    def reset(self) -> None:
        """Restore all devices, and forget what workers have requested."""
        self._requested.clear()
        self._in_force.clear()
        self._backend.reset()

    def request(self, rank: int, frequency: float) -> float:
        """A worker requests a frequency. Returns the lowest of its devices' afterwards."""
        self._requested[rank] = frequency
        mine = [device for device, ranks in self._workers.items() if rank in ranks]
        for device in mine:
            wanted = max(self._requested.get(other, 1.0) for other in self._workers[device])
            if wanted != self._in_force.get(device, 1.0):
                self._in_force[device] = self._backend.set(device, wanted)
        return min((self._in_force.get(device, 1.0) for device in mine), default=1.0)


def _serve(shares: _Shares, requests: socket.socket) -> None:
    """Carry out orders and requests until the input ends."""
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(requests, selectors.EVENT_READ)
        buffer = b""
        while True:
            for key, _ in selector.select():
                if key.fileobj is requests:
                    _grant(shares, requests)
                    continue
                data = os.read(sys.stdin.fileno(), 65536)
                if not data:
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    _tell(_errors_as_answers(lambda line=line: _execute(shares, json.loads(line))))


def _grant(shares: _Shares, requests: socket.socket) -> None:
    """Carry out one request of a worker, and answer it."""
    data, sender = requests.recvfrom(_MOST_BYTES)
    granted: list[float] = []

    def grant() -> None:
        request = json.loads(data)
        granted.append(shares.request(int(request["rank"]), float(request["frequency"])))

    _tell(_errors_as_answers(grant))
    if granted and sender:
        with contextlib.suppress(OSError):  # the worker has ended
            requests.sendto(json.dumps({"frequency": granted[0]}).encode(), sender)


def _open(name: str, where: str = "") -> tuple[Mapping[str, Any], FrequencyController | None]:
    """The first answer, which names the devices or the error, and the backend if there was no error."""
    found: list[FrequencyController] = []

    def ready() -> dict[str, Any]:
        backend = open_backend(name, where)
        devices = {device: dataclasses.asdict(backend.range_of(device)) for device in backend.devices()}
        found.append(backend)
        return {"ready": devices}

    answer = _errors_as_answers(ready)
    return answer, found[0] if found else None


def _tell(answer: Mapping[str, Any]) -> None:
    """Write an answer if it is an error: of what succeeds nothing is told."""
    if "error" in answer:
        _answer(answer)


def _execute(shares: _Shares, order: Mapping[str, Any]) -> None:
    """Carry out one order of the controller."""
    if "share" in order:
        shares.share(order["share"])
    else:
        shares.reset()


def _errors_as_answers(work: Callable[[], Mapping[str, Any] | None]) -> Mapping[str, Any]:
    """The answer that `work` returns, or one with the error that it raised: one error does not end the guard."""
    try:
        return work() or {}
    except UserError as error:
        return {"error": error.fields()}
    except Exception as error:
        return {"error": {"what": f"the process that sets frequencies failed ({type(error).__name__}: {error})"}}


def _answer(answer: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the controller has ended; the next read finds the end of the input
        os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


def _end(*_: object) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
