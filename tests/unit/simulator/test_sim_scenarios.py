"""Scenarios as data, tables and files; timelines of virtual time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from elaswave_spmd.errors import ConfigError, PlanError, UserError
from elaswave_spmd.scheduling.dvfs import FrequencyRange
from elaswave_spmd.simulator import report, scenario
from elaswave_spmd.simulator.engine import execute
from elaswave_spmd.simulator.policies import Ours
from elaswave_spmd.simulator.report import Figure, Report, Table
from elaswave_spmd.simulator.tables import cases_of, run_scenario, timeline_of
from elaswave_spmd.simulator.trace import Timeline
from elaswave_spmd.simulator.transition import HEALTHY, HINTS, LAYERS, MICROBATCHES, RECOMPUTED, simulate_transition
from elaswave_spmd.simulator.work import Work
from tests.unit.scheduling.planning_cases import assigned, costs_of
from tests.unit.simulator.sim_cases import case_of

EVENTS = {
    "kind": "events",
    "title": "A few",
    "model": {"alike": 4},
    "optimum": True,
    "memory": 2,
    "cases": [
        {"name": "one", "mesh": "dp2_pp2", "microbatches": 4, "event": "fail 1"},
        {"name": "drawn", "mesh": "dp4", "microbatches": 8, "lose": [1, 2]},
    ],
}
GOODPUT = {
    "kind": "goodput",
    "title": "Weeks",
    "model": {"alike": 4},
    "devices": [64, 256],
    "island": 4,
    "stages": 4,
    "microbatches": 4,
    "days": 2,
    "failures": {"count": 40, "days": 2, "devices": 64},
    "spares": [0, 0.1],
}


def written(folder: Path, data: object) -> str:
    path = folder / "mine.yaml"
    text = data if isinstance(data, str) else yaml.safe_dump(json.loads(json.dumps(data)))  # no value twice: no aliases
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_scenarios_of_the_package_can_be_read():
    assert {"small_events", "llama96", "goodput"} <= set(scenario.names())
    for name in scenario.names():
        found = scenario.load(name)
        assert found.title and found.about


def test_cases_lost_are_drawn_once_for_all_policies(tmp_path):
    found = scenario.load(written(tmp_path, EVENTS | {"draws": 3}))
    assert isinstance(found, scenario.Events)
    rows = [row for case in found.cases for row in cases_of(found, case)]
    assert [label for label, _ in rows] == ["one", "drawn, 1 lost", "drawn, 2 lost"]
    assert [len(cases) for _, cases in rows] == [1, 3, 3]
    assert all(len(case.change.gone) == 2 for case in rows[2][1])
    again = [row for case in found.cases for row in cases_of(found, case)]
    assert [[c.change for c in cases] for _, cases in again] == [[c.change for c in cases] for _, cases in rows]
    assert all(math.isfinite(case.memory_limit) for _, cases in rows for case in cases)


@pytest.mark.parametrize(
    "change, telling",
    [
        ({"kind": "poem"}, "a scenario has a kind"),
        ({"colour": "red"}, "colour"),
        ({"cases": []}, "a scenario has cases"),
        ({"cases": [3]}, "a mapping"),
        ({"cases": [{"name": "a", "mesh": "dp2"}]}, "no microbatches"),
        ({"cases": [{"name": "a", "mesh": "dp2", "microbatches": 4}]}, "neither"),
        ({"cases": [{"name": "a", "mesh": "dp2", "microbatches": 4, "event": "fail 1", "lose": [1]}]}, "both"),
        ({"cases": [{"name": "a", "mesh": "dp2", "microbatches": 4, "event": "fail 2"}]}, "rank 2"),
        ({"cases": [{"name": "a", "mesh": "pd2", "microbatches": 4, "event": "fail 1"}]}, "pd2"),
        ({"cases": [{"name": "a", "mesh": "dp2", "microbatches": 4, "lose": [2]}]}, "below 2"),
        ({"cases": [{"name": "a", "mesh": "dp2", "microbatches": 4, "lose": {"two": 2}}]}, "a list of numbers"),
        ({"cases": [{"name": "a", "mesh": "dp2", "microbatches": 4, "event": "join 1"}]}, "lost or slow"),
        ({"cases": [{"name": "a", "mesh": "stages3-2", "microbatches": 6, "lose": 1}]}, "stages of equal size"),
        ({"cases": [{"name": "a", "mesh": "dp2", "microbatches": 4, "lose": 1}] * 2}, "a name of its own"),
        ({"cases": [{"name": 7, "mesh": "dp2", "microbatches": 4, "lose": 1}]}, "names are text"),
        ({"title": 7}, "names are text"),
        ({"seed": -1}, "seed"),
        ({"optimum": "yes"}, "neither true nor false"),
        ({"cases": [{"name": "a", "mesh": "dp2", "microbatches": 0, "lose": [1]}]}, "microbatches"),
        (
            {"cases": [{"name": "a", "mesh": "pp5", "microbatches": 4, "lose": [1]}]},
            "5 stages, but the model has 4 layers",
        ),
        ({"model": None}, "a case has a model"),
        ({"model": {"llama": "8B"}}, "7B, 13B"),
        ({"model": {"alike": 4, "llama": "7B"}}, "alike, or a Llama shape"),
        ({"model": {"alike": 4, "colour": 1}}, "colour"),
        ({"model": {"alike": -4}}, "alike"),
        ({"model": {"llama": "7B", "tflops": 0}}, "tflops"),
        ({"model": {"llama": "7B", "bandwidth": 0}}, "bandwidth"),
        ({"memory": 0.5}, "memory"),
        ({"draws": 0}, "draws"),
        ({"zero": 4}, "zero"),
    ],
)
def test_scenarios_that_contradict_themselves_are_refused(tmp_path, change, telling):
    with pytest.raises(UserError) as caught:
        scenario.load(written(tmp_path, EVENTS | change))
    assert telling in str(caught.value), str(caught.value)
    assert isinstance(caught.value, (ConfigError, PlanError)) and caught.value.what


@pytest.mark.parametrize(
    "change, telling",
    [
        ({"devices": [16]}, "two replicas or more"),
        ({"devices": ["many"]}, "devices"),
        ({"devices": []}, "a scenario has devices"),
        ({"join_s": -1}, "join_s"),
        ({"repair_hours": 0}, "repair takes time"),
        ({"spares": [2]}, "spares"),
        ({"days": 0}, "a scenario lasts"),
        ({"failures": {"count": -1}}, "a failure rate"),
        ({"failures": {"every": 1}}, "every"),
        ({"stages": 5}, "every stage has at least one layer"),
        ({"highest_frequency": 0.5}, "highest_frequency"),
    ],
)
def test_fleets_that_cannot_be_are_refused(tmp_path, change, telling):
    with pytest.raises(UserError) as caught:
        scenario.load(written(tmp_path, GOODPUT | change))
    assert telling in str(caught.value), str(caught.value)


def test_a_scenario_that_is_not_there_or_no_yaml(tmp_path):
    with pytest.raises(ConfigError, match="no scenario and no file") as caught:
        scenario.load("small_evnts")
    assert "small_events" in caught.value.exists
    with pytest.raises(ConfigError, match="a scenario is YAML"):
        scenario.load(written(tmp_path, "a: [1"))
    with pytest.raises(ConfigError, match="a scenario has a kind"):
        scenario.load(written(tmp_path, "7"))


def test_a_scenario_has_no_aliases(tmp_path: Path) -> None:
    """They stand for more than any memory holds; the package's other YAML has none either."""
    file = tmp_path / "mine.yaml"
    file.write_text("kind: &kind events\ntitle: *kind\ncases: []\n")
    with pytest.raises(ConfigError, match="is no YAML: it has an alias"):
        scenario.load(str(file))


