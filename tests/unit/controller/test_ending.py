"""The last lines of a run that did not finish: what happened, the newest checkpoint, the command that goes on."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from elaswave_spmd.conf.compose import settings_from
from elaswave_spmd.conf.format_version import FORMAT_FIELD, FORMAT_VERSION
from elaswave_spmd.conf.schema import CheckpointSettings, RunSettings, RuntimeSettings, Settings, TrainSettings
from elaswave_spmd.controller import ending as module
from elaswave_spmd.controller.ending import Command, Ending
from elaswave_spmd.errors import FilesError, RunError, StoppedBySignal, WorkerError
from elaswave_spmd.run_dir.lock import WORKERS_LOCK
from elaswave_spmd.run_dir.manifest import MANIFEST
from elaswave_spmd.runtime.processes.scratch import hold_lock
from elaswave_spmd.runtime.processes.stop_signals import Signalled

TYPED = Command(("python", "train.py"), ("mesh=dp2", "run.trace=true", "run.dir=runs/a b", "chaos=random", "seed=3"))


@pytest.fixture
def good(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """The directories that have a good checkpoint, of step 4."""
    folders: set[Path] = set()

    def newest(folder: Path) -> object:
        path = folder / "checkpoints" / "step_00000004"
        return SimpleNamespace(step=4, path=path) if folder in folders else None

    monkeypatch.setattr(module, "newest_checkpoint", newest)
    return folders


def ending(
    error: BaseException, run_dir: Path | None, *, resume: str | None = None, command: Command = TYPED
) -> Ending:
    train, run = TrainSettings(resume=resume), RunSettings(dir=str(run_dir) if run_dir else None)
    return Ending(error, replace(Settings(), train=train, run=run), command, run_dir)


def test_the_newest_checkpoint_is_named_with_the_command_for_a_shell(good: set[Path]) -> None:
    run_dir = Path("/runs/a b")
    good.add(run_dir)
    assert ending(RunError("the fork server has died"), run_dir).lines() == [
        "error: the fork server has died",
        "newest checkpoint: /runs/a b/checkpoints/step_00000004, after step 4",
        "resume with: python train.py 'train.resume=/runs/a b' run.trace=true",
    ]


def test_what_the_error_names_is_not_said_twice(good: set[Path]) -> None:
    run_dir = Path("/runs/a")
    good.add(run_dir)
    saved = StoppedBySignal(f"the run stops. Its state after step 4 is in {run_dir}/checkpoints/step_00000004")
    lines = ending(saved, run_dir).lines()
    assert lines == [str(saved), "resume with: python train.py train.resume=/runs/a run.trace=true"]


@pytest.mark.parametrize(
    "error",
    [RunError("x"), WorkerError(1, "ValueError: x"), FilesError("f", OSError(28, "No space left")), ValueError("x")],
)
def test_every_end_says_why_nothing_can_go_on(good: set[Path], error: Exception, tmp_path: Path) -> None:
    what, *_, last = ending(error, tmp_path).lines()
    assert what.startswith("error: ") or "ValueError: x" in what
    assert last == f"nothing to resume: {tmp_path} has no good checkpoint (checkpoint.every=N writes them)"
    *_, nothing, last = ending(error, tmp_path / "gone").lines()
    assert nothing == f"nothing to resume: there is no {tmp_path}/gone"
    command = "python train.py train.resume=/NEW/PLACE run.trace=true"
    assert last == f"if it was moved to /NEW/PLACE, resume with: {command}"


def test_a_run_that_writes_checkpoints_is_not_told_to_but_that_none_was_finished(
    good: set[Path], tmp_path: Path
) -> None:
    ended = ending(RunError("x"), tmp_path)
    ended = replace(ended, settings=replace(ended.settings, checkpoint=CheckpointSettings(every=50)))
    none = f"nothing to resume: {tmp_path} has no good checkpoint"
    directory = tmp_path / "checkpoints" / "step_00000050"
    directory.mkdir(parents=True)
    assert ended.lines()[1:] == [f"{none} (with checkpoint.every=50 none was finished yet)"]
    (directory / MANIFEST).touch()
    assert ended.lines()[1:] == [f"{none} (checkpoint.every=N writes them)"], "it was finished, and is damaged"


def test_a_run_that_was_resumed_repeats_what_was_named_then(good: set[Path]) -> None:
    run_dir = Path("/runs/a")
    good.add(run_dir)
    words = ("train.resume=/runs/a", "mesh=dp3", "+model.args.x=[1,2]", "chaos.events=[]", "run.tensorboard=false")
    typed = Command(("elaswave-spmd", "train"), words)
    *_, last = ending(RunError("x"), run_dir, resume="/runs/a", command=typed).lines()
    assert shlex.split(last.removeprefix("resume with: ")) == [
        *("elaswave-spmd", "train", "train.resume=/runs/a"),
        *("mesh=dp3", "+model.args.x=[1,2]", "run.tensorboard=false"),
    ]


def test_what_torchruns_nodes_derive_anew_is_repeated_if_it_was_named(good: set[Path]) -> None:
    run_dir = Path("/runs/a")
    good.add(run_dir)
    of_nodes = ("runtime.rendezvous=node0:7", "runtime.agent_workers=2")
    typed = Command(
        ("python", "-m", "elaswave_spmd", "train"),
        ("mesh=dp4", "runtime.token_file=token", *of_nodes, "run.dir=/runs/a"),
    )
    runtime = RuntimeSettings(
        transport="tcp", rendezvous="node0:7", agents=1, token_file="token", agent_workers=2, launcher="torchrun"
    )
    *_, last = Ending(RunError("x"), Settings(runtime=runtime), typed, run_dir).lines()
    command, comma, rest = last.partition(", ")
    assert shlex.split(command.removeprefix("resume with: "))[4:] == ["train.resume=/runs/a", *of_nodes]
    assert (comma, rest) == (", ", "by torchrun on all nodes")


@pytest.mark.parametrize("name", ["a b", " a", "lr=0.1", "a,b", "b(1)", "it's", 'a"b', "ü", "a~#&!", "a[0]{1}", "a\\"])
@pytest.mark.parametrize("taken", [False, True])
def test_the_command_that_goes_on_is_read_as_it_is_meant(
    good: set[Path], tmp_path: Path, name: str, taken: bool
) -> None:
    """Hydra's grammar takes words apart, and a directory has any name: the user may never have typed it."""
    run_dir = tmp_path / name
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(f"{FORMAT_FIELD}: {FORMAT_VERSION}\n{Settings().to_yaml()}")
    good.add(run_dir)
    if taken:
        (run_dir / "summary.json").touch()
    *_, last = ending(RunError("x"), run_dir).lines()
    settings = settings_from(shlex.split(last.removeprefix("resume with: "))[2:])
    assert settings.train.resume == str(run_dir)
    assert settings.run.dir == (f"{run_dir}_2" if taken else None)


