"""Many faults in one run, and more of them at once than it has copies: every bit is that of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from elaswave_spmd.run_dir import read_metrics
from tests.faults.fault_runs import (
    Bits,
    all_events,
    chaos,
    events_so_far,
    made_once,
    num_joined,
    patient_until,
    run_with,
)
from tests.multiprocess import patient_model

STEPS = 60
Undisturbed = Callable[[int], Bits]


def test_thirty_random_events_in_sixty_steps(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Three losses before the copies are complete again can happen: then the run begins again at a checkpoint."""
    changes = run_with(
        tmp_path,
        "mesh=dp2_pp2",
        "sharding=zero3",
        "mirror.count=2",
        "elastic.replace=true",
        "checkpoint.every=5",
        f"train.steps={STEPS}",
        "chaos=random",
        "chaos.seed=7",  # draws an event in 30 of the 60 steps
        "chaos.rate=0.5",
    )
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)
    counts = {kind: sum(map(len, changes.ranks(kind))) for kind in ("fail", "leave", "join")}
    # Whom an event is for is drawn from the members: a worker that is gone before its turn takes its event with it.
    assert min(counts.values()) > 0 and sum(counts.values()) >= 20, all_events(tmp_path)


def test_all_but_one_killed_one_after_the_other(tmp_path: Path, undisturbed: Undisturbed) -> None:
    kills = [f"step: {step}, kind: kill, rank: {rank}, point: any" for step, rank in ((4, 2), (22, 0), (40, 3))]
    settings = ["mesh=dp2_pp2", "sharding=zero2", "timeouts.suspect=4", f"train.steps={STEPS}"]
    changes = run_with(tmp_path, *settings, chaos(*kills))
    assert changes.ranks("fail") == [[2], [0], [3]] and not changes.of_kind("restart"), all_events(tmp_path)
    assert read_metrics(tmp_path / "run")[-1].workers == 1
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)


def test_two_at_once_with_one_mirror_begin_again_at_the_checkpoint(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Each is a mirror of the other. Steps after the checkpoint are computed again: their lines are there already.

    A newcomer comes when the checkpoint that the others began with is gone (checkpoint.keep is 2).
    """
    events = (
        "step: 14, kind: kill, rank: [1, 2], point: backward",
        "step: 24, kind: join, rank: 0, point: forward",
    )
    settings = ["mesh=dp4", "sharding=zero2", "mirror.count=1", "checkpoint.every=2", f"train.steps={STEPS}"]
    saved = tmp_path / "saved"  # whatever a disk takes for the first checkpoint: it is there when the two are killed
    with (
        made_once(saved, lambda: events_so_far(tmp_path, "checkpoint")),
        patient_until(lambda: num_joined(tmp_path), tmp_path, growth=1.1) as model,
    ):
        words = [*model, *patient_model.held(13, saved)]
        changes = run_with(tmp_path, *settings, *words, "timeouts.suspect=4", chaos(*events))
    (restart,) = changes.of_kind("restart")
    # Those who die may have been the only ones that had applied step 13.
    assert restart["step"] in range(2, 14, 2) and restart["lost_after"] in (12, 13), all_events(tmp_path)
    assert restart["workers"] == 2, all_events(tmp_path)
    assert changes.ranks("join") == [[2]], all_events(tmp_path)
    assert [line.step for line in read_metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)