def test_events_become_tables_and_files(tmp_path):
    said: list[str] = []
    found = run_scenario("mine", scenario.load(written(tmp_path, EVENTS)), said.append)
    assert said == ["one", "drawn, 1 lost", "drawn, 2 lost"]
    ratios, recovery, axes, *_ = found.tables
    assert [row[0] for row in ratios.rows] == said == [row[0] for row in axes.rows]
    assert {"ours", "reroute", "drop replica", "templates", "restart", "best of all groupings"} <= set(ratios.columns)
    best, ours = (ratios.columns.index(name) for name in ("best of all groupings", "ours"))
    for row in ratios.rows:
        assert 0 < float(row[ours] or 0) <= float(row[best] or 0) + 1e-9
    assert len(recovery.rows) == 3 and all(float(cell or 0) > 0 for row in recovery.rows for cell in row[1:])
    paths = found.write(tmp_path / "out" / "deep")
    read = json.loads(paths[0].read_text(encoding="utf-8"))
    assert read["scenario"] == "mine" and read["tables"][0]["rows"][0]["case"] == "one"
    page = paths[-1].read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "drawn, 2 lost" in page and "src=" not in page
    assert sum(path.suffix == ".png" for path in paths) == (len(found.figures) if report.can_draw() else 0)


def test_a_timeline_is_of_the_first_case_or_of_the_one_named(tmp_path):
    found = scenario.load(written(tmp_path, EVENTS))
    said = []
    for label in ("", "one", "drawn, 2 lost"):
        timeline = timeline_of(found, label)
        assert timeline is not None
        said.append([event["name"] for event in timeline.events() if event["ph"] == "i"])
    assert said[0] == said[1] != said[2] and "worker 1 is lost" in said[0]
    assert sum(name.endswith("is lost") for name in said[2]) == 2
    with pytest.raises(ConfigError, match="no case of the scenario") as caught:
        timeline_of(found, "two")
    assert "drawn, 1 lost" in caught.value.exists
    weeks = scenario.load(written(tmp_path, GOODPUT))
    assert timeline_of(weeks) is None
    with pytest.raises(ConfigError, match="no timeline"):
        timeline_of(weeks, "one")


