"""Parts of workers become one trace that viewers open; a part that was torn counts as far as it goes."""

from __future__ import annotations

import io
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.run_dir.trace import TracePart, counter_of, instant_of, merge_trace, slice_of, write_trace

START = 1_000_000.0
EVENTS = (
    {"event": "start", "time": START, "mesh": "dp2"},
    {"event": "frequency", "time": START + 2, "paces": {"1": [[0, 0.5]]}},
    {"event": "fail", "time": START + 4, "mesh_epoch": 1, "mesh": "dp1", "after_step": 3, "ranks": [0]},
    {"event": "fail", "time": START + 5, "mesh_epoch": 1, "mesh": "dp1", "ranks": [7]},
    {"event": "finish", "time": START + 6},
)


def write_events(folder: Path) -> None:
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))


def part(folder: Path, rank: int, zero: float = START - 50.0) -> TracePart:
    """A part whose perf_counter() is 50 when the run starts."""
    return TracePart(folder, rank, lambda: (zero + 50.0, 50.0))


def merged(folder: Path) -> list[dict[str, Any]]:
    path = merge_trace(folder)
    assert (
        path is not None
        and path == folder / "trace.json"
        and not list(folder.glob("trace-*"))
        and not list(folder.glob(".trace*"))
    )
    return json.loads(path.read_text())["traceEvents"]


def test_all_that_a_worker_does_is_on_its_row(tmp_path: Path) -> None:
    write_events(tmp_path)
    for rank in (0, 11):
        trace = part(tmp_path, rank)
        trace.action(1, 4, 2, "F", 50.5, 50.75)
        trace.action(1, 4, 2, "B", 51.0, 51.5)
        trace.wait("activation of micro-batch 5", 51.5, 52.0)
        trace.send(-1 if rank else 11, "Activation", 4096, 52.0, 52.001)
        trace.copy("PartialSum", 512, 52.25, 52.251)
        trace.mark("step 1 applied", 52.5)
        trace.close()
        trace.close()
    events = merged(tmp_path)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "controller", 2: "worker 0", 13: "worker 11"}
    of = [e for e in events if e["pid"] == 13 and e["ph"] != "M"]
    assert [(e["ph"], e["tid"], e["name"], e["ts"], e.get("dur")) for e in of] == [
        ("X", 1, "F micro-batch 4, layer 2", 0.5e6, 0.25e6),
        ("X", 1, "B micro-batch 4, layer 2", 1e6, 0.5e6),
        ("X", 1, "wait: activation of micro-batch", 1.5e6, 0.5e6),
        ("X", 2, "Activation to controller", 2e6, 1e3),
        ("X", 2, "PartialSum to the group", 2.25e6, 1e3),
        ("i", 1, "step 1 applied", 2.5e6, None),
    ]
    assert of[0]["args"] == {"step": 1, "microbatch": 4, "layer": 2} and of[3]["args"] == {"bytes": 4096, "to": -1}
    assert of[4]["args"] == {"bytes": 512}
    assert [e["cat"] for e in of[:5]] == ["forward", "backward", "wait", "send", "send"]


def test_events_mesh_epochs_and_frequencies_of_the_controller(tmp_path: Path) -> None:
    write_events(tmp_path)
    part(tmp_path, 0).close()
    with closing(part(tmp_path, 1)) as other:
        other.frequency(0.5)
    events = [e for e in merged(tmp_path) if e["ph"] != "M"]
    assert [(e["name"], e["ts"]) for e in events if e["ph"] == "i"] == [
        ("start", 0.0), ("frequency", 2e6), ("fail", 4e6), ("fail", 5e6), ("finish", 6e6),
    ]  # fmt: skip
    assert [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        ("mesh epoch 0: dp2", 0.0, 4e6),
        ("mesh epoch 1: dp1", 4e6, 2e6),
    ]
    assert [(e["pid"], e["args"]) for e in events if e["ph"] == "C"] == [(3, {"frequency": 0.5})]


