"""`plan` and `simulate` on the command line: what they print, what they refuse, and with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elaswave_spmd import cli
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.simulator import arguments
from elaswave_spmd.simulator.shapes import alike
from tests.unit.scheduling.planning_cases import costs_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def call(monkeypatch, capsys):
    """call("plan", "mesh=dp2") -> (exit code, stdout, stderr)."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["elaswave-spmd", *words])
        code = cli.main()
        return code, *capsys.readouterr()

    return run


def test_a_plan_shows_old_and_new_placement_bytes_time_and_why(call):
    code, out, err = call("plan", "mesh=dp4_pp4", "event=fail 6", "microbatches=32")
    assert (code, err) == (0, "")
    assert "event: fail 6" in out and "costs made up: 18 layers" in out
    old, new = out.index("old placement"), out.index("workers [4, 5, 7]")
    assert old < out.index("workers [4, 5, 6, 7], micro-batches [8, 8, 8, 8]") < new
    for words in (
        "bytes:",
        "lost copies made again",
        "step: ",
        "throughput: ",
        "why: micro-batches dealt by speed",
        "planned in",
    ):
        assert words in out


def test_layers_move_with_bytes_and_a_lower_bound(call, tmp_path):
    profile = tmp_path / "costs.json"
    profile.write_text(costs_of([1.0] * 16, bandwidth=1e9, state_bytes=1000).to_json(), encoding="utf-8")
    words = ("plan", "mesh=dp4_pp2", "event=fail 4 5 6", f"profile={profile}", "microbatches=16", "sharding=zero2")
    code, out, _ = call(*words, "stages=false")
    assert code == 0 and f"costs {profile}" in out
    assert "new placement, when its state is there" in out and "B move (at least " in out and "why: layers move" in out
    code, out, _ = call(*words, "steps=0")
    assert code == 0 and "when its state is there" not in out and "why: layers stay" in out


def test_a_plan_as_json_with_hints_and_a_trace(call, tmp_path):
    trace = tmp_path / "trace.json"
    code, out, _ = call(
        "plan", "mesh=dp2_pp2", "event=slow 2 0.5", "json=true", "frequency=0.8 1.1", f"trace={trace}", "layers=8"
    )
    assert code == 0
    plan = json.loads(out)
    assert plan["event"] == "slow 2 0.5" and plan["old"]["stages"] == [[0, 1], [2, 3]] and plan["speed_left"] == 0.875
    assert plan["now"]["microbatch_counts"][1][0] < plan["now"]["microbatch_counts"][1][1] and plan["hints"]
    assert plan["mirror_bytes"] == 0 < plan["ratio"] <= 1.1
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert any(e["ph"] == "C" for e in events) and any("slows down" in e["name"] for e in events)


def test_a_plan_without_an_event_and_with_newcomers(call):
    assert "event: nothing" in call("plan", "mesh=dp2")[1]
    code, out, _ = call("plan", "mesh=dp2_pp2", "event=fail 1; join 2", "microbatches=12", "stages=false")
    assert code == 0 and "[0, 4" in out and "why:" in out


def test_microbatches_go_with_the_mesh_where_none_are_named(call):
    for mesh, microbatches in (("dp2_pp2", 8), ("stages3-2", 12), ("dp4_pp4", 16)):
        assert f", {microbatches} micro-batches, event: nothing" in call("plan", f"mesh={mesh}")[1]


def test_lost_copies_are_counted(call):
    _, out, _ = call("plan", "mesh=dp4", "event=fail 1", "layers=2", "json=true")
    state = 2 * alike(2).layers[0].state_bytes
    assert json.loads(out)["mirror_bytes"] == pytest.approx(state * 2 / 4)
    _, out, _ = call("plan", "mesh=dp4", "event=fail 1", "sharding=zero0", "json=true")
    assert json.loads(out)["mirror_bytes"] == 0


@pytest.mark.parametrize(
    "words, telling",
    [
        (["mesh=dp2", "event=explode 1"], ["an event is known", "explode 1", "fail RANK ..."]),
        (["mesh=dp2_pp2", "event=fail 6"], ["rank 6", "0-3"]),
        (["mesh=dp2_pp2", "event=slow 9 0.5"], ["rank 9", "0-3"]),
        (["mesh=dp2", "event=fail 0 1"], ["somebody is left"]),
        (["mesh=dp2", "event=fail 1; slow 1 0.5"], ["one thing happens"]),
        (["event=fail 1"], ["plan needs mesh"]),
        (["mesh=pd2"], ["pd2"]),
        (["mesh=pp20", "layers=18"], ["every stage has at least one layer", "pp18"]),
        (["mesh=dp2", "microbatches=many"], ["microbatches is a whole number", "many"]),
        (["mesh=dp2", "microbatches=0"], ["microbatches is a whole number"]),
        (["mesh=dp2", "colour=red"], ["plan knows the name", "colour"]),
        (["mesh=dp2", "mesh=dp3"], ["given once"]),
        (["mesh=dp2", "fail"], ["name=value", "fail"]),
        (["mesh=dp2", "profile=nowhere.json"], ["a profile can be read", "nowhere.json"]),
        (["mesh=dp2", "sharding=zero9"], ["zero9", "zero0, zero1"]),
        (["mesh=dp2", "stages=maybe"], ["stages is true or false"]),
        (["mesh=dp2", "frequency=0.8"], ["frequency is 2 numbers"]),
        (["mesh=dp2", "frequency=0.8 fast"], ["frequency is 2 numbers"]),
        (["mesh=dp2", "frequency=1.2 1.1"], ["0 < lowest <= 1 <= highest"]),
        (["mesh=dp2", "memory=-1"], ["memory"]),
        (["mesh=dp2_pp2", "memory=1e9"], ["fits in its memory", "stage 0 lacks"]),
        (["mesh=dp2", "trace=nowhere/at/all.json"], ["a trace is written to a file"]),
    ],
)
def test_a_plan_that_cannot_be_is_refused(call, monkeypatch, tmp_path, words, telling):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("plan", *words)
    assert (code, out) == (2, "") and err.startswith("error: ") and len(err.splitlines()) <= 6
    assert all(word in err for word in telling), err


