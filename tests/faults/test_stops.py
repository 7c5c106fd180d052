"""Runs that are asked to end: SIGINT and SIGTERM, once and twice, to the command and to its whole process group.

And a run whose command is killed. tests/faults/test_killed_together.py has the others that are killed.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from elaswave_spmd.runtime.processes.stop_signals import SAME_SIGNAL_S
from tests.multiprocess import patient_model
from tests.multiprocess.real_runs import SMALL, TRAIN, Done, Launched, eventually, launch, train, write_text
from tests.waiting import PATIENCE_S
from tests.waiting import eventually as waiting

RUN = [*SMALL, "train.steps=40", "train.validate_every=8", "model.dropout=0.1", "mesh=dp2_pp2", "sharding=zero2"]
# Nobody is stopped here, so a worker that is not heard for a moment is one that a busy machine keeps waiting.
RUN += ["timeouts.suspect=10", "timeouts.status=12", "timeouts.leave=14"]
# Step 4 lasts until the file `go` is there.
HELD = """
import time
from functools import partial
from pathlib import Path
from elaswave_spmd.models import GPT

class Held(GPT):
    def __init__(self, *, go, **sizes):
        super().__init__(**sizes)
        next(iter(self.layers)).register_forward_pre_hook(partial(wait, Path(go)))

def wait(go, _, given):
    while int(given[1].step) == 4 and not go.exists():
        time.sleep(0.02)
