"""Death watch: every way to die is reported, once, and nothing else is. Real processes, real signals."""

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
from elaswave_spmd.runtime.processes.death_watch import (
    DeathWatch,
    NotWatchedError,
    RobustMutexTable,
    hold_mutex,
    is_available,
)
from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient, ForkServerSpec
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the death watch is Linux only")
NEVER = "never"


class Scene:
    """A table of mutexes, a watch whose reports go into `deaths`, and workers that end when asked to."""

    def __init__(self, directory: Path, capacity: int) -> None:
        self.directory = directory / "mutexes"
        self.directory.mkdir()
        self.scratch = directory
        self.table = RobustMutexTable(str(self.directory), capacity)
        self.deaths: queue.Queue[int] = queue.Queue()
        self.watch = DeathWatch(self.table, self.deaths.put)
        self.fork_server = ForkServerClient.start("death_watch_targets:worker", ForkServerSpec(preload=("numpy",)))
        self.pids: dict[int, int] = {}

    def start(self, rank: int, ends: str = NEVER, *, holds: bool = True) -> None:
        """Start worker `rank`; returns when it runs and holds its mutex."""
        spec: dict[str, Any] = {
            "slot": self.table.slot(rank) if holds else None,
            "ends": ends,
            "ready": str(self.scratch / f"ready-{rank}"),
            "go": str(self.scratch / f"go-{rank}"),
        }
        self.table.slot(rank)
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
        self.watch.close()
        self.fork_server.stop(0)
        self.table.close()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def watch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("death-watch-")]


def no_thread_is_left() -> None:
    """Waits until all threads of the watch have ended: `close` itself waits for two seconds, no longer."""
    eventually(lambda: watch_threads() == [])


@pytest.fixture
def capacity() -> int:
    return 8


