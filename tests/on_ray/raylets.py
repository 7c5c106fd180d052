"""A Ray cluster for a test, and the commands that are typed beside it. Nothing of either is left behind."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.processes import processes_with
from elaswave_spmd.run_dir import read_events
from tests.multiprocess.real_runs import Done
from tests.multiprocess.train_server import new_mark
from tests.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parents[2]
MONITOR, AUTH, TOKEN_PATH = "RAY_memory_monitor_refresh_ms", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"


class Raylets:
    """A cluster whose head takes no agents.

    Args:
        environment: of the cluster's processes.
        temporary: a folder with a short path: the names of Ray's sockets are long.
        program: what runs the cluster's process.
    """

    def __init__(self, environment: dict[str, str], temporary: Path, program: Sequence[str] = ()) -> None:
        self.temporary = temporary
        self._errors = temporary / "stderr"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [*program, sys.executable, str(Path(__file__).with_name("cluster_process.py")), str(temporary)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.address = str(self.ask(address=None))

    def ask(self, **order: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the cluster has ended: {self._errors.read_text()}"
        answer = json.loads(line)
        assert "error" not in answer, answer
        return answer["answer"]

    def add(self, cpus: int = 1) -> str:
        return self.ask(add=cpus)

    def end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=60)


class Command:
    """The command that hands a run to Ray."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, output: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self._output = output

    @property
    def out(self) -> str:
        """What it has printed."""
        return self._output.read_text()

    @property
    def log(self) -> str:
        log = Path(f"{self.run_dir}.ray/log")
        return log.read_text() if log.exists() else ""

    def until(self, *lines: str) -> None:
        """Wait until the command has printed all of this."""
        self._eventually(lambda: all(line in self.out for line in lines))

    def wait_for_steps(self, steps: int) -> None:
        metrics = self.run_dir / "metrics.jsonl"
        self._eventually(lambda: metrics.exists() and metrics.read_text().count("\n") >= steps)

    def wait_for(self, kind: str, number: int = 1) -> None:
        """Wait for events of the run."""
        self._eventually(lambda: len(self.events(kind)) >= number)

    def _eventually(self, condition: Any) -> None:
        def holds() -> object:
            assert self.process.poll() is None or condition(), self.end()
            return condition()

        try:
            eventually(holds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None

    def events(self, kind: str) -> list[dict[str, Any]]:
        if not (self.run_dir / "events.jsonl").exists():
            return []
        return [event for event in read_events(self.run_dir) if event["event"] == kind]

    def end(self) -> Done:
        code = self.process.wait(PATIENCE_S)
        return Done(code, self.out, self._output.with_suffix(".err").read_text())


class Site:
    """A folder with a cluster."""

    def __init__(self, folder: Path, raylets: Raylets, environment: dict[str, str]) -> None:
        self.folder = folder
        self.raylets = raylets
        self.environment = environment
        self.run_dir = folder / "run"
        self._commands = 0

    @contextmanager
    def train(self, words: Sequence[str]) -> Iterator[Command]:
        self._commands += 1
        output = self.folder / f"command_{self._commands}.out"
        with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "elaswave_spmd", "train", *words],
                cwd=self.folder,
                env=self.environment | {"RAY_ADDRESS": self.raylets.address},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        try:
            yield Command(process, self.run_dir, output)
        finally:
            process.kill()
            process.wait()


@contextmanager
def site_in(folder: Path, program: Sequence[str] = (), **variables: str | None) -> Iterator[Site]:
    """A cluster without nodes for agents, in an environment of its own; asserts that no process is left.

    Args:
        program: as for Raylets.
        variables: of its processes, beside what they need; None: not set.
    """
    mark = new_mark()
    temporary = Path(tempfile.mkdtemp(prefix="ewr", dir="/tmp"))
    token = temporary / "ray_token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    name, _, value = mark.partition("=")
    wanted = {name: value, AUTH: "token", TOKEN_PATH: str(token), MONITOR: "0", "PYTHONPATH": str(ROOT)}
    wanted |= {"RAY_USAGE_STATS_ENABLED": "0", "XDG_RUNTIME_DIR": str(temporary)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONWARN"))}
    environment |= wanted
    of_cluster = {name: value for name, value in (environment | variables).items() if value is not None}
    # Where a cluster in a process writes its address. Ray makes /tmp/ray only where it is the folder of a node.
    of_cluster["RAY_TMPDIR"] = str(temporary)
    (temporary / "ray").mkdir()
    raylets = None
    try:
        raylets = Raylets(of_cluster, temporary, program)
        yield Site(folder, raylets, environment)
        raylets.end()
        eventually(lambda: not processes_with(mark))
    finally:
        for pid in processes_with(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if raylets is not None:
            raylets.end()
        shutil.rmtree(temporary, ignore_errors=True)
