"""The collector of cyclic garbage waits for the end of a decision."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from elaswave_spmd.controller.garbage import CollectorPaused
from elaswave_spmd.recovery import messages as m
from tests.cluster.schedules import Schedule, run
from tests.cluster.simulated_io import SimulatedIO
from tests.cluster.tiny import TinyRun


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    ran = gc.isenabled()
    yield
    (gc.enable if ran else gc.disable)()


def test_it_runs_again_afterwards_also_after_an_error() -> None:
    gc.enable()
    with pytest.raises(KeyError), CollectorPaused():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_who_has_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    with CollectorPaused():
        pass
    assert not gc.isenabled()


def test_it_waits_while_the_controller_decides_and_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.enable()
    seen, send = list[bool](), SimulatedIO.send

    def noted(self: SimulatedIO, rank: int, message: bytes) -> None:
        if not isinstance(m.decode(message), m.Stop):  # when nothing is decided any more
            seen.append(gc.isenabled())
        send(self, rank, message)

    monkeypatch.setattr(SimulatedIO, "send", noted)
    run(Schedule(1, TinyRun()))
    assert seen and not any(seen) and gc.isenabled()
