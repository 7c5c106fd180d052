"""Programs that workers compile: what the run's log says of them, and the time that they get for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from elaswave_spmd.controller.events import End, RunStopped
from elaswave_spmd.controller.failures import StartDeadline
from elaswave_spmd.controller.run_log import CompilationLog
from elaswave_spmd.controller.summary import RunRecord
from elaswave_spmd.recovery.messages import Heartbeat, Measured, Ready
from elaswave_spmd.run_dir import RunDir, RunObserver, read_events
from elaswave_spmd.sharding.layout import ModelLayout


def logged(folder: Path, *messages: Ready | Measured) -> tuple[RunRecord, list[tuple[str, int, int]]]:
    """The record of these messages, and the events as (kind, rank, programs)."""
    record = RunRecord(cast(ModelLayout, None))  # of state, which is not looked at here
    with RunObserver(RunDir.create(folder / "run", "", model="m", mesh="dp2"), board=False) as observer:
        log = CompilationLog(observer, record)
        for message in messages:
            if isinstance(message, Ready):
                log.ready(message)
            else:
                log.measured(message)
    return record, [(e["event"], e["rank"], e["programs"]) for e in read_events(folder / "run")]


def test_nothing_is_said_where_nothing_is_compiled(tmp_path: Path) -> None:
    record, events = logged(tmp_path, Ready(0, "a"), Measured(0, 1, ()))
    assert (record.compiled, events) == ({}, [])


def test_programs_of_the_start_and_of_later(tmp_path: Path) -> None:
    steps = [Measured(rank, step, (), (), 8) for step in (1, 2) for rank in (0, 1)]
    late = [Measured(1, 3, (), (), 10), Measured(1, 4, (), (), 10)]
    record, events = logged(tmp_path, Ready(0, "a", False, 8), Ready(1, "b", False, 8), *steps, *late)
    assert record.compiled == {0: [8, 0], 1: [8, 2]}
    assert events == [("compile", 0, 8), ("compile", 1, 8), ("recompile", 1, 2)]


def is_late(*, ready: bool, beat: Heartbeat | None) -> bool:
    """True if the run ends 12 s after its start, of at most 10 s, with this heartbeat of worker 3 after 5 s."""
    mesh = SimpleNamespace(members=(3,))
    addresses = {3: "a"} if ready else {}
    protocol = SimpleNamespace(started=False, addresses=addresses, placement=SimpleNamespace(mesh=mesh))
    deadline = StartDeadline(cast(Any, protocol), 10.0, now=100.0)
    if beat is not None:
        deadline.heartbeat(beat, 105.0)
    actions = deadline.check(112.0)
    assert all(isinstance(it, End) and isinstance(it.outcome, RunStopped) for it in actions)
    return bool(actions)


def test_a_worker_that_compiles_has_more_time_to_start() -> None:
    assert not is_late(ready=False, beat=Heartbeat(3, 1, False, "compiling"))
    assert is_late(ready=False, beat=None)
    assert is_late(ready=False, beat=Heartbeat(3, 1, True)), "it waits"
    assert is_late(ready=True, beat=Heartbeat(3, 1, False)), "what it does after its start does not count"