def test_a_controller_that_came_back_has_the_mesh_that_it_has_adopted(tmp_path: Path) -> None:
    start = {"event": "start", "time": START + 8, "mesh": "dp1"}
    back = {"event": "controller", "time": START + 9, "mesh_epoch": 3, "after_step": 5, "seconds": 1.0}
    end = {"event": "finish", "time": START + 10}
    lines = [*EVENTS[:-1], start, back, end]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
    part(tmp_path, 0).close()
    epochs = [(e["name"], e["ts"]) for e in merged(tmp_path) if e["ph"] == "X"]
    assert epochs[-2:] == [("mesh epoch 0: dp1", 8e6), ("mesh epoch 3: dp1", 9e6)]


def test_earlier_lives_of_the_run_stay_in_the_trace(tmp_path: Path) -> None:
    """A run that is resumed, or begins again from a checkpoint, makes its trace anew at its end."""
    write_events(tmp_path)
    for rank in (0, 1):
        with closing(part(tmp_path, rank)) as trace:
            trace.action(1, 0, 0, "F", 50.0, 50.25)
            trace.mark("step 1 applied \u00e9", 50.5)
    before = [e for e in merged(tmp_path) if e["pid"] > 1]
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": "start", "time": START + 8, "mesh": "dp1"}) + "\n")
    for rank in (0, 2):
        with closing(part(tmp_path, rank, START - 42.0)) as trace:  # other processes
            trace.action(2, 0, 0, "F", 50.0, 50.25)
    events = merged(tmp_path)
    assert [e for e in events if e["pid"] > 1][: len(before)] == before
    found = [(e["pid"], e["args"]["step"], e["ts"]) for e in events if e.get("cat") == "forward"]
    assert found == [(2, 1, 0.0), (3, 1, 0.0), (2, 2, 8e6), (4, 2, 8e6)]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "controller", "worker 0", "worker 1", "worker 2",
    ]  # fmt: skip
    assert [e["name"] for e in events if e["pid"] == 1 and e["ph"] == "i"].count("start") == 2, "its events are once"


