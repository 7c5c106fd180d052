"""The timeline of a run: each worker records its work in a file, and the controller merges the files for Perfetto.

A worker's part, trace-RANK.jsonl, is written in blocks. Its first line relates the worker's clock to the time of day,
and the others are short arrays. If a worker is killed, its part ends with the last block that it wrote. `merge_trace`
makes trace.json from all parts, from events.jsonl, and from what an earlier trace.json has of workers, in the Trace
Event Format, which Perfetto and chrome://tracing open.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from elaswave_spmd.regular_files import open_regular
from elaswave_spmd.run_dir.atomic_write import open_private, replacing
from elaswave_spmd.run_dir.json_lines import read_json_lines

TRACE = "trace.json"
_PART = re.compile(r"trace-([0-9]+)\.jsonl")
FORWARD, BACKWARD, WEIGHTS, WAIT, SEND, COPY, MARK, FREQUENCY = "F", "B", "W", "I", "S", "G", "M", "C"
_PROGRAMS = {FORWARD: "forward", BACKWARD: "backward", WEIGHTS: "weights"}
_BLOCK = 2000  # rows that are collected before they are written
_GAP_S = 3e-4  # two waits for the same thing with less than this between them are shown as one
_CONTROLLER, _FIRST_WORKER = 1, 2  # process numbers in the trace; some viewers take process 0 for the idle process
_MERGED = "parts"  # the field of `otherData` with the first lines of the parts that a trace.json was made of
_ROWS = {1: "layers, waits", 2: "sends"}

TraceEvent = dict[str, Any]
"""One event of the Trace Event Format."""


class TracePart:
    """The timeline of one worker, open for writing. All times are those of time.perf_counter(), in seconds.

    If the disk is full, the timeline ends, and training goes on.

    Args:
        folder: the run's directory.
        rank: the rank of the worker.
        clocks: returns (time of day, perf_counter) of the same moment; None for the system's clocks.

    Raises:
        OSError: the part cannot be opened.
    """

    def __init__(self, folder: str | Path, rank: int, clocks: Callable[[], tuple[float, float]] | None = None) -> None:
        path = Path(folder) / f"trace-{rank}.jsonl"
        self._file: int | None = open_private(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._encoder = msgspec.json.Encoder()
        self._rows: list[object] = []
        self._waiting: list[Any] | None = None  # the last wait, which the next one may continue
        # If the run is resumed, this file may exist and end within a line; the newline ends that line.
        os.write(self._file, b"\n")
        day, counter = clocks() if clocks is not None else (time.time(), time.perf_counter())
        self._rows.append({"rank": rank, "pid": os.getpid(), "zero": day - counter})
        self.flush()

    def action(self, step: int, microbatch: int, layer: int, kind: str, began: float, ended: float) -> None:
        """Record one run of a layer's program: FORWARD, BACKWARD, or WEIGHTS for the second part of a backward."""
        self._add([kind, began, ended, step, microbatch, layer])

    def wait(self, what: str, began: float, ended: float) -> None:
        """Record that the training thread waited; `what` names what it waited for."""
        waiting = self._waiting
        # The training thread wakes up for every message, so one wait for the reader of the trace is many short waits.
        if waiting is not None and waiting[3] == what and began - waiting[2] < _GAP_S:
            waiting[2] = ended
            return
        self._add(None)
        self._waiting = [WAIT, began, ended, what]

    def send(self, peer: int, kind: str, num_bytes: int, began: float, ended: float) -> None:
        """Record that a message with a payload was given to a link."""
        self._add([SEND, began, ended, peer, kind, num_bytes])

    def copy(self, kind: str, num_bytes: int, began: float, ended: float) -> None:
        """Record that values for the other workers of the stage were given to their process group."""
        self._add([COPY, began, ended, kind, num_bytes])

    def mark(self, name: str, at: float | None = None) -> None:
        """Record an instant, such as the begin of a mesh epoch, and flush all rows, so that they survive a kill."""
        self._add([MARK, time.perf_counter() if at is None else at, name])
        self.flush()

    def frequency(self, value: float) -> None:
        """Record the frequency of the worker's device from now on, relative to the normal one."""
        self._add([FREQUENCY, time.perf_counter(), value])

    def flush(self) -> None:
        """Hand all rows to the operating system."""
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
        """Write the remaining rows and close the file; closing again is allowed."""
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


