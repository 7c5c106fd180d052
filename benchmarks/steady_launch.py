"""One launch of steady_state: the processes of both sides, alive at the same time, which run blocks in turn."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gate import Team

_STOP_S = 20.0
OURS, PLAIN = "ours", "plain"


@dataclass(frozen=True)
class Case:
    """One row: a model on a mesh, our sharding of it, and the kind of plain PyTorch that it is compared with."""

    model: str
    title: str
    mesh: dict[str, int]
    sharding: str
    kind: str

    @property
    def workers(self) -> int:
        return self.mesh.get("dp", 1) * self.mesh.get("pp", 1)


MODELS: dict[str, dict[str, Any]] = {
    "1M": {
        "model": {"name": "gpt_1m", "target": "gpt", "layers": 4, "d_model": 128, "heads": 4},
        "microbatch": 4,
    },
    "10M": {
        "model": {"name": "gpt_10m", "target": "gpt", "layers": 6, "d_model": 384, "heads": 6},
        "microbatch": 2,
    },
    "deep": {
        "model": {"name": "gpt_deep", "target": "gpt", "layers": 16, "d_model": 128, "heads": 4},
        "microbatch": 4,
    },
}
SEQ_LEN = 128


def settings_of(case: Case, microbatches: int, steps: int, directory: Path) -> dict[str, Any]:
    """The settings of a run in the form of `Settings.from_dict`. The plain side reads the same ones.

    There are no mirrors and no checks of devices, since the systems that it is compared with have none. The failure
    detector runs, but does not check progress: it would take a worker that waits at the benchmark's gate for one that
    hangs.
    """
    microbatch = MODELS[case.model]["microbatch"]
    return {
        "mesh": case.mesh,
        "sharding": {"name": case.sharding},
        "model": MODELS[case.model]["model"],
        "train": {
            "steps": steps,
            "global_batch": microbatches * microbatch,
            "microbatch_size": microbatch,
            "seq_len": SEQ_LEN,
            "validate_every": 0,
        },
        "optim": {"lr": 1e-3, "schedule": "constant", "warmup_steps": 0, "clip": 1.0},
        "mirror": {"count": 0},
        "verify": {"rate": 0.0},
        "timeouts": {"progress": 3600, "start": 7200},
        "run": {"dir": str(directory / "run")},
    }


@dataclass(frozen=True)
class SideSpec:
    """The specification of one side.

    Args:
        command: "ours", "counted" or "plain" (benchmarks/steady_sides.py).
        settings: in the form of `Settings.from_dict`.
        kind: the system, if the command is "plain".
    """

    command: str
    settings: dict[str, Any]
    workers: int
    kind: str = ""


class Side:
    """The process of one side, and the gate to its workers."""

    def __init__(self, name: str, spec: SideSpec, directory: Path) -> None:
        self.team, self.workers = Team(name, directory), spec.workers
        self.log = directory / f"{name}.log"
        arguments = json.dumps({"settings": spec.settings, "gate": self.team.path, "kind": spec.kind})
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.steady_sides", spec.command, arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Waits until it has ended by itself."""
        if self.process.wait(_STOP_S):
            raise RuntimeError(f"{self.team.name} ended with exit code {self.process.returncode}:\n{self.tail()}")

    def close(self) -> None:
        """Sends Ctrl-C, and kills what is left after that."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.team.close()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


def launch(
    case: Case, microbatches: int, steps: int, sides: tuple[str, ...] = (OURS, PLAIN)
) -> contextlib.AbstractContextManager[dict[str, Side]]:
    """Starts the sides of a case; all workers wait before their first step. All processes are ended at exit.

    Raises:
        RuntimeError: a side did not start, or a worker ended; with the end of its output.
    """

    def spec_of(side: str, directory: Path) -> SideSpec:
        return SideSpec(side, settings_of(case, microbatches, steps, directory), case.workers, case.kind)

    return started(f"{case.title}, {case.model}", sides, spec_of)


@contextlib.contextmanager
def started(title: str, names: Sequence[str], spec_of: Callable[[str, Path], SideSpec]) -> Iterator[dict[str, Side]]:
    """Like `launch`, for any sides. `spec_of` makes a side from its name and the directory for its files."""
    directory = Path(tempfile.mkdtemp(prefix="steady-"))
    sides: dict[str, Side] = {}
    try:
        for name in names:
            own = _made(directory / name)
            sides[name] = Side(name, spec_of(name, own), own)
        for side in sides.values():
            side.team.gather(side.workers, lambda side=side: side.process.poll() is None)
        yield sides
    except (OSError, RuntimeError) as error:
        outputs = "\n".join(f"-- {name}\n{side.tail()}" for name, side in sides.items())
        raise RuntimeError(f"{title}: {error}\n{outputs}") from error
    finally:
        for side in sides.values():
            side.close()
        shutil.rmtree(directory, ignore_errors=True)


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