@pytest.fixture
def scene(tmp_path: Path, capacity: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    made = Scene(tmp_path, capacity)
    yield made
    made.close()
    no_thread_is_left()


def test_a_kill_is_reported_once_and_only_for_the_killed_worker(scene: Scene) -> None:
    for rank in (0, 1, 2):
        scene.start(rank)
        assert scene.watch.watch(rank)
    scene.kill(1)
    assert scene.death() == 1
    scene.kill(2)
    assert scene.death() == 2 and scene.deaths.empty()


def test_what_is_kept_of_a_watch_goes_with_its_worker(scene: Scene) -> None:
    for rank in (0, 1):
        scene.start(rank)
        assert scene.watch.watch(rank)
    scene.kill(1)
    assert scene.death() == 1
    eventually(lambda: set(scene.watch._threads) == {0})


def test_a_worker_without_a_thread_to_watch_it_is_told_and_the_others_are_watched(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    for rank in (0, 1, 2):
        scene.start(rank)
    assert scene.watch.watch(0)
    scene.kill(2)
    scene.reaped()
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(NotWatchedError, match="can't start new thread"):
            scene.watch.watch(1)
        assert scene.watch.watch(2) is False, "it is dead already"
    scene.kill(1)
    scene.reaped()
    scene.kill(0)
    assert scene.death() == 0 and scene.deaths.empty()


@pytest.mark.parametrize("ends", ["return", "raise", "exit in a thread", "segfault"])
def test_every_way_to_end_is_reported(scene: Scene, ends: str, capfd: pytest.CaptureFixture[str]) -> None:
    scene.start(4, ends)
    assert scene.watch.watch(4)
    scene.go(4)
    assert scene.death() == 4


def test_a_stopped_worker_is_not_dead_until_it_is_killed(scene: Scene) -> None:
    for rank in (0, 1):
        scene.start(rank)
        assert scene.watch.watch(rank)
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
    assert scene.watch.watch(0) and scene.watch.watch(1)
    scene.kill(1)
    assert scene.death() == 1 and scene.deaths.empty()
    scene.kill(0)
    assert scene.death() == 0


def test_the_instant_of_an_injected_fault_is_known_when_the_death_is_reported(scene: Scene) -> None:
    for rank, ends in ((0, "injected kill"), (1, NEVER)):
        scene.start(rank, ends)
        assert scene.watch.watch(rank) and scene.table.injected_at(rank) is None
    before = time.monotonic()
    scene.go(0)
    assert scene.death() == 0
    injected_at = scene.table.injected_at(0)
    assert injected_at is not None and before <= injected_at <= time.monotonic()
    scene.kill(1)
    assert scene.death() == 1 and scene.table.injected_at(1) is None, "no fault was injected"
    assert scene.table.injected_at(9) is None, "it never had a slot"


def test_a_worker_that_died_before_it_was_watched_is_reported(scene: Scene) -> None:
    scene.start(3)
    scene.kill(3)
    scene.reaped()
    assert scene.watch.watch(3)
    assert scene.death() == 3


def test_a_worker_without_its_mutex_is_not_watched(scene: Scene) -> None:
    scene.start(0, holds=False)
    assert scene.watch.watch(0) is False
    scene.kill(0)
    scene.reaped()
    assert scene.deaths.empty() and watch_threads() == []


@pytest.mark.parametrize("capacity", [1, 3])
def test_more_ranks_than_a_file_holds(scene: Scene, capacity: int) -> None:
    ranks = (0, 1, 2, 3, 4, 11)
    for rank in ranks:
        scene.start(rank)
        assert scene.watch.watch(rank)
    assert len(list(scene.directory.iterdir())) == len({rank // capacity for rank in ranks})
    for rank in reversed(ranks):
        scene.kill(rank)
        assert scene.death() == rank


def test_close_ends_the_threads_while_workers_live_and_reports_nothing_more(scene: Scene) -> None:
    for rank in (0, 1):
        scene.start(rank)
        assert scene.watch.watch(rank)
    assert sorted(watch_threads()) == ["death-watch-0", "death-watch-1"]
    scene.watch.close()
    scene.watch.close()
    no_thread_is_left()
    assert state(scene.pids[0]) != "Z"
    scene.kill(0)
    scene.reaped()
    assert scene.deaths.empty()


def test_a_watch_may_be_closed_by_the_report_of_a_death(scene: Scene) -> None:
    reported: queue.Queue[int] = queue.Queue()

    def on_death(rank: int) -> None:
        watch.close()
        reported.put(rank)

    watch = DeathWatch(scene.table, on_death)
    for rank in (0, 1):
        scene.start(rank)
        assert watch.watch(rank)
    scene.kill(0)
    assert reported.get(timeout=PATIENCE_S) == 0
    no_thread_is_left()


def test_mutexes_that_are_held_work_without_their_files(scene: Scene) -> None:
    scene.start(0)
    scene.table.close()
    assert list(scene.directory.iterdir()) == []
    assert scene.watch.watch(0)
    scene.kill(0)
    assert scene.death() == 0


def test_files_are_private(scene: Scene) -> None:
    path = Path(scene.table.slot(0).path)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent == scene.directory


def test_a_slot_is_plain_data_and_stays_the_same(scene: Scene, capacity: int) -> None:
    first, second = scene.table.slot(1), scene.table.slot(capacity + 1)
    assert first == scene.table.slot(1) and first.position == second.position == 1 and first.path != second.path


def test_a_mutex_has_one_owner(scene: Scene, tmp_path: Path) -> None:
    report = tmp_path / "report"
    with ForkServerClient.start("death_watch_targets:hold_twice", ForkServerSpec(preload=())) as fork_server:
        fork_server.spawn(0, {"slot": scene.table.slot(0), "report": str(report)})
        eventually(lambda: report.exists() and report.read_text())
    assert "has an owner already: EBUSY" in report.read_text()


def test_only_the_main_thread_may_lock_it(scene: Scene) -> None:
    errors: list[str] = []

    def wrong() -> None:
        try:
            hold_mutex(*scene.table.slot(0))
        except AssertionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wrong)
    thread.start()
    thread.join()
    assert errors and "locking thread" in errors[0] and scene.watch.watch(0) is False


def test_a_slot_that_does_not_exist(scene: Scene, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hold_mutex(str(tmp_path / "nothing"), 0)
    with pytest.raises(AssertionError):
        hold_mutex(scene.table.slot(0).path, 10**6)


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RobustMutexTable(str(tmp_path / "nothing")).slot(0)


def test_this_system_has_robust_mutexes() -> None:
    assert is_available() is True


def test_the_watch_is_not_available_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert death_watch.is_available() is False


def test_the_watch_is_not_available_without_robust_mutexes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        def __init__(self) -> None:
            raise AttributeError("pthread_mutex_consistent")

    monkeypatch.setattr(death_watch, "_Libc", Bare)
    assert death_watch.is_available() is False
