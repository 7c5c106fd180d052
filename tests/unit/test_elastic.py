"""The pure parts of benchmarks/elastic: traces are drawn from a seed, lines are read, and runs are scored."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.elastic.contestants import SYSTEMS, named
from benchmarks.elastic.judge import Observed, Slots, Struck, to_strike
from benchmarks.elastic.lines import Follower, Line, Read, Start, Step, Writer, parse
from benchmarks.elastic.picture import draw_picture
from benchmarks.elastic.runs import Run, different_begins
from benchmarks.elastic.score import Score, losses, progress, score, surviving, usual_step_s
from benchmarks.elastic.table import COLUMNS, rows_of
from benchmarks.elastic.trace import HANG, HOST, KILL, KINDS, LOG, Failure, Machines, draw, printed

MACHINES = Machines(workers=4, per_host=2)
ORDER = [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33], [40, 41, 42, 43], [50, 51, 52, 53]]


# ---- the trace


def test_the_log_has_the_419_unexpected_interruptions_of_the_paper() -> None:
    assert sum(cause.count for cause in LOG) == 419
    assert {cause.kind for cause in LOG} == KINDS.keys()


def test_a_trace_follows_from_its_seed() -> None:
    assert draw(3, 5, 100, MACHINES) == draw(3, 5, 100, MACHINES)
    assert draw(3, 5, 100, MACHINES) != draw(4, 5, 100, MACHINES)


@pytest.mark.parametrize(
    ("rate", "steps", "number"), [(1, 100, 1), (5, 100, 5), (20, 100, 20), (20, 60, 12), (1, 20, 1)]
)
def test_a_trace_has_as_many_failures_as_the_rate_asks_for(rate: float, steps: int, number: int) -> None:
    trace = draw(1, rate, steps, MACHINES)
    assert len(trace) == number
    assert [failure.at for failure in trace] == sorted(failure.at for failure in trace)
    assert all(1 <= failure.at <= steps - 1 and 0 <= failure.slot < MACHINES.workers for failure in trace)


def test_a_rate_of_0_has_no_failure() -> None:
    assert draw(1, 0, 100, MACHINES) == ()


@pytest.mark.parametrize(("rate", "steps"), [(-1, 100), (math.inf, 100), (math.nan, 100), (5, 1)])
def test_what_is_no_rate_is_refused(rate: float, steps: int) -> None:
    with pytest.raises(ValueError, match="rate"):
        draw(1, rate, steps, MACHINES)


def test_causes_come_as_often_as_in_the_log() -> None:
    drawn = Counter(failure.cause for failure in draw(1, 100, 40_000, MACHINES))
    for cause in LOG:
        expected = 40_000 * cause.count / 419
        assert abs(drawn[cause.name] - expected) < 5 * math.sqrt(expected), cause
    kinds = {cause.name: cause.kind for cause in LOG}
    assert all(kinds[failure.cause] == failure.kind for failure in draw(1, 100, 400, MACHINES))


def test_a_lost_host_takes_all_of_its_slots() -> None:
    hosts = Machines(workers=5, per_host=2)
    assert [hosts.struck(Failure(2.5, HOST, slot, "SSD")) for slot in range(5)] == [
        (0, 1),
        (0, 1),
        (2, 3),
        (2, 3),
        (4,),
    ]
    assert hosts.struck(Failure(2.5, KILL, 3, "NIC")) == (3,)


def test_a_trace_is_printed_with_a_line_for_each_failure() -> None:
    shown = printed((Failure(2.5, HOST, 3, "SSD"), Failure(17.25, HANG, 1, "NIC")), MACHINES)
    assert shown.splitlines() == ["step    2.500  host  slots 2,3   SSD", "step   17.250  hang  slots 1     NIC"]


# ---- the lines


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    follower, writer = Follower(tmp_path), Writer(tmp_path)
    writer.start()
    writer.step(1, [3, 4], 2.5, history=7)
    (start, step) = follower.new()
    assert isinstance(start, Start) and isinstance(step, Step)
    assert (step.step, step.samples, step.loss, step.history) == (1, (3, 4), 2.5, 7) and step.at >= start.at
    assert follower.new() == []
    writer.read([5])
    assert follower.new() == [Read((5,))]
    writer.close()


def test_a_line_that_is_still_written_waits(tmp_path: Path) -> None:
    (tmp_path / "lines").mkdir()
    path, follower = tmp_path / "lines" / "1.jsonl", Follower(tmp_path)
    path.write_text('{"kind": "read", "samples": [1]}\n{"kind": "re')
    assert follower.new() == [Read((1,))]
    with path.open("a") as file:
        file.write('ad", "samples": [2]}\n')
    assert follower.new() == [Read((2,))]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"kind": "stop"}', '{"kind": "step", "step": 1}', '{"kind": "start", "pid": "x", "at": 0}']
)
def test_what_is_no_line_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no line of a system"):
        parse(text)


# ---- the score


def lines_of(steps: range, *, at: float = 0.0, history: int = 0, loss: float = 1.0) -> list[Line]:
    """Two workers, one second for each step, half of the samples each."""
    found: list[Line] = []
    for moment, step in enumerate(steps):
        ids = ORDER[step - 1]
        found.append(Step(step, at + moment, tuple(ids[:2]), loss + step, history))
        found.append(Step(step, at + moment + 0.25, tuple(ids[2:]), loss + step + 0.5, history))
    return found


def scored(
    lines: list[Line], *, steps: int = 5, ended: float = 100.0, undisturbed: dict[int, float] | None = None
) -> Score:
    calm = losses(line for line in lines_of(range(1, 6)) if isinstance(line, Step))
    return score(lines, ORDER, steps, -2.0, ended, calm if undisturbed is None else undisturbed)


def test_an_undisturbed_run() -> None:
    found = scored(lines_of(range(1, 6)), ended=4.25)
    assert found == Score(5, 4.0, 2.0, 1.0, 0, 0, 0, 0.0, True)


def test_a_run_that_goes_back_undoes_its_steps_and_computes_them_again() -> None:
    lines = lines_of(range(1, 5)) + lines_of(range(3, 6), at=20.0, history=1)
    found = scored(lines)
    assert (found.steps, found.seconds, found.pause_s) == (5, 22.0, 19.0)
    assert (found.twice, found.never, found.again) == (0, 0, 2)
    assert found.equal_bits and found.loss_difference == 0.0


def test_a_history_that_ends_early_does_not_hide_the_one_before() -> None:
    lines = lines_of(range(1, 5)) + lines_of(range(4, 5), at=9.0, history=1) + lines_of(range(2, 4), at=20.0, history=2)
    kept = {(line.history, line.step) for line in surviving(x for x in lines if isinstance(x, Step))}
    assert kept == {(0, 1), (2, 2), (2, 3)}
    found = scored(lines)
    assert (found.steps, found.seconds, found.again) == (3, None, 3)
    assert found.never == 0  # of the steps that are there


def test_a_step_that_is_in_the_weights_twice_is_counted() -> None:
    found = scored(lines_of(range(1, 6)) + lines_of(range(2, 4), at=10.0))
    assert (found.twice, found.never, found.again) == (8, 0, 0)


def test_samples_of_a_worker_that_was_missing_are_never_used() -> None:
    lines = [line for line in lines_of(range(1, 6)) if not (isinstance(line, Step) and line.samples == (32, 33))]
    found = scored(lines)
    assert (found.twice, found.never) == (0, 2)
    assert not found.equal_bits and found.loss_difference == 0.25


def test_samples_of_other_steps_do_not_stand_for_those_that_are_missing() -> None:
    lines = lines_of(range(1, 6))
    lines[2] = replace(lines[2], samples=(60, 61))  # of step 2, in place of 20 and 21
    assert (scored(lines).twice, scored(lines).never) == (0, 2)


def test_what_no_worker_has_read_was_not_used() -> None:
    reads: list[Line] = [*(Read(tuple(ids)) for ids in ORDER[:4]), Read((50, 51, 52))]
    assert scored(lines_of(range(1, 6)) + reads).never == 1
    assert scored(lines_of(range(1, 6)) + reads + [Read((53,))]).never == 0


def test_a_pause_at_the_end_counts() -> None:
    found = scored(lines_of(range(1, 4)), ended=62.0)
    assert (found.steps, found.seconds, found.pause_s) == (3, None, 60.0)
    assert not found.equal_bits and found.loss_difference == 0.0


def test_after_the_last_step_no_pause_counts() -> None:
    assert scored(lines_of(range(1, 6)), ended=500.0).pause_s == 1.0


def test_a_run_without_a_step() -> None:
    found = scored([Start(1, 0.0)], ended=30.0)
    assert (found.steps, found.seconds, found.launch_s, found.pause_s) == (0, None, 32.0, 32.0)
    assert found.loss_difference is None and not found.equal_bits


def test_steps_beyond_the_last_one_do_not_count() -> None:
    found = scored(lines_of(range(1, 6)), steps=3)
    assert (found.steps, found.seconds, found.never) == (3, 2.0, 0)


def test_a_last_bit_of_one_workers_loss_is_a_difference() -> None:
    lines = lines_of(range(1, 6))
    assert isinstance(lines[8], Step)
    lines[8] = replace(lines[8], loss=float(np.nextafter(np.float32(lines[8].loss), np.float32(9))))
    found = scored(lines)
    assert not found.equal_bits and found.loss_difference and found.loss_difference < 1e-6


def test_the_loss_of_a_step_is_the_mean_over_samples_in_any_order_of_lines() -> None:
    lines = [Step(1, 0.0, (1,), 0.1), Step(1, 0.0, (2, 3), 0.7), Step(1, 0.0, (4, 5, 6), 1e-9)]
    found = {tuple(losses(some).items()) for some in itertools.permutations(lines)}
    assert len(found) == 1
    assert found.pop()[0][1] == pytest.approx((0.1 + 2 * 0.7 + 3e-9) / 6)


def test_progress_is_what_is_new() -> None:
    lines = [
        line for line in lines_of(range(1, 4)) + lines_of(range(2, 5), at=10.0, history=1) if isinstance(line, Step)
    ]
    assert progress(lines) == [(0.0, 1), (1.0, 2), (2.0, 3), (12.0, 4)]
    assert usual_step_s(lines) == 1.0
    with pytest.raises(ValueError, match="fewer than two steps"):
        usual_step_s(lines[:1])


# ---- slots, strikes


def test_a_worker_that_comes_gets_the_lowest_slot_that_is_empty() -> None:
    slots = Slots(MACHINES)
    for pid in (101, 102, 103, 104):
        slots.come(pid)
    assert slots.alive({101, 102, 103, 104}) == {0: 101, 1: 102, 2: 103, 3: 104}
    slots.come(105)
    assert slots.alive({101, 102, 103, 104, 105}) == {0: 101, 1: 102, 2: 103, 3: 104}  # it waits
    assert slots.alive({101, 103, 104, 105}) == {0: 101, 1: 105, 2: 103, 3: 104}
    slots.come(106)
    slots.come(107)
    assert slots.alive({103, 104, 105, 107}) == {0: 107, 1: 105, 2: 103, 3: 104}  # 106 has ended before it had one


def test_a_failure_strikes_who_is_there_and_leaves_one_that_trains() -> None:
    host, kill = Failure(2.5, HOST, 1, "SSD"), Failure(2.5, KILL, 1, "software bug")
    assert to_strike(host, MACHINES, {0: 101, 1: 102, 2: 103, 3: 104}, set()) == (101, 102)
    assert to_strike(host, MACHINES, {0: 101, 2: 103}, set()) == (101,)
    assert to_strike(host, MACHINES, {0: 101, 1: 102}, set()) == ()
    assert to_strike(host, MACHINES, {0: 101, 1: 102, 2: 103}, {103}) == ()  # the third stands still
    assert to_strike(kill, MACHINES, {0: 101, 2: 103}, set()) == ()
    assert to_strike(kill, MACHINES, {0: 101, 1: 102}, {102}) == ()


# ---- table and picture


def made_up_run(system: str, rate: float, found: Score, *, first_loss: float = 2.0, struck: bool = True) -> Run:
    lines = (Step(1, 0.0, (1,), first_loss), Step(2, 1.0, (2,), 1.5), Step(3, 4.0, (3,), 1.25))
    failures = (Struck(Failure(1.5, KILL, 0, "NIC"), 1.5, (11,) if struck else ()),) if rate else ()
    return Run(system, rate, 0, found, Observed(lines, failures, -1.0, 4.0, 1 if rate else 0, ""))


def test_the_table_has_what_was_reached_and_what_was_not_run() -> None:
    calm, lost = Score(3, 4.0, 1.0, 3.0, 0, 0, 0, 0.0, True), Score(2, None, 1.0, 9.0, 1, 2, 3, 0.5, False)
    runs = [made_up_run(name, rate, calm if not rate or name == "a" else lost) for rate in (0.0, 5.0) for name in "ab"]
    rows = rows_of(runs, {"c": "it is not there"})
    assert [len(row) for row in rows] == [len(COLUMNS)] * 3
    assert rows[0][:9] == ["5", "a", "1 / 0", "4.0", "4.0", "3.00", "0 / 0", "0", "equal bits"]
    assert rows[1][:9] == ["5", "b", "1 / 0", "step 2 only", "4.0", "9.00", "1 / 2", "3", "5.0e-01"]
    assert rows[0][9] == "1" and rows[2][:3] == ["-", "c", "not run: it is not there"]


def test_a_difference_of_0_before_the_last_step_is_no_equal_run() -> None:
    calm = Score(3, 4.0, 1.0, 3.0, 0, 0, 0, 0.0, True)
    short = Score(2, None, 1.0, 9.0, 0, 0, 0, 0.0, False)
    rows = rows_of([made_up_run("a", 0.0, calm), made_up_run("a", 5.0, short)], {})
    assert rows[0][8] == "equal bits to step 2"


def test_systems_that_begin_with_another_loss_are_named() -> None:
    calm = Score(3, 4.0, 1.0, 3.0, 0, 0, 0, 0.0, True)
    runs = [made_up_run("a", 0.0, calm), made_up_run("b", 0.0, calm), made_up_run("c", 0.0, calm, first_loss=2.1)]
    assert [text.partition(":")[0] for text in different_begins(runs)] == ["c"]


def test_the_picture_has_a_line_for_each_system_in_each_panel_and_a_mark_for_each_failure() -> None:
    calm = Score(3, 4.0, 1.0, 3.0, 0, 0, 0, 0.0, True)
    runs: list[Any] = [made_up_run(name, rate, calm).plain for rate in (0.0, 1.0, 5.0) for name in ("a & b", "c")]
    runs.append(made_up_run("c", 20.0, calm, struck=False).plain)
    text = draw_picture(runs, 3)
    root = ElementTree.fromstring(text)
    assert len([e for e in root.iter() if e.tag.endswith("circle")]) == 4
    assert len([e for e in root.iter() if e.tag.endswith("path")]) == 3 + 5 + 2
    assert "a &amp; b" in text and text == draw_picture(runs, 3)


def test_systems_are_chosen_by_parts_of_their_names() -> None:
    assert [system.name for system in named("torchrun, this")] == ["this project", "torchrun + DCP"]
    assert len(named("")) == len(SYSTEMS) == len({system.name for system in SYSTEMS})
    with pytest.raises(ValueError, match="no system is called 'horovod'"):
        named("this,horovod")


def test_every_system_names_a_program_that_exists() -> None:
    for system in SYSTEMS:
        if system.module:
            assert Path(*system.module.split(".")).with_suffix(".py").exists()
            assert system.settings
