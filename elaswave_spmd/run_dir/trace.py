"""The timeline of a run: each worker writes what it does, and the controller makes one trace of it, for Perfetto.

A worker's part, trace-RANK.jsonl, grows in blocks: its first line ties its clock to the time of day, the others are
short arrays. A part of a worker that was killed ends where its last block did. `merge_trace` makes trace.json of all
parts and of events.jsonl, in the Trace Event Format that Perfetto and chrome://tracing open.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec

from elaswave_spmd.run_dir.json_lines import read_json_lines

TRACE = "trace.json"
PARTS = "trace-*.jsonl"
FORWARD, BACKWARD, WAIT, SEND, MARK = "F", "B", "W", "S", "M"
_BLOCK = 2000  # rows
_GAP_S = 3e-4  # two waits for the same thing, with less than this between them, are shown as one
_CONTROLLER, _FIRST_WORKER = 1, 2  # process numbers in the trace; 0 means "idle" to some viewers
_ROWS = {1: "layers, waits", 2: "sends"}

TraceEvent = dict[str, Any]
"""One event of the Trace Event Format."""


class TracePart:
    """What one worker does. Times are of time.perf_counter().

    A disk that is full ends the part, not the training.

    Args:
        folder: the run's directory.
        clocks: (time of day, perf_counter) at the same moment; None: those of the system.

    Raises:
        OSError: the part cannot be opened.
    """

    def __init__(self, folder: str | Path, rank: int, clocks: Callable[[], tuple[float, float]] | None = None) -> None:
        self._file: int | None = os.open(
            Path(folder) / f"trace-{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        self._encoder = msgspec.json.Encoder()
        self._rows: list[object] = []
        self._waiting: list[Any] | None = None  # a wait that may go on
        os.write(self._file, b"\n")  # ends a line that was torn: the part of an earlier life may be there
        day, counter = clocks() if clocks is not None else (time.time(), time.perf_counter())
        self._rows.append({"rank": rank, "pid": os.getpid(), "zero": day - counter})
        self.flush()

    def action(self, step: int, microbatch: int, layer: int, backward: bool, began: float, ended: float) -> None:
        """A layer's program has run."""
        self._add([BACKWARD if backward else FORWARD, began, ended, step, microbatch, layer])

    def wait(self, what: str, began: float, ended: float) -> None:
        """The training thread had nothing to do; `what` in words."""
        waiting = self._waiting
        if waiting is not None and waiting[3] == what and began - waiting[2] < _GAP_S:
            waiting[2] = ended
            return
        self._add(None)
        self._waiting = [WAIT, began, ended, what]

    def send(self, peer: int, kind: str, num_bytes: int, began: float, ended: float) -> None:
        """A message with a payload was handed to a link."""
        self._add([SEND, began, ended, peer, kind, num_bytes])

    def mark(self, name: str, at: float | None = None) -> None:
        """Something that takes no time: a step is applied, a mesh epoch begins. What was written so far is kept."""
        self._add([MARK, time.perf_counter() if at is None else at, name])
        self.flush()

    def flush(self) -> None:
        """Hands all rows to the operating system."""
        rows, self._rows = self._rows, []
        if self._file is None or not rows:
            return
        try:
            block = memoryview(self._encoder.encode_lines(rows))
            while block:
                block = block[os.write(self._file, block) :]
        except OSError:
            self._end()

    def close(self) -> None:
        """Writes what is left; closing again is allowed."""
        self._add(None)
        self.flush()
        self._end()

    def _add(self, row: list[object] | None) -> None:
        rows = self._rows
        if self._waiting is not None:
            rows.append(self._waiting)
            self._waiting = None
        if row is not None:
            rows.append(row)
        if len(rows) >= _BLOCK:
            self.flush()

    def _end(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def merge_trace(folder: str | Path) -> Path | None:
    """Makes trace.json of the parts of a run, and removes them.

    Returns:
        Its path; None if there is nothing to make it of, or if it cannot be written (then the parts stay).
    """
    folder = Path(folder)
    parts = sorted(folder.glob(PARTS), key=lambda path: (len(path.name), path.name))
    if not parts:
        return None
    scratch, path = folder / f".{TRACE}.tmp", folder / TRACE
    try:
        with open(scratch, "w", encoding="utf-8") as file:
            write_trace(file, _all_events(folder, parts))
        os.replace(scratch, path)
        for part in parts:
            part.unlink()
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()
        return None
    return path


def write_trace(file: TextIO, events: Iterable[Mapping[str, object]], **about: object) -> None:
    """Writes events of the Trace Event Format, one a line, without holding them all.

    Args:
        about: what else is to be known of the trace.
    """
    file.write('{"displayTimeUnit": "ms",\n"otherData": ' + json.dumps(about) + ',\n"traceEvents": [\n')
    before = ""
    for event in events:
        file.write(before + json.dumps(event, ensure_ascii=False))
        before = ",\n"
    file.write("\n]}\n")


# ---- events of the format


def slice_of(
    row: tuple[int, int], name: str, kind: str, began_us: float, ended_us: float, **args: object
) -> TraceEvent:
    """Something that takes time. `row`: (process, thread) of the trace."""
    length = round(max(0.0, ended_us - began_us), 3)
    head = {"ph": "X", "pid": row[0], "tid": row[1], "name": name, "cat": kind}
    return head | {"ts": round(began_us, 3), "dur": length, "args": args}


def instant_of(
    row: tuple[int, int], name: str, at_us: float, *, everywhere: bool = False, **args: object
) -> TraceEvent:
    """Something that takes none. `everywhere`: a line over all rows."""
    head = {"ph": "i", "pid": row[0], "tid": row[1], "name": name, "s": "g" if everywhere else "t"}
    return head | {"ts": round(at_us, 3), "args": args}


def counter_of(process: int, name: str, at_us: float, value: float) -> TraceEvent:
    """A number that changes with time."""
    return {"ph": "C", "pid": process, "tid": 0, "name": name, "ts": round(at_us, 3), "args": {name: value}}


def names_of(process: int, name: str, rows: Mapping[int, str]) -> Iterator[TraceEvent]:
    """What a process and its rows are called."""
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
    for thread, of_row in rows.items():
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": of_row}}


# ---- merging


def _all_events(folder: Path, parts: Iterable[Path]) -> Iterator[TraceEvent]:
    said = read_json_lines(folder / "events.jsonl")
    start = said[0]["time"] if said else 0.0
    yield from _of_controller(said, start)
    for part in parts:
        rank = int(part.stem.partition("-")[2])
        yield from names_of(rank + _FIRST_WORKER, f"worker {rank}", _ROWS)
        yield from _of_worker(part, rank + _FIRST_WORKER, start)


def _of_controller(said: list[dict[str, Any]], start: float) -> Iterator[TraceEvent]:
    """Events as lines over everything, mesh epochs as a row, frequencies as numbers of the workers."""
    yield from names_of(_CONTROLLER, "controller", {1: "events", 2: "mesh epochs"})
    begun: tuple[float, str] | None = None
    at, lowered = 0.0, set()
    for event in said:
        kind, at = event["event"], 1e6 * (event["time"] - start)
        rest = {name: value for name, value in event.items() if name not in ("event", "time")}
        yield instant_of((_CONTROLLER, 1), kind, at, everywhere=True, **rest)
        if kind == "start" or "after_step" in event:  # a mesh epoch begins
            name = f"mesh epoch {event.get('mesh_epoch', 0)}: {event.get('mesh')}"
            if begun is not None and name != begun[1]:
                yield slice_of((_CONTROLLER, 2), begun[1], "mesh epoch", begun[0], at)
            begun = begun if begun is not None and name == begun[1] else (at, name)
        if kind == "frequency":
            for rank, value in event.get("frequencies", {}).items():
                if rank not in lowered:
                    lowered.add(rank)
                    yield counter_of(int(rank) + _FIRST_WORKER, "frequency", 0.0, event["before"][rank])
                yield counter_of(int(rank) + _FIRST_WORKER, "frequency", at, value)
    if begun is not None:
        yield slice_of((_CONTROLLER, 2), begun[1], "mesh epoch", begun[0], at)


def _of_worker(part: Path, process: int, start: float) -> Iterator[TraceEvent]:
    zero = 0.0
    with open(part, "rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                if isinstance(row, dict):  # a new life of this rank: another run in the same directory, resumed
                    zero = row["zero"] - start
                else:
                    yield _of_row(row, process, zero)
            except (ValueError, LookupError, TypeError):
                continue  # torn when its worker was killed, or the disk was full


def _of_row(row: list[Any], process: int, zero: float) -> TraceEvent:
    kind, began = row[0], 1e6 * (row[1] + zero)
    if kind == MARK:
        return instant_of((process, 1), row[2], began)
    ended = 1e6 * (row[2] + zero)
    if kind == WAIT:
        return slice_of((process, 1), f"wait: {row[3].rstrip('0123456789 ')}", "wait", began, ended, what=row[3])
    if kind == SEND:
        _, _, _, peer, message, num_bytes = row
        to = "controller" if peer < 0 else f"worker {peer}"
        return slice_of((process, 2), f"{message} to {to}", "send", began, ended, bytes=num_bytes, to=peer)
    _, _, _, step, microbatch, layer = row
    name = f"{kind} micro-batch {microbatch}, layer {layer}"
    word = "forward" if kind == FORWARD else "backward"
    return slice_of((process, 1), name, word, began, ended, step=step, microbatch=microbatch, layer=layer)
