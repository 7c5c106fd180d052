"""The controller with made-up workers: how it ends when they do not start, fail, are killed, or leave pages out."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import cast

import pytest

from elaswave_spmd.conf.schema import Timeouts
from elaswave_spmd.controller import failures as losses
from elaswave_spmd.controller import io as io_module
from elaswave_spmd.controller import startup as module
from elaswave_spmd.controller.launching import data_spec
from elaswave_spmd.controller.startup import make_controller
from elaswave_spmd.data import prepare_data
from elaswave_spmd.errors import ConfigError, RunError, WorkerError
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.admission import EPOCH
from elaswave_spmd.run_dir import RunDir, RunObserver, read_events
from elaswave_spmd.runtime.processes import fd_limit
from elaswave_spmd.runtime.processes.fork_server_client import Exited, ForkServerClient
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links, socket_directory
from elaswave_spmd.worker.message_limits import payload_limits
from elaswave_spmd.worker.plan_run import RunPlan, plan_run
from tests.unit.controller.made_up_workers import Script, Workers, run_to_end, settings_in


@pytest.fixture(scope="module", params=[True, False], ids=["elastic", "not elastic"])
def planned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    """While the first workers start, what a worker fails of by itself ends every run."""
    settings = settings_in(tmp_path_factory.mktemp("controller"), enabled=request.param)
    data = prepare_data(data_spec(settings))
    return plan_run(settings, data)


@pytest.fixture
def scratch() -> Iterator[str]:
    path = socket_directory()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def end(planned: RunPlan, scratch: str, tmp_path: Path) -> Callable[..., tuple[object, str]]:
    """Runs a script to its bad end: the error, and the message of the event `stop`."""

    def run(script: Script, start_timeout_s: float = 90.0, told: tuple[str, ...] = ()) -> tuple[object, str]:
        workers = Workers(script)
        observer = RunObserver(RunDir.create(tmp_path / "run", "", model="m", mesh="dp2"), board=False)
        fork_server = cast(ForkServerClient, workers)
        timeouts = Timeouts(suspect=60.0, status=70.0, progress=80.0, leave=90.0)  # these workers have no heartbeats
        object.__setattr__(timeouts, "start", start_timeout_s)  # shorter than the checks of settings allow
        plan = replace(planned, settings=replace(planned.settings, timeouts=timeouts))
        controller = make_controller(plan, fork_server, observer, scratch)
        with observer, pytest.raises((Exception, KeyboardInterrupt)) as caught:
            run_to_end(controller)
        workers.stop()
        start, *between, stop = read_events(tmp_path / "run")
        assert (start["event"], stop["event"]) == ("start", "stop")
        assert {event["event"] for event in between} <= {"short_of_peak", "fail", *told}
        assert not (tmp_path / "run" / "summary.json").exists()
        return caught.value, stop["message"]

    return run


KILLED = Exited(rank=1, pid=77, code=None, signal=9)
KILLED_TEXT = "worker 1 (pid 77) was ended by signal 9 (SIGKILL)"


def test_workers_that_do_not_start_are_named(end, planned: RunPlan) -> None:
    error, stop = end(lambda workers: None, start_timeout_s=0.3)
    assert isinstance(error, RunError)
    if not planned.settings.elastic.enabled:
        assert str(error) == stop == "workers 0, 1 did not start within 0.3 s"
        return
    why = (
        "0 workers are left, elastic.min_workers is 1, as 2 were lost while workers started (worker 0: not ready after"
    )
    assert stop.startswith(f"the run cannot go on: {why}") and "; worker 1: not ready after" in stop


def test_workers_that_have_started_have_time(end) -> None:
    timers: list[Timer] = []

    def slow(workers: Workers) -> None:
        workers.start(0, 1)

        def fails(rank: int) -> None:
            workers.say(m.Failed(rank, f"late {rank}", 1))
            workers.end(Exited(rank=rank, pid=76 + rank, code=1, signal=None))

        for rank in (0, 1):  # one is enough where the run is not elastic
            timers.append(Timer(3.5, fails, [rank]))
            timers[-1].start()

    error, _ = end(slow, start_timeout_s=3.0)
    for timer in timers:
        timer.join()
    # Each of them says it by a thread and a connection of its own: either may be heard first.
    assert isinstance(error, WorkerError) and error.report == f"late {error.rank}"


def test_a_killed_worker_is_the_cause_not_what_others_say_of_it(end) -> None:
    def script(workers: Workers) -> None:
        workers.unreaped.append(KILLED)
        workers.say(m.Failed(0, "RunError: could not connect to workers [1]"))

    error, stop = end(script)
    assert type(error) is RunError and str(error) == stop == KILLED_TEXT


def test_a_killed_worker_counts_before_one_that_ended_by_itself(end) -> None:
    def script(workers: Workers) -> None:
        workers.say(m.Failed(0, "RunError: could not connect to workers [1]"))
        workers.end(Exited(rank=0, pid=76, code=1, signal=None), KILLED)

    error, _ = end(script)
    assert type(error) is RunError and str(error) == KILLED_TEXT


def test_a_report_is_shown_where_nobody_was_killed(end) -> None:
    def script(workers: Workers) -> None:
        workers.unreaped.append(Exited(rank=0, pid=76, code=1, signal=None))
        workers.say(m.Failed(0, "Traceback ...\nValueError: a bug"))

    error, stop = end(script)
    assert isinstance(error, WorkerError) and error.rank == 0
    assert stop == "worker 0 failed: ValueError: a bug"


def test_an_exit_without_a_report_waits_only_for_its_own(end, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_LAST_WORDS_S", 0.3)

    def script(workers: Workers) -> None:
        workers.end(Exited(rank=1, pid=77, code=7, signal=None))
        poll = workers.poll

        def and_then() -> list[Exited]:
            if found := poll():
                workers.say(m.Failed(0, "RunError: could not connect to workers [1]"))
            return found

        monkeypatch.setattr(workers, "poll", and_then)

    error, _ = end(script)
    assert type(error) is RunError and str(error) == "worker 1 (pid 77) ended with exit code 7"


@pytest.mark.parametrize(
    ("error", "message"),
    [(KeyboardInterrupt(), "interrupted"), (AssertionError("first\nsecond"), "AssertionError: first")],
)
def test_every_end_leaves_its_reason(end, error: BaseException, message: str) -> None:
    def script(workers: Workers) -> None:
        raise error

    assert end(script) == (error, message)


def test_pages_that_never_came_are_missed(end) -> None:
    def script(workers: Workers) -> None:
        for rank in (0, 1):
            workers.say(m.Finished(rank, 0, {}, {}))

    error, _ = end(script)
    assert isinstance(error, RunError) and "pages of the trained weights have not come" in str(error)


@pytest.mark.parametrize("num_payloads", [1, 2])
def test_pages_that_are_no_numbers_are_refused(end, planned: RunPlan, num_payloads: int) -> None:
    """A payload of a few bytes more than its pages have, or in two parts, ended the run in an exception."""
    first, stop = planned.description.layout.layers[0].span(0, 1)
    num_bytes = 4 * (stop - first)

    def script(workers: Workers) -> None:
        workers.start(0, 1)
        parts = [bytes(num_bytes + 3)] if num_payloads == 1 else [bytes(num_bytes - 4), bytes(4)]
        workers._links[1].send(CONTROLLER, m.encode(m.FinalPages(0, 0, 1)), parts)
        for rank in (0, 1):
            workers.say(m.Finished(rank, 0, {}, {}))

    error, _ = end(script, told=("rejected",))
    assert isinstance(error, RunError) and "pages of the trained weights have not come" in str(error)


def test_what_was_refused_in_the_last_second_is_told(end, tmp_path: Path) -> None:
    """By the controller, which looks at its counts once a second, and by workers, between two heartbeats."""

    def script(workers: Workers) -> None:
        workers.start(0, 1)
        workers.say_as(0, m.Prepare(1))
        for rank in (0, 1):
            workers.say(m.Finished(rank, 0, {}, {}, (("a reason", 2 + rank),)))

    end(script, told=("rejected",))
    *_, last, stop = read_events(tmp_path / "run")
    assert (last["event"], stop["event"]) == ("rejected", "stop")
    assert last["totals"] == {"a reason": 5, EPOCH: 1}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Workers]:
    """The fork servers that `controller.run` starts."""
    found: list[Workers] = []

    def start(*_: object, **__: object) -> Workers:
        found.append(Workers(lambda workers: None))
        return found[-1]

    monkeypatch.setattr(module.ForkServerClient, "start", start)
    return found


def test_a_refused_link_leaves_no_directory(
    started: list[Workers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Links:
        assert (tmp_path / "run" / "config.yaml").exists()
        raise ConfigError("the link address could not be bound")

    monkeypatch.setattr(io_module, "Links", refuse)
    with pytest.raises(ConfigError, match="could not be bound"):
        module.run(settings_in(tmp_path))
    assert started[0].stopped and not (tmp_path / "run").exists()


def test_too_many_workers_for_the_open_files_are_refused_first(
    started: list[Workers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fd_limit.resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(ConfigError, match="ulimit -n"):
        module.run(settings_in(tmp_path))
    assert not started and not (tmp_path / "run").exists()


def test_plans_and_messages_count_the_average_of_the_weights(planned: RunPlan) -> None:
    settings = planned.settings
    averaged = plan_run(replace(settings, optim=replace(settings.optim, ema=0.9)), planned.data)
    for layer in planned.description.layout.layers:
        state, values, gradient = planned.bytes_of(layer.index)
        assert state == 3 * 4 * layer.num_state_elements, "adamw: the weights and two moments"
        assert averaged.bytes_of(layer.index) == (state + 4 * layer.num_state_elements, values, gradient)
        assert averaged.costs.layers[layer.index].state_bytes == averaged.bytes_of(layer.index)[0]
    assert averaged.description.layout == planned.description.layout
    before, after = payload_limits(planned), payload_limits(averaged)
    assert after == {**before, "PageState": before["PageState"] * 4 // 3}
