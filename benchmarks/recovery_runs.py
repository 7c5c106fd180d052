"""One run of `recovery` with one kill in it: this project as a user starts it, or a system that it is compared with.

All write times of CLOCK_MONOTONIC, which is the same in all processes of a machine. The driver kills by SIGKILL and
reads the clock right before. No process of a run is left afterwards (benchmarks/processes.py).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.processes import new_directory, program
from elaswave_spmd.runtime.transport.free_ports import free_port

WORKERS = 4
STEPS_BEFORE, STEPS_AFTER = 25, 8
_WARM_STEPS = 5
SIZES: dict[str, Any] = {
    "mesh": {"dp": WORKERS},
    "sharding": {"name": "zero1"},
    "model": {"name": "gpt_tiny", "target": "gpt", "layers": 3, "d_model": 96, "heads": 4},
    "train": {"steps": 1_000_000, "global_batch": 24, "microbatch_size": 2, "seq_len": 32, "validate_every": 0},
    "optim": {"lr": 1e-3, "schedule": "constant", "warmup_steps": 0, "clip": 1.0},
    # No rescheduling: a change by measured speeds at the moment of a kill would be measured as a part of its cost.
    "schedule": {"microbatches": False, "layers": False},
}


@dataclass(frozen=True)
class Kill:
    """The cost of one kill. Times in ms.

    Args:
        step: the median undisturbed step.
        first, all: from the kill until the first, or the last, survivor has applied a step without the lost worker.
        steps_lost: committed steps that were trained again, or begun steps that were discarded.
        samples: per step afterwards.
        parts: the same time in pieces, by name; of this project only.
        losses: loss_hex by step; empty if the system's bits depend on the mesh.
    """

    step: float
    first: float
    all: float
    steps_lost: int
    samples: int
    parts: dict[str, float] = field(default_factory=dict)
    losses: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One line of another system's log: a worker at the end of a step."""

    step: int
    at: float
    samples: int
    workers: int
    committed: bool


def settings_of(directory: Path, cache: Path) -> dict[str, Any]:
    """The settings in the form of `Settings.from_dict`. All systems read the same ones."""
    return SIZES | {"data": {"cache": str(cache)}, "run": {"dir": str(directory / "run"), "tensorboard": False}}


def ours(seed: int, cache: Path, system: str = "") -> Kill:
    """Runs `python train.py`. The killed worker and the moment are drawn."""
    draw = random.Random(seed)
    with new_directory("recovery-") as directory, contextlib.ExitStack() as stack:
        run = stack.enter_context(program([sys.executable, *train_words(directory, cache)], directory))
        metrics, events = directory / "run" / "metrics.jsonl", directory / "run" / "events.jsonl"
        run.wait(lambda: len(json_lines(metrics)) >= STEPS_BEFORE)
        step = statistics.median(line["seconds"] for line in json_lines(metrics)[_WARM_STEPS:])
        time.sleep(draw.uniform(0, 2 * step))
        victim = draw.choice(run.workers())
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        run.wait(lambda: any(e["event"] == "recovered" for e in json_lines(events)))
        recovered = next(e for e in json_lines(events) if e["event"] == "recovered")
        run.wait(lambda: len(json_lines(metrics)) >= recovered["step"] + STEPS_AFTER)
        lines, reported = json_lines(metrics), json_lines(events)
    fail = next(e for e in reported if e["event"] == "fail")
    if recovered["all_applied_at"] is None:
        raise RuntimeError("the next mesh epoch came before all had reported the first step: nothing to measure")
    steps = [line["step"] for line in lines]
    return Kill(
        1e3 * step,
        1e3 * (recovered["committed_at"] - killed),
        1e3 * (recovered["all_applied_at"] - killed),
        steps_lost=len(steps) - len(set(steps)) + (steps != list(range(1, len(steps) + 1))),
        samples=lines[-1]["tokens"] // SIZES["train"]["seq_len"],
        parts=parts_of(killed, step, fail, recovered),
        losses={line["step"]: line["loss_hex"] for line in lines},
    )


