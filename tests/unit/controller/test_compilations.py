"""Programs that workers compile: what the run's log says of them, and the time that they get for it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

from elaswave_spmd.conf.schema import Timeouts
from elaswave_spmd.controller.run_log import CompilationLog
from elaswave_spmd.controller.summary import RunRecord
from elaswave_spmd.controller.supervision import Supervision
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
    """True if worker 3 of the first mesh is given up within 12 s, of 10 that it has, with this heartbeat after 5 s."""
    timeouts = Timeouts(start=10.0, progress=9.0, status=2.0, suspect=1.0)
    supervision = Supervision(timeouts, 100.0)
    supervision.expect(3, joins=False)
    found = []
    for tick in range(120):
        now = 100.1 + tick / 10
        if tick == 50 and beat is not None:
            supervision.heartbeat(beat, now)
        if tick == 60 and ready:
            supervision.watch(3, now)
        if tick >= 60 and ready:
            supervision.heartbeat(Heartbeat(3, 0, True), now)
        found += supervision.tick(now, math.inf, (0, ()), ())[0]
    assert all(suspect.rank == 3 and "not ready" in suspect.reason for suspect in found)
    return bool(found)


def test_a_worker_that_compiles_has_more_time_to_start() -> None:
    assert not is_late(ready=False, beat=Heartbeat(3, 1, False, "compiling"))
    assert is_late(ready=False, beat=None)
    assert is_late(ready=False, beat=Heartbeat(3, 1, True)), "it waits"
    assert not is_late(ready=True, beat=None), "it is ready"
