"""Runs of `python train.py`, and the processes and files that they leave behind."""

from __future__ import annotations

import atexit
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.processes import command_lines, processes_with, start_order
from tests.multiprocess.train_server import Command, TrainServer, new_mark
from tests.waiting import PATIENCE_S

TRAIN = Path(__file__).parents[2] / "train.py"
TOKENS = 12
# Heartbeats of the living are late by more than two seconds on a busy machine: they are not to be evicted for it.
SMALL = (
    f"model.layers=2 model.d_model=16 model.heads=2 train.seq_len={TOKENS} train.global_batch=8 "
    "train.microbatch_size=2 "
    "train.steps=6 train.validate_every=3 train.validate_microbatches=2 optim.warmup_steps=2 page.size=256 "
    "timeouts.suspect=4 run.tensorboard=false data=text data.path=text.txt data.cache=cache run.dir=run"
).split()
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards brew tea"


def write_text(folder: Path, *, lines: int = 60) -> None:
    """A small corpus that is always the same, text.txt."""
    words, draw = WORDS.split(), random.Random(1)
    text = "\n".join(" ".join(draw.choices(words, k=12)) for _ in range(lines))
    (folder / "text.txt").write_text(text + "\n", encoding="utf-8")


@dataclass
class Launched:
    """A running `python train.py`: its processes carry a mark in their environment; sockets lie in `sockets`."""

    process: Command
    folder: Path
    sockets: Path
    mark: str

    def processes(self) -> dict[int, int]:
        """Process id -> parent's id of all living processes of the run, the command itself included."""
        return processes_with(self.mark)

    def fork_server(self) -> int:
        """The fork server's process id: the command has no other child."""
        (found,) = [pid for pid, parent in self.processes().items() if parent == self.process.pid]
        return found

    def workers(self) -> list[int]:
        """The workers' process ids, in the order in which they were started: the fork server's children."""
        processes = self.processes()
        fork_servers = {pid for pid, parent in processes.items() if parent == self.process.pid}
        return sorted((pid for pid, parent in processes.items() if parent in fork_servers), key=start_order)

    def removers(self) -> list[int]:
        """The processes that remove the sockets if all others are killed. Their environment is empty."""
        return [pid for pid, words in command_lines().items() if any(str(self.sockets) in word for word in words)]

    def wait_for_steps(self, steps: int, run_dir: str = "run") -> None:
        """Returns when `steps` steps are in metrics.jsonl."""
        metrics = self.folder / run_dir / "metrics.jsonl"
        eventually(lambda: metrics.exists() and metrics.read_text().count("\n") >= steps, self.process)

    def finish(self, timeout: float = PATIENCE_S) -> Done:
        """Waits for the end of the command; asserts that no other process and no socket of it is left."""
        out, err = self.process.communicate(timeout=timeout)
        left = self.processes()
        assert not left and not self.removers(), f"processes left behind: {left}, {self.removers()}"
        assert not list(self.sockets.iterdir()), "sockets left behind"
        return Done(self.process.returncode, out, err)


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def kill_at_once(pids: Collection[int]) -> None:
    """Ends processes of a run as a power failure would: none can react to the end of another one.

    Children before their parents: the kernel ends the children of a fork server that dies, and they are gone then.
    """
    youngest_first = sorted(pids, key=start_order, reverse=True)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in youngest_first:
            os.kill(pid, number)


