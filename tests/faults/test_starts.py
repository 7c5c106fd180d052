"""Workers that are lost while workers start, in the place of a lost one, and as spares: real processes and signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.controller.admin_client import ask
from elaswave_spmd.errors import ControlError, DataError
from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from tests.faults.fault_runs import PATIENT, TINY, Bits, Changes, all_events
from tests.multiprocess import held_model
from tests.multiprocess.real_runs import Done, Launched, eventually, launch, write_text

STEPS = 40
Undisturbed = Callable[[int], Bits]


@dataclass
class Held:
    """A run whose workers start when a test lets them."""

    run: Launched
    hold: Path

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind by now."""
        with suppress(DataError):
            return [event for event in read_events(self.run.folder / "run") if event["event"] == kind]
        return []

    def wait_for(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Waits until there are so many events of a kind; the last of these."""
        eventually(lambda: len(self.events(kind)) >= count, self.run.process)
        return self.events(kind)[count - 1]

    def held(self) -> list[int]:
        """Process ids of the workers that are held before they are ready, in the order in which they came there."""
        living = self.run.processes()
        found = sorted(self.hold.glob("at-*"), key=lambda path: path.stat().st_mtime_ns)
        return [pid for path in found if (pid := int(path.name[3:])) in living and not self.is_let_go(pid)]

    def is_let_go(self, pid: int) -> bool:
        return (self.hold / f"go-{pid}").exists() or (self.hold / "go").exists()

    def wait_for_held(self, count: int) -> list[int]:
        eventually(lambda: len(self.held()) >= count, self.run.process)
        return self.held()

    def wait_for_new(self, *known: int) -> int:
        """Waits until a worker that is none of these is held. Its process id."""
        eventually(lambda: set(self.held()) - {*known}, self.run.process)
        return min(set(self.held()) - {*known})

    def let_go(self, *pids: int) -> None:
        """These start, or all, from now on."""
        for name in [f"go-{pid}" for pid in pids] or ["go"]:
            (self.hold / name).touch()

    def pids(self) -> dict[int, int]:
        """Rank -> process id, of the workers that the controller knows."""
        status = ask(str(self.run.folder / "run"), {"command": "status"})
        return {w["rank"]: w["pid"] for name in ("members", "newcomers", "spares") for w in status[name] if w["pid"]}

    def wait_until_ready_but(self, missing: int) -> None:
        """Waits until the controller waits for no other worker of the first mesh than this one."""

        def is_ready() -> bool:
            with pytest.raises(ControlError) as caught:
                ask(str(self.run.folder / "run"), {"command": "add", "count": 1})
            return f"worker {missing} has not started yet" in str(caught.value)

        eventually(is_ready, self.run.process)

    def finish(self) -> Done:
        self.let_go()
        (self.hold / "end").touch()
        return self.run.finish()


@contextmanager
def held_run(folder: Path, *settings: str) -> Iterator[Held]:
    write_text(folder)
    model = held_model.write(folder, folder / "hold")
    with launch(folder, *TINY, *model, f"train.steps={STEPS}", *settings) as run:
        yield Held(run, folder / "hold")


def assert_bits(folder: Path, undisturbed: Undisturbed, done: Done) -> None:
    assert (done.code, done.err) == (0, ""), done.err
    assert Bits.of(folder / "run") == undisturbed(STEPS)


@pytest.mark.parametrize(("phase", "replace"), [("spawn", True), ("spawn", False), ("import", False), ("ready", True)])
def test_a_worker_that_is_killed_while_workers_start(
    tmp_path: Path, undisturbed: Undisturbed, phase: str, replace: bool
) -> None:
    """At its birth; before it is ready; when it is ready, and others are not."""
    with held_run(tmp_path, *PATIENT, "mesh=dp3", "sharding=zero2", f"elastic.replace={replace}".lower()) as held:
        if phase == "spawn":
            eventually(held.run.workers, held.run.process)
            victim = held.run.workers()[0]
        else:
            held.wait_for_held(3)
            victim = held.pids()[1]
        if phase == "ready":
            held.let_go(victim, held.pids()[0])
            held.wait_until_ready_but(2)
        os.kill(victim, signal.SIGKILL)
        fail = held.wait_for("fail")
        assert_bits(tmp_path, undisturbed, held.finish())
    assert fail["phase"] == "start" and len(fail["ranks"]) == 1 and "SIGKILL" in fail["reason"]
    assert not Changes.of(tmp_path / "run").of_kind("join"), all_events(tmp_path)
    assert {line.workers for line in read_metrics(tmp_path / "run")} == {3 if replace else 2}
    assert read_summary(tmp_path / "run")["lost_workers"] == {"start": 1, "run": 0, "join": 0, "spare": 0}
    (begin,) = [event for event in read_events(tmp_path / "run") if event["event"] == "begin"]
    assert begin["mesh"] == ("dp3" if replace else "dp2")


def test_a_whole_stage_is_lost_while_workers_start(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Nothing is lost with it: the other stage gives it one of its workers."""
    with held_run(tmp_path, *PATIENT, "mesh=dp2_pp2", "sharding=zero1") as held:
        held.wait_for_held(4)
        for rank in (2, 3):
            os.kill(held.pids()[rank], signal.SIGKILL)
        held.wait_for("fail", 2)
        assert_bits(tmp_path, undisturbed, held.finish())
    (begin,) = [event for event in read_events(tmp_path / "run") if event["event"] == "begin"]
    assert begin["stages"] == [[0], [1]]


def test_a_worker_that_is_stopped_after_it_was_ready(tmp_path: Path, undisturbed: Undisturbed) -> None:
    with held_run(tmp_path, "mesh=dp2", "sharding=zero3", "elastic.replace=true") as held:
        held.wait_for_held(2)
        pids = held.pids()
        held.let_go(pids[0])
        held.wait_until_ready_but(1)
        os.kill(pids[0], signal.SIGSTOP)
        fail = held.wait_for("fail")
        assert_bits(tmp_path, undisturbed, held.finish())
    assert (fail["ranks"], fail["phase"]) == ([0], "start") and "no heartbeat" in fail["reason"]


def test_a_worker_that_is_stopped_before_it_is_ready_is_late(tmp_path: Path, undisturbed: Undisturbed) -> None:
    settings = ["timeouts.status=5", "timeouts.progress=30", "timeouts.start=40"]
    with held_run(tmp_path, "mesh=dp2", *settings) as held:
        held.wait_for_held(2)
        os.kill(held.pids()[1], signal.SIGSTOP)
        held.let_go()
        fail = held.wait_for("fail")
        assert_bits(tmp_path, undisturbed, held.finish())
    assert (fail["ranks"], fail["phase"]) == ([1], "start") and "not ready after" in fail["reason"]


def test_a_worker_that_is_asked_to_leave_while_workers_start_goes(tmp_path: Path, undisturbed: Undisturbed) -> None:
    with held_run(tmp_path, *PATIENT, "mesh=dp3") as held:
        held.wait_for_held(3)
        os.kill(held.pids()[1], signal.SIGTERM)
        held.let_go(held.pids()[1])
        fail = held.wait_for("fail")
        assert_bits(tmp_path, undisturbed, held.finish())
    assert (fail["ranks"], fail["phase"]) == ([1], "start") and "exit code 0" in fail["reason"]


@pytest.mark.parametrize("min_workers", [2, 1])
def test_too_few_are_left_to_start(tmp_path: Path, min_workers: int) -> None:
    with held_run(tmp_path, *PATIENT, "mesh=dp2", f"elastic.min_workers={min_workers}") as held:
        for pid in held.wait_for_held(2)[: 3 - min_workers]:
            os.kill(pid, signal.SIGKILL)
        done = held.run.finish()
    assert done.code == 1 and f"elastic.min_workers is {min_workers}" in done.err and "SIGKILL" in done.err, done.err
    assert "Traceback" not in done.err and "nothing to resume" in done.err


@pytest.mark.parametrize(
    ("how", "code", "text"), [("raise", 2, "ValueError: a bug in the model"), ("crash", 1, "SIGSEGV")]
)
def test_a_bug_in_the_users_program_ends_the_run_at_once(tmp_path: Path, how: str, code: int, text: str) -> None:
    """However many replacements there might be. What raises is a constructor, which is bad input on any worker."""
    with held_run(tmp_path, *PATIENT, "mesh=dp2", "elastic.replace=true") as held:
        (held.hold / how).touch()
        held.let_go()
        done = held.run.finish()
    assert done.code == code and text in done.err, done.err
    assert len(list(held.hold.glob("at-*"))) <= 4


def test_a_worker_that_is_killed_while_workers_of_a_restart_start(tmp_path: Path, undisturbed: Undisturbed) -> None:
    settings = ["mesh=dp3", "sharding=zero2", "mirror.count=1", "checkpoint.every=2", "elastic.replace=true"]
    with held_run(tmp_path, *PATIENT, *settings) as held:
        held.let_go()
        held.run.wait_for_steps(5)
        held.wait_for("checkpoint")  # a busy disk may take longer than the steps after it
        (held.hold / "go").unlink()
        pids = held.pids()
        for rank in (0, 1):  # each is the mirror of some of the other's pages
            os.kill(pids[rank], signal.SIGSTOP)
        for rank in (0, 1):
            os.kill(pids[rank], signal.SIGKILL)
        held.wait_for("restart")

        again: list[int] = []

        def all_are_held_again() -> bool:
            """The workers of the restart; a replacement of before, begun between the deaths, is none."""
            with suppress(ControlError):
                now, all_held = held.pids(), held.held()
                again[:] = [pid for rank in range(3) if (pid := now.get(rank, 0)) in all_held and pid != pids[rank]]
            return len(again) == 3

        eventually(all_are_held_again, held.run.process)
        os.kill(again[2], signal.SIGKILL)
        eventually(lambda: any(event.get("phase") == "start" for event in held.events("fail")), held.run.process)
        assert_bits(tmp_path, undisturbed, held.finish())
    assert read_summary(tmp_path / "run")["lost_workers"]["start"] == 1


# ---- replacements


def kill_a_worker_and_its_replacement(held: Held) -> None:
    """Kills worker 1 after step 3, and the one that takes its place while it starts."""
    held.let_go()
    held.run.wait_for_steps(3)
    (held.hold / "go").unlink()
    pids = held.pids()
    os.kill(pids[1], signal.SIGKILL)
    os.kill(held.wait_for_new(*pids.values()), signal.SIGKILL)


def test_a_replacement_that_dies_before_it_joins_is_replaced(tmp_path: Path, undisturbed: Undisturbed) -> None:
    with held_run(tmp_path, *PATIENT, "mesh=dp2", "elastic.replace=true") as held:
        kill_a_worker_and_its_replacement(held)
        held.wait_for("fail", 2)
        held.let_go()
        held.wait_for("join")
        assert_bits(tmp_path, undisturbed, held.finish())
    changes = Changes.of(tmp_path / "run")
    assert changes.ranks("join") == [[3]] and [e["phase"] for e in changes.of_kind("fail")] == ["run", "join"]


def test_the_limit_of_replacements_is_said_once(tmp_path: Path, undisturbed: Undisturbed) -> None:
    settings = ["mesh=dp2", "elastic.replace=true", "elastic.replacements_per_minute=1"]
    with held_run(tmp_path, *PATIENT, *settings) as held:
        kill_a_worker_and_its_replacement(held)
        limit = held.wait_for("replacements")
        done = held.finish()
        assert_bits(tmp_path, undisturbed, done)
    assert (limit["missing"], limit["per_minute"]) == (1, 1)
    assert done.out.count("elastic.replacements_per_minute=1") == 1, done.out


# ---- spares


def test_a_spare_takes_a_lost_workers_place_in_the_same_epoch(tmp_path: Path, undisturbed: Undisturbed) -> None:
    with held_run(tmp_path, *PATIENT, "mesh=dp2", "sharding=zero2", "elastic.spares=1") as held:
        held.let_go()
        held.wait_for("spare")
        held.run.wait_for_steps(3)
        status = ask(str(tmp_path / "run"), {"command": "status"})
        assert [(w["rank"], w["ready"]) for w in status["spares"]] == [(2, True)] and not status["newcomers"]
        os.kill(held.pids()[1], signal.SIGKILL)
        join = held.wait_for("join")
        held.wait_for("spare", 2)
        os.kill(held.pids()[3], signal.SIGKILL)  # the next spare
        held.wait_for("spare", 3)
        assert_bits(tmp_path, undisturbed, held.finish())
    fails = Changes.of(tmp_path / "run").of_kind("fail")
    assert [(event["ranks"], event["phase"]) for event in fails] == [([1], "run"), ([3], "spare")]
    assert join["ranks"] == [2] and join["mesh_epoch"] == fails[0]["mesh_epoch"] == 1, all_events(tmp_path)
    assert read_metrics(tmp_path / "run")[-1].workers == 2


def test_a_spare_that_is_stopped_is_found_and_replaced(tmp_path: Path, undisturbed: Undisturbed) -> None:
    with held_run(tmp_path, "mesh=dp2", "elastic.spares=1") as held:
        held.let_go()
        held.wait_for("spare")
        os.kill(held.pids()[2], signal.SIGSTOP)
        held.wait_for("spare", 2)
        assert_bits(tmp_path, undisturbed, held.finish())
    (fail,) = Changes.of(tmp_path / "run").of_kind("fail")
    assert (fail["ranks"], fail["phase"]) == ([2], "spare") and "no heartbeat" in fail["reason"]
