"""Small runs that lose workers, and the checks that hold for each of them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_spmd.errors import DataError
from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from tests.multiprocess import patient_model
from tests.multiprocess.real_runs import Done, train, write_text

STEPS = 10
# A run in which nothing fails waits for whatever a busy machine takes.
PATIENT = ("timeouts.suspect=60", "timeouts.status=70", "timeouts.progress=80", "timeouts.join=90", "timeouts.leave=90")
# 7 micro-batches of 2 sequences: uneven on every mesh of more than one worker. Dropout on.
TINY = (
    "model.layers=2 model.d_model=32 model.heads=2 model.dropout=0.1 train.seq_len=12 train.global_batch=14 "
    f"train.microbatch_size=2 train.steps={STEPS} train.validate_every=5 train.validate_microbatches=3 "
    "optim.warmup_steps=2 page.size=256 "
    "run.tensorboard=false data=text data.path=text.txt data.cache=cache run.dir=run "
    # on a busy machine heartbeats of the living are late by more than a second: they are not to be evicted for it
    "timeouts.suspect=4 "
    # exactly these events: none for steps that a busy machine slows
    "schedule.microbatches=false schedule.layers=false"
).split()


@dataclass(frozen=True)
class Bits:
    """The results that no fault may change."""

    loss_hex: tuple[str, ...]
    grad_norm_hex: tuple[str, ...]
    validation: Mapping[int, str]
    weights_sha256: str

    @classmethod
    def of(cls, run_dir: Path) -> Bits:
        lines = read_metrics(run_dir)
        assert [line.step for line in lines] == list(range(1, len(lines) + 1)), "each step once, in order"
        validation = {e["step"]: e["loss_hex"] for e in read_events(run_dir) if e["event"] == "validation"}
        return cls(
            tuple(line.loss_hex for line in lines),
            tuple(line.grad_norm_hex for line in lines),
            validation,
            read_summary(run_dir)["weights_sha256"],
        )


@dataclass(frozen=True)
class Changes:
    """The mesh epochs of a run, read from events.jsonl."""

    events: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, run_dir: Path) -> Changes:
        kinds = ("fail", "leave", "join", "rebalance", "recovered", "restart")
        return cls(tuple(event for event in read_events(run_dir) if event["event"] in kinds))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def ranks(self, kind: str) -> list[list[int]]:
        return [event["ranks"] for event in self.of_kind(kind)]

    @property
    def epochs(self) -> list[int]:
        """Numbers of the mesh epochs, in order; of a run that restarted, those after its last restart."""
        begun = max((i + 1 for i, event in enumerate(self.events) if event["event"] == "restart"), default=0)
        return [event["mesh_epoch"] for event in self.events[begun:] if event["event"] != "recovered"]


def events_so_far(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind of a run that goes on, or that has not begun yet."""
    with suppress(DataError):
        return [event for event in read_events(folder / "run") if event["event"] == kind]
    return []


def num_joined(folder: Path) -> int:
    """The newcomers that a run has taken so far."""
    return sum(len(event["ranks"]) for event in events_so_far(folder, "join"))


@contextmanager
def made_once(path: Path, condition: Callable[[], object]) -> Iterator[None]:
    """Makes a file, beside what is done meanwhile, once a condition holds."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.05):
            if condition():
                path.touch()
                return

    looks = threading.Thread(target=look)
    looks.start()
    try:
        yield
    finally:
        ended.set()
        looks.join()


def patient(folder: Path, growth: float = 1.1) -> list[str]:
    """The words of a model whose steps take longer and longer from step 6 on, until the file `go` is there.

    In a hundred steps there is time for whatever a busy machine takes; no bit depends on it.
    """
    model = patient_model.write(folder, folder / "go")
    return [*model, f"+model.args.growth={growth}", "+model.args.longest_s=1"]


def go_on(folder: Path) -> None:
    """Makes the file `go`: what was to happen in the middle of the run has happened, and its steps are fast now."""
    (folder / "go").touch()


@contextmanager
def patient_until(condition: Callable[[], object], folder: Path, growth: float = 1.2) -> Iterator[list[str]]:
    """The words of the same model; the file is made once a condition holds, and then the steps are fast."""
    words = patient(folder, growth)
    with made_once(folder / "go", condition):
        yield words


def chaos(*events: str) -> str:
    """The override for events such as `step: 3, kind: kill, rank: 1, point: norm`."""
    return f"chaos.events=[{', '.join(f'{{{event}}}' for event in events)}]"


def run_undisturbed(folder: Path, *arguments: str) -> Bits:
    """The bits of a run on one worker, which are those of any mesh."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder)
    done = train(folder, *TINY, *PATIENT, *arguments)
    assert (done.code, done.err) == (0, ""), done.err
    return Bits.of(folder / "run")


def run_with(folder: Path, *arguments: str) -> Changes:
    """Trains to the end in spite of these events, and returns the changes of the mesh."""
    write_text(folder)
    return survived(folder, train(folder, *TINY, *arguments))


def survived(folder: Path, done: Done) -> Changes:
    """Checks a run that has reached its end: exit code, output, and the order of its mesh epochs.

    That it has mended nothing unasked is checked for all tests of real processes (tests/conftest.py).
    """
    assert (done.code, done.err) == (0, ""), done.err
    changes = Changes.of(folder / "run")
    assert changes.epochs == sorted(changes.epochs), "mesh epochs are in order"
    # A line of the display for each, and nothing else that a person would take for an error.
    rest = done.out
    for event in changes.events:
        line = f"{event['event']}: {event['message']}"
        assert line in done.out
        rest = rest.replace(line, "")
    assert not re.search("Traceback|Error|Warning", rest)
    return changes


def all_events(folder: Path) -> str:
    """All events of a run, for messages of failed tests."""
    return json.dumps(read_events(folder / "run"), indent=1)
