"""Runs that end before their last step: a bug in the model, too few workers, Ctrl-C. Nothing is left behind.

And what does not end it: the loss of one worker of several.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from tests.descriptors import unread
from tests.multiprocess import deaf_model
from tests.multiprocess.real_runs import SMALL, eventually, launch, train, write_text
from tests.waiting import PATIENCE_S

ENDLESS = [*SMALL, "train.steps=1000000", "train.validate_every=0", "mesh=dp2_pp2"]
BROKEN = """
import torch
from torch import nn
from elaswave_spmd.models import LayeredModel

class Embed(nn.Module):
    def __init__(self, vocab_size, d_model):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab_size, d_model) * 0.02)
    def forward(self, x, keys):
        return nn.functional.embedding(x, self.weight)

class Head(nn.Module):
    def __init__(self, vocab_size, d_model):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab_size, d_model) * 0.02)
    def forward(self, x, keys):
        if int(keys.step) == 3:
            raise RuntimeError("a bug in the head")
        return nn.functional.linear(x, self.weight)

class Broken(LayeredModel):
    def __init__(self, vocab_size, d_model, **others):
        super().__init__({"embed": Embed(vocab_size, d_model), "head": Head(vocab_size, d_model)})
"""
PRINTING = BROKEN.replace('raise RuntimeError("a bug in the head")', "print(1, flush=True)")


@pytest.mark.parametrize("mesh", ["single", "dp2_pp2"])
def test_a_bug_in_the_model_is_shown_once(tmp_path: Path, mesh: str) -> None:
    write_text(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    done = train(tmp_path, *SMALL, f"mesh={mesh}", "model.target=broken.Broken", "sharding=zero2")
    assert done.code == 1
    assert done.err.count("Traceback") == 1 and done.err.count("RuntimeError: a bug in the head") == 1
    assert re.search(r"worker \d failed", done.err) and 'broken.py", line' in done.err
    assert "Traceback" not in done.out
    kinds = [event["event"] for event in read_events(tmp_path / "run")]
    assert kinds[0] == "start" and kinds[-1] == "stop"
    assert "checkpoint" in kinds and set(kinds[1:-1]) <= {"model_check", "fail", "checkpoint"}, (
        "the first to fail may have been a loss, until the next one failed there too"
    )
    assert len(read_metrics(tmp_path / "run")) == 2 and not (tmp_path / "run" / "summary.json").exists()


def test_a_killed_worker_ends_a_run_that_is_not_elastic_with_its_name(tmp_path: Path) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *ENDLESS, "elastic.enabled=false") as run:
        run.wait_for_steps(2)
        workers = run.workers()
        assert len(workers) == 4
        os.kill(workers[2], signal.SIGKILL)
        done = run.finish()
    assert done.code == 1
    how, state = done.err.splitlines()
    # The second one where the fork server does not get to reap it within a second.
    ends = f"worker 2 (pid {workers[2]}) was ended by signal 9 (SIGKILL)", "worker 2: its process ended"
    assert how in [f"error: {end}" for end in ends]
    assert state == f"nothing to resume: {tmp_path}/run has no good checkpoint (checkpoint.every=N writes them)"


def test_a_worker_that_is_asked_to_end_saves_a_run_that_is_not_elastic(tmp_path: Path) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *ENDLESS, "elastic.enabled=false") as run:
        run.wait_for_steps(2)
        os.kill(run.workers()[2], signal.SIGTERM)
        done = run.finish()
    steps = len(read_metrics(tmp_path / "run"))
    assert done.code == 1 and "error: the run stops: worker 2 was asked to end by SIGTERM" in done.err
    assert f"Its state after step {steps} is in {tmp_path}/run/checkpoints/step_{steps:08d}\nresume with: " in done.err


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGKILL, "fail"), (signal.SIGTERM, "leave")])
def test_a_run_goes_on_without_one_worker(tmp_path: Path, number: signal.Signals, kind: str) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *ENDLESS) as run:
        run.wait_for_steps(2)
        workers = run.workers()
        os.kill(workers[2], number)
        eventually(lambda: kind in [event["event"] for event in read_events(tmp_path / "run")], run.process)
        run.wait_for_steps(len(read_metrics(tmp_path / "run")) + 5)
        eventually(lambda: run.workers() == [pid for pid in workers if pid != workers[2]], run.process)
        run.process.send_signal(signal.SIGINT)
        done = run.finish()
    assert done.code == 130 and done.err.startswith("the run stops: it was asked to by SIGINT. Its state after step ")
    (event,) = [event for event in read_events(tmp_path / "run") if event["event"] == kind]
    assert event["ranks"] == [2] and event["mesh_epoch"] == 1
    lines = read_metrics(tmp_path / "run")
    assert [line.step for line in lines] == list(range(1, len(lines) + 1)), "every step is committed once"
    assert (lines[0].workers, lines[-1].workers) == (4, 3)


def test_a_worker_that_cannot_receive_any_more_is_lost_with_the_cause_and_the_run_goes_on(tmp_path: Path) -> None:
    """Its heartbeats would go on, and it would wait for ever."""
    write_text(tmp_path)
    done = train(
        tmp_path, *SMALL, "mesh=dp2_pp2", "run.dir=run", "runtime.check_model=false", *deaf_model.write(tmp_path)
    )
    assert done.code == 0, done.err
    assert (tmp_path / "deaf").exists()
    (fail,) = [event for event in read_events(tmp_path / "run") if event["event"] == "fail"]
    assert "cannot receive messages any more: MemoryError: unable to allocate 2 GiB for a message" in fail["reason"]
    assert [line.step for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("zero", [0, 3])
def test_a_worker_that_is_killed_in_a_step_changes_no_bit(tmp_path: Path, zero: int) -> None:
    write_text(tmp_path)
    runs = {"quiet": [], "killed": ["chaos.events=[{step: 3, kind: kill, rank: 2, point: backward}]"]}
    for name, chaos in runs.items():
        done = train(tmp_path, *SMALL, "mesh=dp2_pp2", f"sharding=zero{zero}", f"run.dir={name}", *chaos)
        assert (done.code, done.err) == (0, ""), name
    (fail,) = [event for event in read_events(tmp_path / "killed") if event["event"] == "fail"]
    assert fail["ranks"] == [2] and fail["after_step"] == 2 and fail["microbatches_redone"] > 0
    found, wanted = ([line.loss_hex for line in read_metrics(tmp_path / name)] for name in ("killed", "quiet"))
    assert found == wanted and len(found) == 6
    shas = {read_summary(tmp_path / name)["weights_sha256"] for name in runs}
    assert len(shas) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_only_worker_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *ENDLESS, "mesh=single") as run:
        run.wait_for_steps(2)
        (worker,) = run.workers()
        os.kill(worker, number)
        done = run.finish()
    saved = number == signal.SIGTERM  # it can still write what it has
    headline = "error: the run stops: worker 0 leaves" if saved else "error: the run cannot go on: "
    assert done.code == 1 and done.err.startswith(headline) and "Traceback" not in done.err
    assert read_events(tmp_path / "run")[-1]["event"] == "stop"
    assert bool(list(tmp_path.glob("run/checkpoints/*/manifest.json"))) == saved


def test_the_death_of_the_fork_server_ends_the_run(tmp_path: Path) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *ENDLESS) as run:
        run.wait_for_steps(2)
        os.kill(run.fork_server(), signal.SIGKILL)
        done = run.finish()
    assert done.code == 1 and "the fork server" in done.err and "Traceback" not in done.err
    assert "save their state" not in done.out, "nobody is left to do so"


def test_the_death_of_the_controller_ends_its_workers(tmp_path: Path) -> None:
    write_text(tmp_path)
    # Longer than the test waits: the fork server kills no worker, so all of them end by themselves.
    with launch(tmp_path, *ENDLESS, f"timeouts.shutdown={10 * PATIENCE_S}") as run:
        run.wait_for_steps(2)
        run.process.kill()
        run.process.communicate(timeout=PATIENCE_S)  # its pipes are closed by the last of its descendants
        assert not run.processes() and not list(run.sockets.iterdir())


def test_an_output_that_nobody_reads_meanwhile_stops_no_step(tmp_path: Path) -> None:
    """As of a pager: all lines are there when it is read, and the run has ended before."""
    write_text(tmp_path)
    words = [*SMALL, "mesh=dp2", "train.steps=120", "train.validate_every=1", "run.dir=run"]
    with launch(tmp_path, *words, pipe_bytes=4096) as run:
        eventually(lambda: (tmp_path / "run" / "summary.json").exists(), run.process)
        done = run.finish()
    assert done.code == 0 and done.out.count("validation loss ") >= 120
    assert "left out" not in done.out and "weights sha256" in done.out


def test_an_output_that_nobody_has_read_from_the_begin_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `python train.py 2>&1 | true`, or in a terminal that has closed."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    write_text(tmp_path)
    with unread() as output, launch(tmp_path, *SMALL, "mesh=dp2", output=output) as run:
        assert run.finish().code == 0
    assert [event["event"] for event in read_events(tmp_path / "run")][-1] == "finish"


def test_a_reader_that_ends_before_the_run_ends_no_worker_whose_model_prints(tmp_path: Path) -> None:
    """As with `python train.py | head -1`."""
    write_text(tmp_path)
    (tmp_path / "printing.py").write_text(PRINTING)
    reading, writing = os.pipe()
    with launch(tmp_path, *SMALL, "mesh=dp2", "model.target=printing.Broken", output=writing) as run:
        os.close(writing)
        with open(reading) as output:
            output.readline()
        assert run.finish().code == 0
    kinds = {event["event"] for event in read_events(tmp_path / "run")}
    assert kinds == {"start", "model_check", "validation", "finish"}


def test_a_run_whose_weights_cannot_be_written_has_not_finished_and_goes_on(tmp_path: Path) -> None:
    write_text(tmp_path)
    in_the_way = tmp_path / "run" / ".weights.safetensors.tmp"
    in_the_way.mkdir(parents=True)
    done = train(tmp_path, *SMALL, "checkpoint.every=4")
    assert done.code == 1 and "weights.safetensors (Is a directory)" in done.err, done
    assert "resume with:" in done.err and "run_2" not in done.err, "it goes on where it is"
    assert len(read_metrics(tmp_path / "run")) == 6 and not (tmp_path / "run" / "summary.json").exists()
    in_the_way.rmdir()
    again = train(tmp_path, "train.resume=run")
    assert again.code == 0 and (tmp_path / "run" / "weights.safetensors").exists(), again
    assert read_summary(tmp_path / "run")["steps"] == 6
