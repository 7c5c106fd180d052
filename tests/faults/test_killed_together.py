"""A command and its fork server that are killed at one instant: nothing is left, and the command that goes on ends."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.processes import in_use
from elaswave_spmd.run_dir import read_events
from elaswave_spmd.run_dir.lock import WORKERS_LOCK
from tests.faults.fault_runs import TINY, Bits
from tests.locks import is_locked
from tests.multiprocess import held_model, patient_model
from tests.multiprocess.real_runs import TRAIN, Launched, eventually, kill_at_once, launch, write_text
from tests.waiting import PATIENCE_S
from tests.waiting import eventually as waiting

STEPS = 20
Undisturbed = Callable[[int], Bits]
SHARED_MEMORY = Path("/dev/shm")


def shared_memory() -> set[Path]:
    """The files there, but for semaphores of multiprocessing, which are those of other programs."""
    found = SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ()
    return {path for path in found if not path.name.startswith("sem.mp-")}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files of what a test starts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def held_in_step_10(folder: Path) -> list[str]:
    """The words of a model that comes no further before the file `go` is there, whatever a spare or a disk takes."""
    return [*patient_model.write(folder, folder / "go"), *patient_model.held(10, folder / "go")]


def kill_together(run: Launched) -> None:
    """SIGKILL to the command and its fork server. None of them can react to the end of the other."""
    kill_at_once([run.process.pid, run.fork_server()])
    run.process.communicate(timeout=PATIENCE_S)  # its pipes are closed by the last of its descendants


def assert_nothing_is_left(run: Launched, temporary: Path, shared_before: set[Path]) -> None:
    """The last process removes the sockets, when the kernel has ended the workers."""
    waiting(lambda: not run.processes() and not run.removers())
    assert not list(run.sockets.iterdir()) and not list(temporary.iterdir())
    assert not (run.folder / "run" / "ctl.sock").exists()
    # Others' are in use, or about to be mapped or removed.
    waiting(lambda: not [path for path in shared_memory() - shared_before if not in_use(path)])
    assert not is_locked(run.folder / "run" / WORKERS_LOCK)


def go_on(run: Launched, *words: str) -> None:
    """The command that goes on, or begins again, ends, and leaves nothing."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(run.sockets)}
    command = [sys.executable, str(TRAIN), *words]
    done = subprocess.run(
        command, cwd=run.folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), shlex.join(command)
    assert not list(run.sockets.iterdir()) and not run.removers()


def knows(folder: Path, kind: str) -> bool:
    """True if the run has told an event of this kind."""
    events = folder / "run" / "events.jsonl"
    return events.exists() and any(event["event"] == kind for event in read_events(folder / "run"))


@pytest.mark.parametrize("mesh", ["dp2", "dp2_pp2"])
def test_while_workers_start(tmp_path: Path, temporary: Path, undisturbed: Undisturbed, mesh: str) -> None:
    write_text(tmp_path)
    model, before = held_model.write(tmp_path, tmp_path / "hold"), shared_memory()
    words = [*TINY, *model, f"train.steps={STEPS}", f"mesh={mesh}"]
    with launch(tmp_path, *words) as run:
        eventually(lambda: list((tmp_path / "hold").glob("at-*")), run.process)
        kill_together(run)
        assert_nothing_is_left(run, temporary, before)
        for name in ("go", "end"):
            (tmp_path / "hold" / name).touch()
        go_on(run, *words[:-1], f"mesh={mesh}", "run.dir=again")
    assert Bits.of(tmp_path / "again") == undisturbed(STEPS)


@pytest.mark.parametrize("settings", ["mesh=dp2 sharding=zero1", "mesh=dp2_pp2 sharding=zero2", "mesh=dp3_pp1"])
def test_in_the_middle_of_steps(tmp_path: Path, temporary: Path, undisturbed: Undisturbed, settings: str) -> None:
    write_text(tmp_path)
    model, before = held_in_step_10(tmp_path), shared_memory()
    words = [f"train.steps={STEPS}", *settings.split(), "checkpoint.every=2"]
    with launch(tmp_path, *TINY, *model, *words) as run:
        run.wait_for_steps(8)
        eventually(lambda: knows(tmp_path, "checkpoint"), run.process)
        kill_together(run)
        assert_nothing_is_left(run, temporary, before)
        (tmp_path / "go").touch()
        go_on(run, "train.resume=run")
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)


def test_with_a_spare(tmp_path: Path, temporary: Path, undisturbed: Undisturbed) -> None:
    write_text(tmp_path)
    model, before = held_in_step_10(tmp_path), shared_memory()
    words = [f"train.steps={STEPS}", "mesh=dp2", "elastic.spares=1", "checkpoint.every=1"]
    with launch(tmp_path, *TINY, *model, *words) as run:
        eventually(lambda: knows(tmp_path, "spare") and knows(tmp_path, "checkpoint"), run.process)
        kill_together(run)
        assert_nothing_is_left(run, temporary, before)
        (tmp_path / "go").touch()
        go_on(run, "train.resume=run", "elastic.spares=1")
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)
