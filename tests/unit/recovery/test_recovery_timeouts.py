"""The ladder of waiting times: what holds between any two of them, and what the error says."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.conf.schema import Timeouts
from elaswave_spmd.errors import ConfigError

NAMES = [field.name for field in dataclasses.fields(Timeouts) if field.name != "adopt"]  # which may be left out
seconds = st.floats(1e-3, 1e4, allow_nan=False)


def in_order(t: Timeouts) -> bool:
    rungs = [
        3 * t.heartbeat <= t.suspect < t.status < t.progress < t.start,
        t.status < t.join,
        t.status < t.leave,
        t.controller < t.shutdown,
    ]
    return all(rungs)


def test_the_defaults_are_in_order() -> None:
    assert in_order(Timeouts())


def test_a_whole_ladder_may_be_scaled() -> None:
    made = Timeouts(**{name: getattr(Timeouts(), name) * 50 for name in NAMES})
    assert made.suspect == 100.0


@given(st.dictionaries(st.sampled_from([n for n in NAMES if n != "progress_factor"]), seconds, max_size=4))
def test_whatever_can_be_made_is_in_order(given_seconds: dict[str, float]) -> None:
    wanted = {name: given_seconds.get(name, getattr(Timeouts(), name)) for name in NAMES}
    try:
        made = Timeouts(**given_seconds)
    except ConfigError as error:
        _, upper = error.where.split()[::-1]
        assert upper.startswith("timeouts.")
        stand_in = dataclasses.make_dataclass("StandIn", NAMES)(**wanted)
        assert not in_order(stand_in)
    else:
        assert in_order(made)


@pytest.mark.parametrize(
    ("given_seconds", "upper", "lower"),
    [
        ({"heartbeat": 0.7}, "suspect", "heartbeat"),
        ({"suspect": 0.2}, "suspect", "heartbeat"),
        ({"suspect": 5.0}, "status", "suspect"),
        ({"status": 30.0, "leave": 40.0}, "progress", "status"),
        ({"start": 20.0}, "start", "progress"),
        ({"join": 4.0}, "join", "status"),
        ({"leave": 5.0}, "leave", "status"),
        ({"shutdown": 5.0}, "shutdown", "controller"),
    ],
)
def test_each_rung_names_both_values_and_its_reason(given_seconds: dict[str, float], upper: str, lower: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Timeouts(**given_seconds)
    values = {name: given_seconds.get(name, getattr(Timeouts(), name)) for name in (upper, lower)}
    assert caught.value.where == f"timeouts.{upper}={values[upper]:g} timeouts.{lower}={values[lower]:g}"
    assert caught.value.what.startswith(f"timeouts.{upper}={values[upper]:g} is ")
    assert caught.value.what.endswith(f"timeouts.{lower}={values[lower]:g}")
    assert caught.value.rule and caught.value.fix.startswith(f"timeouts.{upper} ")


def test_orphans_wait_for_the_controller_and_then_have_the_time_of_a_shutdown() -> None:
    assert Timeouts(controller=4.0, shutdown=9.0).orphan_grace == 13.0


def test_adopted_workers_wait_for_the_next_controller_instead() -> None:
    assert Timeouts(controller=4.0, shutdown=9.0, adopt=60.0).orphan_grace == 69.0
    for value in (0, -1, float("nan"), "1", True):
        with pytest.raises(ConfigError, match="adopt"):
            Timeouts(adopt=value)  # type: ignore[arg-type]


def test_three_beats_are_enough() -> None:
    assert Timeouts(heartbeat=0.5, suspect=1.5).suspect == 1.5


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "1", None, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_value_is_a_positive_number(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Timeouts(**{name: value})  # type: ignore[arg-type]
    assert caught.value.where.startswith(f"timeouts.{name}=")


def test_a_factor_below_one_would_call_the_usual_a_hang() -> None:
    with pytest.raises(ConfigError, match="progress_factor"):
        Timeouts(progress_factor=0.9)


def test_whole_numbers_become_seconds() -> None:
    assert isinstance(Timeouts(suspect=1).suspect, float)