@pytest.mark.parametrize(
    "change, telling",
    [
        (lambda data: data["layers"].pop(0), ["each layer", "no layer 0"]),
        (lambda data: data["layers"][1].update(forward_s=-1), ["forward_s", "-1"]),
        (lambda data: data["speeds"].update({"7": 0.5}), ["speeds of workers that exist", "ranks 7", "0-3"]),
        (lambda data: data.pop("bandwidth"), ["no 'bandwidth'"]),
    ],
)
def test_profiles_that_cannot_be_are_refused(call, tmp_path, change, telling):
    data = json.loads(alike(4).to_json())
    change(data)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    code, _, err = call("plan", "mesh=dp2_pp2", f"profile={path}")
    assert code == 2 and all(word in err for word in telling), err
    path.write_text(alike(4).to_json(), encoding="utf-8")
    code, _, err = call("plan", "mesh=dp2_pp2", f"profile={path}", "layers=5")
    assert code == 2 and "4 layers" in err and "5 layers in the model" in err


def test_a_simulation_prints_tables_and_writes_files(call, tmp_path):
    path = tmp_path / "tiny.yaml"
    cases = "cases: [{name: one lost, mesh: dp2_pp2, microbatches: 4, event: fail 1}]"
    path.write_text(f"kind: events\ntitle: Tiny\nmodel: {{alike: 4}}\n{cases}\n", encoding="utf-8")
    code, out, _ = call("simulate", f"scenario={path}", f"out={tmp_path / 'out'}")
    assert code == 0 and "Tiny" in out and "one lost" in out and "drop replica" in out and "virtual time" in out
    assert (tmp_path / "out" / "tiny.json").is_file() and (tmp_path / "out" / "tiny.html").is_file()
    events = json.loads((tmp_path / "out" / "tiny_trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert any(e["name"] == "worker 1 is lost" for e in events) and "tiny_trace.json" in out
    code, out, _ = call("simulate", f"scenario={path}", "json=true")
    assert code == 0 and json.loads(out)["tables"][0]["rows"][0]["case"] == "one lost"


def test_a_simulation_without_matplotlib_says_what_to_install(call, tmp_path, monkeypatch):
    monkeypatch.setattr("elaswave_spmd.simulator.report.can_draw", lambda: False)
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "kind: events\ntitle: T\nmodel: {alike: 2}\ncases: [{name: a, mesh: dp2, microbatches: 2, lose: [1]}]\n"
    )
    code, _, err = call("simulate", f"scenario={path}", f"out={tmp_path / 'out'}")
    assert code == 0 and "pip install 'elaswave-spmd[plots]'" in err


@pytest.mark.parametrize(
    "words, telling",
    [
        ([], "simulate needs scenario"),
        (["scenario=nothing_like_it"], "small_events"),
        (["scenario=goodput", "devices=3"], "simulate knows the name"),
        (["scenario=goodput", "json=perhaps"], "json is true or false"),
        (["scenario=goodput", "trace=1 of 8"], "a timeline is written to a folder"),
        (["scenario=goodput", "trace=1 of 8", "out=here"], "a timeline is of a case"),
    ],
)
def test_a_simulation_that_cannot_be_is_refused(call, words, telling):
    code, out, err = call("simulate", *words)
    assert (code, out) == (2, "") and telling in err


def test_help_names_the_arguments(call):
    for command, words in (("plan", ("event=", "profile=")), ("simulate", ("scenario=", "small_events", "out="))):
        code, out, _ = call(command, "--help")
        assert code == 0 and all(word in out for word in words)
    code, _, err = call("pan")
    assert code == 2 and "train, agent, ctl, plan, simulate" in err
    assert all(word in call("--help")[1] for word in ("plan mesh=NAME", "simulate scenario=NAME"))


def test_a_process_exits_with_the_code_and_without_torch():
    code = "import sys; sys.argv = ['x', 'plan', 'mesh=dp2', 'event=fail 1']; from elaswave_spmd import cli; "
    code += "code = cli.main(); print('torch' in sys.modules); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0 and done.stdout.endswith("False\n"), done
    command = [sys.executable, "-m", "elaswave_spmd", "plan", "mesh=dp2", "event=fail 7"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, env=environment)
    assert done.returncode == 2 and done.stdout == "" and "rank 7" in done.stderr and "Traceback" not in done.stderr


def test_named_arguments_have_defaults():
    known = {"a": None, "b": "2", "c": ""}
    assert arguments.read(["a=x=y"], known, "do") == {"a": "x=y", "b": "2", "c": ""}
    with pytest.raises(ConfigError, match="do needs a"):
        arguments.read(["a="], known, "do")
