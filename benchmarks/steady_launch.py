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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gate import Team
from benchmarks.harness import estimate

_STOP_S = 20.0
_WARM_UP = 3
ENDLESS = 10**6  # steps of a run that ends when its benchmark does
OURS, PLAIN = "ours", "plain"


@dataclass(frozen=True)
class Case:
    """One row: a model on a mesh, our sharding of it, and the kind of plain PyTorch that it is compared with.

    Args:
        backward: our schedule.split_backward. It is forced: a trial would be measured as well.
        device, dtype: those of `runtime`.
        replicas: our mirror.count.
    """

    model: str
    title: str
    mesh: dict[str, int]
    sharding: str
    kind: str
    backward: str = "always"
    device: str = "cpu"
    dtype: str = "fp32"
    replicas: int = 0

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
    "85M": {
        "model": {"name": "gpt_85m", "target": "gpt", "layers": 12, "d_model": 768, "heads": 12},
        "microbatch": 8,
        "seq_len": 1024,
    },
    # As in benchmarks.recovery: 768 tokens a step, of which little is computing.
    "small": {
        "model": {"name": "gpt_small", "target": "gpt", "layers": 3, "d_model": 96, "heads": 4},
        "microbatch": 2,
        "microbatches": 12,
        "seq_len": 32,
    },
}
"""What each model is, and its micro-batch; that of 85 M parameters is for accelerators."""
SEQ_LEN, MICROBATCHES = 128, 8


def seq_len_of(model: str) -> int:
    """Tokens per sequence."""
    return MODELS[model].get("seq_len", SEQ_LEN)


def microbatches_of(model: str) -> int:
    """Micro-batches of a step, where its speed is measured."""
    return MODELS[model].get("microbatches", MICROBATCHES)


def settings_of(case: Case, microbatches: int, steps: int, directory: Path) -> dict[str, Any]:
    """The settings of a run in the form of `Settings.from_dict`. The plain side reads the same ones.

    There are no checks of devices, since the systems that it is compared with have none. The failure
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
            "seq_len": seq_len_of(case.model),
            "validate_every": 0,
        },
        "optim": {"lr": 1e-3, "schedule": "constant", "warmup_steps": 0, "clip": 1.0},
        "schedule": {"split_backward": case.backward},
        "mirror": {"count": case.replicas},
        "verify": {"rate": 0.0},
        "timeouts": {"progress": 3600, "start": 7200},
        "runtime": {"device": case.device, "dtype": case.dtype},
        "run": {"dir": str(directory / "run")},
    }


@dataclass(frozen=True)
class SideSpec:
    """The specification of one side.

    Args:
        command: "ours", "counted" or "plain" (benchmarks/steady_sides.py).
        settings: in the form of `Settings.from_dict`.
        kind: the system, if the command is "plain".
        source: the folder of another version of this repository, whose code the side runs; None: this one's.
    """

    command: str
    settings: dict[str, Any]
    workers: int
    kind: str = ""
    source: Path | None = None


class Side:
    """The process of one side, and the gate to its workers."""

    def __init__(self, name: str, spec: SideSpec, directory: Path) -> None:
        self.team, self.workers = Team(name, directory), spec.workers
        self.log = directory / f"{name}.log"
        arguments = json.dumps({"settings": spec.settings, "gate": self.team.path, "kind": spec.kind})
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if spec.source is not None:
            environment["PYTHONPATH"] = str(spec.source)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.steady_sides", spec.command, arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=spec.source,
                env=environment,
                start_new_session=True,
            )

    @property
    def processor(self) -> float:
        """Seconds of processor time of the workers, when their last block ended."""
        return sum(member.processor for member in self.team.members)

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


@dataclass(frozen=True)
class Used:
    """Seconds, and processor seconds of all workers, of a step of one side."""

    seconds: float
    processor: float


def in_turns(sides: Mapping[str, Side], pairs: int, steps: int) -> dict[str, Used]:
    """Let two sides of our own run blocks of steps in turn, every other pair with the other side first.

    Raises:
        RuntimeError: their losses differ, in any bit.
    """
    names = tuple(sides)
    seconds, processor = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for side in sides.values():
        side.team.block(_WARM_UP)
    for pair in range(pairs):
        for name in names if pair % 2 else names[::-1]:
            before = sides[name].processor
            seconds[name] += sides[name].team.block(steps)
            processor[name] += sides[name].processor - before
    losses = {name: side.team.members[0].loss for name, side in sides.items()}
    if len({*losses.values()}) > 1:
        raise RuntimeError(f"the losses differ: {losses}")
    return {name: Used(seconds[name] / (pairs * steps), processor[name] / (pairs * steps)) for name in names}


def ratio_cells(launches: Sequence[Mapping[str, Used]], name: str, other: str) -> list[str]:
    """Four cells of a table: the ratios of seconds and of processor time of two sides, and the processor seconds."""
    seconds = [[found[name].seconds / found[other].seconds] for found in launches]
    processor = [[found[name].processor / found[other].processor] for found in launches]
    means = [sum(found[side].processor for found in launches) / len(launches) for side in (name, other)]
    return [str(estimate(seconds)), str(estimate(processor)), *(f"{mean:.3f}" for mean in means)]


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
