"""How a run ends before its time: a bug in the model, a killed worker, Ctrl-C. Nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.multiprocess.real_runs import SMALL, launch, train, write_text

pytestmark = pytest.mark.multiprocess
ENDLESS = [*SMALL, "train.steps=1000000", "train.validate_every=0", "mesh=dp2_pp2"]
BROKEN = """
import torch
from torch import nn
from elaswave_spmd.models import LayeredModel

class Embed(nn.Module):
    def __init__(self, vocab_size, d_model):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
    def forward(self, x, keys):
        return nn.functional.embedding(x, self.weight)

class Head(nn.Module):
    def __init__(self, vocab_size, d_model):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
    def forward(self, x, keys):
        if int(keys.step) == 3:
            raise RuntimeError("a bug in the head")
        return nn.functional.linear(x, self.weight)

class Broken(LayeredModel):
    def __init__(self, vocab_size, d_model):
        super().__init__({"embed": Embed(vocab_size, d_model), "head": Head(vocab_size, d_model)})
"""


@pytest.mark.parametrize("mesh", ["single", "dp2_pp2"])
def test_a_bug_in_the_model_is_shown_once(tmp_path: Path, mesh: str) -> None:
    write_text(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    done = train(tmp_path, *SMALL, f"mesh={mesh}", "model.target=broken.Broken", "sharding=zero2")
    assert done.code == 1
    assert done.err.count("Traceback") == 1 and done.err.count("RuntimeError: a bug in the head") == 1
    assert re.search(r"worker \d failed", done.err) and 'broken.py", line' in done.err
    assert "Traceback" not in done.out
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "stop"]
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_worker_ends_the_run_with_its_name(tmp_path: Path, number: signal.Signals) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *ENDLESS) as run:
        run.wait_for_steps(2)
        workers = run.workers()
        assert len(workers) == 4
        os.kill(workers[2], number)
        done = run.finish()
    assert done.code == 1
    assert done.err.strip() == f"error: worker 2 (pid {workers[2]}) was ended by signal {number.value} ({number.name})"


def test_the_death_of_the_zygote_ends_the_run(tmp_path: Path) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *ENDLESS) as run:
        run.wait_for_steps(2)
        (zygote,) = [pid for pid, parent in run.processes().items() if parent == run.process.pid]
        os.kill(zygote, signal.SIGKILL)
        done = run.finish()
    assert done.code == 1 and "zygote" in done.err and "Traceback" not in done.err


def test_the_death_of_the_controller_ends_its_workers(tmp_path: Path) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *ENDLESS) as run:
        run.wait_for_steps(2)
        start = time.monotonic()
        run.process.kill()
        run.process.communicate(timeout=60)  # its pipes are closed by the last of its descendants
        assert time.monotonic() - start < 8, "workers end by themselves, not by the zygote's patience"
        assert not run.processes() and not list(run.sockets.iterdir())


@pytest.mark.parametrize("to", ["group", "command"])
def test_ctrl_c_ends_everything_quietly(tmp_path: Path, to: str) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *ENDLESS) as run:
        run.wait_for_steps(2)
        (os.killpg if to == "group" else os.kill)(run.process.pid, signal.SIGINT)
        done = run.finish()
    assert done.code == 130
    assert done.err == "interrupted\n"


@pytest.mark.parametrize("after_s", [0.5, 1.5, 3.0])
def test_ctrl_c_while_a_run_starts_ends_everything_quietly(tmp_path: Path, after_s: float) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *ENDLESS) as run:
        time.sleep(after_s)
        os.killpg(run.process.pid, signal.SIGINT)
        done = run.finish()
    assert done.code == 130 and done.err == "interrupted\n"
