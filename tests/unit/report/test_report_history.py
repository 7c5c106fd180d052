"""The history of a run, worked out of its events."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elaswave_spmd.errors import DataError
from elaswave_spmd.report.columns import as_json, columns_of
from elaswave_spmd.report.decimate import MOST_POINTS, kept_points
from elaswave_spmd.report.history import Plan, history_of
from elaswave_spmd.report.page import fragments_of
from elaswave_spmd.report.recorded import FollowedLines, RecordedRun, RunReader
from elaswave_spmd.run_dir.discard import discard_after
from elaswave_spmd.run_dir.metrics import MetricsLine

FOUR = {"mesh": "dp2_pp2", "stages": [[0, 1], [2, 3]], "layer_cuts": [0, 2, 4], "microbatch_counts": [[2, 2], [2, 2]]}
THREE = {"mesh": "stages1-2", "stages": [[0], [2, 3]], "layer_cuts": [0, 2, 4], "microbatch_counts": [[4], [2, 2]]}


def line(step: int, seconds: float = 1.0, loss: float = 2.0) -> MetricsLine:
    return MetricsLine.of(
        step=step, mesh_epoch=0, loss=loss, grad_norm=1.0, lr=0.1, tokens=100, seconds=seconds, workers=4
    )


def event(kind: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "time": time, **fields}


def recorded(*events: dict[str, Any], metrics: tuple[MetricsLine, ...] = ()) -> RecordedRun:
    start = event("start", 100.0, first_step=1, total_steps=10, model="m", **FOUR)
    return RecordedRun(Path("runs/a"), "model: m", metrics, (start, *events))


def lost(epoch: int = 1, after_step: float = 4, **fields: Any) -> dict[str, Any]:
    told = {"ranks": [1], "mesh_epoch": epoch, "after_step": after_step, "bytes_moved": 10, "bytes_bound": 8, **THREE}
    return event("fail", 105.0, **told | fields)


def test_a_loss_has_the_plans_before_and_after_it() -> None:
    history = history_of(recorded(lost()))
    [incident] = history.incidents
    assert (incident.kind, incident.step, incident.seconds, incident.ranks) == ("fail", 5, 5.0, (1,))
    assert incident.before == Plan("dp2_pp2", ((0, 1), (2, 3)), (0, 2, 4), ((2, 2), (2, 2)))
    assert incident.after == Plan("stages1-2", ((0,), (2, 3)), (0, 2, 4), ((4,), (2, 2)))


def test_the_stage_of_each_worker_is_known_at_each_step() -> None:
    history = history_of(recorded(lost(), metrics=tuple(map(line, range(1, 11)))))
    found = [(p.rank, p.stage, p.first, p.last) for p in history.placed]
    assert found == [(0, 0, 1, 10), (1, 0, 1, 4), (2, 1, 1, 10), (3, 1, 1, 10)]


def test_a_life_on_another_mesh_is_known_also_where_nothing_happened_before_it() -> None:
    """Its controller was killed, and the run was resumed on three workers."""
    again = event("start", 130.0, first_step=6, total_steps=10, **THREE)
    history = history_of(recorded(again, metrics=tuple(map(line, range(1, 11)))))
    assert [(incident.kind, incident.step) for incident in history.incidents] == [("start", 6)]
    found = [(p.rank, p.stage, p.first, p.last) for p in history.placed]
    assert (1, 0, 1, 5) in found and (0, 0, 1, 10) in found and len(found) == 4


def test_time_lost_is_that_of_a_step_beyond_the_usual_one() -> None:
    metrics = tuple(line(step, 3.5 if step == 5 else 1.0) for step in range(1, 11))
    history = history_of(recorded(lost(), event("recovered", 107.0, mesh_epoch=1, penalty_ms=1500.0), metrics=metrics))
    assert history.incidents[0].penalty_ms == 1500.0
    [fail] = history.lost
    assert (fail.cause, fail.times, fail.seconds, fail.again) == ("fail", 1, 2.5, 1.0)


def test_mesh_epochs_of_two_lives_of_a_run_are_told_apart() -> None:
    """Each life numbers its epochs from 0."""
    metrics = tuple(line(step, 3.5 if step == 5 else 1.0) for step in range(1, 11))
    again = (event("stop", 108.0), event("start", 110.0, first_step=7, **FOUR), event("resume", 110.0, step=6))
    first = (lost(), event("recovered", 107.0, mesh_epoch=1, penalty_ms=1500.0))
    second = (lost(after_step=8), event("recovered", 113.0, mesh_epoch=1, penalty_ms=200.0))
    run = recorded(*first, *again, *second, metrics=metrics)
    history = history_of(run)
    assert [i.penalty_ms for i in history.incidents if i.kind == "fail"] == [1500.0, 200.0]
    assert columns_of(run, history)["moved"]["step"] == [5, 9]


def test_an_epoch_with_two_kinds_of_incidents_has_moved_its_bytes_once() -> None:
    joined = {**lost(), "event": "join", "ranks": [4]}
    run = recorded(lost(), joined, lost(epoch=2, after_step=6))
    assert columns_of(run, history_of(run))["moved"]["step"] == [5, 7]


def test_a_worker_that_computed_wrongly_is_a_cause_of_its_own() -> None:
    metrics = tuple(line(step, 3.5 if step == 5 else 1.0) for step in range(1, 11))
    corrupt = event("corrupt", 104.0, ranks=[1], step=5, message="worker 1 computed wrongly")
    run = recorded(corrupt, lost(), event("recovered", 107.0, mesh_epoch=1, penalty_ms=2500.0), metrics=metrics)
    assert [found.cause for found in history_of(run).lost] == ["corrupt"]


def test_steps_given_up_and_pauses_count_as_lost() -> None:
    metrics = tuple(map(line, range(1, 9)))
    restart = event("restart", 109.0, step=4, lost_after=7)
    again = event("start", 130.0, first_step=5, **FOUR)
    found = {
        row.cause: row.seconds
        for row in history_of(recorded(restart, event("stop", 110.0), again, metrics=metrics)).lost
    }
    assert found == {"steps given up": 3.0, "not running": 20.0}


def paused(*events: dict[str, Any], metrics: tuple[MetricsLine, ...] = ()) -> list[tuple[int, float]]:
    found = history_of(recorded(*events, metrics=metrics)).lost
    return [(row.times, row.seconds) for row in found if row.cause == "not running"]


def test_workers_that_were_adopted_had_trained_on_and_their_pause_is_that_of_the_controller() -> None:
    metrics = tuple(map(line, range(1, 11)))
    again = event("start", 130.0, first_step=9, **FOUR)
    back = event("controller", 130.2, generation=2, seconds=3.5, workers=4, mesh_epoch=1, after_step=8)
    asked = event("signal", 130.1, signal="SIGTERM")
    assert paused(lost(), again, asked, back, metrics=metrics) == [(1, 3.5)], "not since the worker was lost"


def test_the_steps_that_a_killed_controller_committed_are_no_pause() -> None:
    """Its last event may be hours older than its end, of which it has written nothing."""
    metrics = tuple(map(line, range(1, 11)))
    again = event("start", 130.0, first_step=8, **FOUR)
    assert paused(lost(after_step=4), again, metrics=metrics) == [(1, 25.0 - 3)], "steps 5 to 7 since second 105"
    resume = event("resume", 130.0, step=7, steps_again=2)
    assert paused(lost(after_step=4), again, resume, metrics=metrics) == [(1, 25.0 - 5)], "steps 8 and 9, too"
    slow = event("slow", 108.0, ranks=[1], speed=0.5, mesh_epoch=1)
    assert paused(lost(after_step=4), slow, again, resume, metrics=metrics) == [(1, 20.0)], "slow is of no known step"
    written = event("checkpoint", 107.0, step=4, shards=4, bytes=9, copy_ms=0.0, write_ms=2e3)
    assert paused(written, again, resume, metrics=metrics) == [(1, 20.0)], "it was written while steps went on"


def test_a_restart_by_the_same_command_is_a_pause_from_the_loss_on() -> None:
    metrics = tuple(map(line, range(1, 9)))
    restart = event("restart", 109.0, step=4, lost_after=7)
    again = (event("start", 115.0, first_step=5, **FOUR), event("resume", 115.0, step=4, steps_again=3))
    assert paused(restart, *again, metrics=metrics) == [(1, 6.0)], "steps 5 to 7 were before it"


def test_a_pause_begins_with_the_last_event_at_the_earliest() -> None:
    again = event("start", 130.0, first_step=2, **FOUR)
    check = event("model_check", 115.0, seconds=12.0)
    assert paused(check, again, metrics=(line(1), line(2))) == [(1, 15.0)], "before it workers were starting"
    stopped = (event("stop", 120.0, message="x"), event("callback", 121.0, state="failed"))
    assert paused(*stopped, event("start", 130.0, first_step=9, **FOUR), metrics=(line(8),)) == [(1, 9.0)]


def test_a_rebalance_is_a_move_only_if_the_plan_is_another_one() -> None:
    same = event("rebalance", 101.0, ranks=[], mesh_epoch=1, after_step=2, **FOUR)
    other = event("rebalance", 102.0, ranks=[], mesh_epoch=2, after_step=3, **FOUR | {"layer_cuts": [0, 1, 4]})
    assert [incident.kind for incident in history_of(recorded(same, other)).incidents] == ["move"]


def test_a_run_whose_events_do_not_tell_the_first_plan_has_none() -> None:
    run = RecordedRun(Path("runs/a"), "", (), (event("start", 1.0, mesh="dp2"), lost()))
    history = history_of(run)
    assert history.first_plan is None and history.incidents[0].before is None
    assert "not told" in fragments_of(run, history)["table-plans"]


def test_events_of_unknown_kinds_or_with_odd_fields_are_incidents_without_them() -> None:
    odd = event("fail", 101.0, ranks="all", stages=7, layer_cuts=None, after_step="x", message="?")
    [first, second] = history_of(recorded(event("novel", 100.5, a=1), odd)).incidents
    assert (first.kind, first.text, second.kind, second.ranks, second.after) == (
        "novel",
        "novel: a=1",
        "fail",
        (),
        None,
    )


HUGE = 10**30


@pytest.mark.parametrize(
    "odd",
    [
        lost(after_step=HUGE),
        lost(after_step=float("inf")),
        lost(after_step=float("nan")),
        lost(stages=[["9" * 400]]),
        lost(ranks=[HUGE], bytes_moved=float("inf"), microbatches_redone=float("nan"), detect_ms=HUGE),
        event("start", float("nan"), first_step=float("inf")),
        event("validation", HUGE, step=float("inf"), loss=1.0),
        event("recovered", 106.0, mesh_epoch=HUGE, penalty_ms=float("nan")),
    ],
    ids=str,
)
def test_numbers_that_no_run_has_make_a_page_as_if_they_were_not_told(odd: dict[str, Any]) -> None:
    run = recorded(lost(), odd, metrics=(line(1), line(2)))
    history = history_of(run)
    assert as_json(columns_of(run, history)) and fragments_of(run, history)
    assert all(abs(incident.step) <= 2**53 for incident in history.incidents)


def test_steps_given_up_are_those_that_the_run_had() -> None:
    """An event that names a hundred billion of them made a report count for hours."""
    run = recorded(event("restart", 101.0, step=1, lost_after=10**15), metrics=(line(1), line(2, 3.0), line(3, 4.0)))
    assert given_up(run) == (7.0, 7.0)


def given_up(run: RecordedRun) -> tuple[float, float]:
    (found,) = [lost for lost in history_of(run).lost if lost.cause == "steps given up"]
    return found.seconds, found.again


def test_of_a_rollback_the_steps_count_that_it_has_removed_and_not_those_that_were_done_since() -> None:
    back = event("rollback", 101.0, step=1, given_up=3, seconds=7.0)
    assert given_up(recorded(back, metrics=(line(1), line(2, 20.0), line(3, 30.0)))) == (7.0, 7.0)
    assert given_up(recorded(back, metrics=(line(1),))) == (7.0, 7.0)
    del back["seconds"]  # of an earlier version
    assert given_up(recorded(back, metrics=(line(1), line(2, 20.0)))) == (0.0, 0.0)


def validation(step: int, loss: float = 2.0) -> dict[str, Any]:
    """The event as events.jsonl has it: a loss that is no number of JSON is text there."""
    written = loss if math.isfinite(loss) else str(loss)
    return event("validation", 100.0 + step, step=step, loss=written, loss_hex=loss.hex(), microbatches=2)


def test_validations_that_a_rollback_has_given_up_are_not_shown() -> None:
    back = event("rollback", 109.0, step=4, given_up=8, seconds=4.0)
    assert history_of(recorded(validation(8), back)).validations == ()
    found = history_of(recorded(validation(4), validation(8), back, validation(8, 1.5))).validations
    assert found == ((4, 2.0), (8, 1.5))


def test_a_validation_loss_that_is_not_a_number_is_shown_and_not_an_older_one() -> None:
    run = recorded(validation(4), validation(8, math.nan), metrics=tuple(map(line, range(1, 9))))
    history = history_of(run)
    assert "<dt>validation loss</dt><dd>nan</dd>" in fragments_of(run, history)["facts"]
    assert as_json(columns_of(run, history))["validation"] == {"step": [4, 8], "loss": [2.0, None]}
    without_hex = event("validation", 104.0, step=4, loss=2.5)  # as other programs may write it
    assert history_of(recorded(without_hex)).validations == ((4, 2.5),)


@pytest.mark.parametrize("end, state", [("finish", "finished"), ("stop", "stopped"), ("validation", "not ended")])
def test_the_state_of_a_run_is_that_of_its_last_event(end: str, state: str) -> None:
    assert history_of(recorded(event(end, 101.0))).state == state


def test_the_steps_of_a_run_are_those_that_it_was_given_last() -> None:
    again = event("start", 200.0, first_step=101, total_steps=200, model="m", **FOUR)
    run = recorded(event("finish", 150.0), again, metrics=tuple(map(line, range(1, 181))))
    assert "<dt>steps</dt><dd>180 of 200</dd>" in fragments_of(run, history_of(run))["facts"]


def test_a_run_that_goes_on_from_another_directory_begins_with_its_own_first_step() -> None:
    """The lines of the other run's steps, and its validations, are copied."""
    start = event("start", 1000.0, first_step=51, total_steps=100, model="m", **FOUR)
    events = (event("validation", 10.0, step=50, loss=2.0), start, lost(after_step=60) | {"time": 1005.0})
    run = RecordedRun(Path("runs/b"), "", tuple(map(line, range(1, 62))), events)
    history = history_of(run)
    assert [incident.seconds for incident in history.incidents] == [5.0]
    assert [(p.rank, p.first, p.last) for p in history.placed] == [(0, 51, 61), (1, 51, 60), (2, 51, 61), (3, 51, 61)]
    assert [step for step, _ in history.plans()] == [51, 61]
    assert "<td>51</td><td>start</td>" in fragments_of(run, history)["table-plans"]


