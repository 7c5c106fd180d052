"""Latches: every way to die is told, once, and nothing else is. Real processes, real signals."""

from __future__ import annotations

import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.runtime.processes import death_watch
from elaswave_spmd.runtime.processes.death_watch import RobustMutexTable, Watcher, available, hold
from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="latches are Linux only")
NEVER = "never"


class Scene:
    """A board, a watcher whose notices go into `deaths`, and workers that end when told."""

    def __init__(self, directory: Path, capacity: int) -> None:
        self.directory = directory / "latches"
        self.directory.mkdir()
        self.scratch = directory
        self.board = RobustMutexTable(str(self.directory), capacity)
        self.deaths: queue.Queue[int] = queue.Queue()
        self.watcher = Watcher(self.board, self.deaths.put)
        self.fork_server = ForkServerClient.start("death_watch_targets:worker", preload=("numpy",))
        self.pids: dict[int, int] = {}

    def start(self, rank: int, ends: str = NEVER, *, holds: bool = True) -> None:
        """Worker `rank` is up and holds its latch."""
        spec: dict[str, Any] = {
            "seat": self.board.seat(rank) if holds else None,
            "ends": ends,
            "ready": str(self.scratch / f"ready-{rank}"),
            "go": str(self.scratch / f"go-{rank}"),
        }
        self.board.seat(rank)
        self.pids[rank] = self.fork_server.spawn(rank, spec)
        eventually((self.scratch / f"ready-{rank}").exists)

    def go(self, rank: int) -> None:
        (self.scratch / f"go-{rank}").touch()

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)

    def reaped(self) -> None:
        """Wait for one worker's end as the launcher sees it."""
        assert select.select([self.fork_server], [], [], PATIENCE_S)[0] and self.fork_server.poll()

    def death(self) -> int:
        return self.deaths.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self.watcher.close()
        self.fork_server.stop(0)
        self.board.close()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def latch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("latch-")]


@pytest.fixture
def capacity() -> int:
    return 8


