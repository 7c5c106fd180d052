"""The guard: a process that sets frequencies for a job, and puts them back whatever becomes of it.

    python -m elaswave_spmd.runtime.devices.dvfs.guard BACKEND [WHERE]

Lines of JSON on standard input: {"set": {device: frequency}}, {"reset": true}; one line each as an answer, and a first
one that says which devices there are. When its input ends, since the job has ended or was killed, and on SIGTERM,
everything is put back. Only its own SIGKILL it cannot answer.
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
    """Entry of the guard's process."""
    # SIGINT and SIGHUP are for the whole job: its controller answers them, and the pipe says when it has ended.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    backend: FrequencyController | None = None
    try:
        answer, backend = _opened(*sys.argv[1:3])
        _say(answer)
        while backend is not None and (line := sys.stdin.readline()):
            _say(_guarded(lambda line=line, backend=backend: _obey(backend, json.loads(line))))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        left = _guarded(lambda: _obey(backend, {"reset": True})) if backend is not None else {}
        if "error" in left:
            print(f"frequencies are not back: {left['error']}", file=sys.stderr, flush=True)


def _opened(name: str, where: str = "") -> tuple[dict[str, Any], FrequencyController | None]:
    found: list[FrequencyController] = []

    def ready() -> dict[str, Any]:
        backend = open_backend(name, where)
        devices = {device: dataclasses.asdict(backend.range_of(device)) for device in backend.devices()}
        found.append(backend)
        return {"ready": devices}

    answer = _guarded(ready)
    return answer, found[0] if found else None


def _obey(backend: FrequencyController, order: dict[str, Any]) -> dict[str, Any]:
    if "set" in order:
        return {"set": {device: backend.set(device, frequency) for device, frequency in order["set"].items()}}
    backend.reset()
    return {"reset": True}


def _guarded(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the work says, or the error."""
    try:
        return work()
    except UserError as error:
        return {"error": error.fields()}
    except Exception as error:
        return {"error": {"what": f"the process that sets frequencies failed ({type(error).__name__}: {error})"}}


def _say(answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more; the next read says so
        os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


def _end(*_: object) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
