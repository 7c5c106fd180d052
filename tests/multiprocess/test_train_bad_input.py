"""Bad input: one clear screen, exit code 2, before any worker starts, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from elaswave_spmd.cli import FIRST_LINE
from tests.multiprocess.real_runs import SMALL, Done, train, train_in_new_interpreter, write_text

MODEL = """
import torch
from torch import nn
from elaswave_spmd.models import LayeredModel
from elaswave_spmd.sharding import P, shard

class Layer(nn.Module):
    def __init__(self, vocab_size, d_model, last, spec):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab_size, d_model) * 0.02)
        self.last = last
        shard(self, weight=spec)
    def forward(self, x, keys):
        return nn.functional.linear(x, self.weight) if self.last else nn.functional.embedding(x, self.weight)

class MyModel(LayeredModel):
    def __init__(self, vocab_size, d_model, spec, **others):
        layers = {str(n): Layer(vocab_size, d_model, n == "head", P(*spec)) for n in ("embed", "head")}
        super().__init__(layers)
"""

LOCKLESS = """
import errno, fcntl, os, sys

flock = fcntl.flock

def of_no_run(file, operation):
    fd = file if isinstance(file, int) else file.fileno()
    if os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) == "controller.lock":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    flock(file, operation)

if __name__ == "__main__":
    fcntl.flock = of_no_run
    from elaswave_spmd.cli import train
    sys.exit(train())
"""


def refused(folder: Path, *arguments: str) -> str:
    """Starts a run that must be refused; returns its stderr. Asserts one screen, exit code 2, and no file left."""
    before = sorted(path for path in folder.rglob("*") if "cache" not in path.parts and "__pycache__" not in path.parts)
    done: Done = train(folder, *SMALL, *arguments)
    after = sorted(path for path in folder.rglob("*") if "cache" not in path.parts and "__pycache__" not in path.parts)
    assert done.code == 2, (done.code, done.out, done.err)
    assert after == before, "files left behind"
    assert done.err.startswith("error: ") and len(done.err.splitlines()) <= 12
    assert "Traceback" not in done.err and done.out == f"{FIRST_LINE}\n"
    return done.err


@pytest.mark.parametrize(
    "arguments, telling",
    [
        (["mesh.stages=[3,2]", "mesh.dp=2"], "mesh.stages=[3,2]"),
        (["mesh=dp0"], "mesh=dp0"),
        (["mesh=pd3"], "dpN_ppM"),
        (["mesh.dp=abc"], "mesh.dp=abc"),
        (["train.microbatch_size=3"], "train.microbatch_size=3"),
        (["train.steps=0"], "train.steps=0"),
        (["train.steps="], "train.steps"),
        (["train.global_batch=-8"], "train.global_batch=-8"),
        (["optim.lr=0"], "optim.lr=0"),
        (["optim.lr=-1e-3"], "optim.lr"),
        (["data.path=???"], "data.path"),
        (["--multirun", "seed=1,2"], "multirun"),
        (["model=gpt9"], "gpt_tiny"),
        (["trian.steps=3"], "train.steps=3"),
        (["model.layer=3"], "model.layers=3"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, list) else "",
)
def test_settings_that_cannot_be(tmp_path: Path, arguments: list[str], telling: str) -> None:
    write_text(tmp_path)
    assert telling in refused(tmp_path, *arguments)


@pytest.mark.parametrize(
    "spec, telling",
    [('["dq"]', "dq"), ('["tp","tp"]', "tp"), ('["tp",null,null]', "2"), ('["dp"]', "dp")],
    ids=["unknown axis", "axis twice", "longer than the tensor", "worker axis"],
)
def test_specs_that_cannot_be(tmp_path: Path, spec: str, telling: str) -> None:
    write_text(tmp_path)
    (tmp_path / "my_file.py").write_text(MODEL)
    screen = refused(tmp_path, "model.target=my_file.MyModel", f"+model.args.spec={spec}")
    assert telling in screen


@pytest.mark.parametrize(
    "declared, mesh, telling",
    [
        ("batch=P(None)", "dp2", ["batch=P(None) gives all", "each of the 2 workers of stage 0", 'batch=P("dp")']),
        ("layers=P(None)", "pp2", ["layers=P(None) gives all 2 layers to each of 2 stages", 'layers=P("pp")']),
    ],
)
def test_specs_that_the_mesh_cannot_run(tmp_path: Path, declared: str, mesh: str, telling: list[str]) -> None:
    write_text(tmp_path)
    head = "class MyModel(LayeredModel):\n"
    source = MODEL.replace("import P, shard", "import P, Shardings, shard")
    (tmp_path / "my_file.py").write_text(source.replace(head, f"{head}    shardings = Shardings({declared})\n"))
    model = ["model.target=my_file.MyModel", '+model.args.spec=["tp",null]']
    screen = refused(tmp_path, *model, f"mesh={mesh}")
    assert all(words in screen for words in telling), screen


def test_the_model_of_these_tests_is_good_otherwise(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "my_file.py").write_text(MODEL)
    done = train(tmp_path, *SMALL, "model.target=my_file.MyModel", '+model.args.spec=["tp",null]', "train.steps=1")
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    "arguments, telling",
    [
        (["mesh=pp5"], "4 layers"),
        (["model.target=my_file.Nothing"], "my_file"),
        (["model.target=nothing"], "nothing"),
        (["model.heads=3"], "heads"),
        (["data.path=none/*.txt"], "none/*.txt"),
        (["data.path=empty.txt"], "empty"),
        (["data.path=folder"], "folder"),
        (["data.path=short.txt"], "train.seq_len"),
        (["data.tokenizer=text.txt"], "text.txt"),
        (["data.tokenizer=none.json"], "none.json"),
        (["train.global_batch=100000", "train.microbatch_size=2"], "100000"),
        (["run.dir=text.txt/run"], "text.txt/run"),
        (["run.dir=text.txt"], "text.txt"),
        (["runtime.device=cuda"], "cuda"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, list) else "",
)
def test_models_data_and_folders_that_cannot_be(tmp_path: Path, arguments: list[str], telling: str) -> None:
    write_text(tmp_path)
    (tmp_path / "my_file.py").write_text(MODEL)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("ten bytes.")
    (tmp_path / "folder").mkdir()
    assert telling in refused(tmp_path, *arguments)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_files_and_folders_without_permission(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "locked" in refused(tmp_path, "run.dir=locked/run")
    (tmp_path / "secret.txt").write_text("x" * 10_000)
    (tmp_path / "secret.txt").chmod(0)
    assert "secret.txt" in refused(tmp_path, "data.path=secret.txt")


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    write_text(tmp_path)
    done = train(tmp_path, *SMALL, "train.steps=1", "train.validate_every=0")
    assert done.code == 0, done.err
    summary = (tmp_path / "run" / "summary.json").read_text()
    assert json.loads(summary)["steps"] == 1
    assert re.search(r"error: run\.dir=\S*run holds another run", refused(tmp_path))
    assert (tmp_path / "run" / "summary.json").read_text() == summary


def test_a_file_system_without_locks_is_refused_before_the_first_step(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "lockless.py").write_text(LOCKLESS)
    done = train_in_new_interpreter(tmp_path, *SMALL, script=tmp_path / "lockless.py")
    assert done.code == 2, done
    assert f"error: the file system of {tmp_path / 'run'} has no locks by flock (Function not implemented)" in done.err
    assert "run.dir=DIR on another file system" in done.err and not (tmp_path / "run").exists()
