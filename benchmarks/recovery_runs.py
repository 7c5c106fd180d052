"""One run of `recovery` with one kill in it: ours as a user starts it, and its peers.

All write down CLOCK_MONOTONIC, which is the same in all processes of a machine; the driver kills by SIGKILL and notes
the moment before it does. Every run is a session of its own, and nothing of it is left afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.shutdown import session_processes

WORKERS = 4
STEPS_BEFORE, STEPS_AFTER = 25, 8
_WARM_STEPS = 5
_PATIENCE_S = 180.0
SIZES: dict[str, Any] = {
    "mesh": {"dp": WORKERS},
    "sharding": {"name": "zero1"},
    "model": {"name": "gpt_tiny", "target": "gpt", "layers": 4, "d_model": 96, "heads": 4},
    "unit": {"size": 2},
    "train": {"steps": 1_000_000, "global_batch": 24, "seq_len": 32, "validate_every": 0},
    "optim": {"lr": 1e-3, "schedule": "constant", "warmup_steps": 0, "clip": 1.0},
}


@dataclass(frozen=True)
class Kill:
    """What one kill cost. Times in ms, from the kill on where nothing else is said.

    Args:
        step: the median undisturbed step.
        detect: until the loss was seen; None where a system does not say.
        known: until every survivor has answered that it knows.
        edit: from the loss seen to the new mesh sent.
        first, all: until the first, or the last, survivor has applied a step without the lost worker.
        steps_lost: committed steps that were trained again, or begun ones that were thrown away.
        samples: per step afterwards.
        losses: loss_hex by step; empty where a system's bits depend on the mesh.
    """

    step: float
    first: float
    all: float
    steps_lost: int
    samples: int
    detect: float | None = None
    known: float | None = None
    edit: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    losses: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """A peer's worker at the end of a step."""

    step: int
    at: float
    samples: int
    workers: int
    committed: bool


def settings_of(directory: Path, cache: Path) -> dict[str, Any]:
    """As `Settings.from_dict` takes them; all systems read the same."""
    return SIZES | {"data": {"cache": str(cache)}, "run": {"dir": str(directory / "run"), "tensorboard": False}}


def ours(seed: int, cache: Path, system: str = "") -> Kill:
    """`python train.py`; the killed worker is drawn, and so is the moment."""
    draw = random.Random(seed)
    with _directory() as directory, contextlib.ExitStack() as stack:
        words = [f"sharding={SIZES['sharding']['name']}"]
        for group, values in settings_of(directory, cache).items():
            if group != "sharding":
                words += [f"{group}.{name}={value}" for name, value in values.items()]
        run = stack.enter_context(_session([sys.executable, "train.py", *words], directory))
        metrics, events = directory / "run" / "metrics.jsonl", directory / "run" / "events.jsonl"
        run.wait(lambda: len(_json_lines(metrics)) >= STEPS_BEFORE)
        step = statistics.median(line["seconds"] for line in _json_lines(metrics)[_WARM_STEPS:])
        time.sleep(draw.uniform(0, 2 * step))
        victim = draw.choice(run.workers())
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        run.wait(lambda: any(e["event"] == "recovered" for e in _json_lines(events)))
        event = next(e for e in _json_lines(events) if e["event"] == "recovered")
        run.wait(lambda: len(_json_lines(metrics)) >= event["step"] + STEPS_AFTER)
        lines, told = _json_lines(metrics), _json_lines(events)
    fail = next(e for e in told if e["event"] == "fail")
    moments = [killed, *(fail[f"{name}_at"] for name in ("seen", "prepared", "answered", "placed"))]
    moments += [event["committed_at"], event["all_applied_at"]]
    names = ("seen", "PREPARE", "all STATUS", "PLACE", "first commit", "all commit")
    parts = {name: 1e3 * (b - a) for name, (a, b) in zip(names, itertools.pairwise(moments), strict=True)}
    since = [1e3 * (moment - killed) for moment in moments]
    steps = [line["step"] for line in lines]
    return Kill(
        1e3 * step,
        since[5],
        since[6],
        steps_lost=len(steps) - len(set(steps)) + (steps != list(range(1, len(steps) + 1))),
        samples=lines[-1]["tokens"] // SIZES["train"]["seq_len"],
        detect=since[1],
        known=since[3],
        edit=since[4] - since[1],
        parts=parts,
        losses={line["step"]: line["loss_hex"] for line in lines},
    )


