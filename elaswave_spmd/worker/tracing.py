"""Between a worker and its part of the trace (`run.trace=true`)."""

from __future__ import annotations

from time import perf_counter

from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.run_dir.trace import TracePart
from elaswave_spmd.worker.channel import Channel, Incoming


def open_trace(folder: str | None, rank: int) -> TracePart | None:
    """A worker's part of the trace.

    Args:
        folder: the run's directory; None: no trace.

    Returns:
        None as well where the directory is not: on another machine that does not share it.
    """
    try:
        return TracePart(folder, rank) if folder is not None else None
    except OSError:
        return None


class TracedChannel:
    """A port that tells of what it sends with a payload."""

    def __init__(self, port: Channel, part: TracePart) -> None:
        self._port, self._part = port, part

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        began = perf_counter()
        self._port.send(peer, message, payload)
        if payload is not None:
            self._part.send(peer, type(message).__name__, payload.nbytes, began, perf_counter())

    def take(self) -> list[Incoming]:
        return self._port.take()
