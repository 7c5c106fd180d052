"""A signal that comes while a run's first processes are made: nothing of them is left behind."""

from __future__ import annotations

import signal
from typing import Any, ClassVar

import pytest

from elaswave_spmd.conf.compose import settings_from
from elaswave_spmd.controller import startup
from elaswave_spmd.runtime.processes.stop_signals import Signalled, StopSignals


class FakeScratch:
    """Stands for the directory of sockets: a signal comes when it has been made, before anybody is to remove it."""

    made: ClassVar[list[FakeScratch]]

    def __init__(self) -> None:
        self.is_there = True
        self.made.append(self)
        signal.raise_signal(signal.SIGINT)
        self.path = "/nowhere"

    def remove(self) -> None:
        assert self.path
        self.is_there = False


@pytest.mark.parametrize("is_held", [False, True], ids=["raising", "held"])
def test_a_signal_while_the_directory_of_sockets_is_made(monkeypatch: pytest.MonkeyPatch, is_held: bool) -> None:
    made: list[FakeScratch] = []
    monkeypatch.setattr(FakeScratch, "made", made, raising=False)
    monkeypatch.setattr(startup, "Scratch", FakeScratch)
    monkeypatch.setattr(startup, "find_orphaned_run", lambda _: None)
    monkeypatch.setattr(startup, "start_launcher", lambda *_, **__: pytest.fail("it has been interrupted"))
    lives: Any = startup._Lives.__new__(startup._Lives)
    lives._has_begun_again = False
    with StopSignals() as lives._signals, pytest.raises(Signalled):
        if is_held:
            with lives._signals.held():
                lives._run_once(settings_from([]), None, here=False)
        else:
            lives._run_once(settings_from([]), None, here=False)
    (scratch,) = made
    assert not scratch.is_there