def torchft(seed: int, cache: Path, system: str) -> Kill:
    """Four replicas under a lighthouse. `system`: heartbeat timeout/join timeout/tick/heartbeat of a replica, in ms."""
    draw = random.Random(seed)
    heartbeat, join, tick, manager = system.split("/")
    with _directory() as directory, contextlib.ExitStack() as stack:
        lighthouse = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--min_replicas", "1"]
        port = _free_port()
        lighthouse += ["--bind", f"[::]:{port}", "--join_timeout_ms", join]
        lighthouse += ["--quorum_tick_ms", tick, "--heartbeat_timeout_ms", heartbeat]
        stack.enter_context(_session(lighthouse, directory / "lighthouse"))
        spec = {"settings": settings_of(directory, cache), "world": WORKERS, "heartbeat": int(manager)}
        logs = [directory / f"log-{rank}" for rank in range(WORKERS)]
        runs = []
        for rank, log in enumerate(logs):
            told = json.dumps(spec | {"rank": rank, "log": str(log), "lighthouse": f"http://localhost:{port}"})
            command = [sys.executable, "-m", "benchmarks.recovery_peers", "torchft", told]
            runs.append(stack.enter_context(_session(command, directory / f"replica-{rank}")))
        runs[0].wait(lambda: all(len(_full(log)) >= STEPS_BEFORE for log in logs))
        step = _usual(logs[0])
        time.sleep(draw.uniform(0, 2 * step))
        victim = draw.randrange(WORKERS)
        killed = time.monotonic()
        runs[victim].process.kill()
        survivors = [log for rank, log in enumerate(logs) if rank != victim]
        watch = runs[victim - 1]
        watch.wait(lambda: all(len(_without(log, killed)) > STEPS_AFTER for log in survivors))
        found = [_lines(log) for log in survivors]
        without = [_without(log, killed) for log in survivors]
    first = [lines[0].at for lines in without]
    common = set.intersection(*({x.step for x in lines} for lines in without))
    samples = sum(x.samples for lines in without for x in lines if x.step == max(common))
    thrown_away = max(sum(not x.committed and x.at > killed for x in lines) for lines in found)
    return Kill(1e3 * step, 1e3 * (min(first) - killed), 1e3 * (max(first) - killed), thrown_away, samples)


def torchrun(seed: int, cache: Path, system: str = "") -> Kill:
    """torchrun restarts all workers, which load the newest checkpoint of DCP."""
    draw = random.Random(seed)
    with _directory() as directory, contextlib.ExitStack() as stack:
        spec = {"settings": settings_of(directory, cache), "directory": str(directory)}
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:1", f"--nproc-per-node={WORKERS}"]
        command += ["--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        command += ["-m", "benchmarks.recovery_peers", "torchrun", json.dumps(spec)]
        run = stack.enter_context(_session(command, directory, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}))
        before = [directory / f"log-0-{rank}" for rank in range(WORKERS)]
        after = [directory / f"log-1-{rank}" for rank in range(WORKERS)]
        run.wait(lambda: len(_lines(before[0])) >= STEPS_BEFORE)
        step = _usual(before[0])
        time.sleep(draw.uniform(0, 10 * step))
        pids = [int((directory / f"pid-0-{rank}").read_text()) for rank in range(WORKERS)]
        killed = time.monotonic()
        os.kill(draw.choice(pids), signal.SIGKILL)
        run.wait(lambda: all(len(_lines(log)) >= STEPS_AFTER for log in after))
        old, new = [_lines(log) for log in before], [_lines(log) for log in after]
    first = [lines[0].at for lines in new]
    lost = max(x.step for lines in old for x in lines) - new[0][0].step + 1
    samples = sum(lines[-1].samples for lines in new)
    return Kill(1e3 * step, 1e3 * (min(first) - killed), 1e3 * (max(first) - killed), lost, samples)


SYSTEMS: dict[str, tuple[Callable[[int, Path, str], Kill], str]] = {
    "this project": (ours, ""),
    "torchft-nightly 200/200/5/20 ms": (torchft, "200/200/5/20"),
    "torchft-nightly 500/500/10/50 ms": (torchft, "500/500/10/50"),
    "torchrun + DCP every 10 steps": (torchrun, ""),
}


# ---- processes


@dataclass
class _Run:
    process: subprocess.Popen[bytes]
    said: Path

    def wait(self, condition: Callable[[], object]) -> None:
        """Until the condition holds.

        Raises:
            RuntimeError: the process ended before, or it takes too long; with the end of its output.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it ended or takes too long:\n{self.said.read_text(errors='replace')[-3000:]}")
            time.sleep(0.02)

    def workers(self) -> list[int]:
        """Children of children: the controller's zygote makes the workers."""
        parents = {pid: _parent(pid) for pid in session_processes(self.process.pid)}
        zygotes = {pid for pid, parent in parents.items() if parent == self.process.pid}
        return sorted(pid for pid, parent in parents.items() if parent in zygotes)


@contextlib.contextmanager
def _session(command: Sequence[str], directory: Path, environment: dict[str, str] | None = None) -> Iterator[_Run]:
    directory.mkdir(parents=True, exist_ok=True)
    said = directory / "said"
    with said.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            start_new_session=True,
        )
    try:
        yield _Run(process, said)
    finally:
        while left := [pid for pid in session_processes(process.pid) if process.poll() is None or pid != process.pid]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        process.wait()


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="recovery-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


# ---- what they wrote


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that may still grow, or not be there yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def _lines(path: Path) -> list[Line]:
    return [Line(**line) for line in _json_lines(path)]


def _full(path: Path) -> list[Line]:
    """Steps that all workers took part in."""
    return [line for line in _lines(path) if line.committed and line.workers == WORKERS]


def _without(path: Path, since: float) -> list[Line]:
    """Steps since a moment that fewer than all took part in."""
    return [line for line in _lines(path) if line.committed and line.workers < WORKERS and line.at > since]


def _usual(path: Path) -> float:
    """The median step, seconds."""
    at = [line.at for line in _full(path)][_WARM_STEPS:]
    return statistics.median(b - a for a, b in itertools.pairwise(at))