def loss_table(num_steps: int, *validated: int) -> tuple[dict[int, str], str]:
    """The table beside the chart of losses: step -> its validation loss, and what the page says of it."""
    run = recorded(*map(validation, validated), metrics=tuple(map(line, range(1, num_steps + 1))))
    table = fragments_of(run, history_of(run))["table-loss"]
    rows = re.findall(r"<tr><td>([\d,]+)</td><td>2.0000</td><td>([\d.]*)</td>", table)
    return {int(step.replace(",", "")): loss for step, loss in rows}, re.sub(
        "</?p>", "", table.partition("</table></div>")[2]
    )


def test_the_numbers_of_the_losses_have_the_validations() -> None:
    rows, note = loss_table(400, 100, 200, 300, 400)
    assert [step for step, loss in rows.items() if loss] == [100, 200, 300, 400]
    assert len(rows) == 20 + 4 and note == "One step in 20, and all validations."
    rows, note = loss_table(4000, *range(10, 4001, 10))
    assert len([loss for loss in rows.values() if loss]) == 20 + 1 and rows[4000] == "2.0000"
    assert note == "One step in 200, and one validation in 20."
    assert loss_table(400)[1] == "One step in 20."
    assert loss_table(3, 2) == ({1: "", 2: "2.0000", 3: ""}, "")


