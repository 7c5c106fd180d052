"""A small GPT whose workers start when a test lets them, and whose steps wait for the test; `write` puts it in place.

Each worker process writes a file `at-PID` into the folder `hold` when it makes the model for the first time, before
it is ready, and goes on when `go-PID` or `go` is there. From step 6 on each micro-batch waits before it is computed,
longer in every step, until `end` is there. With a file `raise` a worker raises an exception instead, with `crash` it
crashes. No bit depends on any of this.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from elaswave_spmd.models import GPT

FAST_STEPS, FIRST_S, GROWTH, LONGEST_S = 5, 0.02, 1.3, 5.0
_LOOK_S = 0.01


class HeldGPT(GPT):
    """A GPT of workers that a test holds."""

    def __init__(self, *, hold: str, **sizes: Any) -> None:
        super().__init__(**sizes)
        folder = Path(hold)
        next(iter(self.layers)).register_forward_pre_hook(partial(_wait, folder / "end"))
        own = folder / f"at-{os.getpid()}"
        if os.getpid() != os.getsid(0) and not own.exists():  # the command leads its session, and is not held
            own.touch()
            _start(folder, own.name.replace("at", "go"))


def _start(folder: Path, name: str) -> None:
    while not ((folder / "go").exists() or (folder / name).exists()):
        time.sleep(_LOOK_S)
    if (folder / "raise").exists():
        raise ValueError("a bug in the model")
    if (folder / "crash").exists():
        os.kill(os.getpid(), signal.SIGSEGV)


def _wait(end: Path, _: nn.Module, given: tuple[Any, ...]) -> None:
    slow_steps = int(given[1].step) - FAST_STEPS
    if slow_steps > 0 and not end.exists():
        time.sleep(min(FIRST_S * GROWTH**slow_steps, LONGEST_S))


def write(folder: Path, hold: Path) -> list[str]:
    """Puts the model into a run's folder; returns the overrides that choose it. `hold` is made."""
    hold.mkdir(exist_ok=True)
    shutil.copy(__file__, folder / "held_model.py")
    return ["model.target=held_model.HeldGPT", f"+model.args.hold={hold}"]
