"""Runs on the emulated accelerator: the same bits on every mesh, whatever happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from tests.faults.fault_runs import PATIENT
from tests.multiprocess.real_runs import SMALL, train, write_text

# Workers are lost by their ends alone: one that is late on a busy machine would say on stderr that it was evicted.
EMULATED = ("runtime.device=emulated", "emulated.forward_ms=1", "emulated.backward_ms=2", *PATIENT)
NO_PARTS = {"kinds": [], "why": "emulated.weight_share=0"}
KILL = "chaos.events=[{step: 3, kind: kill, rank: 1, point: backward}]"


def bits(folder: Path, *arguments: str) -> tuple[list[tuple[str, str]], object]:
    folder.mkdir()
    write_text(folder)
    done = train(folder, *SMALL, *EMULATED, *arguments)
    assert (done.code, done.err) == (0, "")
    lines = read_metrics(folder / "run")
    return [(x.loss_hex, x.grad_norm_hex) for x in lines], read_summary(folder / "run")["weights_sha256"]


def test_the_mesh_changes_no_bit(tmp_path: Path) -> None:
    single = bits(tmp_path / "single", "mesh=single")
    assert len(set(single[0])) == 6
    for number, arguments in enumerate(
        (("mesh=pp3", "sharding=zero1"), ("mesh=dp3", "sharding=zero3", KILL), ("mesh=dp2_pp2", "sharding=zero2", KILL))
    ):
        assert bits(tmp_path / str(number), *arguments) == single


def test_weight_gradients_are_put_off_and_change_no_bit(tmp_path: Path) -> None:
    """Also where a worker dies before it has made those that it put off."""
    single = bits(tmp_path / "single", "mesh=single")
    killed = "chaos.events=[{step: 3, kind: kill, rank: 1, point: weights}]"
    assert bits(tmp_path / "parts", "mesh=pp3", killed, "run.trace=true") == single
    assert bits(tmp_path / "whole", "mesh=pp3", "emulated.weight_share=0") == single
    runs = {name: tmp_path / name / "run" for name in ("parts", "whole")}
    told = {name: read_summary(run)["split_backward"] for name, run in runs.items()}
    assert told == {"parts": {"kinds": ["block0", "block1", "head"]}, "whole": NO_PARTS}
    actions = json.loads((runs["parts"] / "trace.json").read_text())["traceEvents"]
    assert any(action.get("cat") == "weights" for action in actions)


@pytest.mark.mends("corruption")
def test_a_step_that_begins_anew_after_a_repair_computes_with_the_repaired_parameters(tmp_path: Path) -> None:
    """A parameter flips before it is used, is found before the vote, and comes from the other replica: same version."""
    # chaos.seed=1 draws the parameters of a page range, not its optimizer state.
    damage = "chaos.seed=1", "chaos.events=[{step: 3, kind: corrupt, rank: 1, point: forward}]"
    found = bits(tmp_path / "found", "mesh=dp2", "mirror.verify_every=1", *damage)
    events = read_events(tmp_path / "found" / "run")
    assert [(e["ranks"], e["step"]) for e in events if e["event"] == "corruption"] == [([1], 3)]
    assert found == bits(tmp_path / "single", "mesh=single")


def test_a_worker_that_validates_for_long_is_not_taken_to_hang(tmp_path: Path) -> None:
    """Its share takes longer than an action may, and than an answer to a loss. Worker 1 dies as it begins.

    A layer takes 0.2 s of the 5 s in which something is to be seen; a worker has 8 micro-batches or more, of 4 layers.
    """
    write_text(tmp_path)
    long = ("runtime.device=emulated", "emulated.forward_ms=200", "emulated.backward_ms=1")
    limits = ("timeouts.progress=5", "timeouts.progress_factor=1", "timeouts.status=4.5", "timeouts.start=300")
    validated = (
        "train.validate_every=2",
        "train.validate_microbatches=32",
        "data.validation_fraction=0.3",
        "train.steps=2",
    )
    killed = "chaos.events=[{step: 2, kind: kill, rank: 1, point: publish}]"
    done = train(tmp_path, *SMALL, *long, *limits, *validated, "mesh=dp4", killed)
    assert (done.code, done.err) == (0, "")
    events = read_events(tmp_path / "run")
    assert [event["ranks"] for event in events if event["event"] == "fail"] == [[1]]
    assert [event["step"] for event in events if event["event"] == "validation"] == [2]


def test_costs_for_other_layers_are_refused(tmp_path: Path) -> None:
    write_text(tmp_path)
    done = train(tmp_path, *SMALL, *EMULATED, "emulated.layer_costs=[1,2]")
    assert done.code == 2 and "emulated.layer_costs=[1.0,2.0] has 2 numbers, and the model has 4 layers" in done.err
    assert not (tmp_path / "run").exists()
