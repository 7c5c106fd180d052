"""Programs that workers compile: what the run says of them."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from elaswave_spmd.controller.events import Compilations
from elaswave_spmd.controller.summary import RunRecord
from elaswave_spmd.recovery.messages import AnyMessage, Heartbeat, Measured, Ready
from elaswave_spmd.run_dir import RunDir, RunObserver, read_events
from elaswave_spmd.sharding.layout import ModelLayout


def told(folder: Path, *messages: AnyMessage) -> tuple[Compilations, RunRecord, list[tuple[str, int, int]]]:
    """What is recorded of these messages, and the events as (kind, rank, programs)."""
    record = RunRecord(cast(ModelLayout, None))  # of state, which is not looked at here
    with RunObserver(RunDir.create(folder / "run", "", model="m", mesh="dp2"), board=False) as observer:
        compilations = Compilations(observer, record)
        for message in messages:
            compilations.take(message)
    return compilations, record, [(e["event"], e["rank"], e["programs"]) for e in read_events(folder / "run")]


def test_nothing_is_said_where_nothing_is_compiled(tmp_path: Path) -> None:
    _, record, events = told(tmp_path, Ready(0, "a"), Measured(0, 1, ()))
    assert (record.compiled, events) == ({}, [])


def test_programs_of_the_start_and_of_later(tmp_path: Path) -> None:
    steps = [Measured(rank, step, (), (), 8) for step in (1, 2) for rank in (0, 1)]
    late = [Measured(1, 3, (), (), 10), Measured(1, 4, (), (), 10)]
    _, record, events = told(tmp_path, Ready(0, "a", False, 8), Ready(1, "b", False, 8), *steps, *late)
    assert record.compiled == {0: [8, 0], 1: [8, 2]}
    assert events == [("compile", 0, 8), ("compile", 1, 8), ("recompile", 1, 2)]


def test_who_is_ready_gets_no_further_with_its_start(tmp_path: Path) -> None:
    assert told(tmp_path, Heartbeat(3, 1, False, "compiling"))[0].got_further_at > 0
    for name in "bc":
        (tmp_path / name).mkdir()
    assert told(tmp_path / "c", Heartbeat(3, 1, True))[0].got_further_at == 0, "it waits"
    assert told(tmp_path / "b", Ready(3, "a"), Heartbeat(3, 1, False))[0].got_further_at == 0
