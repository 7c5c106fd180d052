"""Real runs end early after the same step, with the same bits, and keep the checkpoint with the lowest loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elaswave_spmd.recovery.early_stop import EarlyStop
from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from elaswave_spmd.run_dir.best import best_path
from elaswave_spmd.weights.trained import open_trained
from tests.multiprocess.real_runs import SMALL, launch, train, write_text
from tests.multiprocess.test_resume import kill_after_checkpoint, no_longer_still, standing_still

STEPS, RULE = 30, EarlyStop(3, 0.5)
SETTINGS = [
    *SMALL,
    f"train.steps={STEPS}",
    "train.validate_every=2",
    "optim.lr=0.3",  # so large that the loss goes up and down
    f"train.stop_patience={RULE.patience}",
    f"train.stop_min_delta={RULE.min_delta}",
    "checkpoint.keep_best=1",
    "checkpoint.keep=1",
]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an undisturbed run on one worker."""
    folder = tmp_path_factory.mktemp("single")
    write_text(folder)
    done = train(folder, *SETTINGS, "mesh=single")
    assert done.code == 0, done.err
    assert "early_stop: the run ends after step" in done.out
    return folder / "run"


def bits(run_dir: Path) -> list[tuple[int, str, str]]:
    return [(line.step, line.loss_hex, line.grad_norm_hex) for line in read_metrics(run_dir)]


def losses(run_dir: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in read_events(run_dir) if event["event"] == "validation"}


def assert_same(run_dir: Path, other: Path) -> None:
    assert bits(run_dir) == bits(other)
    mine, its = read_summary(run_dir), read_summary(other)
    names = ("steps", "weights_sha256", "validation_loss", "early_stop")
    assert [mine[name] for name in names] == [its[name] for name in names]


def test_a_run_ends_where_its_validation_losses_say_and_its_summary_says_why(single: Path) -> None:
    found, summary = losses(single), read_summary(single)
    last = next(step for step in sorted(found) if RULE.is_over({s: found[s] for s in found if s <= step}))
    assert summary["steps"] == max(found) == bits(single)[-1][0] == last < STEPS
    best = RULE.progress(found)
    about = {"best_step": best.best_step, "best_loss": best.best_loss, "validations_since": 3}
    about |= {"patience": 3, "min_delta": 0.5}
    assert summary["early_stop"] == {"stopped": True, **about}
    (event,) = [event for event in read_events(single) if event["event"] == "early_stop"]
    assert event["step"] == last and about.items() <= event.items()


def test_the_checkpoint_with_the_lowest_loss_is_kept_and_named(single: Path) -> None:
    found, best = losses(single), read_summary(single)["best"]
    # On a disk that is too slow for one every 20 ms some are not written, as the run says.
    lost = {event["step"] for event in read_events(single) if event["event"] == "checkpoint_lost"}
    saved = {step: loss for step, loss in found.items() if step not in lost}
    with_result = {**saved, max(found): found[max(found)]}
    assert best["step"] == min(with_result, key=lambda step: (with_result[step], step))
    assert best["validation_loss"] == found[best["step"]]
    # If the last step is the best, the best one before is kept as well, unless the last loss was known in time.
    kept = {int(path.parent.name[5:]) for path in single.glob("checkpoints/*/manifest.json")}
    rest = {step: loss for step, loss in saved.items() if step != max(found)}
    before = {min(rest, key=lambda step: (rest[step], step))}
    assert kept == before | {max(kept)} or (best["step"] == max(found) and kept == {max(found)})
    assert best_path(single) == (single if best["step"] == max(found) else single / best["path"])
    trained = open_trained(str(single), best=True)
    assert trained.path == single / best["path"]
    trained.source.close()


def test_it_ends_after_the_same_step_with_stages_and_a_kill(tmp_path: Path, single: Path) -> None:
    write_text(tmp_path)
    kill = "chaos.events=[{step: 5, kind: kill, rank: 1, point: backward}]"
    done = train(tmp_path, *SETTINGS, "mesh=dp2_pp2", kill)
    assert done.code == 0, done.err
    assert_same(tmp_path / "run", single)


def test_it_ends_after_the_same_step_when_it_is_resumed_elsewhere(tmp_path: Path, single: Path) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *SETTINGS, "mesh=dp2", *standing_still(tmp_path, 9)) as run:
        kill_after_checkpoint(run, "run", 4)
    no_longer_still(tmp_path)
    other = ["train.resume=run", "run.dir=other", "mesh=pp2"]
    refused = train(tmp_path, *other, "train.stop_patience=5")
    assert refused.code == 2 and "train.stop_patience: saved 3, now 5" in refused.err
    done = train(tmp_path, *other)
    assert done.code == 0, done.err
    assert_same(tmp_path / "other", single)
    assert losses(tmp_path / "other") == losses(single), "it has those of the run that it goes on from"
    # Of a validation that is not known any more nobody can tell whether the run would have ended by it.
    file = tmp_path / "run" / "events.jsonl"
    lines = [line for line in file.read_text().splitlines() if json.loads(line).get("event") != "validation"]
    file.write_text("\n".join(lines) + "\n")
    cut = train(tmp_path, "train.resume=run", "run.dir=cut")
    assert cut.code == 2 and "events.jsonl has no validation of step 2" in cut.err, cut