def parts_of(killed: float, step: float, fail: dict[str, Any], recovered: dict[str, Any]) -> dict[str, float]:
    """The cost of a kill of this project in pieces, in ms.

    The time of computing again is an estimate, not measured: micro-batches times their usual time, as if each worker
    had a core of its own. The rest of the step may then be negative.
    """
    microbatches = SIZES["train"]["global_batch"] // SIZES["train"]["microbatch_size"]
    redo = fail["microbatches_redone"] * step * WORKERS / microbatches / (WORKERS - 1)
    rest = recovered["all_applied_at"] - fail["placed_at"] - redo
    pieces = {
        "kill to seen by the controller": fail["seen_at"] - killed,
        "detect: kill to known by all survivors": fail["answered_at"] - killed,
        "edit: known by all to the new mesh sent": fail["placed_at"] - fail["answered_at"],
        "redo: micro-batches computed again, worked out": redo,
        "rest of the step": rest,
        "kill to all have committed": recovered["all_applied_at"] - killed,
        "kill to all have committed, less one step": recovered["all_applied_at"] - killed - step,
    }
    return {name: 1e3 * seconds for name, seconds in pieces.items()}


def train_words(directory: Path, cache: Path, **more: dict[str, Any]) -> list[str]:
    """The command line of train.py for these settings; `more` has further ones, by group."""
    words = ["train.py", f"sharding={SIZES['sharding']['name']}"]
    for group, values in (settings_of(directory, cache) | more).items():
        if group != "sharding":
            words += [f"{group}.{name}={value}" for name, value in values.items()]
    return words


def torchft(seed: int, cache: Path, system: str) -> Kill:
    """Runs four replicas under a lighthouse. `system`: heartbeat timeout/join timeout/tick/heartbeat, all in ms."""
    draw = random.Random(seed)
    heartbeat, join, tick, manager = system.split("/")
    with new_directory("recovery-") as directory, contextlib.ExitStack() as stack:
        lighthouse = [peers.program_of("torchft_lighthouse"), "--min_replicas", "1"]
        port = free_port("127.0.0.1")
        lighthouse += ["--bind", f"[::]:{port}", "--join_timeout_ms", join]
        lighthouse += ["--quorum_tick_ms", tick, "--heartbeat_timeout_ms", heartbeat]
        stack.enter_context(program(lighthouse, directory / "lighthouse"))
        spec = {"settings": settings_of(directory, cache), "world": WORKERS, "heartbeat": int(manager)}
        logs = [directory / f"log-{rank}" for rank in range(WORKERS)]
        runs = []
        for rank, log in enumerate(logs):
            arguments = json.dumps(spec | {"rank": rank, "log": str(log), "lighthouse": f"http://localhost:{port}"})
            command = [peers.program_of("python"), "-m", "benchmarks.recovery_peers", "torchft", arguments]
            runs.append(stack.enter_context(program(command, directory / f"replica-{rank}")))
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
    """Runs torchrun, which restarts all workers; they load the newest checkpoint of DCP."""
    draw = random.Random(seed)
    with new_directory("recovery-") as directory, contextlib.ExitStack() as stack:
        spec = {"settings": settings_of(directory, cache), "directory": str(directory)}
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:1", f"--nproc-per-node={WORKERS}"]
        command += ["--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        command += ["-m", "benchmarks.recovery_peers", "torchrun", json.dumps(spec)]
        run = stack.enter_context(program(command, directory, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}))
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


# ---- reading the logs


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that may still grow, or not exist yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def _lines(path: Path) -> list[Line]:
    return [Line(**line) for line in json_lines(path)]


def _full(path: Path) -> list[Line]:
    """The steps that all workers took part in."""
    return [line for line in _lines(path) if line.committed and line.workers == WORKERS]


def _without(path: Path, since: float) -> list[Line]:
    """The steps after a moment that fewer than all workers took part in."""
    return [line for line in _lines(path) if line.committed and line.workers < WORKERS and line.at > since]


def _usual(path: Path) -> float:
    """The median duration of a step, in seconds."""
    at = [line.at for line in _full(path)][_WARM_STEPS:]
    return statistics.median(b - a for a, b in itertools.pairwise(at))