@contextmanager
def launch(
    folder: Path,
    *arguments: str,
    mark: str = "",
    script: Path = TRAIN,
    limits: Mapping[int, tuple[int, int]] | None = None,
    pipe_bytes: int = -1,
    in_new_interpreter: bool = False,
    output: int | None = None,
) -> Iterator[Launched]:
    """Starts `python train.py ARGUMENTS` in `folder`, in a session of its own; kills what is left at the end.

    Args:
        limits: resource -> (soft, hard) limit of the command, from its very begin.
        pipe_bytes: what each of its output's pipes holds; -1: as many as the system has it.
        in_new_interpreter: the command imports everything itself, as with the other three. Else it is
            forked from a process that has imported it.
        output: the descriptor of its stdout and stderr; None: two pipes, which `finish` reads.
    """
    words, mark = [str(script), *arguments], mark or new_mark()
    with _sockets_and_environment(os.environ, mark) as (sockets, environment):
        if limits or pipe_bytes != -1 or output is not None or in_new_interpreter:
            process = exec_command(words, folder, environment, limits=limits, pipe_bytes=pipe_bytes, output=output)
        else:
            process = train_server().start(words, folder, environment)
        with _until_ended(Launched(process, folder, sockets, mark)) as launched:
            yield launched


@contextmanager
def _sockets_and_environment(base: Mapping[str, str], mark: str) -> Iterator[tuple[Path, dict[str, str]]]:
    sockets = Path(tempfile.mkdtemp(prefix="ew", dir="/tmp"))  # short: paths of ipc sockets are
    name, _, value = mark.partition("=")
    try:
        yield sockets, {**base, name: value, "XDG_RUNTIME_DIR": str(sockets)}
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


@contextmanager
def _until_ended(launched: Launched) -> Iterator[Launched]:
    """Kills what is left of a command at the end."""
    try:
        yield launched
    finally:
        for pid in launched.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launched.process.communicate()


def exec_command(
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    *,
    limits: Mapping[int, tuple[int, int]] | None = None,
    pipe_bytes: int = -1,
    output: int | None = None,
) -> subprocess.Popen[str]:
    """Starts `python WORDS` as `TrainServer.start` does, but by exec: it imports everything itself."""

    def limit() -> None:
        for what, soft_and_hard in (limits or {}).items():
            resource.setrlimit(what, soft_and_hard)

    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env={name: value for name, value in environment.items() if name != "PYTHONWARNINGS"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if output is None else output,
        stderr=subprocess.PIPE if output is None else output,
        text=True,
        start_new_session=True,
        pipesize=pipe_bytes,
        preexec_fn=limit if limits else None,
    )


@cache
def train_server() -> TrainServer:
    """The server of this test process, which ends with it."""
    server = TrainServer()
    atexit.register(server.stop)
    return server


def train(folder: Path, *arguments: str, timeout: float = PATIENCE_S) -> Done:
    """Runs `python train.py ARGUMENTS` to its end; asserts that nothing of it is left."""
    return fork_command(TRAIN, folder, *arguments, environment=dict(os.environ), timeout=timeout)


def fork_command(
    script: Path,
    folder: Path,
    *arguments: str,
    environment: dict[str, str],
    timeout: float = PATIENCE_S,
    merged: bool = False,
) -> Done:
    """Runs a script that needs torch to its end, in a fork of the train server; asserts that nothing of it is left."""
    mark = new_mark()
    with _sockets_and_environment(environment, mark) as (sockets, environment):
        process = train_server().start([str(script), *arguments], folder, environment, merged=merged)
        with _until_ended(Launched(process, folder, sockets, mark)) as launched:
            return launched.finish(timeout)


def train_in_new_interpreter(folder: Path, *arguments: str, timeout: float = PATIENCE_S, script: Path = TRAIN) -> Done:
    """The same, or another script, as a command that imports everything itself."""
    with launch(folder, *arguments, script=script, in_new_interpreter=True) as launched:
        return launched.finish(timeout)


def eventually(condition: Callable[[], object], process: Command, seconds: float = PATIENCE_S) -> None:
    """Waits until the condition holds; fails when the process ends before or the time is up."""
    deadline = time.monotonic() + seconds
    while True:
        has_ended = process.poll() is not None  # asked first: what a command does last is seen after its end
        if condition():
            return
        assert not has_ended, f"the command ended early: {process.communicate()}"
        assert time.monotonic() < deadline, f"the condition does not hold after {seconds:.0f} s"
        time.sleep(0.02)
