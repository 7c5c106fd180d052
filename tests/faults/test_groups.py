"""Stages with groups of gloo, in real processes: nobody's end, and no group's, changes a bit."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.controller.admin_client import ask
from elaswave_spmd.run_dir import read_events
from tests.faults.fault_runs import (
    TINY,
    Bits,
    all_events,
    chaos,
    events_so_far,
    patient,
    patient_until,
    run_with,
    survived,
)
from tests.multiprocess.real_runs import eventually, launch, write_text

STEPS = 100
LATE = 60
"""A step before which groups serve: until they do, the steps take their time."""
GROUP_S = 8
"""What a collective may take where one takes too long: more than a busy machine stands still."""
ARGUMENTS = (f"train.steps={STEPS}", "runtime.collectives=group")
Undisturbed = Callable[[int], Bits]


def group_events(folder: Path) -> list[dict[str, Any]]:
    """The events that name the way by which parameters go from a step on."""
    return [event for event in read_events(folder / "run") if event["event"] == "group"]


def serve_at(folder: Path, step: int) -> bool:
    return [False, *(event["serves"] for event in group_events(folder) if event["step"] <= step)][-1]


def serves_now(folder: Path) -> bool:
    """Of a run that goes on. There is an event where this changes."""
    return [False, *(event["serves"] for event in events_so_far(folder, "group"))][-1]


def test_a_group_serves_each_stage(tmp_path: Path, undisturbed: Undisturbed) -> None:
    with patient_until(lambda: serves_now(tmp_path), tmp_path) as model:
        run_with(tmp_path, *ARGUMENTS, *model, "mesh=dp3_pp2", "sharding=zero1")
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)
    assert serve_at(tmp_path, LATE) and len(group_events(tmp_path)) == 1, all_events(tmp_path)


@pytest.mark.parametrize("sharding", ["zero0", "zero2"])
def test_sums_and_reduced_gradients_go_through_the_groups_and_by_no_link(
    tmp_path: Path, undisturbed: Undisturbed, sharding: str
) -> None:
    with patient_until(lambda: serves_now(tmp_path), tmp_path) as model:
        run_with(tmp_path, *ARGUMENTS, *model, "mesh=dp3_pp2", f"sharding={sharding}", "run.trace=true")
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)
    (served,) = group_events(tmp_path)
    assert served["serves"] and served["step"] <= LATE, all_events(tmp_path)
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    applied = {e["pid"]: e["ts"] for e in trace if e["name"] == f"step {served['step']} applied"}
    assert len(applied) == 6
    for kind in ("PartialSum", "ReducedGradient"):
        sent = [e for e in trace if e["name"].startswith(kind)]
        later = [e for e in sent if e["ts"] > applied[e["pid"]]]
        assert {e["name"] for e in later} == {f"{kind} to the group"} and {e["pid"] for e in later} == {*applied}
        assert any("to worker" in e["name"] for e in sent), "the first step of an epoch goes by links"


@pytest.mark.parametrize(
    ("kind", "sharding", "point"),
    [
        ("kill", "zero1", "publish"),
        ("stop", "zero3", "publish"),
        ("kill", "zero2", "reduce"),
        ("kill", "zero0", "norm"),
        ("kill", "zero1", "norm"),
        ("kill", "zero3", "norm"),
        ("stop", "zero2", "norm"),
        ("stop", "zero1", "backward"),
    ],
)
def test_a_worker_is_lost_in_the_middle_of_its_collectives(
    tmp_path: Path, undisturbed: Undisturbed, sharding: str, kind: str, point: str
) -> None:
    event = f"step: {LATE}, kind: {kind}, rank: 1, point: {point}"
    with patient_until(lambda: serves_now(tmp_path), tmp_path) as model:
        changes = run_with(tmp_path, *ARGUMENTS, *model, "mesh=dp4", f"sharding={sharding}", chaos(event))
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS) and changes.ranks("fail") == [[1]]
    assert serve_at(tmp_path, LATE - 1), all_events(tmp_path)


def sent_in_step(folder: Path, step: int, rank: int) -> list[str]:
    """What a worker has sent between the ends of the step before and of this one, by the trace."""
    trace = json.loads((folder / "run" / "trace.json").read_text())["traceEvents"]
    (pid,) = {e["pid"] for e in trace if e["name"] == "process_name" and e["args"]["name"] == f"worker {rank}"}
    mine = [e for e in trace if e["pid"] == pid and "ts" in e]
    began, ended = ([e["ts"] for e in mine if e["name"] == f"step {n} applied"] for n in (step - 1, step))
    return [e["name"] for e in mine if began[0] < e["ts"] < ended[0]]


def test_members_come_and_go(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """A newcomer, a loss and one who leaves: each is another group, and links serve until it is there."""
    write_text(tmp_path)
    with launch(tmp_path, *TINY, *ARGUMENTS, *patient(tmp_path, 1.05), "mesh=dp3", "sharding=zero2") as run:

        def wait_for_group_after(kind: str) -> None:
            """And for the step after the first one of that epoch, which would have an event if it went over links."""
            eventually(lambda: events_so_far(tmp_path, kind), run.process)
            run.wait_for_steps(events_so_far(tmp_path, kind)[0]["after_step"] + 2)
            eventually(lambda: serves_now(tmp_path), run.process)

        eventually(lambda: serves_now(tmp_path), run.process)
        workers = run.workers()
        ask(str(tmp_path / "run"), {"command": "add", "count": 1})
        wait_for_group_after("join")
        os.kill(workers[0], signal.SIGKILL)
        wait_for_group_after("fail")
        os.kill(workers[2], signal.SIGTERM)
        wait_for_group_after("leave")
        (tmp_path / "go").touch()
        changes = survived(tmp_path, run.finish())
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)
    assert [changes.ranks(kind) for kind in ("join", "fail", "leave")] == [[[3]], [[0]], [[2]]], all_events(tmp_path)


@pytest.mark.parametrize(
    ("sharding", "point"),
    [("zero2", "publish"), ("zero1", "reduce"), ("zero3", "reduce"), ("zero0", "norm"), ("zero2", "norm")],
)
def test_links_take_over_when_a_collective_takes_too_long(
    tmp_path: Path, undisturbed: Undisturbed, sharding: str, point: str
) -> None:
    """One stands still in the middle of all-gathers or of exchanges, longer than these may take, and is not lost."""

    def is_stopped(pid: int) -> bool:
        with suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    write_text(tmp_path)
    event = chaos(f"step: {LATE}, kind: stop, rank: 1, point: {point}")
    patience = f"timeouts.group={GROUP_S}", "timeouts.suspect=30", "timeouts.status=40", "timeouts.progress=50"
    patience = (*patience, "timeouts.join=60", "timeouts.leave=60")
    words = [*TINY, *ARGUMENTS, *patience, "mesh=dp3", f"sharding={sharding}", event, "run.trace=true"]
    with (
        patient_until(lambda: serves_now(tmp_path), tmp_path) as model,
        launch(tmp_path, *words, *model) as run,
    ):
        run.wait_for_steps(LATE - (point != "publish"))
        eventually(lambda: any(map(is_stopped, run.workers())), run.process)
        (victim,) = filter(is_stopped, run.workers())
        eventually(lambda: len(group_events(tmp_path)) == 2, run.process)  # no other limit is below 30 s
        os.kill(victim, signal.SIGCONT)
        changes = survived(tmp_path, run.finish())
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS) and not changes.events, all_events(tmp_path)
    before, after = group_events(tmp_path)
    assert before["serves"] and not after["serves"] and after["mesh_epoch"] == 0, all_events(tmp_path)
    assert after["step"] == LATE + (point == "publish"), all_events(tmp_path)
    assert re.search(f"worker [02]: .*(not complete within {GROUP_S} s|[Tt]imed? ?out|closed)", str(after["reason"]))
    if point == "norm":  # it had a reduced gradient that no exchange has taken
        assert any(name.startswith("ReducedGradient to worker") for name in sent_in_step(tmp_path, LATE, rank=1))
