"""Samples that are no tokens in `python train.py`: equal bits with a kill and after a resume; and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import elaswave_spmd
from elaswave_spmd.run_dir import read_events
from tests import sample_models
from tests.faults.fault_runs import Bits, Changes, chaos
from tests.multiprocess.real_runs import train

SMALL = (
    *("model.layers=2", "model.d_model=16", "model.dropout=0.1", "optim.warmup_steps=2", "page.size=256"),
    *("train.global_batch=8", "train.microbatch_size=2", "train.steps=6", "run.tensorboard=false"),
    # Whom a busy machine holds up is not to be evicted for it.
    *("train.validate_every=3", "train.validate_microbatches=2", "timeouts.suspect=4"),
)
IMAGES = ("model.target=sample_models.Classifier", "data.target=sample_models.Augmented")
SENTENCES = (
    "model.target=sample_models.Tagger",
    "data.target=sample_models.Sentences",
    "data.validation_fraction=0.2",
    "runtime.activation_checkpointing=true",
)
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: torch.compile needs a C++ compiler")
EVERY = "checkpoint.every=3"
KILL = chaos("step: 3, kind: kill, rank: 1, point: backward")


def run(folder: Path, *words: str) -> Bits:
    folder.mkdir(parents=True)
    shutil.copy(sample_models.__file__, folder / "sample_models.py")
    done = train(folder, *SMALL, "run.dir=run", *words)
    assert done.code == 0, done.err
    if KILL in words:
        assert Changes.of(folder / "run").ranks("fail") == [[1]]
    return Bits.of(folder / "run")


def validations(folder: Path) -> list[dict[str, object]]:
    """Metrics by validation."""
    return [event["metrics"] for event in read_events(folder / "run") if event["event"] == "validation"]


def refused(folder: Path, *words: str) -> str:
    shutil.copy(sample_models.__file__, folder / "sample_models.py")
    done = train(folder, *SMALL, "run.dir=run", *words)
    assert done.code == 2, done.err
    return " ".join(done.err.split())


def test_a_dataset_may_fork_and_end_processes(tmp_path: Path) -> None:
    """A worker takes SIGTERM as a request to leave, which is not for what its dataset forks."""
    images = "model.target=sample_models.Classifier", "data.target=sample_models.Decoded"
    run(tmp_path / "one", *images, "mesh=dp2", "train.steps=2", "train.validate_every=0", "verify.rate=0")


def test_images_with_labels(tmp_path: Path) -> None:
    """A worker is killed; later the run goes on, from its checkpoint, on another mesh."""
    one, two = tmp_path / "one", tmp_path / "two"
    wanted = run(one, *IMAGES, "mesh=single")
    assert run(two, *IMAGES, "mesh=dp2_pp2", EVERY, KILL) == wanted
    assert validations(one) == validations(two)
    assert validations(one)[-1].keys() == {"accuracy", "recall of 2"}
    summary = json.loads((one / "run" / "summary.json").read_text())
    assert summary["validation_metrics"] == validations(one)[-1]
    # Saved for certain: a run with too few workers writes a checkpoint and stops.
    lost = chaos("step: 5, kind: kill, rank: 1, point: forward")
    stopped = train(two, *SMALL, *IMAGES, "run.dir=resumed", "mesh=dp2", "elastic.min_workers=2", EVERY, lost)
    assert stopped.code == 1 and "resume with: " in stopped.err, stopped
    resumed = train(two, "train.resume=resumed", "mesh=pp3")
    assert resumed.code == 0, resumed.err
    assert Bits.of(two / "resumed") == wanted
    # What the model's constructor had of the dataset is in the summary, and in the checkpoints.
    whole = elaswave_spmd.load_model(one / "run", sample_models.Classifier)
    (checkpoint, *_) = sorted((two / "run" / "checkpoints").iterdir(), reverse=True)
    for loaded in (whole, elaswave_spmd.load_model(checkpoint, sample_models.Classifier)):
        output = loaded(torch.from_numpy(np.stack([sample_models.Images()[n][0] for n in range(6)])))
        assert output.shape == (6, sample_models.CLASSES)
    found = elaswave_spmd.load_run(one / "run")
    assert found.validation.metrics["accuracy"].tolist() == [at["accuracy"] for at in validations(one)]
    assert np.isnan(found.history.weight).all() and not set(found.history.tokens) - {8}


def test_sequences_of_other_lengths_with_a_mask(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    wanted = run(one, *SENTENCES, "mesh=single")
    assert run(two, *SENTENCES, "mesh=dp2_pp2", "sharding=zero2", "verify.rate=1", KILL) == wanted
    assert validations(one) == validations(two)
    lines = [json.loads(line) for line in (two / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < line["weight"] == int(line["weight"]) for line in lines)
    history = elaswave_spmd.load_run(two / "run").history
    assert history.weight.tolist() == [line["weight"] for line in lines]


def test_a_collate_that_fails_later_is_told_with_the_line(tmp_path: Path) -> None:
    shutil.copy(sample_models.__file__, tmp_path / "sample_models.py")
    words = ("model.target=sample_models.Tagger", "data.target=sample_models.Broken", "data.validation_fraction=0")
    done = train(tmp_path, *SMALL, *words, "run.dir=run", "mesh=dp2")
    assert done.code == 1, done.err
    assert "RuntimeError: five is too long" in done.err and "in collate(samples) of sample_models.Broken" in done.err


@NEEDS_COMPILER
@pytest.mark.timeout(900)
def test_compiled_layers(tmp_path: Path) -> None:
    """Sequences that are padded to one length, their weights and metrics: the same bits with a kill, none late."""
    words = (*SENTENCES, "data.target=sample_models.Padded", "runtime.compile=true")
    wanted = run(tmp_path / "one", *words, "mesh=single")
    assert run(tmp_path / "two", *words, "mesh=pp2", KILL) == wanted
    assert validations(tmp_path / "one") == validations(tmp_path / "two")
    found = json.loads((tmp_path / "two" / "run" / "summary.json").read_text())["programs_compiled_per_worker"]
    assert len(found) == 2 and all(before and not late for before, late in found.values()), found


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("data.target=sample_models.Restless", IMAGES[0]), "are not the same when they are read again"),
        (("data.target=sample_models.Mapped", IMAGES[0], "+model.args.num_classes=2"), 'batch has no "x"'),
        pytest.param(
            (*SENTENCES, "runtime.compile=true"),
            "where layers are compiled all micro-batches have one form",
            marks=NEEDS_COMPILER,
        ),
    ],
    ids=["restless", "no inputs", "other lengths"],
)
def test_what_is_refused_before_the_first_step(tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    assert told in refused(tmp_path, *words, "mesh=dp2")
