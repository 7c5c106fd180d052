"""A subset of the golden set: runs have the bits, and schedules the ends, that were recorded in tests/golden.json.

In another environment than that of the record (another CPU or torch) bits cannot be compared with it. Then these tests
compare runs with each other, and are reported as skipped, with the reason, when all of that is right.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.golden import (
    MODELS,
    QUICK_REAL,
    QUICK_SEEDS,
    QUICK_SIMULATED,
    AnyCase,
    check_runs,
    check_schedules,
    decode_runs,
    difference,
    other_environment,
    problems_of_schedules,
    problems_with_record,
    read_record,
)


def assert_as_recorded(part: str, cases: Sequence[AnyCase]) -> None:
    """Runs the cases and compares as far as the environment allows it."""
    record = read_record()[part]
    assert check_runs(record, cases) == []
    if why := other_environment(record):
        pytest.skip(f"the runs agree with each other, but bits cannot be compared with the record: {why}")


@pytest.mark.parametrize("model", MODELS)
def test_simulated_runs_have_the_recorded_bits(model: str) -> None:
    # Every fifth: still all meshes, levels and events. `make golden` runs the whole set.
    assert_as_recorded("runs", [case for case in QUICK_SIMULATED if case.model == model][::5])


@pytest.mark.processes
def test_real_runs_have_the_recorded_bits() -> None:
    assert_as_recorded("real", QUICK_REAL)


@pytest.mark.parametrize("kind", QUICK_SEEDS)
def test_schedules_end_as_recorded(kind: str) -> None:
    assert check_schedules(read_record()["schedules"], {kind: QUICK_SEEDS[kind]}) == []


def test_a_changed_bit_is_found_and_named() -> None:
    part = read_record()["runs"]
    wanted = decode_runs(part)
    series = next(iter(part["series"].values()))
    series["loss_hex"][3] = "0x1.8p+1"
    changed = decode_runs(part)
    problems = problems_with_record(wanted, changed)
    assert len(problems) == len(wanted) // len(MODELS)
    assert all("loss of step 4: 0x" in problem and "is now 0x1.8p+1" in problem for problem in problems)
    name = next(name for name in wanted if wanted[name] != changed[name])
    assert difference(wanted[name], wanted[name]) == ""
    assert problems_with_record({}, {name: wanted[name]}) == [
        f"{name}: this case is not in the record: record the part again"
    ]


def test_a_schedule_that_ends_otherwise_is_named() -> None:
    wanted = {"plain": {0: "b", 1: "l"}}
    assert problems_of_schedules(wanted, wanted) == []
    assert problems_of_schedules(wanted, {"plain": {1: "f"}}) == ["schedule plain 1: lost is now failed"]
