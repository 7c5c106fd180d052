"""`python train.py` with what `optim.*` offers beside the defaults: equal bits on meshes, through kills and resumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.run_dir import read_events, read_metrics, read_summary, weights_sha256
from elaswave_spmd.weights import export_command, generate_command
from elaswave_spmd.worker.learning_rate import LearningRate
from tests.multiprocess.real_runs import SMALL, Done, kill_at_once, launch, train, write_text

SCALED, DECAYED = (
    '{match: "embed.* head.weight", lr_scale: 0.1, weight_decay: 0}',
    '{match: "*.bias", weight_decay: 0.3}',
)
GROUPS = f"optim.groups=[{SCALED}, {DECAYED}]"
MODEL = [*SMALL, "model=gpt_tiny", "model.dropout=0.1"]
# Saved for certain, after step 4: a run with too few workers writes a checkpoint and stops.
STOP = ("elastic.min_workers=2", "chaos.events=[{step: 5, kind: kill, rank: 1, point: forward}]")
KILL = "chaos.events=[{kind: kill, step: 3, rank: 1}]"


def trained(folder: Path, *words: str) -> Done:
    done = train(folder, *words)
    assert done.code == 0, done.err
    return done


def stopped(folder: Path, *words: str) -> None:
    """Trains until one of two workers is killed in step 5; the run is saved."""
    done = train(folder, *words, *STOP)
    assert done.code == 1 and "resume with: " in done.err, done


def result(run_dir: Path) -> tuple[object, ...]:
    summary = read_summary(run_dir)
    names = ("final_loss_hex", "weights_sha256", "validation_loss", "weights_ema_sha256")
    return tuple(summary.get(name) for name in names)


def test_groups_on_a_mesh_with_a_kill_and_after_a_resume(tmp_path: Path) -> None:
    write_text(tmp_path)
    trained(tmp_path, *MODEL, GROUPS, "run.dir=single")
    trained(tmp_path, *MODEL, GROUPS, "run.dir=killed", "mesh=dp2_pp2", "sharding=zero2", KILL)
    stopped(tmp_path, *MODEL, GROUPS, "run.dir=resumed", "mesh=dp2")
    others = GROUPS.replace("0.1", "0.2")
    refused = train(tmp_path, "train.resume=resumed", others, "run.dir=other")
    assert refused.code == 2 and "lr_scale: saved 0.1, now 0.2" in refused.err and not (tmp_path / "other").exists()
    trained(tmp_path, "train.resume=resumed", "mesh=pp2", "sharding=zero3")
    assert result(tmp_path / "killed") == result(tmp_path / "resumed") == result(tmp_path / "single")


def test_an_average_of_the_weights(tmp_path: Path) -> None:
    """On a mesh with a kill, after a resume, and read by the commands; a resume may switch it off."""
    write_text(tmp_path)
    settings = [*MODEL, "optim.ema=0.8", 'optim.freeze="embed.*"']
    trained(tmp_path, *settings, "run.dir=single")
    trained(tmp_path, *settings, "run.dir=killed", "mesh=dp2_pp2", "sharding=zero3", KILL)
    stopped(tmp_path, *settings, "run.dir=resumed", "mesh=dp2")
    (saved,) = (tmp_path / "resumed" / "checkpoints").iterdir()
    trained(tmp_path, "train.resume=resumed", "run.dir=without", "mesh=pp2", "optim.ema=null")
    trained(tmp_path, "train.resume=resumed", "mesh=pp2", "sharding=zero3")
    wanted = result(tmp_path / "single")
    assert wanted[-1] and wanted == result(tmp_path / "killed") == result(tmp_path / "resumed")
    assert result(tmp_path / "without") == (*wanted[:-1], None), "the average is read by nothing else"
    weights, averages = (load_file(tmp_path / "single" / f"{name}.safetensors") for name in ("weights", "weights_ema"))
    assert weights_sha256(averages) == wanted[-1] and weights.keys() == averages.keys()
    assert {name for name in weights if np.array_equal(weights[name], averages[name])} == set(
        name for name in weights if name.startswith("embed.")
    )
    assert not (tmp_path / "without" / "weights_ema.safetensors").exists()
    # The commands read the file, or the pages of a checkpoint.
    for run in (tmp_path / "single", saved):
        out = tmp_path / f"{run.name}_hf"
        assert export_command.main([str(run), "--to", "hf", str(out), "--ema"], "elaswave_spmd") == 0
        found = load_file(out / "model.safetensors")
        same = any(np.array_equal(values, averages["head.norm.weight"]) for values in found.values())
        assert same == (run != saved), "the checkpoint is older"
        assert not any(np.array_equal(values, weights["head.norm.weight"]) for values in found.values())
    assert generate_command.main([str(saved), "the quick", "--tokens", "4", "--ema"], "elaswave_spmd") == 0
    with pytest.raises(ConfigError, match="has no average of its weights"):
        generate_command.main([str(tmp_path / "without"), "the quick", "--ema"], "elaswave_spmd")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (['optim.groups=[{match: "embedding.*", lr_scale: 0.1}]'], "embedding.* in optim.groups="),
        (['optim.groups=[{match: "head.*"}]'], "has neither lr_scale nor weight_decay"),
    ],
)
def test_what_is_refused(tmp_path: Path, words: list[str], told: str) -> None:
    write_text(tmp_path)
    done = train(tmp_path, *MODEL, *words)
    assert done.code == 2 and told in done.err and not (tmp_path / "run").exists()


def test_a_run_is_not_made_shorter_than_what_it_has_committed(tmp_path: Path) -> None:
    """It was killed a step after its checkpoint; without a decay its rates are those of any length."""
    write_text(tmp_path)
    stopped(tmp_path, *MODEL, "optim.schedule=constant", "run.dir=run", "mesh=dp2")
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    step = len(lines)
    metrics.write_text("\n".join([*lines, lines[-1].replace(f'"step": {step}', f'"step": {step + 1}')]) + "\n")
    done = train(tmp_path, "train.resume=run", f"train.steps={step}")
    assert done.code == 2 and f"is fewer than the {step + 1} steps that run has committed" in done.err, done


WSD = ("optim.schedule=wsd", "optim.decay_steps=2")


def test_a_longer_run_than_the_saved_one_is_the_run_of_that_length(tmp_path: Path) -> None:
    """WSD is saved at step 4 of 6, before its decay: 9 steps, on another mesh, are those of a run of 9 steps."""
    write_text(tmp_path)
    stopped(tmp_path, *MODEL, *WSD, "run.dir=short", "mesh=dp2", "train.steps=7")
    trained(tmp_path, *MODEL, *WSD, "run.dir=long", "train.steps=9")
    done = trained(tmp_path, "train.resume=short", "train.steps=9", "mesh=pp2", "run.dir=longer")
    assert "train.steps=9 in place of 7" in done.out
    assert result(tmp_path / "longer") == result(tmp_path / "long")
    assert lines_of(tmp_path / "longer") == lines_of(tmp_path / "long")
    resumed = next(e for e in read_events(tmp_path / "longer") if e["event"] == "resume")
    assert resumed["changed"] == {"train.steps": [7, 9]}
    # In the directory of the run itself as well, and into a decay that is decided on late.
    trained(tmp_path, "train.resume=short", "train.steps=12", "optim.decay_steps=6")
    rates = [line.lr for line in read_metrics(tmp_path / "short")]
    assert len(rates) == 12 and rates[5] == max(rates) > rates[6] > rates[11]


def test_a_cosine_stretches_if_that_is_asked_for(tmp_path: Path) -> None:
    write_text(tmp_path)
    stopped(tmp_path, *MODEL, "run.dir=short", "mesh=dp2")
    refused = train(tmp_path, "train.resume=short", "train.steps=9", "run.dir=long")
    assert refused.code == 2 and "train.reschedule=true" in refused.err and not (tmp_path / "long").exists()
    done = trained(tmp_path, "train.resume=short", "train.steps=9", "train.reschedule=true", "run.dir=long")
    assert "from here on with other learning rates" in done.out
    old, new = lines_of(tmp_path / "short"), lines_of(tmp_path / "long")
    step = next(e for e in read_events(tmp_path / "long") if e["event"] == "resume")["step"]
    assert new[:step] == old[:step] and len(new) == 9
    wanted = LearningRate(2e-3, "cosine", warmup_steps=2, num_steps=9)
    assert [rate for *_, rate in new[step:]] == [wanted.at(n) for n in range(step + 1, 10)]


def test_a_supervised_run_that_dies_before_its_first_checkpoint_goes_on_with_the_other_learning_rates(
    tmp_path: Path,
) -> None:
    write_text(tmp_path)
    stopped(tmp_path, *MODEL, "run.dir=short", "mesh=dp2")
    saved = len(read_metrics(tmp_path / "short"))
    words = ["train.resume=short", "train.steps=9", "train.reschedule=true", "checkpoint.every=100"]
    patience = ["timeouts.suspect=20", "timeouts.status=25", "timeouts.leave=30"]
    stands_still = ["chaos.events=[{step: 7, kind: stop, rank: 0}]", *patience]
    with launch(tmp_path, "--supervise", *words, *stands_still) as run:
        run.wait_for_steps(5, "short")  # the one that stands still may have applied step 6, and told nobody
        kill_at_once([pid for pid in run.processes() if pid != run.process.pid])
        done = run.finish()
    assert done.code == 0 and "another one takes its place" in done.err, done
    rates = [line.lr for line in read_metrics(tmp_path / "short")]
    wanted = LearningRate(2e-3, "cosine", warmup_steps=2, num_steps=9)
    assert rates[saved:] == [wanted.at(step) for step in range(saved + 1, 10)]


def lines_of(run_dir: Path) -> list[tuple[str, str, float]]:
    return [(line.loss_hex, line.grad_norm_hex, line.lr) for line in read_metrics(run_dir)]