def test_a_case_that_fits_in_no_memory_is_a_row_without_us(tmp_path):
    """The last worker would have all layers: no reason to end."""
    cases = [{"name": "most", "mesh": "pp4", "microbatches": 4, "event": "fail 0 1 2"}]
    data = EVENTS | {"memory": 1, "optimum": False, "cases": cases}
    found = run_scenario("tight", scenario.load(written(tmp_path, data)))
    (row,) = found.tables[0].rows
    assert row[found.tables[0].columns.index("ours")] == 0
    assert timeline_of(scenario.load(written(tmp_path, data))) is None


def test_goodput_becomes_a_table_for_each_stock_of_spares(tmp_path):
    found = run_scenario("weeks", scenario.load(written(tmp_path, GOODPUT)))
    *goodput, steps = found.tables
    assert len(goodput) == 2 == len(found.figures)
    seconds = [[float(cell or 0) for cell in row[1:]] for row in steps.rows[:3]]
    assert [row[0] for row in steps.rows] == ["none", "one worker", "one of each stage", "mean, as taken above"]
    assert all(float(cell or 0) >= 1 for cell in steps.rows[-1][-2:])
    assert 0.9 * seconds[0][1] < seconds[0][0] <= seconds[0][1], "an even mesh is near its bound"
    assert all(0 < of_row[2] <= of_row[3] * (1 + 1e-9) for of_row in seconds), "in favour of reroute"
    for table in goodput:
        assert [row[0] for row in table.rows] == [64, 256]
        for row in table.rows:
            shares = dict(zip(table.columns, row, strict=True))
            assert all(0 <= float(shares[name] or 0) <= 1 for name in ("ours", "reroute", "drop replica", "restart"))
            assert int(shares["losses"] or 0) > 0


