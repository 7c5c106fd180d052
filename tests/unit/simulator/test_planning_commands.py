"""`plan` and `simulate` on the command line: what they print, what they refuse, and with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_spmd import cli
from elaswave_spmd.simulator import scenario
from elaswave_spmd.simulator.shapes import alike
from elaswave_spmd.simulator.simulate import with_settings
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
    code, out, err = call("plan", "mesh=dp4_pp4", "event=fail 6", "train.global_batch=128")
    assert (code, err) == (0, "")
    assert "event: fail 6" in out and "costs made up: 18 layers" in out
    old, new = out.index("old placement"), out.index("workers [4, 5, 7]")
    assert old < out.index("workers [4, 5, 6, 7], micro-batches [8, 8, 8, 8]") < new
    for words in (
        "state:",
        "page ranges are promoted in place",
        "in the background, replicas made again: ",
        "reshard plan, without worker 6: mesh stages4-3-4x2",
        "promote 4 in place of 6: ",
        "step: ",
        "throughput: ",
        "why: micro-batches assigned by speed",
        "planned in",
    ):
        assert words in out


def test_layers_move_with_bytes_and_a_lower_bound(call, tmp_path):
    profile = tmp_path / "costs.json"
    profile.write_text(costs_of([1.0] * 16, bandwidth=1e9, state_bytes=1000).to_json(), encoding="utf-8")
    words = (
        "plan",
        "mesh=dp4_pp2",
        "event=fail 4 5",
        f"schedule.profile={profile}",
        "train.global_batch=64",
        "sharding=zero2",
    )
    code, out, _ = call(*words)
    assert code == 0 and f"costs {profile}" in out
    assert "new placement, when its state is there" in out and "B move (at least " in out and "why: layers move" in out
    heavy = tmp_path / "heavy.json"  # so much state that one step cannot pay for moving it
    heavy.write_text(costs_of([1.0] * 16, bandwidth=1e9, state_bytes=10**13).to_json(), encoding="utf-8")
    for stays in (f"schedule.profile={heavy} train.steps=1", "schedule.layers=false"):
        code, out, _ = call(*words, *stays.split())
        assert code == 0 and "when its state is there" not in out and "why: layers stay" in out


def test_layers_move_only_for_a_gain_that_a_run_would_move_them_for(call):
    words = ("plan", "mesh=dp2_pp2", "event=fail 3", "json=true")
    plans = [json.loads(call(*words, f"schedule.min_gain={least}")[1]) for least in (0.01, 0.9)]
    assert plans[0]["later"] is not None and plans[1]["later"] is None
    assert plans[0]["now"]["step_s"] == plans[1]["now"]["step_s"]
    assert "less than 90.0% with schedule.min_gain" in plans[1]["reasons"][1]


def test_no_worker_gets_more_state_than_a_run_would_give_it(call, tmp_path):
    profile = tmp_path / "costs.json"
    costs = costs_of([1.0] * 6)
    sized = tuple(replace(layer, state_bytes=1000 * (i >= 3)) for i, layer in enumerate(costs.layers))
    profile.write_text(replace(costs, layers=sized).to_json(), encoding="utf-8")
    words = ("plan", "mesh=pp3", "event=slow 0 0.05; slow 1 0.05", f"schedule.profile={profile}", "json=true")
    cuts = [json.loads(call(*words, *limit)[1])["later"] for limit in (("schedule.memory_limit=1e9",), ())]
    assert cuts[0]["layer_cuts"] == [0, 1, 2, 6], "all three layers with state for the fastest"
    assert cuts[1] is None, "with two of them, twice the even share, no other cut is faster"


def test_a_plan_as_json_with_hints_and_a_trace(call, tmp_path):
    trace = tmp_path / "trace.json"
    frequency = ("schedule.frequency=cpufreq", "schedule.f_min=0.8", "schedule.f_max=1.1", "schedule.f_margin=0")
    # A user's model is not imported: its layers are taken to be alike, 6 and an embedding and a head.
    model = ("model.target=my_file.MyModel", "model.layers=6")
    code, out, _ = call("plan", "mesh=dp2_pp2", "event=slow 2 0.5", "json=true", *frequency, f"trace={trace}", *model)
    assert code == 0
    plan = json.loads(out)
    assert plan["event"] == "slow 2 0.5" and plan["old"]["stages"] == [[0, 1], [2, 3]] and plan["speed_left"] == 0.875
    assert plan["now"]["microbatch_counts"][1][0] < plan["now"]["microbatch_counts"][1][1] and plan["hints"]
    assert plan["now"]["move"]["bytes"] == 0 < plan["ratio"] <= 1.1
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert any(e["ph"] == "C" for e in events) and any("slows down" in e["name"] for e in events)


def test_a_plan_without_an_event_and_with_newcomers(call):
    assert "event: nothing" in call("plan", "mesh=dp2")[1]
    code, out, _ = call("plan", "mesh=dp2_pp2", "event=fail 1; join 2", "train.global_batch=48")
    assert code == 0 and "[0, 4" in out and "why:" in out


def test_microbatches_go_with_the_mesh_where_none_are_named(call):
    for mesh, microbatches in (("dp2_pp2", 8), ("stages3-2", 12), ("dp4_pp4", 16)):
        assert f", {microbatches} micro-batches, event: nothing" in call("plan", f"mesh={mesh}")[1]


def test_lost_copies_are_counted(call):
    _, out, _ = call("plan", "mesh=dp4", "event=fail 1", "model.target=my.Model", "model.layers=1", "json=true")
    state = 3 * alike(3).layers[0].state_bytes
    plan = json.loads(out)
    assert plan["now"]["move"]["bytes"] == pytest.approx(state * 2 / 4, rel=1e-4), "to a page for each worker and layer"
    assert plan["layers_stay"] and plan["now"]["move"]["bytes"] == plan["now"]["move"]["bound_bytes"]
    _, out, _ = call("plan", "mesh=dp4", "event=fail 1", "sharding=zero0", "json=true")
    assert json.loads(out)["now"]["move"]["bytes"] == 0


def test_a_stage_that_is_lost_is_read_from_the_checkpoint(call):
    code, out, _ = call("plan", "mesh=dp2_pp2", "event=fail 2 3")
    assert code == 0 and "before going on: " in out and "are read from the checkpoint" in out


@pytest.mark.parametrize(
    "words, telling",
    [
        (["mesh=dp2", "event=explode 1"], ["explode 1", "fail RANK ..."]),
        (["mesh=dp2_pp2", "event=fail 6"], ["rank 6", "0-3"]),
        (["mesh=dp2_pp2", "event=slow 9 0.5"], ["rank 9", "0-3"]),
        (["mesh=dp2", "event=fail 0 1"], ["somebody is left"]),
        (["mesh=dp2", "event=fail 1; slow 1 0.5"], ["one thing happens"]),
        (["event=fail 1"], ["plan needs a mesh"]),
        (["mesh=pd2"], ["mesh=pd2 is not the name of a mesh", "mesh=dp2"]),
        (["mesh=pp20"], ["every stage has at least one layer", "pp18"]),
        (["mesh=dp2", "train.global_batch=many"], ["train.global_batch=many is not a whole number"]),
        (["mesh=dp2", "train.global_batch=0"], ["train.global_batch=0 is out of range"]),
        (["mesh=dp2", "colour=red"], ["there is no setting colour"]),
        (["mesh=dp2", "train.stpes=3"], ["there is no setting train.stpes", "train.steps=3"]),
        (["mesh=dp2", "event=fail 1", "event=fail 0"], ["event is given twice"]),
        (["mesh=dp2", "event"], ["event has no value"]),
        (["mesh=dp2", "fail"], ["fail is not a setting", "name=value"]),
        (
            ["mesh=dp2", "schedule.profile=x.json"],
            ["error: cannot read schedule.profile=x.json (No such file or directory)", "a run of 10 steps or more"],
        ),
        (
            ["mesh=dp2", "model=llama_tiny", "++model.args.hidden=wide"],
            ["model.args.hidden=wide is not a whole number"],
        ),
        (
            ["mesh=dp2", "model=llama_tiny", "++model.args.kv_heads=[2]"],
            ["model.args.kv_heads=[2] is not a whole number"],
        ),
        (["mesh=dp2", "model=llama_tiny", "++model.args.kv_heads=-1"], ["model.args.kv_heads=-1 is out of range"]),
        (["mesh=dp2", "sharding=zero9"], ["sharding=zero9 is not a choice", "zero0, zero1"]),
        (["mesh=dp2", "schedule.stages=maybe"], ["schedule.stages=maybe is neither true nor false"]),
        (["mesh=dp2", "schedule.microbatches=false"], ["assigns micro-batches by the speed"]),
        (["mesh=dp2", "json=maybe"], ["json=maybe is neither true nor false"]),
        (["mesh=dp2", "schedule.frequency=cpufreq", "schedule.f_min=1.2"], ["schedule.f_min=1.2 is out of range"]),
        (["mesh=dp2", "schedule.memory_limit=-1"], ["schedule.memory_limit=-1 is out of range"]),
        (["mesh=dp2_pp2", "schedule.memory_limit=1e9"], ["fits in its memory", "stage 0 lacks"]),
        (["mesh=dp2", "trace=nowhere/at/all.json"], ["cannot write trace=nowhere/at/all.json (No such file"]),
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
        (lambda data: data["speeds"].update({"7": 0.5}), ["has speeds of ranks 7", "ranks 0-3"]),
        (lambda data: data.pop("bandwidth"), ["no 'bandwidth'"]),
    ],
)
def test_profiles_that_cannot_be_are_refused(call, tmp_path, change, telling):
    data = json.loads(alike(4).to_json())
    change(data)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    code, _, err = call("plan", "mesh=dp2_pp2", f"schedule.profile={path}")
    assert code == 2 and all(word in err for word in telling), err
    path.write_text(alike(4).to_json(), encoding="utf-8")
    code, _, err = call("plan", "mesh=dp2_pp2", f"schedule.profile={path}", "model.layers=3")
    assert code == 2 and "4 layers" in err and "and the model 5" in err


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
        ([], "simulate needs a scenario"),
        (["scenario=nothing_like_it"], "small_events"),
        (["scenario=goodput", "devices=3"], "there is no setting devices"),
        (["scenario=goodput", "json=perhaps"], "json=perhaps is neither true nor false"),
        (["scenario=goodput", "trace=1 of 8"], "a timeline is written to a folder"),
        (["scenario=goodput", "train.steps=3"], "train.steps has no meaning for this scenario"),
        (["scenario=small_events", "model=llama_7b"], "model has no meaning for this scenario"),
        (["scenario=goodput", "trace=1 of 8", "out=here"], "trace=1 of 8 is no case of the scenario"),
    ],
)
def test_a_simulation_that_cannot_be_is_refused(call, words, telling):
    code, out, err = call("simulate", *words)
    assert (code, out) == (2, "") and telling in err


def test_help_names_the_arguments(call):
    for command, words in (
        ("plan", ("event=", "schedule.profile=")),
        ("simulate", ("scenario=", "small_events", "out=")),
    ):
        code, out, _ = call(command, "--help")
        assert code == 0 and all(word in out for word in words)
    code, _, err = call("pan")
    assert code == 2 and "train, agent, ctl, report, watch, export, generate, demo, plan, simulate" in err
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


@pytest.mark.parametrize(
    ("words", "source"),
    [
        ([], "made up: 18 layers"),
        (["model=llama_7b"], "modelled: llama_7b, 34 layers"),
        (["model=gpt2_124m"], "modelled: gpt2_124m, 14 layers"),
        (["model.layers=6"], "modelled: gpt_tiny, 8 layers"),
        (["model=mlp_tiny"], "made up: 6 layers"),
    ],
)
def test_a_model_that_is_named_has_modelled_costs(call, words, source):
    assert f"costs {source}" in call("plan", "mesh=dp2_pp2", *words)[1]


def test_the_words_of_train_are_taken(call):
    same = ["mesh=dp4_pp2", "event=fail 3", "json=true"]
    plans = []
    for mesh in ([], ["mesh.dp=4", "mesh.pp=2"], ["mesh.stages=[4,4]"]):
        words = same if not mesh else [*mesh, *same[1:]]
        code, out, err = call("plan", *words, "optim.lr=0.1", "elastic.replace=true", "train.microbatch_size=2")
        assert (code, err) == (0, "")
        plans.append({name: value for name, value in json.loads(out).items() if name != "planned_s"})
    assert plans[0] == plans[1] == plans[2] and plans[0]["mesh"] == "dp4_pp2"


def test_a_hundred_thousand_workers_are_planned(call):
    code, out, _ = call("plan", "mesh.dp=6250", "mesh.pp=16", "event=fail 3", "json=true")
    assert code == 0 and json.loads(out)["planned_s"] < 60


def test_settings_take_the_place_of_a_scenarios_own(call, tmp_path):
    path = tmp_path / "tiny.yaml"
    cases = "cases: [{name: a, mesh: dp2_pp2, microbatches: 4, event: fail 1}]"
    path.write_text(f"kind: events\ntitle: T\nmodel: {{alike: 4}}\n{cases}\n", encoding="utf-8")
    chosen = scenario.load(str(path))
    changed = with_settings(chosen, ["sharding=zero0", "train.steps=7", "seed=5"])
    assert changed == replace(chosen, zero=0, steps=7, seed=5) and with_settings(chosen, []) == chosen
    assert call("simulate", f"scenario={path}", "json=true", "sharding=zero0")[0] == 0


@pytest.mark.parametrize("whole", ["runtime.check_model=false", "runtime.device=cuda", "schedule.split_backward=never"])
def test_a_plan_is_for_backwards_in_two_parts_where_workers_would_run_them_so(call, whole):
    words = ("plan", "mesh=pp4", "train.global_batch=8", "json=true")
    step_s = {}
    for settings in ((), (whole,), ("runtime.device=xla",)):
        code, out, _ = call(*words, *settings)
        assert code == 0
        step_s[settings] = json.loads(out)["old"]["step_s"]
    assert step_s[()] < 0.9 * step_s[whole,] and step_s[()] == step_s["runtime.device=xla",]


def test_a_profile_says_which_layers_are_in_two_parts(call, tmp_path):
    profile, found = tmp_path / "costs.json", []
    for share in (0.0, 0.4):
        costs = costs_of([1.0] * 8)
        layers = tuple(replace(layer, weight_share=share) for layer in costs.layers)
        profile.write_text(replace(costs, layers=layers).to_json(), encoding="utf-8")
        code, out, _ = call("plan", "mesh=pp4", "train.global_batch=8", "json=true", f"schedule.profile={profile}")
        found.append(json.loads(out)["old"]["step_s"])
        assert code == 0
    assert found[1] < found[0]
