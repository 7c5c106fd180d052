"""Pairs of gloo, in real processes: nobody's end in the middle of a transfer, and no pair's, changes a bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.controller.admin_client import ask
from elaswave_spmd.run_dir import read_events
from tests.faults.fault_runs import (
    TINY,
    Bits,
    Changes,
    all_events,
    chaos,
    events_so_far,
    patient,
    patient_until,
    run_with,
    survived,
)
from tests.multiprocess.real_runs import Launched, eventually, launch, write_text

STEPS = 100
LATE = 60
"""A step before which pairs serve: until they do, the steps take their time."""
SLOW = 26
"""A step from which on each micro-batch takes half a second, until the file `go` is there."""
ARGUMENTS = (f"train.steps={STEPS}", "runtime.collectives=group", "runtime.pairs=true", "run.trace=true")
Undisturbed = Callable[[int], Bits]


def sent_by_pairs(folder: Path, kind: str) -> int:
    """How many workers have sent messages of a kind through pairs; of a run that goes on, up to a step ago."""
    texts = [part.read_text() for part in (folder / "run").glob("trace-*.jsonl")]
    return sum(f'"{kind} by the pair"' in text for text in texts)


def serve_now(folder: Path, workers: int) -> bool:
    """All workers of two stages have sent something through a pair."""
    return sent_by_pairs(folder, "Activation") + sent_by_pairs(folder, "ActivationGradient") >= workers


def pair_events(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "run") if event["event"] == "pair"]


def sent_in_trace(folder: Path, kind: str) -> bool:
    """True if a finished run has sent something of a kind through a pair."""
    return f"{kind} by the pair" in (folder / "run" / "trace.json").read_text()


@pytest.mark.parametrize("sharding", ["zero0", "zero3"])
def test_boundary_tensors_go_through_pairs(tmp_path: Path, undisturbed: Undisturbed, sharding: str) -> None:
    with patient_until(lambda: serve_now(tmp_path, 4), tmp_path) as model:
        changes = run_with(tmp_path, *ARGUMENTS, *model, "mesh=dp2_pp2", f"sharding={sharding}")
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS) and not changes.events
    assert sent_in_trace(tmp_path, "Activation") and sent_in_trace(tmp_path, "ActivationGradient")
    assert not pair_events(tmp_path), all_events(tmp_path)


@pytest.mark.parametrize("kind", ["kill", "stop"])
@pytest.mark.parametrize(("rank", "point"), [(0, "forward"), (2, "forward"), (3, "backward")])
def test_a_worker_is_lost_in_the_middle_of_boundary_tensors(
    tmp_path: Path, undisturbed: Undisturbed, kind: str, rank: int, point: str
) -> None:
    """Worker 0 sends activations, 2 is to get one, and 3 sends gradients; the others wait for it in the library."""
    event = f"step: {LATE}, kind: {kind}, rank: {rank}, point: {point}"
    with patient_until(lambda: serve_now(tmp_path, 4), tmp_path) as model:
        changes = run_with(tmp_path, *ARGUMENTS, *model, "mesh=dp2_pp2", "sharding=zero1", chaos(event))
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS) and changes.ranks("fail") == [[rank]]
    assert sent_in_trace(tmp_path, "Activation"), all_events(tmp_path)


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_worker_is_lost_in_the_middle_of_state_transfers(tmp_path: Path, undisturbed: Undisturbed, kind: str) -> None:
    """Worker 1 is lost, and in the step in which its pages get new mirrors another one, that gets and sends state."""
    first = f"step: {SLOW}, kind: kill, rank: 1, point: backward"
    second = f"step: {SLOW + 1}, kind: {kind}, rank: 2, point: forward"
    two_lost = lambda: len(events_so_far(tmp_path, "fail")) == 2  # noqa: E731
    with patient_until(two_lost, tmp_path) as model:
        arguments = *ARGUMENTS, *model, "mesh=dp4", "sharding=zero1", "mirror.count=2", chaos(first, second)
        changes = run_with(tmp_path, *arguments, "timeouts.progress=60")
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS) and changes.ranks("fail") == [[1], [2]]


def test_newcomers_get_their_state_through_pairs(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Unless a pair comes too late for that, on a busy machine: then another one is taken."""

    def take_newcomer(run: Launched, number: int) -> None:
        ask(str(tmp_path / "run"), {"command": "add", "count": 1})
        eventually(lambda: len(events_so_far(tmp_path, "join")) == number, run.process)
        run.wait_for_steps(events_so_far(tmp_path, "join")[-1]["after_step"] + 3)

    write_text(tmp_path)
    with launch(tmp_path, *TINY, *ARGUMENTS, *patient(tmp_path, 1.2), "mesh=dp2", "sharding=zero1") as run:
        run.wait_for_steps(SLOW - 10)
        for number in range(1, 9):
            take_newcomer(run, number)
            if sent_by_pairs(tmp_path, "PageState"):
                break
        os.kill(run.workers()[0], signal.SIGKILL)
        eventually(lambda: events_so_far(tmp_path, "fail"), run.process)
        (tmp_path / "go").touch()
        survived(tmp_path, run.finish())
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)
    assert Changes.of(tmp_path / "run").ranks("fail") == [[0]]
    assert sent_in_trace(tmp_path, "PageState"), all_events(tmp_path)