def test_texts_of_events_are_escaped() -> None:
    text = "<img src=x onerror=alert(1)>\"'&"
    run = recorded(lost(message=text, mesh=text), event(text, 106.0, message=text))
    pages = "".join(fragments_of(run, history_of(run)).values())
    assert "<img" not in pages and "&lt;img src=x onerror=alert(1)&gt;&quot;&#x27;&amp;" in pages


def test_columns_as_json_have_no_number_that_json_lacks() -> None:
    run = recorded(lost(), metrics=(line(1, 0.0), line(2, loss=float("nan"))))
    columns = as_json(columns_of(run, history_of(run)))
    assert columns["loss"] == {"step": [1.0, 2.0], "loss": [2.0, None]}
    assert columns["speed"]["speed"] == [None, 200.0]
    assert columns["marks_fail"]["step"] == [5]


def test_a_run_without_steps_and_incidents_has_columns_and_tables() -> None:
    run = recorded()
    history = history_of(run)
    assert all(
        len(row) == 0 for name, table in columns_of(run, history).items() if name != "lost" for row in table.values()
    )
    assert "nothing so far" in fragments_of(run, history)["table-incidents"]


def test_fewer_points_keep_the_peaks_and_the_ends() -> None:
    y = np.zeros(100_000)
    y[31_415], y[27_182], y[5] = 7.0, -7.0, np.nan
    kept = kept_points(y)
    assert {0, 5, 27_182, 31_415, 99_999} <= {*kept.tolist()} and len(kept) <= MOST_POINTS + 2
    assert kept_points(np.zeros(3)).tolist() == [0, 1, 2] and len(kept_points(np.zeros(0))) == 0


