"""`python train.py` with frozen parameters: equal bits on meshes, through a kill and a resume, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from elaswave_spmd.run_dir import read_summary
from tests.multiprocess.real_runs import SMALL, launch, train, write_text
from tests.multiprocess.test_resume import kill_after_checkpoint, no_longer_still, standing_still

FREEZE = 'optim.freeze="embed.* *.bias"'
FROZEN = [*SMALL, "model=gpt_tiny", "model.dropout=0.1", "train.steps=8", FREEZE]


def weights(run_dir: Path) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in load_file(run_dir / "weights.safetensors").items()}


def trained(folder: Path, *words: str) -> None:
    done = train(folder, *words)
    assert done.code == 0, done.err


def test_meshes_a_kill_and_a_resume(tmp_path: Path) -> None:
    write_text(tmp_path)
    trained(tmp_path, *FROZEN, "run.dir=single")
    trained(tmp_path, *FROZEN, "run.dir=meshed", "mesh=dp2_pp2", "sharding=zero3")
    kill = "chaos.events=[{kind: kill, step: 3, rank: 1}]"
    trained(tmp_path, *FROZEN, "run.dir=killed", "mesh=dp2_pp2", "sharding=zero2", kill)
    words = [*FROZEN, "run.dir=resumed", "mesh=dp2", "checkpoint.every=2", *standing_still(tmp_path, 6)]
    with launch(tmp_path, *words) as stopped:
        kill_after_checkpoint(stopped, "resumed", 2)
    no_longer_still(tmp_path)
    trained(tmp_path, "train.resume=resumed", "mesh=pp2", "sharding=zero3")
    wanted = weights(tmp_path / "single")
    for name in ("meshed", "killed", "resumed"):
        assert weights(tmp_path / name) == wanted, name
        loss = "final_loss_hex"
        assert read_summary(tmp_path / name)[loss] == read_summary(tmp_path / "single")[loss]
    # What is frozen has its initial values: those that a shorter run with another learning rate ends with as well.
    trained(tmp_path, *FROZEN, "run.dir=other", "train.steps=2", "optim.lr=0.5", "train.validate_every=0")
    same = {name for name, values in weights(tmp_path / "other").items() if values == wanted[name]}
    assert same == {name for name in wanted if name.startswith("embed.") or name.endswith(".bias")}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (['optim.freeze="embedding.*"'], "embedding.* matches no parameter"),
        (['optim.freeze="*"'], "all parameters of GPT are frozen"),
        (['optim.freeze="embed.*"', "+model.args.tied=true"], "head.weight, which is tied to it, is trained"),
    ],
)
def test_what_is_refused(tmp_path: Path, words: list[str], told: str) -> None:
    write_text(tmp_path)
    done = train(tmp_path, *SMALL, "model=gpt_tiny", *words)
    assert done.code == 2 and told in done.err and not (tmp_path / "run").exists()


def test_another_frozen_set_is_not_resumed(tmp_path: Path) -> None:
    write_text(tmp_path)
    # Saved for certain: a checkpoint that is being written when a run finishes is given up.
    saved = ("elastic.enabled=false", "chaos.events=[{step: 3, kind: term, rank: 0, point: forward}]")
    stopped = train(tmp_path, *FROZEN, "run.dir=first", *saved)
    assert stopped.code == 1 and "resume with: " in stopped.err, stopped
    done = train(tmp_path, "train.resume=first", 'optim.freeze="head.*"', "run.dir=second")
    assert done.code == 2 and "frozen: saved" in done.err
    assert "embed.positions" in done.err and "head.weight" in done.err and not (tmp_path / "second").exists()
