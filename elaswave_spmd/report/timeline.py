"""The pipeline timeline of a traced run: a window of trace.json around the first incident, for a chart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from elaswave_spmd.regular_files import open_regular
from elaswave_spmd.run_dir.trace import TRACE

KINDS = {"forward": "F", "backward": "B", "weights": "W", "wait": "I"}
"""Category of a slice in trace.json -> its letter."""
LARGEST_BYTES = 300_000_000  # a larger trace is not read; this one takes about 2 s
_MOST_SLICES = 4000


@dataclass(frozen=True)
class Slice:
    """A piece of work or waiting of one worker, in milliseconds since the window began. `kind` is one of `KINDS`."""

    rank: int
    kind: str
    began_ms: float
    ended_ms: float
    name: str


@dataclass(frozen=True)
class Timeline:
    """A window of a run's timeline.

    Args:
        slices: the slices in the window, by the time at which they began.
        note: a sentence that says what the window is, or why there is no timeline.
    """

    slices: tuple[Slice, ...]
    note: str


def read_timeline(folder: Path, around_s: float | None, step_s: float) -> Timeline:
    """The window of a run's timeline around a moment: three steps before it, and five after.

    Args:
        folder: the run's directory.
        around_s: the moment, in seconds since the run began; None for the first eight steps of the trace.
        step_s: the usual time of a step, in seconds.
    """
    path = folder / TRACE
    if not os.path.isfile(path):
        return Timeline((), "The run was not traced, or has not ended yet; run.trace=true records a timeline.")
    if path.stat().st_size > LARGEST_BYTES:
        return Timeline((), f"{TRACE} is too large to be shown here; ui.perfetto.dev opens it.")
    window = None if around_s is None else (1e3 * (around_s - 3 * step_s), 1e3 * (around_s + 5 * step_s))
    found: list[Slice] = []
    for piece in _read(path):
        # Without a moment to look at, the window begins with the first slice of the file.
        window = window or (piece.began_ms, piece.began_ms + 8e3 * step_s)
        if piece.ended_ms > window[0] and piece.began_ms < window[1]:
            found.append(piece)
    found.sort(key=lambda piece: piece.began_ms)
    zero = window[0] if window is not None else 0.0
    cut = f", the first {_MOST_SLICES:,} of {len(found):,} parts of it" if len(found) > _MOST_SLICES else ""
    shown = (Slice(s.rank, s.kind, s.began_ms - zero, s.ended_ms - zero, s.name) for s in found[:_MOST_SLICES])
    what = "the first steps" if around_s is None else "the steps around the first incident"
    if not found:  # such as of a run that was traced only after it
        return Timeline((), f"{TRACE} has nothing of {what}. ui.perfetto.dev opens it.")
    return Timeline(tuple(shown), f"Shown are {what}{cut}. ui.perfetto.dev opens {TRACE}, which has all of it.")


def _read(path: Path) -> Iterator[Slice]:
    """The slices of programs and waits, in milliseconds since the run began. All other lines are left out."""
    decoder = msgspec.json.Decoder()
    with open_regular(path) as file:
        for line in file:
            if b'"ph": "X"' not in line or b'"cat": "send"' in line:
                continue
            try:
                event: Any = decoder.decode(line.rstrip().removesuffix(b","))
                kind = KINDS.get(event["cat"])
                if kind is not None:
                    began = event["ts"] / 1e3
                    yield Slice(event["pid"] - 2, kind, began, began + event["dur"] / 1e3, str(event["name"]))
            except (msgspec.DecodeError, LookupError, TypeError):
                continue
