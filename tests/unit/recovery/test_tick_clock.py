"""The clock of the controller's deadlines: pauses are no time on it, and it never runs back."""

from __future__ import annotations

from elaswave_spmd.recovery.tick_clock import TickClock


def test_a_tick_counts_as_one_period_at_most() -> None:
    clock = TickClock(0.5, 100.0)
    clock.tick(100.25)
    assert clock.now == 0.25
    clock.tick(3700.0)  # the machine was suspended
    assert clock.now == 0.75
    clock.tick(3700.25)
    assert clock.now == 1.0


def test_time_of_which_nothing_is_known_does_not_count_and_is_not_lost() -> None:
    """Ticks come, and what waits to be read is still that of before."""
    clock = TickClock(0.5, 100.0)
    for to in (100.25, 100.25, 100.0, 100.25):
        clock.tick(to)
        assert clock.now == 0.25
    clock.tick(100.5)
    assert clock.now == 0.5
