"""Signals from outside to workers of a running job, at whatever moment they come."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.faults.fault_runs import TINY, Bits, Changes, all_events, go_on, patient, survived
from tests.multiprocess.real_runs import Launched, eventually, launch, write_text

STEPS = 100
Undisturbed = Callable[[int], Bits]


def wait_for_event(run: Launched, kind: str) -> None:
    """Returns when an event of this kind is in events.jsonl."""
    events = run.folder / "run" / "events.jsonl"
    eventually(lambda: f'"event": "{kind}"' in events.read_text(), run.process)


def test_kill_9_typed_on_a_worker(tmp_path: Path, undisturbed: Undisturbed) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *TINY, *patient(tmp_path), f"train.steps={STEPS}", "mesh=dp2_pp2", "sharding=zero3") as run:
        run.wait_for_steps(4)
        os.kill(run.workers()[2], signal.SIGKILL)
        go_on(run.folder)
        changes = survived(tmp_path, run.finish())
    assert changes.ranks("fail") == [[2]] and not changes.of_kind("leave"), all_events(tmp_path)
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)


def test_kill_minus_term_typed_on_a_worker(tmp_path: Path, undisturbed: Undisturbed) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *TINY, *patient(tmp_path), f"train.steps={STEPS}", "mesh=dp3", "sharding=zero2") as run:
        run.wait_for_steps(4)
        os.kill(run.workers()[0], signal.SIGTERM)
        go_on(run.folder)
        changes = survived(tmp_path, run.finish())
    assert changes.ranks("leave") == [[0]] and not changes.of_kind("fail"), all_events(tmp_path)
    # That nothing is computed again is held by the walkthrough, which sees who had begun what: on a busy machine the
    # Prepare may reach a worker in the middle of the next step, which it then answers at once (docs/protocol.md, C1).
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)


def test_a_stopped_worker_that_goes_on_finds_itself_fenced(tmp_path: Path, undisturbed: Undisturbed) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *TINY, *patient(tmp_path), f"train.steps={STEPS}", "mesh=dp4", "sharding=zero3") as run:
        run.wait_for_steps(4)
        victim = run.workers()[1]
        os.kill(victim, signal.SIGSTOP)
        wait_for_event(run, "fail")
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
        eventually(lambda: victim not in run.processes(), run.process)
        go_on(run.folder)
        changes = survived(tmp_path, run.finish())
    assert changes.ranks("fail") == [[1]] and "no heartbeat" in changes.of_kind("fail")[0]["reason"], all_events(
        tmp_path
    )
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)


def test_a_worker_that_stands_still_for_a_moment_stays(tmp_path: Path, undisturbed: Undisturbed) -> None:
    write_text(tmp_path)
    # Half a second, and as much more as a busy machine keeps this test from going on.
    patience = "timeouts.suspect=20", "timeouts.status=22", "timeouts.leave=24"
    words = [*TINY, *patience, *patient(tmp_path), f"train.steps={STEPS}", "mesh=dp2_pp2"]
    with launch(tmp_path, *words) as run:
        run.wait_for_steps(4)
        victim = run.workers()[3]
        os.kill(victim, signal.SIGSTOP)
        steps = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        with suppress(TimeoutError):
            signal.sigtimedwait([], 0.5)
        os.kill(victim, signal.SIGCONT)
        go_on(run.folder)
        changes = survived(tmp_path, run.finish())
    assert steps < STEPS and not changes.events, all_events(tmp_path)
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)


def test_a_worker_is_killed_while_the_fork_server_stands_still(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The others go on at once; its end is told by the death watch."""
    write_text(tmp_path)
    with launch(tmp_path, *TINY, *patient(tmp_path), f"train.steps={STEPS}", "mesh=dp3", "sharding=zero2") as run:
        run.wait_for_steps(4)
        victim, fork_server = run.workers()[1], run.fork_server()
        os.kill(fork_server, signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        wait_for_event(run, "recovered")
        os.kill(fork_server, signal.SIGCONT)
        go_on(run.folder)
        changes = survived(tmp_path, run.finish())
    assert changes.ranks("fail") == [[1]], all_events(tmp_path)
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)


def test_two_killed_by_one_command(tmp_path: Path, undisturbed: Undisturbed) -> None:
    write_text(tmp_path)
    settings = [f"train.steps={STEPS}", "mesh.stages=[3,2]", "sharding=zero1", "mirror.count=2"]
    with launch(tmp_path, *TINY, *patient(tmp_path), *settings) as run:
        run.wait_for_steps(4)
        workers = run.workers()
        for victim in (workers[1], workers[4]):
            os.kill(victim, signal.SIGKILL)
        go_on(run.folder)
        changes = survived(tmp_path, run.finish())
    assert sorted(rank for ranks in changes.ranks("fail") for rank in ranks) == [1, 4], all_events(tmp_path)
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)


def test_one_that_is_lost_while_a_newcomer_joins(tmp_path: Path, undisturbed: Undisturbed) -> None:
    write_text(tmp_path)
    # Two mirrors: the copies that the first loss took may not be complete again when the second comes.
    settings = [f"train.steps={STEPS}", "mesh=dp3", "sharding=zero3", "elastic.replace=true", "mirror.count=2"]
    with launch(tmp_path, *TINY, *patient(tmp_path), *settings) as run:
        run.wait_for_steps(4)
        os.kill(run.workers()[0], signal.SIGKILL)
        wait_for_event(run, "join")
        os.kill(run.workers()[0], signal.SIGKILL)  # its copies have only begun to reach the newcomer
        go_on(run.folder)
        changes = survived(tmp_path, run.finish())
    assert changes.ranks("fail") == [[0], [1]] and changes.ranks("join")[0] == [3], all_events(tmp_path)
    assert Changes.of(tmp_path / "run").epochs[-1] >= 3
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)
