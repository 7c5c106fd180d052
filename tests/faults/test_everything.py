"""All that a user's model may have, and all that may happen to a run, in one run: it has the bits of one worker.

A user's dataset with a collate of its own, weights of samples, tuples between layers, a term of the loss, a tied and a
frozen layer, optimizer groups, an average of the weights, metrics; split backwards and checks; a worker that is killed
with weight gradients put off, one that computes a wrong result, one that joins, one that leaves so that layers move;
and a resume on another mesh.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_events, read_summary
from elaswave_spmd.run_dir.directory import EVENTS
from tests import everything_model
from tests.faults.fault_runs import Bits, Changes, chaos
from tests.multiprocess import patient_model
from tests.multiprocess.real_runs import eventually, launch, train

MODEL = """
from everything_model import Everything
from patient_model import wait_for


class Patient(Everything):
    def __init__(self, go, d_model, dropout):
        super().__init__(d_model, dropout)
        wait_for(self.layers[1], go)
"""
STEPS, RESUMED_AT = 40, 8
RUN = (
    *("model.target=own_model.Patient", "+model.args.go=go", "model.d_model=16", "model.dropout=0.1"),
    "data.target=everything_model.Sentences",
    *("train.global_batch=8", "train.microbatch_size=2", f"train.steps={STEPS}", "data.validation_fraction=0.2"),
    *("train.validate_every=4", "train.validate_microbatches=3", "optim.warmup_steps=2", "page.size=256"),
    *("optim.freeze=mix.*", 'optim.groups=[{match: "embed.*", lr_scale: 0.5, weight_decay: 0.0}]', "optim.ema=0.9"),
    *("checkpoint.every=4", f"checkpoint.keep={STEPS}", "verify.rate=1", "run.tensorboard=false"),
    # Nobody is stopped here: whoever is not heard for a moment is one that a busy machine keeps waiting.
    *("timeouts.suspect=10", "timeouts.status=12", "timeouts.leave=14"),
)
FAULTS = chaos(
    "step: 2, kind: term, rank: 0, point: forward",
    "step: 4, kind: kill, rank: 3, point: weights",
    "step: 6, kind: miscompute, rank: 1, point: forward",
    "step: 8, kind: join, rank: 2, point: backward",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The directory that runs are started in, with the user's code."""
    for module in (everything_model, patient_model):
        shutil.copy(str(module.__file__), tmp_path)
    (tmp_path / "own_model.py").write_text(MODEL)
    return tmp_path


def results(run_dir: Path, first: int = 1) -> tuple[Bits, str, Mapping[int, object]]:
    """The bits of a run, with its validations from a step on; the average of its weights; and its metrics by step."""
    bits = Bits.of(run_dir)
    validations = [event for event in read_events(run_dir) if event["event"] == "validation" and event["step"] >= first]
    losses = {event["step"]: bits.validation[event["step"]] for event in validations}
    metrics = {event["step"]: event["metrics"] for event in validations}
    return replace(bits, validation=losses), read_summary(run_dir)["weights_ema_sha256"], metrics


@pytest.mark.mends("corrupt", "mismatch")
def test_a_run_with_everything_has_the_bits_of_one_worker(folder: Path) -> None:
    faulty, single, resumed = (folder / name for name in ("faulty", "single", "resumed"))
    with launch(folder, *RUN, "mesh=dp2_pp2", "sharding=zero2", FAULTS, "run.dir=faulty") as run:
        eventually((faulty / EVENTS).exists, run.process)
        eventually(lambda: Changes.of(faulty).ranks("join"), run.process)
        (folder / "go").touch()  # it waits until the newcomer has joined
        done = run.finish()
    assert done.code == 0, done.err
    changes = Changes.of(faulty)
    assert (changes.ranks("leave"), changes.ranks("fail")[0], changes.ranks("join")) == ([[0]], [3], [[4]])
    assert [event["ranks"] for event in read_events(faulty) if event["event"] == "corrupt"] == [[1]]

    done = train(folder, *RUN, "mesh=single", "run.dir=single")
    assert done.code == 0, done.err
    assert results(faulty) == results(single)

    again = (f"train.resume_at={RESUMED_AT}", "mesh=pp3", "sharding=zero1")
    done = train(folder, "train.resume=faulty", *again, "run.dir=resumed")
    assert done.code == 0, done.err
    assert results(resumed, RESUMED_AT) == results(single, RESUMED_AT)
