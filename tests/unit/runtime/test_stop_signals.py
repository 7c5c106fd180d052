"""Signals that ask a command to end: an exception, an event, or nothing, by where the command is."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from elaswave_spmd.runtime.processes.stop_signals import SAME_SIGNAL_S, STOP_SIGNALS, Signalled, StopSignals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of the tests' own process are put back, which may ignore some."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def apart() -> StopSignals:
    """Signals of which each comes long after the one before, by a clock that goes on whenever it is looked at."""
    times = itertools.count(0.0, SAME_SIGNAL_S)
    return StopSignals(clock=lambda: next(times))


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_without_anything_to_save_the_first_signal_ends_the_command(number: signal.Signals) -> None:
    with StopSignals() as signals, pytest.raises(Signalled, match=number.name) as caught:
        signal.raise_signal(number)
    assert caught.value.exit_code == 128 + number and signals.first == number
    assert signal.getsignal(number) == signal.SIG_DFL


def test_what_the_first_has_begun_to_clear_up_is_not_interrupted() -> None:
    with StopSignals() as signals:
        with pytest.raises(Signalled):
            signal.raise_signal(signal.SIGINT)
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        signals.check()
        assert signals.first == signal.SIGINT


def test_two_signals_are_events_and_a_third_one_is_not() -> None:
    told: list[int] = []
    with apart() as signals:
        with pytest.raises(Signalled, match="SIGTERM"), signals.as_events(told.append):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            assert told == [signal.SIGTERM, signal.SIGINT]
            signal.raise_signal(signal.SIGINT)
        assert told == [signal.SIGTERM, signal.SIGINT]


def test_the_same_signal_within_a_moment_is_one_request() -> None:
    """`timeout 60 python train.py` signals the command, and then its whole group."""
    told: list[int] = []
    now = 10.0
    with StopSignals(clock=lambda: now) as signals, signals.as_events(told.append, count=3):
        signal.raise_signal(signal.SIGTERM)
        now += SAME_SIGNAL_S / 2
        signal.raise_signal(signal.SIGTERM)
        assert told == [signal.SIGTERM]
        signal.raise_signal(signal.SIGINT)
        assert told == [signal.SIGTERM, signal.SIGINT], "another signal is another request"
        now += SAME_SIGNAL_S / 2
        signal.raise_signal(signal.SIGTERM)
        assert told == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM], "one that is repeated counts after all"


def test_what_is_the_same_request_interrupts_nothing() -> None:
    told: list[int] = []
    with StopSignals(clock=lambda: 0.0) as signals, signals.as_events(told.append, count=1):
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
    assert told == [signal.SIGTERM]


@pytest.mark.parametrize("num_told", [0, 1])
def test_a_signal_raises_again_in_what_it_may_cut_short(num_told: int) -> None:
    told: list[int] = []
    with apart() as signals, signals.as_events(told.append):
        for _ in range(num_told):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Signalled, match="SIGTERM"), signals.raising():
            signal.raise_signal(signal.SIGTERM)
        assert told == [signal.SIGTERM] * num_told


def test_a_signal_that_was_held_is_raised_later() -> None:
    with StopSignals() as signals:
        with signals.held():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Signalled, match="SIGTERM"):
            signals.check()
        signals.check()


def test_a_signal_that_was_held_is_told_when_somebody_listens() -> None:
    told: list[int] = []
    with StopSignals() as signals, signals.held():
        signal.raise_signal(signal.SIGTERM)
        with signals.as_events(told.append):
            assert told == [signal.SIGTERM]
            signal.raise_signal(signal.SIGINT)
        assert told == [signal.SIGTERM, signal.SIGINT]


def _leave(*_: object) -> None:
    raise SystemExit(0)


@pytest.mark.parametrize(("handler", "called"), [(signal.SIG_DFL, "signal.SIG_DFL"), (_leave, f"{__name__}._leave")])
def test_a_signal_that_other_code_has_taken_is_handled_again(handler: Any, called: str) -> None:
    told: list[int] = []
    with StopSignals() as signals, signals.as_events(told.append):
        assert signals.take_again() == {}
        signal.signal(signal.SIGINT, handler)
        assert signals.take_again() == {signal.SIGINT: called} and signals.take_again() == {}
        signal.raise_signal(signal.SIGINT)
        assert told == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) == handler, "afterwards it is as that code has it"


def test_a_signal_that_other_code_has_taken_stays_ignored_if_it_was() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals() as signals:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signals.take_again() == {}
        signal.raise_signal(signal.SIGHUP)
        assert signals.first is None


def test_what_a_shell_has_the_command_ignore_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.first is None
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
