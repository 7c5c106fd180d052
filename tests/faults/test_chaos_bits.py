"""Faults at named points of real runs: the run reaches its end, every bit is that of an undisturbed run, and
events.jsonl says what happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_metrics
from tests.faults.fault_runs import STEPS, Bits, all_events, chaos, num_joined, patient_until, run_with

Undisturbed = Callable[[int], Bits]


@dataclass(frozen=True)
class Case:
    """A mesh and what happens on it.

    Args:
        fail, leave, join: the ranks that events.jsonl names under these kinds, one entry for each event.
        reasons: in the reasons of the losses.
        workers: of the last step.
    """

    mesh: str
    sharding: str
    events: tuple[str, ...]
    workers: int
    fail: list[list[int]] = field(default_factory=list)
    leave: list[list[int]] = field(default_factory=list)
    join: list[list[int]] = field(default_factory=list)
    reasons: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


ENDED = ("its process ended",)
CASES = {
    "kill_backward": Case(
        "mesh=dp4", "zero1", ("step: 4, kind: kill, rank: 3, point: backward",), 3, fail=[[3]], reasons=ENDED
    ),
    "kill_rank_0_forward": Case(
        "mesh=dp4", "zero3", ("step: 3, kind: kill, rank: 0, point: forward",), 3, fail=[[0]], reasons=ENDED
    ),
    "kill_reduce_stages": Case(
        "mesh=dp2_pp2", "zero2", ("step: 5, kind: kill, rank: 1, point: reduce",), 3, fail=[[1]], reasons=ENDED
    ),
    "kill_publish_stages": Case(
        "mesh=dp2_pp2", "zero3", ("step: 3, kind: kill, rank: 2, point: publish",), 3, fail=[[2]], reasons=ENDED
    ),
    "kill_the_only_one_of_a_stage_norm": Case(
        "mesh=pp3", "zero0", ("step: 4, kind: kill, rank: 1, point: norm",), 2, fail=[[1]], reasons=ENDED
    ),
    "kill_ragged_apply": Case(
        "mesh.stages=[3,2]", "zero3", ("step: 5, kind: kill, rank: 4, point: apply",), 4, fail=[[4]], reasons=ENDED
    ),
    "stop_backward": Case(
        "mesh=dp3",
        "zero2",
        ("step: 4, kind: stop, rank: 1, point: backward",),
        2,
        fail=[[1]],
        reasons=("no heartbeat",),
    ),
    "stop_the_only_one_of_a_stage": Case(
        "mesh=pp3", "zero1", ("step: 4, kind: stop, rank: 2, point: reduce",), 2, fail=[[2]], reasons=("no heartbeat",)
    ),
    "leave": Case("mesh=dp2_pp2", "zero1", ("step: 4, kind: term, rank: 1, point: forward",), 3, leave=[[1]]),
    "leave_the_only_one_of_a_stage": Case(
        "mesh.stages=[1,3]", "zero2", ("step: 3, kind: term, rank: 0, point: backward",), 3, leave=[[0]]
    ),
    "join": Case("mesh=dp2_pp2", "zero3", ("step: 2, kind: join, rank: 0, point: forward",), 5, join=[[4]]),
    "replace": Case(
        "mesh=dp3",
        "zero1",
        ("step: 2, kind: kill, rank: 2, point: norm",),
        3,
        fail=[[2]],
        join=[[3]],
        reasons=ENDED,
        settings=("elastic.replace=true",),
    ),
    "two_at_once": Case(
        "mesh=dp4",
        "zero3",
        ("step: 4, kind: kill, rank: [1, 2], point: backward",),
        2,
        reasons=ENDED,
        settings=("mirror.count=2",),
    ),
    # It dies in the step that is being recovered, or together with the first one: the third replica is the last.
    "the_mirror_of_the_one_just_killed": Case(
        "mesh=dp3",
        "zero2",
        ("step: 4, kind: kill, rank: 1, point: backward", "step: 4, kind: kill, rank: 2, point: apply"),
        1,
        reasons=ENDED,
        settings=("mirror.count=2",),
    ),
    "exit_and_raise": Case(
        "mesh=dp2_pp2",
        "zero3",
        ("step: 3, kind: exit, rank: 2, point: reduce", "step: 7, kind: raise, rank: 1, point: forward"),
        2,
        fail=[[2], [1]],
        reasons=(
            "ended",
            "an exception: elaswave_spmd.worker.fault_injection.ChaosError: chaos: an exception in step 7 at forward",
        ),
    ),
    "one_after_the_other_to_a_single_worker": Case(
        "mesh=dp4",
        "zero2",
        (
            "step: 2, kind: kill, rank: 1, point: apply",
            "step: 5, kind: term, rank: 3, point: any",
            "step: 8, kind: kill, rank: 0, point: publish",
        ),
        1,
        fail=[[1], [0]],
        leave=[[3]],
        reasons=ENDED,
    ),
    "leave_and_kill_in_one_step": Case(
        "mesh=dp3_pp2",
        "zero3",
        ("step: 4, kind: term, rank: 5, point: forward", "step: 4, kind: kill, rank: 1, point: backward"),
        4,
        reasons=ENDED,
    ),
}


# In the middle of a backward's first part, and before its second.
CASES |= {
    "kill_weights": Case(
        "mesh=dp2_pp2", "zero1", ("step: 4, kind: kill, rank: 3, point: weights",), 3, fail=[[3]], reasons=ENDED
    ),
    "kill_input_of_four_stages": Case(
        "mesh=pp4", "zero3", ("step: 4, kind: kill, rank: 2, point: input",), 3, fail=[[2]], reasons=ENDED
    ),
    "stop_weights": Case(
        "mesh=dp2_pp2",
        "zero3",
        ("step: 4, kind: stop, rank: 2, point: weights",),
        3,
        fail=[[2]],
        reasons=("no heartbeat",),
    ),
    "stop_input_of_four_stages": Case(
        "mesh=pp4", "zero1", ("step: 5, kind: stop, rank: 1, point: input",), 3, fail=[[1]], reasons=("no heartbeat",)
    ),
    "leave_input": Case("mesh=dp2_pp2", "zero3", ("step: 4, kind: term, rank: 2, point: input",), 3, leave=[[2]]),
    "leave_weights_of_four_stages": Case(
        "mesh=pp4", "zero1", ("step: 4, kind: term, rank: 3, point: weights",), 3, leave=[[3]]
    ),
    "join_input": Case("mesh=dp2_pp2", "zero1", ("step: 2, kind: join, rank: 3, point: input",), 5, join=[[4]]),
    "join_weights": Case("mesh=dp2_pp2", "zero3", ("step: 2, kind: join, rank: 2, point: weights",), 5, join=[[4]]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_changes_no_bit(tmp_path: Path, undisturbed: Undisturbed, name: str) -> None:
    case = CASES[name]
    settings = [case.mesh, f"sharding={case.sharding}", chaos(*case.events), *case.settings]
    # With a joiner, steps and time enough for its processes to start and its copies to be made.
    steps, joiners = 60 if case.join else STEPS, sum(map(len, case.join))
    with patient_until(lambda: num_joined(tmp_path) >= joiners, tmp_path) as model:
        changes = run_with(tmp_path, *settings, f"train.steps={steps}", *(model if joiners else ()))
    assert Bits.of(tmp_path / "run") == undisturbed(steps)
    gone = sorted(rank for kind in ("fail", "leave") for ranks in changes.ranks(kind) for rank in ranks)
    if case.fail or case.leave or case.join:
        for kind in ("fail", "leave", "join"):
            assert changes.ranks(kind) == getattr(case, kind), all_events(tmp_path)
    else:  # several at once: which of them share an epoch depends on timing
        assert gone == sorted(ranks_of(case.events)), all_events(tmp_path)
    for event in changes.of_kind("fail"):
        assert any(reason in event["reason"] for reason in case.reasons), event
        assert max(event["seen_at"], event["prepared_at"]) <= event["answered_at"] <= event["placed_at"]
        assert event["edit_ms"] >= 0
    first = next(event for event in changes.events if event["event"] in ("fail", "leave", "join"))
    step = int(case.events[0].split(",")[0].removeprefix("step: "))
    if first["event"] == "fail":
        # Who dies may have been the only one that had applied the step before: then nobody knows that it was decided.
        assert step - 2 <= first["after_step"] <= step
        # If the step before is the one that is recovered, all of its gradients may be reduced already.
        in_backward = any(point in case.events[0] for point in ("backward", "input", "weights"))
        assert first["microbatches_redone"] >= (first["after_step"] == step - 1 and in_backward)
    # A planned change computes nothing again; but where somebody has begun the next step, micro-batches of that step
    # move.
    assert changes.of_kind("recovered")[0]["step"] == first["after_step"] + 1
    assert last_workers(tmp_path) == case.workers


def ranks_of(events: tuple[str, ...]) -> list[int]:
    """The ranks that are named in events."""
    return [int(digit) for event in events for digit in event.split("rank:")[1].split("point")[0] if digit.isdigit()]


def last_workers(folder: Path) -> int:
    """The number of workers in the last step."""
    return read_metrics(folder / "run")[-1].workers
