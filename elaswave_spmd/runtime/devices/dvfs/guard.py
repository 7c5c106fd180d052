"""The guard: a process that sets frequencies for a job, and restores them however the job ends.

    python -m elaswave_spmd.runtime.devices.dvfs.guard BACKEND [WHERE]

Orders are lines of JSON on standard input: {"set": {device: frequency}} or {"reset": true}. Each is answered by one
line on standard output, after a first line that names the devices. Everything is restored when the input ends, since
then the job has ended or was killed, and on SIGTERM. Only if the guard itself gets SIGKILL, nothing is restored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from elaswave_spmd.errors import UserError
from elaswave_spmd.runtime.devices.dvfs.backends import open_backend
from elaswave_spmd.runtime.devices.dvfs.base import FrequencyController


def main() -> None:
    """The guard's process: open the backend, carry out orders until the input ends, and restore the frequencies."""
    # SIGINT and SIGHUP go to the whole job. Its controller handles them, and the pipe tells when the job has ended.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    backend: FrequencyController | None = None
    try:
        answer, backend = _open(*sys.argv[1:3])
        _answer(answer)
        while backend is not None and (line := sys.stdin.readline()):
            _answer(_errors_as_answers(lambda line=line, backend=backend: _execute(backend, json.loads(line))))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        restored = _errors_as_answers(lambda: _execute(backend, {"reset": True})) if backend is not None else {}
        if "error" in restored:
            print(f"frequencies are not restored: {restored['error']}", file=sys.stderr, flush=True)


def _open(name: str, where: str = "") -> tuple[dict[str, Any], FrequencyController | None]:
    """The first answer, which names the devices or the error, and the backend if there was no error."""
    found: list[FrequencyController] = []

    def ready() -> dict[str, Any]:
        backend = open_backend(name, where)
        devices = {device: dataclasses.asdict(backend.range_of(device)) for device in backend.devices()}
        found.append(backend)
        return {"ready": devices}

    answer = _errors_as_answers(ready)
    return answer, found[0] if found else None


def _execute(backend: FrequencyController, order: dict[str, Any]) -> dict[str, Any]:
    """Carry out one order. Returns the answer."""
    if "set" in order:
        return {"set": {device: backend.set(device, frequency) for device, frequency in order["set"].items()}}
    backend.reset()
    return {"reset": True}


def _errors_as_answers(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer that `work` returns, or an answer with the error that it raised: one error does not end the guard."""
    try:
        return work()
    except UserError as error:
        return {"error": error.fields()}
    except Exception as error:
        return {"error": {"what": f"the process that sets frequencies failed ({type(error).__name__}: {error})"}}


def _answer(answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the controller has ended; the next read finds the end of the input
        os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


def _end(*_: object) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