def test_figures_are_drawn_where_matplotlib_is(tmp_path, monkeypatch):
    bars = Figure("bars", "Bars", "", "y", ("a long label of a case", "b"), {"one": [1.0, None], "two": [0.5, 0.2]})
    lines = Figure("lines", "Lines", "x", "y", (1.0, 1000.0), {"one": [1.0, 0.5], "two": [None, 0.2]}, lines=True)
    table = Table("T", ("a", "b"), (("x", math.inf), ("<y>", 12345)), ("a note",))
    found = Report("r", "Title", "About", (table,), (bars, lines))
    assert found.as_json()["tables"][0]["rows"][0] == {"a": "x", "b": None}
    if report.can_draw():
        paths = found.write(tmp_path)
        assert [path.name for path in paths] == ["r.json", "r_bars.png", "r_lines.png", "r.html"]
        assert paths[1].read_bytes().startswith(b"\x89PNG") and paths[3].read_text().count("<svg") == 2
    monkeypatch.setattr(report, "can_draw", lambda: False)
    paths = found.write(tmp_path / "without")
    page = paths[-1].read_text(encoding="utf-8")
    assert [path.name for path in paths] == ["r.json", "r.html"] and "elaswave-spmd[plots]" in page
    assert "&lt;y&gt;" in page and "12,345" in page
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot write figures to out="):
        found.write(tmp_path / "file")


# ---- timelines


def test_a_timeline_has_each_action_and_fills_the_gaps(tmp_path):
    costs = costs_of([3.0, 3.0])
    run = execute(Work.from_assignment(assigned([2, 1], 4, costs)), costs, steps=2)
    timeline = Timeline("two steps")
    timeline.name_rows(((0, 1), (2,)))
    timeline.actions(run.spans, offset=5.0)
    timeline.event(7.0, "something", why="no reason")
    timeline.frequency(6.0, 2, 0.9)
    read = json.loads(timeline.write(tmp_path / "trace.json").read_text(encoding="utf-8"))
    events = read["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert sum(event["cat"] == "action" for event in spans) == len(run.spans) == 2 * 2 * 2 * 4
    for pid in (2, 3, 4):  # worker 0 is process 2
        mine = [event for event in spans if event["pid"] == pid]
        assert sum(event["dur"] for event in mine) == pytest.approx(1e6 * sum(run.seconds))
        assert min(event["ts"] for event in mine) == pytest.approx(5e6)
    assert [e["ts"] for e in events if "ts" in e] == sorted(e["ts"] for e in events if "ts" in e)
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"events", "stage 0", "stage 1"}
    assert any(e["ph"] == "C" and e["args"] == {"frequency": 0.9} for e in events)


def test_a_transition_goes_from_microbatches_to_layers_to_hints():
    case = case_of("dp4_pp2", 32, "fail 5 6", state_bytes=10**14)
    decision = Ours(stages=False, frequencies=FrequencyRange(0.7, 1.1)).answer(case).decision
    assert decision is not None and decision.later is not None
    transition = simulate_transition(case, decision)
    names = [phase.name for phase in transition.phases]
    assert names == [HEALTHY, RECOMPUTED, MICROBATCHES, LAYERS, HINTS]
    by_name = {phase.name: phase for phase in transition.phases}
    assert by_name[LAYERS].step_s < by_name[MICROBATCHES].step_s
    assert by_name[HINTS].step_s <= by_name[LAYERS].step_s * (1 + 1e-9)
    starts = [phase.start for phase in transition.phases]
    assert starts == sorted(starts) and transition.blocking_s == decision.later.move.seconds > 0
    assert transition.migration_s >= transition.blocking_s, "it has what links have left over"
    assert by_name[MICROBATCHES].steps * by_name[MICROBATCHES].step_s == pytest.approx(transition.migration_s, rel=0.2)
    events = [event["name"] for event in transition.timeline.events() if event["ph"] == "i"]
    assert "worker 5 is lost" in events and any(name.startswith("all state is there") for name in events)
    lost = [e for e in transition.timeline.events() if e["ph"] == "X" and e["pid"] == 7 and e["cat"] == "action"]
    assert max(e["ts"] for e in lost) < 1e6 * by_name[MICROBATCHES].start


def test_a_transition_after_the_loss_of_a_stage_begins_the_step_again():
    case = case_of("dp2_pp2", 8, "fail 2 3")
    decision = Ours().answer(case).decision
    assert decision is not None
    transition = simulate_transition(case, decision)
    assert RECOMPUTED not in [phase.name for phase in transition.phases]
    assert any("begins again" in event["name"] for event in transition.timeline.events())