def test_a_growing_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = FollowedLines(path)
    assert lines.read() == []
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a"')
    assert lines.read() == [{"a": 1}, {"a": 2}]
    assert lines.read() == []
    with open(path, "ab") as file:
        file.write(b": 3}\n")
    assert lines.read() == [{"a": 3}]
    assert not lines.is_anew


@pytest.mark.parametrize("size", ["shorter", "as long", "longer"])
def test_a_file_that_was_written_anew_is_read_from_its_begin(tmp_path: Path, size: str) -> None:
    """A run that goes back to a checkpoint writes metrics.jsonl anew, and may have done the steps again by now."""
    path = tmp_path / "a.jsonl"
    lines = FollowedLines(path)
    old = [{"a": 1, "seconds": 1.0}, {"a": 2, "seconds": 1.0}, {"a": 3, "seconds": 1.0}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in old))
    assert lines.read() == old
    new = [old[0], {"a": 2, "seconds": 2.0}, {"a": 3, "seconds": 2.0}, {"a": 4, "seconds": 2.0}]
    new = new[: {"shorter": 1, "as long": 3, "longer": 4}[size]]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in new))
    assert lines.read() == new and lines.is_anew
    assert lines.name_of(-1) == f"{path}, line {len(new)}"
    assert lines.read() == [] and not lines.is_anew


