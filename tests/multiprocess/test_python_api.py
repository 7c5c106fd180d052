"""Runs from Python: code of a script goes to the workers by value, and trains with the bits of code in a file."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from elaswave_spmd.conf.compose import words_of
from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from tests.multiprocess import script_with_a_model
from tests.multiprocess.kernels import kernel_environment
from tests.multiprocess.real_runs import eventually, launch, train, train_in_new_interpreter
from tests.multiprocess.script_with_a_model import SETTINGS
from tests.waiting import PATIENCE_S
from tests.waiting import eventually as eventually_true

SCRIPT = Path(script_with_a_model.__file__)


def test_a_script_with_a_model_of_its_own_is_killed_interrupted_and_resumed_with_the_same_bits(tmp_path: Path) -> None:
    with launch(tmp_path, script=SCRIPT, in_new_interpreter=True) as launched:
        launched.wait_for_steps(1)
        eventually(lambda: "join" in [event["event"] for event in read_events(tmp_path / "run")], launched.process)
        os.kill(launched.process.pid, signal.SIGINT)
        (tmp_path / "go").touch()
        done = launched.finish()
    assert done.code == 0, done.err
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["after"] == told["before"]
    assert told["stopped_in"] == str(tmp_path / "run") and "asked to by SIGINT" in told["stopped"]
    assert going_on(tmp_path / "run") in told["stopped"]
    assert told["lost"] == [[1]] and told["joined"] == [[4]]  # the newcomer has got the same code
    assert told["finished"] and told["steps"] == list(range(1, 61)) and told["validated"] == [20, 40, 60]
    assert told["called"] == told["steps"][-len(told["called"]) :] and told["called"][-1] == 60
    assert told["same_logits"]
    # The same class by its name, in a file that workers import.
    shutil.copy(SCRIPT, tmp_path)
    names = ("model.target=script_with_a_model.Net", "data.target=script_with_a_model.Rows", "run.dir=named")
    reference = train(tmp_path, *words_of(SETTINGS), *names)
    assert reference.code == 0, reference.err
    lines = [[(line.loss_hex, line.grad_norm_hex) for line in read_metrics(tmp_path / run)] for run in ("run", "named")]
    assert lines[0] == lines[1]
    digests = [read_summary(tmp_path / run)["weights_sha256"] for run in ("run", "named")]
    assert digests[0] == digests[1]


def going_on(run_dir: Path) -> str:
    """What a call is told that has given Net, an object of Rows and SETTINGS, of which `run.*` is no run's own."""
    settings = {name: value for name, value in SETTINGS.items() if name.startswith("run.")}
    return f"resume with: train(resume='{run_dir}', model=Net, data=..., settings={settings}), with the data of this"


def test_the_stop_button_of_a_notebook_ends_a_run_with_its_state_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client_module = pytest.importorskip("jupyter_client", reason="nbclient and ipykernel are not installed")
    pytest.importorskip("ipykernel", reason="nbclient and ipykernel are not installed")
    kernel_environment(monkeypatch, tmp_path)
    shutil.copy(SCRIPT, tmp_path)
    cells = [
        "import elaswave_spmd as ew, script_with_a_model as s",
        "class Net(s.Net): pass",
        "ew.train(Net, s.Rows(pause_s=0.05), 'dp2', run_dir='run', settings=s.SETTINGS)",
    ]
    manager = client_module.KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=PATIENCE_S)
        for cell in cells[:2]:
            assert client.execute_interactive(cell, timeout=PATIENCE_S)["content"]["status"] == "ok"
        asked = client.execute(cells[2])
        eventually_true(lambda: steps_in(tmp_path / "run") >= 2)
        manager.interrupt_kernel()
        (tmp_path / "go").touch()
        reply = client.get_shell_msg(timeout=PATIENCE_S)
        assert reply["parent_header"]["msg_id"] == asked
        assert reply["content"]["ename"] == "RunInterrupted"
        assert going_on(tmp_path / "run") in reply["content"]["evalue"]
        # For a moment after an error the kernel aborts all it is asked, as a notebook wants of the cells that follow.
        eventually_true(lambda: client.execute_interactive("1", timeout=PATIENCE_S)["content"]["status"] == "ok")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


EDITED = """
import importlib
from pathlib import Path

import elaswave_spmd as ew
import my_net
from script_with_a_model import SETTINGS, Rows

file = Path("my_net.py")
text = file.read_text()


def train(name):
    try:
        run = ew.train(my_net.MyNet, Rows(), "dp2", run_dir=name, settings=settings)
        print("weights:", list(run.weights["head.weight"].shape))
    except ew.errors.UserError as error:
        print(type(error).__name__, error, "left:", Path(name).exists())


sizes = ("model.layers", "model.d_model", "model.dropout")
settings = {**{name: SETTINGS[name] for name in SETTINGS if name not in sizes}, "train.steps": 2}
train("first")
file.write_text(text.replace("WIDTH = 16", "WIDTH = 24"))
train("wider")
file.write_text(text.replace("return x", "return 2 * x"))
train("doubled")
importlib.reload(my_net)
train("reloaded")
"""
MY_NET = """
from torch import nn

import elaswave_spmd as ew

WIDTH = 16


class Head(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return x


class MyNet(ew.LayeredModel):
    def __init__(self, vocab_size):
        super().__init__({"embed": nn.Embedding(vocab_size, WIDTH), "head": Head(WIDTH, vocab_size)})
"""


def test_a_model_whose_file_is_edited_between_two_runs_of_a_process_is_refused(tmp_path: Path) -> None:
    """The process still has the class that it has imported, and its workers import the file as it is."""
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "my_net.py").write_text(MY_NET)
    (tmp_path / "twice.py").write_text(EDITED)
    done = train_in_new_interpreter(tmp_path, script=tmp_path / "twice.py")
    assert done.code == 0, done.err
    assert done.out.count("weights: [11, 16]") == 2, done.out  # of the first run, and of that with the module reloaded
    wider, doubled = done.out.partition("ModelError ")[2], done.out.partition("ConfigError ")[2]
    assert "another model than the controller: 2 layers, 539 parameters, sha256" in wider, done.out
    assert "the controller has 2 layers, 363 parameters" in wider and "left: False" in wider, done.out
    assert "my_net.py was edited since this process imported it: Head.forward" in doubled, done.out
    assert "importlib.reload(sys.modules['my_net'])" in doubled and "left: False" in doubled, done.out


def steps_in(run_dir: Path) -> int:
    """Lines of metrics.jsonl so far."""
    file = run_dir / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def test_a_run_that_got_its_code_by_value_is_not_resumed_without_it(tmp_path: Path) -> None:
    config = "model: {target: by_value.Net}\n"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(_format_line() + config)
    done = train(tmp_path, "train.resume=run")
    assert done.code == 2
    assert "the run got its model by value" in done.err and "train(resume=RUN, model=Net)" in done.err


def _format_line() -> str:
    from elaswave_spmd.conf.format_version import FORMAT_FIELD, FORMAT_VERSION

    return f"{FORMAT_FIELD}: {FORMAT_VERSION}\n"