@pytest.fixture
def scene(tmp_path: Path, capacity: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    made = Scene(tmp_path, capacity)
    yield made
    made.close()
    assert latch_threads() == []


def test_a_kill_is_told_once_and_of_the_killed_only(scene: Scene) -> None:
    for rank in (0, 1, 2):
        scene.start(rank)
        assert scene.watcher.watch(rank)
    scene.kill(1)
    assert scene.death() == 1
    scene.kill(2)
    assert scene.death() == 2 and scene.deaths.empty()


@pytest.mark.parametrize("ends", ["return", "raise", "exit in a thread", "segfault"])
def test_every_way_to_end_is_told(scene: Scene, ends: str, capfd: pytest.CaptureFixture[str]) -> None:
    scene.start(4, ends)
    assert scene.watcher.watch(4)
    scene.go(4)
    assert scene.death() == 4


def test_a_stopped_worker_is_not_dead_until_it_is_killed(scene: Scene) -> None:
    for rank in (0, 1):
        scene.start(rank)
        assert scene.watcher.watch(rank)
    os.kill(scene.pids[0], signal.SIGSTOP)
    eventually(lambda: state(scene.pids[0]) == "T")
    scene.kill(1)
    assert scene.death() == 1 and scene.deaths.empty()
    os.kill(scene.pids[0], signal.SIGCONT)
    eventually(lambda: state(scene.pids[0]) != "T")
    assert scene.deaths.empty()
    os.kill(scene.pids[0], signal.SIGSTOP)
    eventually(lambda: state(scene.pids[0]) == "T")
    scene.kill(0)
    assert scene.death() == 0


def test_a_thread_that_ends_is_no_death(scene: Scene) -> None:
    scene.start(0, "a thread has ended")
    scene.start(1)
    assert scene.watcher.watch(0) and scene.watcher.watch(1)
    scene.kill(1)
    assert scene.death() == 1 and scene.deaths.empty()
    scene.kill(0)
    assert scene.death() == 0


def test_the_instant_of_a_fault_on_purpose_is_there_when_the_death_is_told(scene: Scene) -> None:
    for rank, ends in ((0, "strike"), (1, NEVER)):
        scene.start(rank, ends)
        assert scene.watcher.watch(rank) and scene.board.struck_at(rank) is None
    before = time.monotonic()
    scene.go(0)
    assert scene.death() == 0
    struck_at = scene.board.struck_at(0)
    assert struck_at is not None and before <= struck_at <= time.monotonic()
    scene.kill(1)
    assert scene.death() == 1 and scene.board.struck_at(1) is None, "nobody has written it down"
    assert scene.board.struck_at(9) is None, "it never had a seat"


def test_who_died_before_being_watched_is_told(scene: Scene) -> None:
    scene.start(3)
    scene.kill(3)
    scene.reaped()
    assert scene.watcher.watch(3)
    assert scene.death() == 3


def test_who_holds_nothing_is_not_watched(scene: Scene) -> None:
    scene.start(0, holds=False)
    assert scene.watcher.watch(0) is False
    scene.kill(0)
    scene.reaped()
    assert scene.deaths.empty() and latch_threads() == []


@pytest.mark.parametrize("capacity", [1, 3])
def test_more_ranks_than_a_file_holds(scene: Scene, capacity: int) -> None:
    ranks = (0, 1, 2, 3, 4, 11)
    for rank in ranks:
        scene.start(rank)
        assert scene.watcher.watch(rank)
    assert len(list(scene.directory.iterdir())) == len({rank // capacity for rank in ranks})
    for rank in reversed(ranks):
        scene.kill(rank)
        assert scene.death() == rank


def test_close_ends_the_threads_while_workers_live_and_tells_nothing_more(scene: Scene) -> None:
    for rank in (0, 1):
        scene.start(rank)
        assert scene.watcher.watch(rank)
    assert sorted(latch_threads()) == ["latch-0", "latch-1"]
    scene.watcher.close()
    scene.watcher.close()
    assert latch_threads() == [] and state(scene.pids[0]) != "Z"
    scene.kill(0)
    scene.reaped()
    assert scene.deaths.empty()


def test_a_watcher_may_be_closed_by_a_death(scene: Scene) -> None:
    told: queue.Queue[int] = queue.Queue()

    def on_death(rank: int) -> None:
        watcher.close()
        told.put(rank)

    watcher = Watcher(scene.board, on_death)
    for rank in (0, 1):
        scene.start(rank)
        assert watcher.watch(rank)
    scene.kill(0)
    assert told.get(timeout=PATIENCE_S) == 0
    eventually(lambda: latch_threads() == [])


def test_removing_the_files_early_changes_nothing_for_those_who_hold(scene: Scene) -> None:
    scene.start(0)
    scene.board.close()
    assert list(scene.directory.iterdir()) == []
    assert scene.watcher.watch(0)
    scene.kill(0)
    assert scene.death() == 0


def test_files_are_private(scene: Scene) -> None:
    path = Path(scene.board.seat(0).path)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent == scene.directory


def test_a_seat_is_plain_data_and_stays(scene: Scene, capacity: int) -> None:
    first, second = scene.board.seat(1), scene.board.seat(capacity + 1)
    assert first == scene.board.seat(1) and first.slot == second.slot == 1 and first.path != second.path


def test_a_latch_has_one_owner(scene: Scene, tmp_path: Path) -> None:
    report = tmp_path / "report"
    with ForkServerClient.start("death_watch_targets:hold_twice", preload=()) as fork_server:
        fork_server.spawn(0, {"seat": scene.board.seat(0), "report": str(report)})
        eventually(lambda: report.exists() and report.read_text())
    assert "has an owner already: EBUSY" in report.read_text()


def test_only_the_main_thread_may_hold(scene: Scene) -> None:
    errors: list[str] = []

    def wrong() -> None:
        try:
            hold(*scene.board.seat(0))
        except AssertionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wrong)
    thread.start()
    thread.join()
    assert errors and "locking thread" in errors[0] and scene.watcher.watch(0) is False


def test_a_seat_that_is_not_there(scene: Scene, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hold(str(tmp_path / "nothing"), 0)
    with pytest.raises(AssertionError):
        hold(scene.board.seat(0).path, 10**6)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RobustMutexTable(str(tmp_path / "nothing")).seat(0)


def test_this_system_has_them() -> None:
    assert available() is True


def test_other_systems_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert death_watch.available() is False


def test_a_c_library_without_them_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        def __init__(self) -> None:
            raise AttributeError("pthread_mutex_consistent")

    monkeypatch.setattr(death_watch, "_Libc", Bare)
    assert death_watch.available() is False