def test_a_page_that_follows_a_run_goes_back_with_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: m\n")
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(line(step).to_dict())}\n" for step in range(1, 8)))
    (tmp_path / "events.jsonl").touch()
    reader = RunReader(tmp_path)
    assert [found.step for found in reader.read().metrics] == [1, 2, 3, 4, 5, 6, 7]
    discard_after(tmp_path, 4)
    assert [found.step for found in reader.read().metrics] == [1, 2, 3, 4]
    assert reader.read() is reader.read()
    with metrics.open("a") as file:
        file.write(f"{json.dumps(line(5, 2.0).to_dict())}\n")
    assert [found.seconds for found in reader.read().metrics] == [1.0, 1.0, 1.0, 1.0, 2.0]
    metrics.write_text("")  # gone back to the begin
    assert reader.read().metrics == ()


def test_a_malformed_line_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n[]\n')
    with pytest.raises(DataError, match="line 2 is not a JSON object"):
        FollowedLines(path).read()


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "summary.json"])
@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a": 1e999}', '{"a": NaN}', '{"a": 1' + "0" * 400 + "}", "[]"], ids=repr
)
def test_what_no_run_writes_is_refused_with_its_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "config.yaml").write_text("model: m\n")
    (tmp_path / "events.jsonl").write_text('{"event": "start", "time": 1}\n')
    (tmp_path / name).write_text(text + "\n")
    with pytest.raises(DataError, match=f"{name}.* is not"):
        RunReader(tmp_path).read()


def test_an_odd_line_of_metrics_is_refused_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: m\n")
    reader = RunReader(tmp_path)
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.write(f"{json.dumps(line(1).to_dict())}\n")
        file.flush()
        assert len(reader.read().metrics) == 1
        for odd in ({}, {"loss_hex": "0x1p99999"}):
            file.write(f"{json.dumps(line(2).to_dict() | odd)}\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 3: .* is not a line of metrics\.jsonl"):
        reader.read()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no run directory"):
        RunReader(tmp_path)