def test_parts_that_were_not_removed_are_in_the_trace_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller may be killed between the two. The workers of the next life go on in the same files."""
    write_events(tmp_path)
    with closing(part(tmp_path, 0)) as trace:
        trace.action(1, 0, 0, "F", 50.0, 50.25)

    unlinked = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".jsonl":
            raise OSError(5, os.strerror(5))
        unlinked(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        assert merge_trace(tmp_path) is None and (tmp_path / "trace.json").exists()
    for rank in (0, 1):
        with closing(part(tmp_path, rank, START - 42.0)) as trace:
            trace.action(2, 0, 0, "F", 50.0, 50.25)
    for _ in range(2):
        found = [(e["pid"], e["args"]["step"]) for e in merged(tmp_path) if e.get("cat") == "forward"]
        assert found == [(2, 1), (2, 2), (3, 2)]
        with closing(part(tmp_path, 1, START)):  # a life whose worker has done nothing yet
            pass


def test_validations_of_the_run_that_is_gone_on_from_are_not_in_the_trace(tmp_path: Path) -> None:
    """They are copied into the events, with the times that they had."""
    lines = [{"event": "validation", "time": START - 9e5, "step": 50, "loss": 2.0}, *EVENTS]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
    with closing(part(tmp_path, 0)) as trace:
        trace.action(51, 0, 0, "F", 50.5, 50.75)
    events = [e for e in merged(tmp_path) if e["ph"] != "M"]
    assert [(e["name"], e["ts"]) for e in events if e["ph"] == "i"][:2] == [("start", 0.0), ("frequency", 2e6)]
    assert [e["ts"] for e in events if e["pid"] == 2] == [0.5e6]


def test_a_wait_that_goes_on_is_one(tmp_path: Path) -> None:
    write_events(tmp_path)
    trace = part(tmp_path, 0)
    for began, ended in ((50.0, 50.1), (50.1001, 50.2), (50.3, 50.4)):
        trace.wait("votes of step 3", began, ended)
    trace.wait("votes of step 4", 50.4001, 50.5)
    trace.close()
    waits = [(e["ts"], e["dur"], e["args"]["what"]) for e in merged(tmp_path) if e.get("cat") == "wait"]
    assert waits == [
        (0.0, pytest.approx(0.2e6), "votes of step 3"),
        (pytest.approx(0.3e6), pytest.approx(0.1e6), "votes of step 3"),
        (pytest.approx(0.4001e6), pytest.approx(0.0999e6), "votes of step 4"),
    ]


def test_marks_survive_a_kill_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    write_events(tmp_path)
    trace = part(tmp_path, 0)
    trace.action(1, 0, 0, "F", 50.0, 50.1)
    trace.mark("step 1 applied", 50.2)
    trace.action(2, 0, 0, "F", 50.3, 50.4)  # never written: it is killed here
    with open(tmp_path / "trace-0.jsonl", "ab") as file:
        file.write(b'["F",51.0,51')
    again = part(tmp_path, 0, START - 40.0)  # of the resumed run; its clock is another one
    again.action(2, 0, 0, "F", 60.0, 60.1)
    again.close()
    found = [(e["name"], e["ts"]) for e in merged(tmp_path) if e["pid"] == 2 and e["ph"] != "M"]
    assert found == [("F micro-batch 0, layer 0", 0.0), ("step 1 applied", 0.2e6), ("F micro-batch 0, layer 0", 20e6)]


def test_no_part_no_trace(tmp_path: Path) -> None:
    assert merge_trace(tmp_path) is None and not list(tmp_path.iterdir())


def test_rows_are_written_in_blocks(tmp_path: Path) -> None:
    trace = part(tmp_path, 0)
    before = (tmp_path / "trace-0.jsonl").stat().st_size
    for i in range(1999):
        trace.action(1, i, 0, "W", 0.0, 1.0)
    assert (tmp_path / "trace-0.jsonl").stat().st_size == before
    trace.action(1, 1999, 0, "F", 0.0, 1.0)
    assert (tmp_path / "trace-0.jsonl").read_text().count("[") == 2000
    trace.close()


def test_a_full_disk_ends_the_part_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(tmp_path)
    trace = part(tmp_path, 0)

    def full(file: int, data: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "write", full)
    trace.mark("step 1 applied", 51.0)
    monkeypatch.undo()
    trace.mark("step 2 applied", 52.0)
    trace.close()
    assert "applied" not in (tmp_path / "trace-0.jsonl").read_text()


def test_a_trace_that_cannot_be_written_leaves_the_parts(tmp_path: Path) -> None:
    write_events(tmp_path)
    part(tmp_path, 0).close()
    (tmp_path / "trace.json").mkdir()
    assert merge_trace(tmp_path) is None and (tmp_path / "trace-0.jsonl").exists()
    assert not list(tmp_path.glob(".trace*"))


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        TracePart(tmp_path / "none", 0)


TIMES = st.floats(0, 1e6)


@given(st.lists(st.tuples(st.text(max_size=5), TIMES, TIMES), max_size=5))
def test_any_names_and_times_are_valid(rows: list[tuple[str, float, float]]) -> None:
    events = [slice_of((1, 1), name, "x", a, b, text=name) for name, a, b in rows]
    events += [instant_of((1, 1), name, a, everywhere=True) for name, a, _ in rows]
    events += [counter_of(1, name, a, b) for name, a, b in rows]
    file = io.StringIO()
    write_trace(file, events, made_by="a test")
    found = json.loads(file.getvalue())
    assert found["traceEvents"] == events and found["otherData"] == {"made_by": "a test"}
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")


def test_files_whose_names_are_those_of_no_worker_are_no_parts(tmp_path: Path) -> None:
    write_events(tmp_path)
    (tmp_path / "trace-gpu.jsonl").write_text("mine")
    assert merge_trace(tmp_path) is None
    for rank in (2, 10):
        part(tmp_path, rank).close()
    path = merge_trace(tmp_path)
    assert path is not None and '"worker 10"' in path.read_text()
    assert sorted(file.name for file in tmp_path.glob("trace*")) == ["trace-gpu.jsonl", "trace.json"]


@pytest.mark.parametrize("events", [None, "torn\n", '{"event": "start"}\n'], ids=["missing", "no JSON", "no time"])
def test_events_that_cannot_be_read_end_no_run_and_leave_the_parts(tmp_path: Path, events: str | None) -> None:
    if events is not None:
        (tmp_path / "events.jsonl").write_text(events)
    part(tmp_path, 0).close()
    assert merge_trace(tmp_path) is None
    assert (tmp_path / "trace-0.jsonl").exists() and not (tmp_path / "trace.json").exists()