def parts_in(folder: Path) -> dict[Path, int]:
    """The parts of workers in a run's directory, as path -> rank, in the order of ranks. Other files are ignored.

    Empty if the directory cannot be listed.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    found = {folder / name: int(part[1]) for name in names if (part := _PART.fullmatch(name))}
    return dict(sorted(found.items(), key=lambda item: (item[1], item[0])))


def merge_trace(folder: str | Path) -> Path | None:
    """Make trace.json from the workers' parts, and remove the parts. Called by the controller at the end of each life.

    A run that is resumed, or begins again from a checkpoint, has a trace.json already: what it has of workers is kept.
    It also has the first lines of the parts in it: a controller may be killed before it has removed them.

    Returns:
        The path of trace.json; None if there are no parts, or if it cannot be made (then the parts stay).
    """
    folder = Path(folder)
    parts = parts_in(folder)
    if not parts:
        return None
    path = folder / TRACE
    try:
        with replacing(path, durable=False) as scratch, open(scratch, "w", encoding="utf-8") as file:
            first_lines = [row for part in parts for row in _first_lines(part)]
            write_trace(file, _all_events(folder, parts), **{_MERGED: first_lines})
        for part in parts:
            part.unlink()
    except Exception:  # such as a damaged events.jsonl or a full disk; the run has its result and must not fail
        return None
    return path


def write_trace(file: TextIO, events: Iterable[Mapping[str, object]], **about: object) -> None:
    """Write events in the Trace Event Format, one per line, without collecting them in memory.

    Args:
        about: facts about the trace as a whole, for the format's field `otherData`.
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
    """A trace event that takes time. `row` is a pair (process, thread) of the trace."""
    length = round(max(0.0, ended_us - began_us), 3)
    head = {"ph": "X", "pid": row[0], "tid": row[1], "name": name, "cat": kind}
    return head | {"ts": round(began_us, 3), "dur": length, "args": args}


def instant_of(
    row: tuple[int, int], name: str, at_us: float, *, everywhere: bool = False, **args: object
) -> TraceEvent:
    """A trace event that takes no time. With `everywhere` it is drawn as a line over all rows."""
    head = {"ph": "i", "pid": row[0], "tid": row[1], "name": name, "s": "g" if everywhere else "t"}
    return head | {"ts": round(at_us, 3), "args": args}


def counter_of(process: int, name: str, at_us: float, value: float) -> TraceEvent:
    """A trace event for a number that changes with time."""
    return {"ph": "C", "pid": process, "tid": 0, "name": name, "ts": round(at_us, 3), "args": {name: value}}


def names_of(process: int, name: str, rows: Mapping[int, str]) -> Iterator[TraceEvent]:
    """The trace events that name a process and its rows."""
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
    for thread, row_name in rows.items():
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": row_name}}


# ---- merging


def _all_events(folder: Path, parts: Mapping[Path, int]) -> Iterator[TraceEvent]:
    """The trace events of the controller and of all workers; times count from the run's first event `start`."""
    events = read_json_lines(folder / "events.jsonl")
    # What comes before it are validations of the run that this one goes on from, with their times.
    events = events[next((number for number, event in enumerate(events) if event["event"] == "start"), 0) :]
    start = events[0]["time"] if events else 0.0
    yield from _controller_events(events, start)
    named, known = set[int](), _merged_before(folder / TRACE)
    for event in _earlier_worker_events(folder / TRACE):  # their times count from the same event
        if event.get("name") == "process_name":
            named.add(event["pid"])
        yield event
    for part, rank in parts.items():
        if rank + _FIRST_WORKER not in named:
            yield from names_of(rank + _FIRST_WORKER, f"worker {rank}", _ROWS)
        yield from _worker_events(part, rank + _FIRST_WORKER, start, known)


