"""An error of the controller's own ends a life: what its workers have written is made a checkpoint all the same."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller import startup
from elaswave_spmd.controller.outcomes import Outcome, RestartFrom, RunFinished, RunStopped
from elaswave_spmd.errors import DataError, FilesError, RunError
from elaswave_spmd.runtime.processes.stop_signals import StopSignals


class World:
    """A life whose controller ends as it is told, and what is done with its workers and its directory then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
        self.done: list[str] = []
        self.ends_by: Outcome | BaseException = RunFinished()
        self.fails_to_complete: Exception | None = None
        self.launcher = Mock()
        self.launcher.stop.side_effect = lambda *_, **__: self.done.append("stop")
        monkeypatch.setattr(startup, "complete", self._complete)
        for name in ("merge_trace", "remove_superfluous", "remove_unfinished"):
            monkeypatch.setattr(startup, name, Mock())
        start = Mock()
        start.close.side_effect = lambda: self.done.append("unlock")
        self.living = {0: 3, 1: 1}  # rank -> looks at which it lives
        self.protocol = SimpleNamespace(started=True, placement=SimpleNamespace(mesh=SimpleNamespace(members=(0, 1))))
        self.launcher.signal.side_effect = self._is_living
        self.launcher.may_live.side_effect = list
        monkeypatch.setattr(startup, "_SAVED_S", 0.0)
        self.plan = Mock()
        self.plan.settings.timeouts.orphan_grace = 1000.0
        controller = SimpleNamespace(run=self._run, stop_requested=Mock(), protocol=self.protocol)
        observer = Mock(__enter__=Mock(), __exit__=Mock(return_value=None))
        self.begun: Any = SimpleNamespace(
            run_dir=SimpleNamespace(path=run_dir),
            start=start,
            observer=observer,
            frequencies=contextlib.nullcontext(),
            controller=controller,
        )

    def _run(self) -> Outcome:
        if isinstance(self.ends_by, BaseException):
            raise self.ends_by
        return self.ends_by

    def _is_living(self, rank: int, number: int) -> bool:
        assert number == 0
        self.living[rank] -= 1
        self.done.append("wait")
        return self.living[rank] >= 0

    def _complete(self, *_: object) -> None:
        self.done.append("complete")
        if self.fails_to_complete is not None:
            raise self.fails_to_complete

    def control(self) -> list[str]:
        """Carry the life out. Returns what was done, each once."""
        with StopSignals() as signals:
            lives = startup._Lives(Settings(), signals)
            lives._control(self.plan, self.launcher, self.begun)
        return list(dict.fromkeys(self.done))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return World(monkeypatch, tmp_path)


@pytest.mark.parametrize("error", [OverflowError("a bug"), RunError("they contradict each other")])
def test_what_workers_have_written_is_completed_after_an_error(world: World, error: BaseException) -> None:
    world.ends_by = error
    with pytest.raises(type(error)):
        world.control()
    assert list(dict.fromkeys(world.done)) == ["wait", "stop", "complete", "unlock"]
    assert max(world.living.values()) < 0, "all have saved their state before they are ended"


@pytest.mark.parametrize("has_started", [False, True])
def test_workers_are_not_waited_for_that_have_no_state_or_are_to_end_at_once(world: World, has_started: bool) -> None:
    world.protocol.started = has_started
    world.ends_by = KeyboardInterrupt() if has_started else OverflowError("a bug")
    with pytest.raises(type(world.ends_by)):
        world.control()
    assert list(dict.fromkeys(world.done)) == ["stop", "complete", "unlock"]


def test_nor_where_the_parent_of_all_has_died(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.launcher.may_live.side_effect = lambda _: []
    world.ends_by = RunError("the fork server died")
    with pytest.raises(RunError):
        world.control()
    assert world.done == ["stop", "complete", "unlock"] and not capsys.readouterr().out


def test_then_the_workers_on_other_machines_are_waited_for_alone(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.launcher.may_live.side_effect = lambda ranks: [rank for rank in ranks if rank == 1]
    world.ends_by = RunError("the fork server died")
    with pytest.raises(RunError):
        world.control()
    assert list(dict.fromkeys(world.done)) == ["wait", "stop", "complete", "unlock"] and world.living == {0: 3, 1: -1}
    assert capsys.readouterr().out.startswith("the workers on other machines save their state, within 1000 s; ")


def test_a_signal_ends_the_waiting(world: World) -> None:
    world.launcher.signal.side_effect = lambda *_: signal.raise_signal(signal.SIGTERM) or True
    world.ends_by = OverflowError("a bug")
    with pytest.raises(OverflowError):
        world.control()
    assert world.launcher.signal.call_count == 1


def test_one_that_hangs_is_not_waited_for_any_longer_than_its_grace(world: World) -> None:
    world.plan.settings.timeouts.orphan_grace = 0.01
    world.launcher.signal.side_effect = lambda *_: True
    world.ends_by = OverflowError("a bug")
    with pytest.raises(OverflowError):
        world.control()


def test_so_it_is_after_an_end_that_was_decided(world: World) -> None:
    world.ends_by = RunStopped(RunError("workers are lost"))
    assert world.control() == ["stop", "complete", "unlock"]


@pytest.mark.parametrize("outcome", [RunFinished(), RestartFrom(Path("run"), Settings().mesh, 0)])
def test_a_run_that_has_finished_or_begins_again_has_nothing_to_complete(world: World, outcome: Outcome) -> None:
    world.ends_by = outcome
    assert world.control() == ["stop", "unlock"]


@pytest.mark.parametrize(
    "error", [FilesError(Path("metrics.jsonl"), OSError(28, "full")), DataError("metrics.jsonl is damaged"), OSError()]
)
def test_what_cannot_be_completed_hides_no_error(world: World, error: Exception) -> None:
    world.ends_by, world.fails_to_complete = OverflowError("a bug"), error
    with pytest.raises(OverflowError):
        world.control()
