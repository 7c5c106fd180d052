"""Main functions of the workers of test_death_watch, named "death_watch_targets:worker" in ForkServerClient.start."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from elaswave_spmd.runtime.processes.death_watch import hold_mutex


def worker(spec: dict[str, Any]) -> object:
    """Lock the mutex `slot` (if any), create the file `ready`, and end as `ends` says once the file `go` exists."""
    mark_injected = hold_mutex(*spec["slot"]) if spec["slot"] is not None else None
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
        case "injected kill":
            assert mark_injected is not None
            mark_injected()
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit in a thread":
            threading.Thread(target=os._exit, args=(3,)).start()
        case "segfault":
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(1000)
    return None


def hold_twice(spec: dict[str, Any]) -> None:
    """Lock a mutex that has an owner: an assertion fails, whose text is written to `report`."""
    hold_mutex(*spec["slot"])
    try:
        hold_mutex(*spec["slot"])
    except AssertionError as error:
        Path(spec["report"]).write_text(str(error))
