"""The controller with made-up workers after losses: the run goes on, or ends and says why it cannot."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from elaswave_spmd.assembly import plan_run
from elaswave_spmd.controller import Controller, data_spec
from elaswave_spmd.data import prepare_data
from elaswave_spmd.errors import RunError, WorkerError
from elaswave_spmd.observe import RunDir, RunObserver, read_events, read_metrics
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.links import socket_directory
from elaswave_spmd.runtime.zygote import Exited, Zygote
from elaswave_spmd.sharding.pages import ModelLayout
from tests.unit.made_up_workers import Story, settings_in

STEPS = 4
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

    def run(tell: Tell, **elastic: Any) -> Told:
        settings = settings_in(tmp_path, STEPS, **elastic)
        data = prepare_data(data_spec(settings))
        plan = plan_run(settings, data)
        story = Story(lambda story: tell(story, plan.description.layout))
        observer = RunObserver(RunDir.create(tmp_path / "run", "", model="m", mesh="dp2"), board=False)
        controller = Controller(plan, data, cast(Zygote, story.workers), observer, scratch, start_timeout_s=60.0)
        error = None
        try:
            with observer:
                controller.run()
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
        assert (place.stages, place.unit_counts) == (((0,),), ((2,),)) and place.addresses.keys() == {0}
        assert story.prepares(0)[0] == m.Prepare(1, -1), "at once"
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


def test_a_worker_that_asks_to_leave_is_let_go(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.workers.say(m.Leaving(1))
        story.until_epoch(0, {0})
        story.until(lambda: m.Stop() in story.heard[1])
        story.dead.add(1)
        story.workers.end(Exited(rank=1, pid=71, code=0, signal=None))
        the_rest(story, layout, 0)

    run = told(tell)
    assert run.error is None and run.event("leave")["ranks"] == [1] and "fail" not in run.kinds
    assert not run.story.workers.killed


def test_a_worker_without_heartbeats_is_taken_for_lost_and_ended(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.silent.add(1)
        story.until_epoch(0, {0})
        story.dead.add(1)
        the_rest(story, layout, 0)

    run = told(tell)
    assert run.error is None and "no heartbeat for" in run.event("fail")["reason"]
    assert run.story.workers.killed == [1], "it may come back to life: it must not"


def test_a_second_crash_in_the_same_step_is_a_bug_and_shows_the_first_traceback(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.fail(1, 2, "Traceback ...\nValueError: a bug")
        story.until(lambda: story.prepares(0))
        story.fail(0, 2, "Traceback ...\nValueError: a bug, too")
        story.until(lambda: False)

    run = told(tell)
    assert isinstance(run.error, WorkerError) and (run.error.rank, run.error.report) == (
        1,
        "Traceback ...\nValueError: a bug",
    )
    assert run.event("stop")["message"] == "worker 1 failed: ValueError: a bug"


@pytest.mark.parametrize("exited", [Exited(0, 70, None, 11), Exited(0, 70, 7, None)], ids=["SIGSEGV", "exit code"])
def test_crashes_without_a_report_in_one_step_are_a_bug_too(told: Callable[..., Told], exited: Exited) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        story.start(0, 1)
        story.workers.end(Exited(1, 71, exited.code, exited.signal))
        story.dead.add(1)
        story.until(lambda: story.prepares(0))
        story.workers.end(exited)
        story.until(lambda: False)

    run = told(tell)
    assert type(run.error) is RunError and "as worker 1 did in the same step 1" in str(run.error)


def test_a_crash_in_another_step_is_another_loss(told: Callable[..., Told]) -> None:
    """Nobody is left then; what the last one said is shown."""

    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.fail(1, 2, "Traceback ...\nValueError: in step 2")
        story.until_epoch(0, {0})
        story.apply(2, 0)
        story.fail(0, 3, "Traceback ...\nValueError: in step 3")
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
    assert type(run.error) is RunError and str(run.error).startswith("the run cannot go on: no worker is left.")
    assert run.event("stop")["message"] == str(run.error)
    assert not (run.folder / "summary.json").exists()


def test_too_few_workers_end_the_run(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.kill(1)
        story.until(lambda: False)

    run = told(tell, min_workers=2)
    assert "1 workers are left, elastic.min_workers is 2" in str(run.error)


def test_a_run_that_is_not_elastic_ends_with_its_first_loss(told: Callable[..., Told]) -> None:
    def tell(story: Story, layout: ModelLayout) -> None:
        one_step(story)
        story.kill(1)
        story.until(lambda: False)

    run = told(tell, enabled=False)
    assert str(run.error) == "worker 1 (pid 71) was ended by signal 9 (SIGKILL)"
    assert "fail" not in run.kinds and not run.story.prepares(0)
