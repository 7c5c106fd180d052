"""What the workers of the latch tests run; named as "death_watch_targets:worker" in ForkServerClient.start."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from elaswave_spmd.runtime.processes.death_watch import hold


def worker(spec: dict[str, Any]) -> object:
    """Hold the latch `seat` (if any), say so by making the file `ready`, and end as `ends` says once `go` is there."""
    strike = hold(*spec["seat"]) if spec["seat"] is not None else None
    if spec["ends"] == "a thread has ended":
        thread = threading.Thread(target=time.sleep, args=(0,))
        thread.start()
        thread.join()
    Path(spec["ready"]).touch()
    while not os.path.exists(spec["go"]):
        time.sleep(0.002)
    match spec["ends"]:
        case "return":
            return 0
        case "raise":
            raise ValueError("as asked")
        case "strike":
            assert strike is not None
            strike()
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit in a thread":
            threading.Thread(target=os._exit, args=(3,)).start()
        case "segfault":
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(1000)
    return None


def hold_twice(spec: dict[str, Any]) -> None:
    """A latch that has an owner: an assertion, written to `report`."""
    hold(*spec["seat"])
    try:
        hold(*spec["seat"])
    except AssertionError as error:
        Path(spec["report"]).write_text(str(error))
