"""Real runs with a timeline, and with frequencies that are set: the same bits as without."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from tests.multiprocess.real_runs import SMALL, Done, train, write_text

EMULATED = ("runtime.device=emulated", "emulated.forward_ms=2", "emulated.backward_ms=4", "train.validate_every=0")
KILL = "chaos.events=[{step: 4, kind: kill, rank: 1, point: backward}]"


def run(folder: Path, *arguments: str) -> Done:
    folder.mkdir()
    write_text(folder)
    done = train(folder, *SMALL, *arguments)
    assert (done.code, done.err) == (0, ""), done.err
    return done


def bits(folder: Path) -> tuple[object, ...]:
    lines = read_metrics(folder / "run")
    return [(x.loss_hex, x.grad_norm_hex) for x in lines], read_summary(folder / "run")["weights_sha256"]


def trace_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "run" / "trace.json").read_text())["traceEvents"]


def test_a_trace_shows_every_worker_and_changes_no_bit(tmp_path: Path) -> None:
    run(tmp_path / "plain", "mesh=single")
    run(tmp_path / "traced", "mesh=dp2_pp2", "sharding=zero2", "run.trace=true", KILL)
    over = time.time()
    assert bits(tmp_path / "traced") == bits(tmp_path / "plain")
    assert not list((tmp_path / "traced" / "run").glob("trace-*"))
    events = trace_of(tmp_path / "traced")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["controller", "worker 0", "worker 1", "worker 2", "worker 3"]
    start = read_events(tmp_path / "traced" / "run")[0]["time"]
    timed = [e for e in events if e["ph"] != "M"]
    assert all(e["ts"] >= 0 and start + 1e-6 * (e["ts"] + e.get("dur", 0)) <= over for e in timed), "within the run"
    # The killed one is there as far as it had written; the others did the rest of the run.
    steps = {
        names[pid]: {e["args"]["step"] for e in timed if e["pid"] == pid and e.get("cat") == "backward"}
        for pid in names
        if pid != 1
    }
    assert steps["worker 1"] == {1, 2, 3} and steps["worker 0"] == set(range(1, 7))
    # Every micro-batch went forward and backward through every layer, in every undisturbed step.
    for kind in ("forward", "backward"):
        done = {
            (e["args"]["microbatch"], e["args"]["layer"])
            for e in timed
            if e.get("cat") == kind and e["args"]["step"] == 2
        }
        assert done == {(microbatch, layer) for microbatch in range(4) for layer in range(4)}
    assert next(e["name"] for e in timed if e["pid"] == 1 and e["ph"] == "X").startswith("mesh epoch 0: dp2_pp2")
    assert {"wait", "send"} <= {e.get("cat") for e in timed if names[e["pid"]] == "worker 2"}
    assert all(e["args"]["bytes"] > 0 for e in timed if e.get("cat") == "send")
    # The rows of one worker: what it does, it does one after the other.
    for pid in names:
        mine = sorted((e["ts"], e["dur"]) for e in timed if (e["pid"], e["tid"], e["ph"]) == (pid, 1, "X"))
        assert all(a + d <= b + 1 for (a, d), (b, _) in itertools.pairwise(mine))


def test_backwards_are_run_in_both_ways_while_it_is_tried_and_change_no_bit(tmp_path: Path) -> None:
    """The first steps put weight gradients off. After a dozen whole backwards are tried: by the next validation at the
    latest, in which everybody waits for the controller."""
    steps = ("train.steps=32", "train.validate_every=8", "run.trace=true")
    run(tmp_path / "single", "mesh=single", *steps)
    run(tmp_path / "tried", "mesh=pp2", "sharding=zero1", *steps)
    run(tmp_path / "never", "mesh=pp2", *steps, "schedule.split_backward=never")
    assert bits(tmp_path / "tried") == bits(tmp_path / "single") == bits(tmp_path / "never")

    def steps_of(folder: str, kind: str) -> set[int]:
        return {event["args"]["step"] for event in trace_of(tmp_path / folder) if event.get("cat") == kind}

    in_parts = steps_of("tried", "weights")
    assert steps_of("tried", "backward") == set(range(1, 33)) and in_parts >= {1, 2, 3}
    assert set(range(17, 25)) - in_parts, "whole backwards were run as well"
    assert not steps_of("never", "weights")
    told = {name: read_summary(tmp_path / name / "run")["split_backward"] for name in ("tried", "never")}
    assert told["never"] == {"kinds": ["block0", "head"], "kept": "whole", "trials": 0}
    assert told["tried"] == {"kinds": ["block0", "head"]}, "so few steps end no trial"


def test_no_trace_unless_asked_for(tmp_path: Path) -> None:
    run(tmp_path / "a", "mesh=dp2", "train.steps=2", "train.validate_every=0")
    assert not list((tmp_path / "a" / "run").glob("*trace*"))


def test_frequencies_follow_the_bubbles_and_change_no_bit(tmp_path: Path) -> None:
    quick = ("schedule.every=2", "schedule.window=3", "schedule.patience=1", "schedule.lasting=0", "train.steps=24")
    # 4 micro-batches: the first worker has two of them, and keeps them whatever speeds a busy machine shows.
    uneven = ("mesh=dp3", "sharding=zero1", *EMULATED, *quick, "schedule.microbatches=false")
    run(tmp_path / "plain", *uneven)
    # Layers that take so long that what else the machine does is little beside them, and no worker looks slow.
    slower = ("emulated.forward_ms=12", "emulated.backward_ms=24")
    run(tmp_path / "set", *uneven, *slower, "schedule.frequency=simulated", "run.trace=true")
    assert bits(tmp_path / "set") == bits(tmp_path / "plain")
    run_events = read_events(tmp_path / "set" / "run")
    found = [e for e in run_events if e["event"] == "frequency"]
    assert found, [e["event"] for e in run_events]
    to = {rank: pace[0][1] for rank, pace in found[0]["paces"].items()}  # one stage: nobody waits within a step
    assert to["0"] == 1.0 and all(0.5 <= to[rank] <= 0.7 for rank in ("1", "2")), to
    assert found[0]["modelled_energy"] < found[0]["modelled_energy_before"]
    assert not [e for e in run_events if e["event"] == "slow"]
    # The device has really become slower: 24 ms of backward take about 48 ms at half the frequency.
    events = trace_of(tmp_path / "set")
    assert {e["pid"] for e in events if e["ph"] == "C"} == {2, 3, 4}
    changes = [(e["ts"], e["args"]["frequency"]) for e in events if e["ph"] == "C" and e["pid"] == 3]
    in_force = [
        (e["dur"], max((at, value) for at, value in changes if at <= e["ts"])[1])
        for e in events
        if e.get("cat") == "backward" and e["pid"] == 3
    ]
    assert {value for _, value in in_force} >= {1.0, to["1"]}
    assert all(dur >= 24e3 / value * 0.999 for dur, value in in_force), in_force
