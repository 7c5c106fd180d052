"""The controller with made-up workers after losses: the run goes on, or ends and says why it cannot."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from elaswave_spmd.controller import failures
from elaswave_spmd.controller.io import ProcessIO
from elaswave_spmd.controller.launching import data_spec
from elaswave_spmd.controller.startup import make_controller
from elaswave_spmd.data import prepare_data
from elaswave_spmd.errors import RunError, WorkerError
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.run_dir import RunDir, RunObserver, read_events, read_metrics
from elaswave_spmd.run_dir.checkpoint_shard import checkpoint_path, write_shard
from elaswave_spmd.run_dir.checkpoints import load_newest_good
from elaswave_spmd.run_dir.journal import Ballot
from elaswave_spmd.runtime.processes.fork_server_client import Exited, ForkServerClient
from elaswave_spmd.runtime.transport.frames import Message
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links, socket_directory
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.worker.optimizers import AdamW
from elaswave_spmd.worker.plan_run import plan_run
from tests.unit.controller.made_up_workers import Story, run_to_end, settings_in
from tests.waiting import PATIENCE_S

STEPS = 4
# Threads of a busy machine are late: nobody is to be lost for that, but where a test says so.
PATIENT = {"suspect": 60.0, "status": 70.0, "progress": 80.0, "leave": 90.0}
# Whoever is late here is late for good. Who is not may be late by three seconds.
QUICK = {"heartbeat": 0.05, "suspect": 4.0, "status": 4.2, "join": 4.4, "leave": 4.4}
SHORT_START = {"heartbeat": 0.05, "suspect": 3.6, "status": 3.8, "progress": 4.0, "start": 4.2, "join": 4.2}
Tell = Callable[[Story, ModelLayout], None]


@dataclass(frozen=True)
class Told:
    story: Story
    error: BaseException | None
    folder: Path

    @property
    def kinds(self) -> list[str]:
        return [str(event["event"]) for event in read_events(self.folder)]

    def event(self, kind: str) -> dict[str, Any]:
        (found,) = [event for event in read_events(self.folder) if event["event"] == kind]
        return found


@pytest.fixture
def scratch() -> Iterator[str]:
    path = socket_directory()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def told(scratch: str, tmp_path: Path) -> Callable[..., Told]:
    """Runs the controller over a story to its end."""

    def run(tell: Tell, first_limit: int | None = None, **elastic: Any) -> Told:
        settings = settings_in(tmp_path, STEPS, **{"timeouts": PATIENT, **elastic})
        data = prepare_data(data_spec(settings))
        plan = plan_run(settings, data)
        story = Story(lambda story: tell(story, plan.description.layout))
        story.workers.limit = first_limit
        observer = RunObserver(RunDir.create(tmp_path / "run", "", model="m", mesh="dp2"), board=False)
        fork_server = cast(ForkServerClient, story.workers)
        controller = make_controller(plan, fork_server, observer, scratch)
        error = None
        try:
            with observer:
                run_to_end(controller)
        except (RunError, AssertionError) as caught:
            error = caught
        story.end()
        return Told(story, error, tmp_path / "run")

    return run


def one_step(story: Story) -> None:
    """Both workers have their places, and have done step 1."""
    story.start(0, 1)
    story.apply(1, 0, 1)


def the_rest(story: Story, layout: ModelLayout, *ranks: int) -> None:
    for step in range(story.versions[ranks[0]] + 1, STEPS + 1):
        story.apply(step, *ranks)
    story.finish(layout)


def test_a_run_goes_on_after_one_loss(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.kill(1)
        place = story.until_epoch(0, {0})
        assert (place.stages, place.microbatch_counts) == (((0,),), ((2,),)) and place.addresses.keys() == {0}
        assert story.prepares(0)[0] == m.Prepare(1, m.AT_ONCE), "at once"
        story.workers.end(Exited(rank=1, pid=71, code=None, signal=9))  # said twice, it is one loss
        the_rest(story, layout, 0)

    run = told(tell)
    assert run.error is None and run.kinds[0] == "start" and run.kinds[-1] == "finish" and "stop" not in run.kinds
    fail = run.event("fail")
    assert fail["ranks"] == [1] and fail["after_step"] in (0, 1) and "SIGKILL" in fail["reason"]
    assert fail["mesh"] == "single" and fail["edit_ms"] >= 0
    lines = read_metrics(run.folder)
    assert [line.step for line in lines] == [1, 2, 3, 4] and [line.workers for line in lines][1:] == [1, 1, 1]
    assert run.story.workers.killed == [1], "for certain: a process may stand still"
    assert run.story.workers.ranks == [0, 1], "nobody was asked for in its place"


def test_a_lost_worker_is_replaced_where_the_settings_say_so(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.kill(1)
        story.until(lambda: 2 in story.workers.ranks)
        story.workers.start(2)
        place = story.until_epoch(2, {0, 2})
        assert place.addresses.keys() == {0, 2}
        story.apply(2, 0)
        story.versions[2] = 2
        the_rest(story, layout, 0, 2)

    run = told(tell, replace=True)
    assert run.error is None and run.event("fail")["ranks"] == [1] and run.event("join")["ranks"] == [2]


def test_a_replacement_that_cannot_be_started_is_lost_before_it_joined_and_the_run_goes_on(
    told: Callable[..., Told],
) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.workers.limit = 0
        story.kill(1)
        place = story.until_epoch(0, {0})
        assert place.addresses.keys() == {0}
        story.until(lambda: len(story.workers.not_started) >= 2)
        story.apply(2, 0)  # it trains meanwhile
        story.workers.limit = 1
        story.until(lambda: len(story.workers.ranks) == 3)  # one of the next ticks finds room
        newcomer = story.workers.ranks[-1]
        story.workers.start(newcomer)
        story.until_epoch(newcomer, {0, newcomer})
        story.apply(3, 0)
        story.versions[newcomer] = 3
        the_rest(story, layout, 0, newcomer)

    # Each tick is a try, as many as the story is late.
    run = told(tell, replace=True, replacements_per_minute=10_000)
    assert run.error is None
    fails = [event for event in read_events(run.folder) if event["event"] == "fail" and event.get("phase") == "join"]
    assert [event["ranks"] for event in fails] == [[rank] for rank in run.story.workers.not_started]
    why = "it could not be started: [Errno 11] Resource temporarily unavailable"
    assert fails[0]["message"] == f"worker 2 is lost before it joined ({why})" and fails[0]["reason"] == why
    assert run.event("join")["ranks"] == run.story.workers.ranks[2:]


def test_a_first_worker_that_cannot_be_started_ends_the_run(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        raise AssertionError("not reached")

    story_told = told(tell, first_limit=1)
    assert str(story_told.error) == "worker 1 could not be started: [Errno 11] Resource temporarily unavailable"


def test_a_worker_whose_death_nobody_can_watch_for_trains_with_the_others(
    told: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = ProcessIO.connect

    def connect_without_a_thread(io: ProcessIO, rank: int, address: str, *, holds_mutex: bool) -> str:
        return connect(io, rank, address, holds_mutex=holds_mutex) or ("can't start new thread" if rank else "")

    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        the_rest(story, layout, 0, 1)

    monkeypatch.setattr(ProcessIO, "connect", connect_without_a_thread)
    run = told(tell)
    assert run.error is None and "fail" not in run.kinds
    event = run.event("no_death_watch")
    assert event["ranks"] == [1] and event["reason"] == "can't start new thread"


def test_a_controller_that_cannot_receive_any_more_ends_with_the_cause(
    told: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, is_full = Links._file, threading.Event()

    def file_while_there_is_memory(links: Links, message: Message) -> None:
        if is_full.is_set() and links.me == CONTROLLER:
            raise MemoryError("no memory left")
        file(links, message)

    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        is_full.set()
        story.until(lambda: False)  # until the run ends

    monkeypatch.setattr(Links, "_file", file_while_there_is_memory)
    run = told(tell)
    why = "this process cannot receive messages any more: MemoryError: no memory left"
    assert str(run.error) == why and why in run.event("stop")["message"]


def let_worker_1_go(story: Story) -> None:
    """Worker 1 asks to leave, and is told to end. Its process is left to the test."""
    story.workers.say(m.Leaving(1))
    story.until_epoch(0, {0})
    story.until(lambda: m.Stop() in story.heard[1])
    story.dead.add(1)


def test_a_worker_that_asks_to_leave_is_let_go(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        let_worker_1_go(story)
        story.workers.end(Exited(rank=1, pid=71, code=0, signal=None))
        the_rest(story, layout, 0)

    run = told(tell)
    assert run.error is None and run.event("leave")["ranks"] == [1] and "fail" not in run.kinds
    assert not run.story.workers.killed


def test_a_worker_that_was_let_go_and_does_not_end_is_killed(told: Callable[..., Told]) -> None:
    """It hangs over a checkpoint that its disk does not take, say. Its machine would wait for it for ever."""

    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        let_worker_1_go(story)
        story.until(lambda: story.workers.killed == [1])
        story.workers.end(Exited(rank=1, pid=71, code=None, signal=9))
        the_rest(story, layout, 0)

    run = told(tell, timeouts={**PATIENT, "controller": 0.2, "shutdown": 0.5})
    assert run.error is None and run.kinds.count("killed") == 1 and "fail" not in run.kinds
    killed = run.event("killed")
    assert (killed["ranks"], killed["seconds"]) == ([1], 0.5) and "did not end within 0.5 s" in killed["message"]


def test_a_worker_without_heartbeats_is_taken_for_lost_and_ended(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.silent.add(1)
        story.until_epoch(0, {0})
        story.dead.add(1)
        the_rest(story, layout, 0)

    run = told(tell, timeouts=QUICK)
    assert run.error is None and "no heartbeat for" in run.event("fail")["reason"]
    assert run.story.workers.killed == [1], "it may come back to life: it must not"


def test_a_second_crash_in_the_same_step_is_a_bug_and_shows_the_first_traceback(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.fail(1, 2, "Traceback ...\nValueError: a bug")
        story.until(lambda: story.prepares(0))
        story.fail(0, 2, "Traceback ...\nValueError: a bug, too", stays=True)
        story.until(lambda: story.places(0)[-1].save)
        write(story, 0, layout, story.places(0)[-1])
        story.until(lambda: False)

    run = told(tell)
    assert isinstance(run.error, WorkerError) and (run.error.rank, run.error.report) == (
        1,
        "Traceback ...\nValueError: a bug",
    )
    assert run.event("stop")["message"] == "worker 1 failed: ValueError: a bug"
    assert f"Its state after step 1 is in {load_newest_good(run.folder)[0].path}" in str(run.error)


@pytest.mark.parametrize("exited", [Exited(0, 70, None, 11), Exited(0, 70, 7, None)], ids=["SIGSEGV", "exit code"])
def test_crashes_without_a_report_in_one_step_are_a_bug_too(told: Callable[..., Told], exited: Exited) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        story.start(0, 1)
        story.workers.end(Exited(1, 71, exited.code, exited.signal))
        story.dead.add(1)
        story.until(lambda: story.prepares(0))
        story.dead.add(0)
        story.workers.end(exited)
        story.until(lambda: False)

    run = told(tell)
    assert type(run.error) is RunError and "as worker 1 did in the same step 1" in str(run.error)


def test_a_crash_in_another_step_is_another_loss(told: Callable[..., Told]) -> None:
    """It is that of the only worker with the state, which is saved; what that said is shown."""

    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.fail(1, 2, "Traceback ...\nValueError: in step 2")
        story.until_epoch(0, {0})
        story.apply(2, 0)
        story.fail(0, 3, "Traceback ...\nValueError: in step 3", stays=True)
        story.until(lambda: story.places(0)[-1].save)
        write(story, 0, layout, story.places(0)[-1])
        story.until(lambda: False)

    run = told(tell)
    assert isinstance(run.error, WorkerError) and run.error.rank == 0 and "in step 3" in run.error.report
    assert run.event("fail")["reason"] == "an exception: ValueError: in step 2"


def test_the_last_worker_ends_the_run(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.kill(1)
        story.until_epoch(0, {0})
        story.kill(0)
        story.until(lambda: False)

    run = told(tell)
    assert type(run.error) is RunError
    assert str(run.error).startswith("the run cannot go on: no worker is left (worker 0")  # not of 1, which has its own
    assert run.event("stop")["message"] == str(run.error)
    assert not (run.folder / "summary.json").exists()


def write(story: Story, rank: int, layout: ModelLayout, place: m.Reconfigure) -> None:
    """A worker that has all pages writes them, all zeros, and says so."""
    orders = story.workers.specs[rank]["checkpoints"]
    runs = [
        (layer.index, block.first_page, block.first_page + block.num_pages)
        for layer in layout.layers
        for block in layer.state_blocks
    ]
    spans = {run: layout.layers[run[0]].span(run[1], run[2]) for run in runs}
    kinds = ("master", *AdamW().state_names)
    arrays = {run: {kind: np.zeros(b - a, np.float32) for kind in kinds} for run, (a, b) in spans.items()}
    folder = checkpoint_path(orders["run_dir"], place.version)
    ballot = Ballot(orders["incarnation"], place.epoch)
    shard = write_shard(folder, place.version, ballot, rank, arrays, run=orders["run"])
    content = (shard.name, shard.num_bytes, shard.sha256, shard.pages)
    story.workers.say(m.ShardWritten(place.version, rank, place.epoch, *content))


def test_too_few_workers_write_a_checkpoint_and_stop(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.kill(1)
        place = story.until_epoch(0, {0})
        assert place.save and (place.version, place.recovery_plan) == (1, ())
        write(story, 0, layout, place)
        story.until(lambda: False)

    run = told(tell, min_workers=2)
    checkpoint = run.folder / "checkpoints" / "step_00000001"
    assert type(run.error) is RunError and str(run.error) == (
        f"the run stops: 1 workers are left, elastic.min_workers is 2. Its state after step 1 is in {checkpoint}"
    )
    assert load_newest_good(run.folder)[0].path == checkpoint
    assert run.kinds[-1] == "stop" and run.event("stop")["message"] == str(run.error)
    assert run.event("fail")["ranks"] == [1] and run.event("checkpoint")["step"] == 1
    assert not (run.folder / "summary.json").exists()


def test_what_went_wrong_with_an_earlier_attempt_at_the_same_step_does_not_count(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.workers.say(m.ShardWritten(1, 1, 0, error="those before it are still being written"))
        story.kill(1)
        place = story.until_epoch(0, {0})
        story.workers.say(m.ShardWritten(1, 0, 0, error="those before it are still being written"))
        write(story, 0, layout, place)
        story.until(lambda: False)

    run = told(tell, min_workers=2)
    assert "Its state after step 1 is in " in str(run.error) and load_newest_good(run.folder)[0].step == 1


def test_a_checkpoint_that_cannot_be_written_is_said(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.kill(1)
        place = story.until_epoch(0, {0})
        story.workers.say(m.ShardWritten(1, 0, place.epoch, error="the disk is full"))
        story.until(lambda: False)

    run = told(tell, min_workers=2)
    assert "Its state after step 1 could not be written: worker 0: the disk is full" in str(run.error)
    assert run.event("checkpoint_lost")["step"] == 1


def test_workers_that_never_write_are_not_waited_for_for_ever(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.kill(1)
        story.until(lambda: False)

    run = told(tell, min_workers=2, timeouts={**PATIENT, "controller": 0.1, "shutdown": 0.2})
    assert "could not be written: not within 0.2 s (timeouts.shutdown)" in str(run.error)


def test_an_exception_that_takes_too_many_is_shown_with_the_checkpoint(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.fail(1, 2, "Traceback ...\nValueError: a bug")
        write(story, 0, layout, story.until_epoch(0, {0}))
        story.until(lambda: False)

    run = told(tell, min_workers=2)
    assert "step_00000001" in str(run.error)
    assert str(run.error).endswith("worker 1 failed:\nTraceback ...\nValueError: a bug")
    assert "ValueError" not in run.event("stop")["message"]


def test_the_last_worker_that_is_asked_to_leave_writes_a_checkpoint(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        for rank in (0, 1):
            story.workers.say(m.Leaving(rank))
        story.until(lambda: story.places(0)[-1].save)
        write(story, 0, layout, story.places(0)[-1])
        story.until(lambda: False)

    run = told(tell)
    assert "0 stay, elastic.min_workers is 1. Its state after step 1 is in " in str(run.error)
    assert "fail" not in run.kinds and not run.story.workers.killed


# ---- whom nobody waits for


def test_the_first_workers_have_the_time_of_the_settings_to_start(told: Callable[..., Told]) -> None:
    """Who is late is lost, and the first mesh is formed without it."""

    def tell(story: Story, layout: ModelLayout) -> None:
        story.start(0)
        assert [r for s in story.places(0)[-1].stages for r in s] == [0] and story.places(0)[-1].epoch == 0
        story.workers.start(1)  # too late: nobody takes it
        story.versions[0] = 0
        the_rest(story, layout, 0)

    run = told(tell, timeouts=SHORT_START)
    assert run.error is None and run.story.workers.killed == [1] and run.kinds.count("fail") == 1
    fail = run.event("fail")
    assert (fail["ranks"], fail["phase"]) == ([1], "start") and "not ready after" in fail["reason"]
    assert (run.event("begin")["mesh"], run.event("begin")["stages"]) == ("single", [[0]])
    assert [line.workers for line in read_metrics(run.folder)] == [1] * STEPS


@pytest.mark.parametrize("ready", [False, True], ids=["before it is ready", "after that"])
def test_a_worker_that_is_killed_while_workers_start_is_replaced(told: Callable[..., Told], ready: bool) -> None:
    """The first mesh waits for the one in its place, and its epoch is the first."""

    def tell(story: Story, layout: ModelLayout) -> None:
        if ready:
            story.workers.start(1)
        story.kill(1)
        story.until(lambda: 2 in story.workers.ranks)
        story.start(0, 2)
        assert [r for s in story.places(0)[-1].stages for r in s] == [0, 2] and story.places(2)[-1].epoch == 0
        assert story.places(0)[-1].replicas, "nobody could have planned where replicas are on these workers"
        story.versions.update({0: 0, 2: 0})
        the_rest(story, layout, 0, 2)

    run = told(tell, replace=True)
    assert run.error is None and "join" not in run.kinds and run.story.workers.ranks == [0, 1, 2]
    assert (run.event("fail")["ranks"], run.event("fail")["phase"]) == ([1], "start")
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["lost_workers"] == {"start": 1, "run": 0, "join": 0, "spare": 0}


def test_with_too_few_workers_left_a_run_does_not_start(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        story.kill(1)
        story.until(lambda: False)

    run = told(tell, min_workers=2)
    text = (
        "1 workers are left, elastic.min_workers is 2, as 1 were lost while workers started "
        "(worker 1: worker 1 (pid 71) was ended by signal 9 (SIGKILL))"
    )
    assert text in str(run.error) and not run.story.places(0)


def test_a_worker_that_does_not_answer_is_taken_for_lost(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.mute.add(1)
        story.workers.say(m.Damaged(0, 0, 2, ()))
        story.until_epoch(0, {0})
        story.dead.add(1)
        the_rest(story, layout, 0)

    run = told(tell, timeouts=QUICK)
    assert run.error is None and "no answer to Prepare for" in run.event("fail")["reason"]
    assert run.story.workers.killed == [1]


def test_a_newcomer_that_is_never_ready_is_given_up_and_the_run_goes_on(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.kill(1)
        story.until(lambda: 2 in story.workers.ranks)
        story.until(lambda: 2 in story.workers.killed)
        story.workers.start(2)  # too late: nobody takes it
        the_rest(story, layout, 0)

    run = told(tell, replace=True, timeouts=QUICK)
    assert run.error is None and "join" not in run.kinds
    late = [event for event in read_events(run.folder) if event["event"] == "fail" and event["ranks"] == [2]]
    assert len(late) == 1 and "not ready after" in late[0]["reason"] and "before it joined" in late[0]["message"]
    assert [line.workers for line in read_metrics(run.folder)][-1] == 1


def test_a_worker_that_asked_to_leave_and_is_not_let_go_has_failed(told: Callable[..., Told]) -> None:
    """The step that it is to leave after does not end."""

    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.workers.say(m.Leaving(1))
        story.mute.add(0)
        story.until(lambda: story.prepares(0) and story.prepares(0)[-1].after == m.AT_ONCE)
        story.dead.add(1)
        story.workers.say(m.StepReport(story.prepares(0)[-1].epoch, 0, 1))
        story.mute.clear()
        story.until_epoch(0, {0})
        the_rest(story, layout, 0)

    run = told(tell, timeouts=QUICK)
    assert run.error is None and "it asked to leave" in run.event("fail")["reason"] and "leave" not in run.kinds
    assert run.story.workers.killed == [1]


# ---- a link


def test_a_link_that_is_lost_is_made_again_once(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.workers.say(m.LinkClosed(0, 1))
        story.until(lambda: story.places(1)[-1].epoch == 1)
        assert story.places(1)[-1].stages == ((0, 1),)
        story.apply(2, 0, 1)
        story.workers.say(m.LinksClosed(0, (1,)))
        story.until_epoch(0, {0})
        story.dead.add(1)
        the_rest(story, layout, 0)

    run = told(tell)
    assert run.error is None and run.event("link")["ranks"] == [0, 1]
    assert run.event("fail")["reason"] == "the link between workers 0 and 1 was lost again"
    assert run.event("fail")["ranks"] == [1] == run.story.workers.killed


def test_a_run_that_is_not_elastic_ends_with_its_first_loss(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.kill(1)
        story.until(lambda: False)

    run = told(tell, enabled=False)
    assert str(run.error) == "worker 1 (pid 71) was ended by signal 9 (SIGKILL)"
    assert "fail" not in run.kinds and not run.story.prepares(0)


def test_a_step_that_is_reported_after_the_end_of_a_process_is_recorded(
    told: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller hears of a process's end at once, and reads what its workers had sent before only then."""
    monkeypatch.setattr(failures, "_LAST_WORDS_S", PATIENCE_S)

    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.workers.end(Exited(rank=1, pid=71, code=1, signal=None))
        story.until(lambda: not story.workers.ended)
        story.apply(2, 1)  # on the link of what follows, so that it comes first
        story.fail(1, 3, "ValueError: a bug")
        story.until(lambda: False)

    run = told(tell, enabled=False)
    assert isinstance(run.error, WorkerError) and run.error.rank == 1
    assert [line.step for line in read_metrics(run.folder)] == [1, 2]
