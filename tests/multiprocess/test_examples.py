"""The examples train as their first lines say, with the bits of one worker on a mesh that loses a worker."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_metrics
from tests.faults.fault_runs import PATIENT, Bits, Changes, chaos
from tests.multiprocess.real_runs import train, write_text

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = (
    *(
        "train.steps=8",
        "train.global_batch=16",
        "train.microbatch_size=4",
        "train.seq_len=16",
        "train.validate_every=4",
    ),
    *("train.validate_microbatches=2", "optim.warmup_steps=2", "optim.lr=0.01", "page.size=256"),
    *("run.tensorboard=false", "model.d_model=16"),
    *PATIENT,  # exactly one loss, also on a machine that is too busy for heartbeats
)
HEADS = "model.heads=2"
TEXT = ("data=text", "data.path=text.txt", "data.cache=cache")
CASES = {
    "encoder_decoder": (
        ("model.target=encoder_decoder.Translator", "data.target=encoder_decoder.Pairs", "model.layers=2", HEADS),
        "pp3",
    ),
    "images": (("model.target=images.Classifier", "data.target=images.Shapes", "model.layers=2", HEADS), "dp2_pp2"),
    "mixture_of_experts": (("model.target=mixture_of_experts.Mixture", "model.layers=2", *TEXT), "dp2_pp2"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_example_has_the_bits_of_one_worker_through_a_loss(tmp_path: Path, name: str) -> None:
    words, mesh = CASES[name]
    write_text(tmp_path)
    shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    kill = chaos("step: 3, kind: kill, rank: 1, point: backward")
    for run, more in (("one", ()), ("meshed", (f"mesh={mesh}", "sharding=zero2", kill))):
        done = train(tmp_path, *SHORT, *words, f"run.dir={run}", *more)
        assert done.code == 0, done.err
    assert Changes.of(tmp_path / "meshed").ranks("fail") == [[1]]
    assert Bits.of(tmp_path / "meshed") == Bits.of(tmp_path / "one")
    losses = [line.loss for line in read_metrics(tmp_path / "one")]
    assert losses[-1] < losses[0]
