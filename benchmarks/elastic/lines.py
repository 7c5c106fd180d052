"""The lines that a system writes while it trains, as JSON: the form in which the judge hears of it.

A process appends to a file of its own below DIRECTORY/lines, a line at a time. Without torch and without elaswave_spmd,
so that it can be copied into any environment. docs/elastic_benchmark.md has the form of each line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START, STEP, READ = "start", "step", "read"


@dataclass(frozen=True)
class Start:
    """A worker trains from now on."""

    pid: int
    at: float


@dataclass(frozen=True)
class Step:
    """What one worker has contributed to a step that is applied, or what all workers have.

    Args:
        step: from 1.
        at: CLOCK_MONOTONIC, after the step was applied.
        samples: ids of the samples in it.
        loss: mean over these samples, before the update.
        history: grows when a system goes back to an earlier step: what an earlier history did from there on is undone.
    """

    step: int
    at: float
    samples: tuple[int, ...]
    loss: float
    history: int = 0


@dataclass(frozen=True)
class Read:
    """Samples that a worker has read, of a system whose workers do not write its steps themselves."""

    samples: tuple[int, ...]


Line = Start | Step | Read


class Writer:
    """Writes the lines of this process."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        folder = Path(directory) / "lines"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{os.getpid()}-{time.monotonic_ns()}.jsonl"
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115  (for as long as the process lives)

    def start(self, pid: int | None = None) -> None:
        """This worker, or the one with this process id, begins to train."""
        self._write({"kind": START, "pid": pid or os.getpid(), "at": time.monotonic()})

    def step(self, step: int, samples: Iterable[int], loss: float, history: int = 0) -> None:
        """A step is applied: with these samples of this worker, and their mean loss."""
        line = {"kind": STEP, "step": step, "at": time.monotonic(), "samples": [int(i) for i in samples]}
        self._write({**line, "loss": loss, "history": history})

    def read(self, samples: Iterable[int]) -> None:
        """This worker has read samples."""
        self._write({"kind": READ, "samples": [int(i) for i in samples]})

    def close(self) -> None:
        """Closes the file; a process that ends need not."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def parse(text: str) -> Line:
    """A line.

    Raises:
        ValueError: it has not the form of a line.
    """
    try:
        given = json.loads(text)
        match given["kind"]:
            case "start":
                return Start(int(given["pid"]), float(given["at"]))
            case "step":
                samples = tuple(int(i) for i in given["samples"])
                number, history = int(given["step"]), int(given.get("history", 0))
                return Step(number, float(given["at"]), samples, float(given["loss"]), history)
            case "read":
                return Read(tuple(int(i) for i in given["samples"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no line of a system: {text!r} ({error})") from error
    raise ValueError(f"no line of a system: {text!r} (kinds are {START}, {STEP} and {READ})")


@dataclass
class Follower:
    """Reads the lines below a directory as they are written."""

    directory: Path
    _offsets: dict[Path, int] = field(default_factory=dict)

    def new(self) -> list[Line]:
        """The complete lines that have come since the last call, file by file.

        Raises:
            ValueError: a line has not the form of one.
        """
        found: list[Line] = []
        for path in sorted((self.directory / "lines").glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole, newline, _ = text.rpartition(b"\n")  # the last line may still be written
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
            found += [parse(line) for line in whole.decode().splitlines()]
        return found