"""
LONG = ["timeouts.progress=1000", "timeouts.start=2000"]


def held(folder: Path) -> list[str]:
    (folder / "held.py").write_text(HELD)
    return ["model.target=held.Held", f"+model.args.go={folder / 'go'}", *LONG]


def kinds(run_dir: Path) -> list[str]:
    return [event["event"] for event in read_events(run_dir)]


def bits(run_dir: Path) -> tuple[list[tuple[int, str, str]], list[tuple[int, str]], str]:
    lines = [(line.step, line.loss_hex, line.grad_norm_hex) for line in read_metrics(run_dir)]
    validation = [(e["step"], e["loss_hex"]) for e in read_events(run_dir) if e["event"] == "validation"]
    return lines, validation, read_summary(run_dir)["weights_sha256"]


def resume_command(done: Done) -> str:
    """The last line that was shown, as it is typed into a shell."""
    last = done.err.splitlines()[-1]
    assert last.startswith("resume with: "), done.err
    return last.removeprefix("resume with: ")


def resume(folder: Path, command: str, run: Launched) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(run.sockets)}
    return subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    write_text(folder)
    (folder / "go").touch()
    done = train(folder, *RUN, *patient_model.write(folder, folder / "go"))
    assert done.code == 0, done.err
    return folder / "run"


@pytest.mark.parametrize(
    ("number", "to", "elastic"),
    [
        (signal.SIGINT, "command", True),
        (signal.SIGINT, "group", True),
        (signal.SIGTERM, "command", True),
        (signal.SIGTERM, "group", False),
        (signal.SIGHUP, "group", True),
    ],
)
def test_a_run_that_is_asked_to_end_loses_no_step(
    tmp_path: Path, undisturbed: Path, number: signal.Signals, to: str, elastic: bool
) -> None:
    """In the middle of a step: from step 6 on each micro-batch takes longer."""
    write_text(tmp_path)
    model = patient_model.write(tmp_path, tmp_path / "go")
    with launch(tmp_path, *RUN, *model, f"elastic.enabled={elastic}".lower()) as run:
        run.wait_for_steps(9)
        (os.killpg if to == "group" else os.kill)(run.process.pid, number)
        done = run.finish()
        run_dir = tmp_path / "run"
        steps = len(read_metrics(run_dir))
        assert done.code == 128 + number and "Traceback" not in done.err, done.err
        assert "signal" in kinds(run_dir)
        assert kinds(run_dir)[-2:] == ["checkpoint", "stop"] and "fail" not in kinds(run_dir), kinds(run_dir)
        saved = f"Its state after step {steps} is in {run_dir}/checkpoints/step_{steps:08d}"
        assert saved in done.err and read_events(run_dir)[-1]["message"] == done.err.splitlines()[0]
        assert not (run_dir / "ctl.sock").exists()
        (tmp_path / "go").touch()
        resumed = resume(tmp_path, resume_command(done), run)
    assert (resumed.returncode, resumed.stderr) == (0, ""), resumed
    (event,) = [event for event in read_events(run_dir) if event["event"] == "resume"]
    assert (event["step"], event["steps_again"]) == (steps, 0)
    assert bits(run_dir) == bits(undisturbed), "each step once, and the bits of the undisturbed run"


def test_the_other_way_to_start_is_named_as_it_was_typed(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "elaswave_train.py").write_text("import sys\nfrom elaswave_spmd.cli import main\nsys.exit(main())\n")
    script = Path(tmp_path / "elaswave_train.py")
    model = patient_model.write(tmp_path, tmp_path / "go")
    with launch(tmp_path, "train", *RUN, *model, script=script) as run:
        run.wait_for_steps(9)
        run.process.terminate()
        done = run.finish()
    wanted = [sys.executable, str(script), "train", f"train.resume={tmp_path / 'run'}", "run.tensorboard=false"]
    assert shlex.split(resume_command(done)) == wanted


@pytest.mark.parametrize(("second", "every"), [(signal.SIGINT, 0), (signal.SIGTERM, 2)])
def test_a_second_signal_ends_a_run_at_once(tmp_path: Path, second: signal.Signals, every: int) -> None:
    """The step never ends, so nothing can be saved; what is on the disk is named."""
    write_text(tmp_path)
    run_dir = tmp_path / "run"
    with launch(tmp_path, *RUN, *held(tmp_path), f"checkpoint.every={every}") as run:
        run.wait_for_steps(3)
        if every:
            eventually(lambda: "checkpoint" in kinds(run_dir), run.process)
        os.killpg(run.process.pid, signal.SIGINT)
        eventually(lambda: "signal" in kinds(run_dir), run.process)
        time.sleep(SAME_SIGNAL_S)
        os.killpg(run.process.pid, second)
        done = run.finish()
        assert done.code == 130 and "Traceback" not in done.err
        assert done.err.startswith(f"the run stops at once, after a second signal ({second.name})")
        assert read_events(run_dir)[-1]["event"] == "stop" and len(read_metrics(run_dir)) == 3
        if not every:
            none = f"nothing to resume: {run_dir} has no good checkpoint (checkpoint.every=N writes them)"
            assert done.err.splitlines()[1:] == [none]
            return
        assert f"newest checkpoint: {run_dir}/checkpoints/step_00000002, after step 2" in done.err
        (tmp_path / "go").touch()
        assert resume(tmp_path, resume_command(done), run).returncode == 0
    assert [line.step for line in read_metrics(run_dir)] == list(range(1, 41))


def started(run: Launched) -> bool:
    """The command has its fork server: it reads its data, or starts its workers."""
    return len(run.processes()) > 1


def has_directory(run: Launched) -> bool:
    return (run.folder / "run" / "config.yaml").exists()


@pytest.mark.parametrize(("number", "when"), [(signal.SIGINT, started), (signal.SIGTERM, has_directory)])
def test_asked_while_it_starts_a_run_leaves_nothing(
    tmp_path: Path, number: signal.Signals, when: Callable[[Launched], bool]
) -> None:
    write_text(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    # It does not end before the signal, however late that is.
    with launch(tmp_path, *RUN, "train.steps=100000", in_new_interpreter=True) as run:
        eventually(lambda: when(run), run.process)
        os.killpg(run.process.pid, number)
        done = run.finish()
    if (tmp_path / "run").exists():  # it was faster than the signal: then its first step is saved
        assert "resume with: " in done.err
        return
    assert done.code == 128 + number and "Traceback" not in done.err, done.err
    assert done.err.splitlines()[1:] == ["nothing to resume: no step was done, and nothing is left of the run"]
    assert {path.name for path in tmp_path.iterdir()} - {"cache"} == before


def test_asked_while_it_resumes_a_run_names_its_checkpoint(tmp_path: Path, undisturbed: Path) -> None:
    write_text(tmp_path)
    model = patient_model.write(tmp_path, tmp_path / "go")
    with launch(tmp_path, *RUN, *model) as run:
        run.wait_for_steps(7)
        run.process.terminate()
        first = run.finish()
    words = shlex.split(resume_command(first))[2:]
    with launch(tmp_path, *words, in_new_interpreter=True) as run:
        eventually(lambda: started(run), run.process)
        os.killpg(run.process.pid, signal.SIGINT)
        done = run.finish()
        assert done.code == 130
        assert resume_command(done) == resume_command(first)
        (tmp_path / "go").touch()
        assert resume(tmp_path, resume_command(done), run).returncode == 0
    assert bits(tmp_path / "run") == bits(undisturbed)


def test_asked_while_the_run_begins_again_it_names_its_checkpoint(tmp_path: Path, undisturbed: Path) -> None:
    """All copies of some state are lost at once: new workers start from a checkpoint when the signal comes."""
    write_text(tmp_path)
    run_dir = tmp_path / "run"
    chaos = "chaos.events=[{step: 11, kind: kill, rank: [0, 1]}]"
    saved = tmp_path / "saved"  # whatever a disk takes for a checkpoint: one is there when they are killed
    model = [*patient_model.write(tmp_path, tmp_path / "go"), *patient_model.held(10, saved)]
    with launch(tmp_path, *RUN, *model, "mesh=dp2", "checkpoint.every=2", "elastic.replace=true", chaos) as run:
        run.wait_for_steps(1)
        eventually(lambda: "checkpoint" in kinds(run_dir), run.process)
        saved.touch()
        eventually(lambda: "restart" in kinds(run_dir), run.process)
        run.process.terminate()
        done = run.finish()
        assert done.code == 143 and "Traceback" not in done.err, done.err
        assert run_dir.exists() and kinds(run_dir)[-1] in ("restart", "stop")
        (tmp_path / "go").touch()
        resumed = resume(tmp_path, resume_command(done), run)
    assert (resumed.returncode, resumed.stderr) == (0, ""), resumed
    assert bits(run_dir) == bits(undisturbed)


def test_a_closed_terminal_ends_a_run_with_its_state_saved(tmp_path: Path) -> None:
    write_text(tmp_path)
    run_dir = tmp_path / "run"
    terminal, inside = pty.openpty()

    def take_terminal() -> None:  # as the terminal of a session of its own
        os.setsid()
        fcntl.ioctl(inside, termios.TIOCSCTTY, 0)

    arguments = [*RUN, *patient_model.write(tmp_path, tmp_path / "go")]
    process = subprocess.Popen(
        [sys.executable, str(TRAIN), *arguments],
        cwd=tmp_path,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        preexec_fn=take_terminal,
    )
    os.close(inside)
    shown = bytearray()
    try:
        waiting(lambda: has_shown(terminal, process, shown, b"step 8  validation loss"))
        os.close(terminal)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGHUP
    finally:
        process.kill()
        process.wait()
    assert kinds(run_dir)[-2:] == ["checkpoint", "stop"], kinds(run_dir)
    assert [event["signal"] for event in read_events(run_dir) if event["event"] == "signal"] == ["SIGHUP"]


def has_shown(terminal: int, process: subprocess.Popen[bytes], shown: bytearray, text: bytes) -> bool:
    """Read what has been written to a terminal since the last look, to the end of `shown`. True if it has the text."""
    assert process.poll() is None, shown
    if select.select([terminal], [], [], 0)[0]:
        shown += os.read(terminal, 1 << 16)
    return text in shown


def test_a_reader_of_the_output_may_leave(tmp_path: Path) -> None:
    """`python train.py | head -1`: the run goes on, and its files have everything."""
    write_text(tmp_path)
    with launch(tmp_path, *SMALL, "train.steps=30", "mesh=dp2") as run:
        assert run.process.stdout is not None and run.process.stdout.readline()
        run.process.stdout.close()
        run.process.stdout = None
        done = run.finish()
    assert (done.code, done.err) == (0, "") and kinds(tmp_path / "run")[-1] == "finish"


# ---- killed


def test_a_run_is_resumed_when_the_workers_of_its_killed_controller_have_ended(
    tmp_path: Path, undisturbed: Path
) -> None:
    """They finish their step first, which takes until `go` is there, and then write their state."""
    write_text(tmp_path)
    model = [*patient_model.write(tmp_path, tmp_path / "go"), *patient_model.held(13, tmp_path / "go")]
    # Who waits in that step waits as long as it lasts, so that all write the same one.
    with launch(tmp_path, *RUN, *model, "timeouts.controller=500", "timeouts.shutdown=1000") as run:
        run.wait_for_steps(12)
        run.process.kill()
        run.process.wait()
        assert run.processes(), "its workers are in the middle of a step"
        command = [sys.executable, str(TRAIN), "train.resume=run"]
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(run.sockets)}
        with subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as resumed:
            (tmp_path / "go").touch()
            out, err = resumed.communicate(timeout=PATIENCE_S)
        assert (resumed.returncode, err) == (0, ""), out
        waiting(lambda: not run.processes())
    (event,) = [event for event in read_events(tmp_path / "run") if event["event"] == "resume"]
    assert event["step"] >= 12 and event["steps_again"] == 0, "what the workers have written is not lost"
    assert bits(tmp_path / "run") == bits(undisturbed)


@pytest.mark.parametrize("lost_by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_lost_with_the_controller_costs_no_step(
    tmp_path: Path, undisturbed: Path, lost_by: signal.Signals
) -> None:
    """The others cannot end the step that they are in. They write their state before it, and that worker's share."""
    write_text(tmp_path)
    model = [*patient_model.write(tmp_path, tmp_path / "go"), *patient_model.held(13, tmp_path / "go")]
    with launch(tmp_path, *RUN, *model, "timeouts.controller=3", "timeouts.shutdown=1000") as run:
        run.wait_for_steps(12)
        *others, lost = run.workers()
        for pid, number in ((run.process.pid, signal.SIGKILL), (lost, lost_by)):
            os.kill(pid, number)
        run.process.wait()
        (tmp_path / "go").touch()
        waiting(lambda: not run.processes().keys() & {*others})
        if lost_by == signal.SIGSTOP:
            os.kill(lost, signal.SIGKILL)
        waiting(lambda: not run.processes())
    done = train(tmp_path, "train.resume=run")
    assert (done.code, done.err) == (0, ""), done.out
    (event,) = [event for event in read_events(tmp_path / "run") if event["event"] == "resume"]
    assert (event["step"], event["steps_again"]) == (12, 0)
    assert bits(tmp_path / "run") == bits(undisturbed)
