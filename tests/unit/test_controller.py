"""The controller with made-up workers: how it ends when they do not start, fail, are killed, or leave pages out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from typing import Any, cast

import pytest

from elaswave_spmd import controller as module
from elaswave_spmd import losses
from elaswave_spmd.assembly import RunPlan, plan_run
from elaswave_spmd.controller import Controller, data_spec
from elaswave_spmd.data import PreparedData, prepare_data
from elaswave_spmd.errors import ConfigError, RunError, WorkerError
from elaswave_spmd.observe import RunDir, RunObserver, read_events
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime import descriptors
from elaswave_spmd.runtime.links import CONTROLLER, Links, socket_directory
from elaswave_spmd.runtime.mailbox import Mailbox
from elaswave_spmd.runtime.zygote import Exited, Zygote
from elaswave_spmd.settings import Settings

Script = Callable[["Workers"], None]


class Workers:
    """In the zygote's place: two workers that do what `script` says once both have been asked for."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.ended: list[Exited] = []  # what `poll` says next
        self.unreaped: list[Exited] = []  # what the zygote would find if it looked now
        self.stopped = False
        self._read, self._write = os.pipe()
        self._links: dict[int, Links] = {}

    def ready(self) -> None: ...

    def spawn(self, rank: int, spec: dict[str, Any]) -> None:
        self._links[rank] = Links(rank, Mailbox(), directory=spec["directory"], token=bytes.fromhex(spec["token"]))
        self._links[rank].connect(CONTROLLER, spec["controller"])
        if rank == 1:
            self.script(self)

    def say(self, message: m.Ready | m.Failed | m.Finished) -> None:
        assert not self._links[message.rank].wait_connected([CONTROLLER], 10)
        self._links[message.rank].send(CONTROLLER, m.encode(message))

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            self.say(m.Ready(rank, self._links[rank].address))

    def end(self, *exits: Exited) -> None:
        self.ended += exits
        os.write(self._write, b"\n")

    def fileno(self) -> int:
        return self._read

    def poll(self) -> list[Exited]:
        found, self.ended = self.ended, []
        return found

    def signal(self, rank: int, number: int) -> bool:
        assert number == 0
        self.end(*self.unreaped)
        return True

    def stop(self, grace_s: float = 2.0) -> None:
        self.stopped = True
        for links in self._links.values():
            links.close()
        os.close(self._read)
        os.close(self._write)


def settings_in(folder: Path) -> Settings:
    (folder / "text.txt").write_text("a few words for a model that is never trained. " * 40)
    return Settings.from_dict(
        {
            "mesh": {"dp": 2},
            "model": {"target": "mlp", "layers": 1, "d_model": 8, "heads": 1},
            "data": {"name": "text", "path": str(folder / "text.txt"), "cache": str(folder / "cache")},
            "train": {"seq_len": 8, "global_batch": 4, "steps": 2},
            "unit": {"size": 2},
            "elastic": {"enabled": False},  # the first loss is the end
            "run": {"dir": str(folder / "run"), "tensorboard": False},
        }
    )


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunPlan, PreparedData]:
    settings = settings_in(tmp_path_factory.mktemp("controller"))
    data = prepare_data(data_spec(settings))
    return plan_run(settings, data), data


@pytest.fixture
def scratch() -> Iterator[str]:
    path = socket_directory()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def end(planned: tuple[RunPlan, PreparedData], scratch: str, tmp_path: Path) -> Callable[..., tuple[object, str]]:
    """Runs a script to its bad end: the error, and the message of the event `stop`."""

    def run(script: Script, start_timeout_s: float = 60.0) -> tuple[object, str]:
        workers = Workers(script)
        observer = RunObserver(RunDir.create(tmp_path / "run", "", model="m", mesh="dp2"), board=False)
        zygote = cast(Zygote, workers)
        controller = Controller(*planned, zygote, observer, scratch, start_timeout_s=start_timeout_s)
        with observer, pytest.raises((Exception, KeyboardInterrupt)) as caught:
            controller.run()
        workers.stop()
        start, stop = read_events(tmp_path / "run")
        assert (start["event"], stop["event"]) == ("start", "stop")
        assert not (tmp_path / "run" / "summary.json").exists()
        return caught.value, stop["message"]

    return run


KILLED = Exited(rank=1, pid=77, code=None, signal=9)
KILLED_TEXT = "worker 1 (pid 77) was ended by signal 9 (SIGKILL)"


def test_workers_that_do_not_start_are_named(end) -> None:
    error, stop = end(lambda workers: workers.start(0), start_timeout_s=0.3)
    assert isinstance(error, RunError)
    assert str(error) == stop == "workers [1] did not start within 0.3 s"


def test_workers_that_have_started_have_time(end) -> None:
    def slow(workers: Workers) -> None:
        workers.start(0, 1)
        Timer(0.6, workers.say, [m.Failed(0, "late")]).start()

    error, _ = end(slow, start_timeout_s=0.3)
    assert isinstance(error, WorkerError) and error.report == "late"


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
        Timer(0.1, workers.say, [m.Failed(0, "RunError: could not connect to workers [1]")]).start()

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
            workers.say(m.Finished(rank, 0, {}, 0))

    error, _ = end(script)
    assert isinstance(error, RunError) and "pages of the trained weights have not come" in str(error)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Workers]:
    """The zygotes that `controller.run` starts."""
    found: list[Workers] = []

    def start(*_: object, **__: object) -> Workers:
        found.append(Workers(lambda workers: None))
        return found[-1]

    monkeypatch.setattr(module.Zygote, "start", start)
    return found


def test_a_refused_link_leaves_no_directory(
    started: list[Workers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Links:
        assert (tmp_path / "run" / "config.yaml").exists()
        raise ConfigError("the link address could not be bound")

    monkeypatch.setattr(module, "Links", refuse)
    with pytest.raises(ConfigError, match="could not be bound"):
        module.run(settings_in(tmp_path))
    assert started[0].stopped and not (tmp_path / "run").exists()


def test_too_many_workers_for_the_open_files_are_refused_first(
    started: list[Workers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(ConfigError, match="ulimit -n"):
        module.run(settings_in(tmp_path))
    assert not started and not (tmp_path / "run").exists()
