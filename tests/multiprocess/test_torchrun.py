"""The command under the real torchrun: two of them, which are two nodes on one machine."""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.processes import processes_with
from elaswave_spmd.run_dir import read_metrics, read_summary
from tests.multiprocess.real_runs import SMALL, Done, train, write_text
from tests.multiprocess.train_server import new_mark
from tests.ports import free_port
from tests.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parents[2]
MODEL = """
import os

from elaswave_spmd.controller.torchrun import VARIABLES
from elaswave_spmd.models import GPT


class UndisturbedGPT(GPT):
    def __init__(self, **sizes):
        assert not set(VARIABLES) & set(os.environ), "torchrun's variables are for its own processes"
        super().__init__(**sizes)
"""
# torchrun ends when its command has failed. With the first node the place ends where the other one asks for its rank:
# so no command begins before both have been started.
TOGETHER = """
import os
import sys
import time
from pathlib import Path

from elaswave_spmd.cli import main

here = Path(__file__).parent
(here / f"rank_{os.environ['RANK']}").touch()
while len([*here.glob("rank_*")]) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.02)
sys.exit(main())
"""


def new_loopback() -> str:
    """An address of this machine that no other test uses: the ports at it are free."""
    draw = random.SystemRandom()
    return f"127.{draw.randint(2, 254)}.{draw.randint(1, 254)}.{draw.randint(1, 254)}"


@contextmanager
def nodes(
    folders: list[Path], options: list[str], words: list[str], module: str = "elaswave_spmd"
) -> Iterator[list[subprocess.Popen[str]]]:
    """One torchrun of a module in each folder, or beside them; what is left at the end is killed."""
    mark = new_mark()
    name, _, value = mark.partition("=")
    environment = {**os.environ, name: value, "PYTHONPATH": f"{ROOT}:{folders[0].parent}"}
    environment.pop("PYTHONWARNINGS", None)
    started = []
    try:
        for number, folder in enumerate(folders):
            command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(folders)}", *options]
            static = [f"--node-rank={number}"] if not any("rdzv" in option for option in options) else []
            started.append(
                subprocess.Popen(
                    [*command, *static, "-m", module, "train", *words],
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        yield started
        eventually(lambda: not processes_with(mark))
    finally:
        for pid in processes_with(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        for process in started:
            process.communicate()


def ends_of(processes: list[subprocess.Popen[str]]) -> list[Done]:
    ends = [process.communicate(timeout=PATIENCE_S) for process in processes]
    return [Done(process.returncode, *end) for process, end in zip(processes, ends, strict=True)]


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two nodes, each with the data and the model."""
    made = [tmp_path / "node0", tmp_path / "node1"]
    for folder in made:
        folder.mkdir()
        write_text(folder)
        (folder / "undisturbed.py").write_text(MODEL)
    return made


def test_two_nodes_of_torchrun_are_one_run_with_the_bits_of_one_worker(folders: list[Path], tmp_path: Path) -> None:
    alone, token, address = tmp_path / "alone", tmp_path / "token", new_loopback()
    token.touch(0o600)
    token.write_text(secrets.token_hex(16))
    alone.mkdir()
    write_text(alone)
    done = train(alone, *SMALL, "mesh=single")
    assert done.code == 0, done.err
    run_dir = tmp_path / "run"
    options = [
        *("--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"),
        *(f"--rdzv-id={token.name}", f"--local-addr={address}"),
    ]
    words = [*SMALL[:-1], "mesh=dp2", f"run.dir={run_dir}", f"runtime.token_file={token}"]
    with nodes(folders, options, [*words, "model.target=undisturbed.UndisturbedGPT"]) as started:
        ends = ends_of(started)
    assert [end.code for end in ends] == [0, 0], ends
    out = "".join(end.out for end in ends)
    assert out.count("on this node has nothing to do") == 2
    assert f"rank 0 of 2 nodes, the controller: it meets 1 agent at {address}:29600\n" in out
    assert f"rank 2 of 2 nodes, an agent of the run at {address}:29600\n" in out
    assert "places for 1 worker of the run" in out
    found, wanted = read_metrics(run_dir), read_metrics(alone / "run")
    assert [(line.step, line.loss_hex, line.grad_norm_hex) for line in found] == [
        (line.step, line.loss_hex, line.grad_norm_hex) for line in wanted
    ]
    assert read_summary(run_dir)["weights_sha256"] == read_summary(alone / "run")["weights_sha256"]


def test_what_is_missing_is_refused_on_both_nodes_before_anything_starts(folders: list[Path], tmp_path: Path) -> None:
    (tmp_path / "together.py").write_text(TOGETHER)
    options = ["--nproc-per-node=1", f"--master-addr={new_loopback()}", f"--master-port={free_port()}"]
    with nodes(folders, options, [*SMALL, "mesh=dp2"], "together") as started:
        ends = ends_of(started)
    for end in ends:
        assert end.code == 1, "that of torchrun"
        assert "error: torchrun has started 2 nodes, and runtime.token_file is not given\n" in end.err
        assert "exitcode  : 2 " in end.err
    assert not any((folder / "run").exists() for folder in folders)
