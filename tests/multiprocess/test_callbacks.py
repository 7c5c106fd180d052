"""Callbacks of a real run: one keeps a log, one hangs, one raises, while a worker is killed. No number shows them."""

from __future__ import annotations

import json
from pathlib import Path

from elaswave_spmd.controller.admin_client import ask
from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from tests.multiprocess import patient_model
from tests.multiprocess.real_runs import SMALL, eventually, launch, train, write_text

HOOKS = """
import json, time
from pathlib import Path
from elaswave_spmd import Callback


class Log(Callback):
    def __init__(self):
        self.lines = []

    def on_start(self, start):
        self.lines.append(["start", start.mesh, start.settings["train"]["steps"]])

    def on_step(self, step):
        self.lines.append(["step", step.step, step.loss_hex])

    def on_event(self, event):
        self.lines.append(["event", event.kind])

    def on_validation(self, validation):
        self.lines.append(["validation", validation.step])

    def on_checkpoint(self, checkpoint):
        self.lines.append(["checkpoint", checkpoint.step, checkpoint.path.is_dir()])

    def on_end(self, end):
        self.lines.append(["end", end.is_finished, end.step, end.summary["weights_sha256"]])
        Path("log.json").write_text(json.dumps(self.lines))


class Hangs(Callback):
    def on_step(self, step):
        Path("hangs").touch()
        while not Path("go").exists():
            time.sleep(0.01)


class Raises(Callback):
    def on_validation(self, validation):
        raise RuntimeError(f"{validation.step} is no good")
"""
RUN = [*SMALL, "mesh=dp2_pp2", "train.steps=8", "checkpoint.every=4", "timeouts.callbacks=300"]
NAMED = "run.callbacks=[own_hooks.Log,own_hooks.Hangs,own_hooks.Raises]"


def test_callbacks_hear_a_run_with_a_kill_and_neither_hold_it_up_nor_change_it(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for folder in (tmp_path, plain):
        write_text(folder)
    (tmp_path / "own_hooks.py").write_text(HOOKS)
    kill = "chaos.events=[{step: 5, kind: kill, rank: 1, point: backward}]"
    with launch(tmp_path, *RUN, NAMED, kill) as run:
        run.wait_for_steps(8)  # all steps, while one callback has not returned from the first of them
        eventually(lambda: (tmp_path / "hangs").exists(), run.process)  # it has a thread of its own
        eventually(lambda: (tmp_path / "run" / "weights.safetensors").exists(), run.process)
        assert run.process.poll() is None  # it waits for the callback that hangs
        (tmp_path / "go").touch()
        done = run.finish()
    assert done.code == 0, done.err
    assert train(plain, *RUN).code == 0
    lines, expected = read_metrics(tmp_path / "run"), read_metrics(plain / "run")
    assert [line.loss_hex for line in lines] == [line.loss_hex for line in expected]
    summary = read_summary(tmp_path / "run")
    assert summary["weights_sha256"] == read_summary(plain / "run")["weights_sha256"]

    events = read_events(tmp_path / "run")
    log = json.loads((tmp_path / "log.json").read_text())
    assert log[0] == ["start", "dp2_pp2", 8] and log[-1] == ["end", True, 8, summary["weights_sha256"]]
    assert [row[1:] for row in log if row[0] == "step"] == [[line.step, line.loss_hex] for line in lines]
    assert [row[1] for row in log if row[0] == "validation"] == [3, 6, 8]
    assert ["event", "fail"] in log and ["event", "callback"] not in log
    saved = [event["step"] for event in events if event["event"] == "checkpoint"]
    assert [row for row in log if row[0] == "checkpoint"] == [["checkpoint", step, True] for step in saved]
    (failed,) = [event for event in events if event["event"] == "callback"]
    assert (failed["callback"], failed["state"], failed["method"]) == ("Raises", "failed", "on_validation")
    assert "Raises.on_validation raised RuntimeError: 3 is no good" in done.out and "own_hooks.py" in done.out


def test_a_run_is_asked_and_ends_while_a_callback_never_returns(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "own_hooks.py").write_text(HOOKS)
    words = [*SMALL, "mesh=single", "train.steps=40", "run.callbacks=[own_hooks.Hangs]", "timeouts.callbacks=0.2"]
    with launch(tmp_path, *words, *patient_model.write(tmp_path, tmp_path / "asked")) as run:
        eventually(lambda: (tmp_path / "hangs").exists(), run.process)
        assert ask(str(tmp_path / "run"), {"command": "status"})["total_steps"] == 40
        (tmp_path / "asked").touch()
        done = run.finish()
    assert done.code == 0, done.err
    told = [event for event in read_events(tmp_path / "run") if event["event"] == "callback"]
    assert [(event["callback"], event["state"]) for event in told] == [("Hangs", "left_out"), ("Hangs", "unfinished")]
    assert told[0]["left_out"] == {"on_step": 39} and len(read_metrics(tmp_path / "run")) == 40


def test_a_callback_that_cannot_be_made_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "own_hooks.py").write_text(HOOKS)
    done = train(tmp_path, *SMALL, "mesh=single", "run.callbacks=[own_hooks.Logg]")
    assert done.code == 2 and "module own_hooks has no Logg" in done.err and "Log, Hangs, Raises" in done.err
    assert not (tmp_path / "run").exists()