def _controller_events(events: list[dict[str, Any]], start: float) -> Iterator[TraceEvent]:
    """The trace of events.jsonl: events as lines over all rows, mesh epochs as a row."""
    yield from names_of(_CONTROLLER, "controller", {1: "events", 2: "mesh epochs"})
    begun: tuple[float, str] | None = None
    at, mesh = 0.0, None
    for event in events:
        kind, at = event["event"], 1e6 * (event["time"] - start)
        rest = {name: value for name, value in event.items() if name not in ("event", "time")}
        yield instant_of((_CONTROLLER, 1), kind, at, everywhere=True, **rest)
        if kind == "start" or "after_step" in event:  # a mesh epoch begins
            mesh = event.get("mesh", mesh)  # `controller` comes after a `start` with the mesh that was adopted
            name = f"mesh epoch {event.get('mesh_epoch', 0)}: {mesh}"
            if begun is not None and name != begun[1]:
                yield slice_of((_CONTROLLER, 2), begun[1], "mesh epoch", begun[0], at)
            begun = begun if begun is not None and name == begun[1] else (at, name)
    if begun is not None:
        yield slice_of((_CONTROLLER, 2), begun[1], "mesh epoch", begun[0], at)


def _earlier_worker_events(trace: Path) -> Iterator[TraceEvent]:
    """The events of workers in the trace of earlier lives of the run, if there is one. Other lines are left out."""
    try:
        file = open_regular(trace)
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                event = json.loads(line.rstrip().removesuffix(b","))
                if event["pid"] >= _FIRST_WORKER:
                    yield event
            except (ValueError, LookupError, TypeError):
                continue  # a line of the file's frame


def _merged_before(trace: Path) -> list[object]:
    """The first lines of the parts that an earlier trace.json was made of."""
    head = b'"otherData": '
    try:
        with open_regular(trace) as file:
            file.readline()
            about = json.loads(file.readline().removeprefix(head).rstrip().removesuffix(b","))
    except (FileNotFoundError, ValueError):
        return []
    return about.get(_MERGED, [])


def _first_lines(part: Path) -> Iterator[dict[str, Any]]:
    """The lines of a part with which a worker has begun it; several if the run was resumed in its directory."""
    with open_regular(part) as file:
        for line in file:
            with contextlib.suppress(ValueError):
                if line.startswith(b"{"):
                    yield json.loads(line)


def _worker_events(part: Path, process: int, start: float, known: Sequence[object]) -> Iterator[TraceEvent]:
    """The trace of one worker's part. Lines that cannot be read are left out, and what follows a `known` first line."""
    zero, is_known = 0.0, False
    with open_regular(part) as file:
        for line in file:
            try:
                row = json.loads(line)
                if isinstance(row, dict):  # a first line; a part has several if the run was resumed in its directory
                    zero, is_known = row["zero"] - start, row in known
                elif not is_known:
                    yield _row_event(row, process, zero)
            except (ValueError, LookupError, TypeError):
                continue  # cut short when the worker was killed, or when the disk was full


def _row_event(row: list[Any], process: int, zero: float) -> TraceEvent:
    """One row of a worker's part as a trace event."""
    kind, began = row[0], 1e6 * (row[1] + zero)
    if kind == MARK:
        return instant_of((process, 1), row[2], began)
    if kind == FREQUENCY:
        return counter_of(process, "frequency", began, row[2])
    ended = 1e6 * (row[2] + zero)
    if kind == WAIT:
        return slice_of((process, 1), f"wait: {row[3].rstrip('0123456789 ')}", "wait", began, ended, what=row[3])
    if kind == SEND:
        _, _, _, peer, message, num_bytes = row
        to = "controller" if peer < 0 else f"worker {peer}"
        return slice_of((process, 2), f"{message} to {to}", "send", began, ended, bytes=num_bytes, to=peer)
    if kind == COPY:
        return slice_of((process, 2), f"{row[3]} to the group", "send", began, ended, bytes=row[4])
    _, _, _, step, microbatch, layer = row
    name = f"{kind} micro-batch {microbatch}, layer {layer}"
    return slice_of((process, 1), name, _PROGRAMS[kind], began, ended, step=step, microbatch=microbatch, layer=layer)
