"""A small GPT, one of whose workers gets no memory for what it receives, from step 3 on; `write` puts it in place.

It is the first worker that comes to that step; its process id is written into the file `deaf`. It tells the cause, and
does not end before it is killed: the end of a process may be seen before what it has said is read.
"""

from __future__ import annotations

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from elaswave_spmd.models import GPT
from elaswave_spmd.runtime.transport.event_loop import EventLoop

DEAF_STEP = 3


class DeafGPT(GPT):
    """A GPT with which a worker stops to hear."""

    def __init__(self, *, deaf: str, **sizes: Any) -> None:
        super().__init__(**sizes)
        next(iter(self.layers)).register_forward_pre_hook(partial(_go_deaf, Path(deaf)))


def _go_deaf(deaf: Path, _: nn.Module, given: tuple[Any, ...]) -> None:
    if int(given[1].step) < DEAF_STEP or deaf.exists():
        return
    try:
        with deaf.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:  # another worker was the first
        return
    os._exit = _until_killed  # by which the process of a worker ends
    EventLoop._drain_pull = _without_memory  # pyright: ignore[reportPrivateUsage]


def _without_memory(self: EventLoop) -> bool:
    raise MemoryError("unable to allocate 2 GiB for a message")


def _until_killed(status: int) -> NoReturn:
    while True:
        signal.pause()


def write(folder: Path) -> list[str]:
    """Puts the model into a run's folder; returns the overrides that choose it."""
    shutil.copy(__file__, folder / "deaf_model.py")
    return ["model.target=deaf_model.DeafGPT", f"+model.args.deaf={folder / 'deaf'}"]
