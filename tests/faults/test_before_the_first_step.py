"""All replicas of a page are lost before any step is committed: the run begins again with what it began with."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_events, read_metrics
from tests.faults.fault_runs import PATIENT, TINY, Bits, Changes
from tests.multiprocess.real_runs import Launched, eventually, launch, write_text

STEPS = 10
Undisturbed = Callable[[int], Bits]
# The first micro-batches wait until the file `go` is there; each worker that waits leaves a file `at-PID`.
HELD = """
import os
import time
from functools import partial
from pathlib import Path
from elaswave_spmd.models import GPT

class Held(GPT):
    def __init__(self, *, hold, **sizes):
        super().__init__(**sizes)
        next(iter(self.layers)).register_forward_pre_hook(partial(wait, Path(hold)))

def wait(hold, _, given):
    if given[1] is not None and int(given[1].step) == 1 and not (hold / "go").exists():
        (hold / f"at-{os.getpid()}").touch()
        while not (hold / "go").exists():
            time.sleep(0.02)
"""


@contextmanager
def held_run(folder: Path, *settings: str) -> Iterator[Launched]:
    """A run of which two workers of the first stage have begun their first step."""
    write_text(folder)
    (folder / "held.py").write_text(HELD)
    (folder / "hold").mkdir()
    model = ["model.target=held.Held", f"+model.args.hold={folder / 'hold'}", "timeouts.start=2000"]
    # The check of the model computes micro-batches of the first step, too: workers would wait before they are ready.
    with launch(folder, *TINY, *PATIENT, *model, "runtime.check_model=false", *settings) as run:
        eventually(lambda: len(waits(run)) >= 2, run.process)
        yield run


def waits(run: Launched) -> list[int]:
    return sorted(int(path.name[3:]) for path in (run.folder / "hold").glob("at-*"))


def kill_two(run: Launched) -> None:
    """At one moment. On all of these meshes some page has its replicas on them alone."""
    victims = waits(run)[:2]  # the same for both signals: a third worker may begin to wait between them
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in victims:
            os.kill(pid, number)


@pytest.mark.parametrize(
    ("mesh", "settings", "num_left"),
    [("dp3", [], 1), ("dp2", ["elastic.replace=true"], 2), ("dp2_pp2", ["elastic.min_workers=2"], 2)],
)
def test_the_run_begins_again(
    tmp_path: Path, undisturbed: Undisturbed, mesh: str, settings: list[str], num_left: int
) -> None:
    with held_run(tmp_path, f"mesh={mesh}", "sharding=zero2", *settings) as run:
        kill_two(run)
        (tmp_path / "hold" / "go").touch()  # who is left cannot commit a step without their votes
        done = run.finish()
    assert (done.code, done.err) == (0, ""), done.err
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)
    (restart,) = Changes.of(tmp_path / "run").of_kind("restart")
    assert (restart["step"], restart["workers"]) == (0, num_left)
    assert {line.workers for line in read_metrics(tmp_path / "run")} == {num_left}


def test_with_too_few_left_it_ends_and_says_so(tmp_path: Path) -> None:
    with held_run(tmp_path, "mesh=dp3", "sharding=zero2", "elastic.min_workers=2") as run:
        kill_two(run)
        (tmp_path / "hold" / "go").touch()
        done = run.finish()
    assert done.code == 1 and done.err.startswith("error: the run cannot go on: all replicas of "), done.err
    assert "nothing to resume" in done.err
    assert "restart" not in [event["event"] for event in read_events(tmp_path / "run")]