def test_a_run_that_ends_while_it_starts_is_begun_as_it_was(good: set[Path]) -> None:
    stopped = Signalled(15)
    assert ending(stopped, None).lines() == [
        "interrupted by SIGTERM",
        "nothing to resume: no step was done, and nothing is left of the run",
    ]
    good.add(Path("/runs/a"))
    typed = Command(("python", "train.py"), ("train.resume=/runs/a", "run.dir=/runs/b"))
    assert ending(stopped, None, resume="/runs/a", command=typed).lines()[1:] == [
        "newest checkpoint: /runs/a/checkpoints/step_00000004, after step 4",
        "resume with: python train.py train.resume=/runs/a run.dir=/runs/b",
    ]


def test_workers_that_live_on_are_named_and_not_said_to_be_nothing(good: set[Path], tmp_path: Path) -> None:
    held = hold_lock(tmp_path / WORKERS_LOCK)
    try:
        _, who, command = ending(Signalled(15), None, resume=str(tmp_path)).lines()
    finally:
        os.close(held)
    assert str(tmp_path) in who and "still live" in who and command == f"resume with: {TYPED.again()}"
    assert "no good checkpoint" in ending(Signalled(15), None, resume=str(tmp_path)).lines()[-1]


def test_a_directory_that_is_taken_is_not_named_again(good: set[Path], tmp_path: Path) -> None:
    """It has a result without weights, or was begun from another one and has no checkpoint of its own."""
    good.add(tmp_path)
    (tmp_path / "summary.json").touch()
    typed = Command(words=())
    wanted = f"resume with: python train.py train.resume={tmp_path} run.dir="
    assert ending(RunError("x"), tmp_path, command=typed).lines()[-1] == f"{wanted}{tmp_path}_2"
    (tmp_path / "summary.json").unlink()
    lines = ending(RunError("x"), Path("/runs/b"), resume=str(tmp_path), command=typed).lines()
    assert lines[-1] == f"{wanted}/runs/b_2"


@pytest.mark.parametrize(
    ("error", "number", "code"),
    [(RunError("x"), None, 1), (RunError("x"), 15, 143), (Signalled(2), 2, 130), (KeyboardInterrupt(), None, 130)],
)
def test_exit_codes(error: BaseException, number: int | None, code: int) -> None:
    assert ending(error, None).exit_code(number) == code


@pytest.mark.parametrize(
    ("whole", "program"),
    [
        (["python", "train.py", "mesh=dp2"], ("python", "train.py")),
        ([".venv/bin/python", "-u", "train.py", "mesh=dp2"], (".venv/bin/python", "-u", "train.py")),
        (["python", "-m", "elaswave_spmd", "train", "mesh=dp2"], ("python", "-m", "elaswave_spmd", "train")),
        (["python", "/b/elaswave-spmd", "train", "mesh=dp2"], ("elaswave-spmd", "train")),
    ],
)
def test_the_command_as_it_was_typed(
    whole: list[str], program: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", whole)
    monkeypatch.setattr(module.shutil, "which", lambda name: "/b/elaswave-spmd" if name == "elaswave-spmd" else None)
    assert Command.typed(["mesh=dp2"]) == Command(program, ("mesh=dp2",))
    supervised = Command.typed(["mesh=dp2"], is_supervised=True)
    assert supervised == Command((*program, "--supervise"), ("mesh=dp2",)), "it goes on with a supervisor, too"
    assert supervised.again() == shlex.join((*program, "--supervise", "mesh=dp2"))
    assert supervised.resuming(Path("/runs/a"), was_resumed=False) == shlex.join(
        (*program, "--supervise", "train.resume=/runs/a")
    )


def test_what_happened_is_said_also_where_nothing_can_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / WORKERS_LOCK).mkdir()
    lines = ending(RunError("the disk is broken"), None, resume=str(tmp_path)).lines()
    assert lines[0] == "error: the disk is broken"
    assert "what is left of the run cannot be looked at" in lines[1] and WORKERS_LOCK in lines[1]
