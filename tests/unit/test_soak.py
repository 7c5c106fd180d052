"""The pure parts of benchmarks/soak: plans are drawn from a seed, and checks find what does not hold."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import in_use
from benchmarks.soak_checks import Strike, by_kind, leaked, mended, untold
from benchmarks.soak_plans import (
    CONTROLLER_KILL,
    KILL,
    KINDS,
    MESHES,
    MOMENTS,
    PAIR,
    PAIR_S,
    PAUSE,
    RESTART,
    START,
    TRANSPORTS,
    ZEROS,
    chosen,
    draw,
)

STEPS = 100


def test_a_plan_follows_from_seed_and_number() -> None:
    assert draw(3, 7, 12) == draw(3, 7, 12)
    assert draw(3, 7, 12) != draw(3, 8, 12) and draw(3, 7, 12).faults != draw(4, 7, 12).faults


def test_a_few_runs_have_all_meshes_and_settings_and_many_all_faults_at_all_moments() -> None:
    plans = [draw(1, number, 12) for number in range(40)]
    assert {plan.mesh for plan in plans[:5]} == set(MESHES)
    assert (
        {plan.mesh for plan in plans if plan.replace} == {plan.mesh for plan in plans if not plan.replace} == {*MESHES}
    )
    for mesh in MESHES:
        assert {plan.transport for plan in plans if plan.mesh == mesh} == set(TRANSPORTS)
        assert {plan.zero for plan in plans if plan.mesh == mesh} == set(ZEROS)
    drawn = {(fault.kind, fault.moment) for plan in plans for fault in plan.faults}
    assert {kind for kind, _ in drawn} == set(KINDS) and {moment for _, moment in drawn} == set(MOMENTS)
    assert all(len(plan.faults) == 12 for plan in plans)


def test_pairs_are_of_two_within_the_time_that_is_promised() -> None:
    faults = [fault for number in range(40) for fault in draw(1, number, 12).faults]
    pairs = [fault for fault in faults if fault.kind == PAIR]
    assert pairs and all(len(fault.victims) == 2 and 0 <= fault.gap <= PAIR_S for fault in pairs)
    assert all(len(fault.victims) == 1 for fault in faults if fault.kind != PAIR)


@pytest.mark.parametrize(
    ("shares", "number", "expected"),
    [((0.0,), 3, [0]), ((0.99,), 3, [2]), ((0.5, 0.5), 4, [2, 1]), ((0.0, 0.0), 2, [0, 1]), ((0.3, 0.9), 1, [0])],
)
def test_shares_name_different_entries(shares: tuple[float, ...], number: int, expected: list[int]) -> None:
    assert chosen(shares, number) == expected


def strike(kind: str = KILL, *, rank: int | None = 1, life: int = 1, step: int = 10, moment: str = "any") -> Strike:
    return Strike(kind, moment, life, step, rank, 4711)


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"event": kind, **fields}


STARTED = event("start", workers=4)


@pytest.mark.parametrize(
    ("events", "strikes"),
    [
        ([STARTED, event("fail", ranks=[1])], [strike()]),
        ([STARTED, event("leave", ranks=[0, 1])], [strike()]),
        ([STARTED, event("restart", ranks=[1, 3], reason="all replicas of 3 page ranges are lost")], [strike()]),
        ([STARTED, event("restart", ranks=[2, 3])], [strike(rank=6)]),  # a newcomer that had not joined
        ([STARTED], [strike(step=STEPS - 1)]),  # the run was over before it mattered
        ([STARTED], [strike(PAUSE)]),
        ([STARTED, STARTED], [strike(), strike(CONTROLLER_KILL, rank=None)]),
        ([STARTED, event("fail", ranks=[4])], [strike(rank=None, moment=START)]),
    ],
    ids=["fail", "leave", "restart", "newcomer", "last step", "pause", "its controller, too", "unknown rank"],
)
def test_losses_that_are_told(events: list[dict[str, Any]], strikes: list[Strike]) -> None:
    assert not untold(events, strikes, STEPS)


@pytest.mark.parametrize(
    ("events", "strikes"),
    [
        ([STARTED], [strike()]),
        ([STARTED, event("fail", ranks=[2])], [strike()]),
        ([STARTED, event("restart", ranks=[2, 3], reason="")], [strike(moment=RESTART)]),
        ([STARTED, event("join", ranks=[6]), event("restart", ranks=[2, 3])], [strike(rank=6)]),
        ([STARTED, event("fail", ranks=[1]), STARTED], [strike(life=2)]),  # the worker 1 of the first controller
        ([STARTED, event("join", ranks=[1])], [strike(rank=None)]),
        ([STARTED, STARTED], [strike(), strike(CONTROLLER_KILL, rank=None, life=2)]),
    ],
    ids=[
        "nothing",
        "another",
        "restart without it",
        "restart without a newcomer",
        "another life",
        "unknown rank",
        "another controller",
    ],
)
def test_losses_that_are_not_told(events: list[dict[str, Any]], strikes: list[Strike]) -> None:
    (problem,) = untold(events, strikes, STEPS)
    assert str(strikes[0]) in problem


@pytest.mark.parametrize("kind", ["standstill", "rejected", "link", "mismatch", "corrupt", "corruption"])
def test_what_a_run_mends_unasked_is_a_problem(kind: str) -> None:
    events = [STARTED, event("fail", ranks=[1]), event(kind, message="so it was"), event("validation", step=2)]
    assert mended(events) == [f"no fault asked for the event {kind}: so it was"]
    assert mended(events, expected=[kind]) == mended([STARTED, event("recovered", step=3)]) == []


def test_descriptors_that_grow_in_the_same_state_leak() -> None:
    looks = [("3 workers", {"socket": 9}), ("2 workers", {"socket": 7}), ("3 workers", {"socket": 11, "pipe": 1})]
    (problem,) = leaked(looks)
    assert "3 workers" in problem and "socket +2" in problem and "pipe +1" in problem
    assert not leaked([*looks[:2], ("3 workers", {"socket": 8, "pipe": 1})])
    assert not leaked([("3 workers", {"/run/a": 1}), ("3 workers", {"/run/b": 1})])  # another file in its place
    assert not leaked([])


def test_a_file_is_in_use_while_it_is_open_or_mapped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    assert not in_use(path)
    with path.open("rb") as file:
        assert in_use(path)
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    assert in_use(path)
    mapped.close()
    assert not in_use(path)


def test_descriptors_are_counted_by_what_they_are_open_on() -> None:
    found = by_kind(["socket:[12]", "socket:[13]", "pipe:[4]", "anon_inode:[eventpoll]", "/run/step_12", "/run/step_7"])
    assert found == {"socket": 2, "pipe": 1, "anon_inode": 1, "/run/step_N": 2}
