"""Runs that follow what they measure, on the emulated accelerator: other placements, the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from elaswave_spmd.scheduling.cost_model import CostModel
from tests.multiprocess.real_runs import SMALL, train, write_text

EMULATED = ["runtime.device=emulated", "emulated.forward_ms=2", "emulated.backward_ms=4", "train.validate_every=0"]
QUICK = [
    "schedule.every=2",
    "schedule.window=3",
    "schedule.patience=1",
    "schedule.lasting=0",
    "train.steps=30",
    "train.global_batch=16",
]


def run(folder: Path, *arguments: str) -> list[dict[str, object]]:
    folder.mkdir()
    write_text(folder)
    done = train(folder, *SMALL, *EMULATED, *QUICK, *arguments)
    assert (done.code, done.err) == (0, ""), done.err
    return list(read_events(folder / "run"))


def bits(folder: Path) -> tuple[object, ...]:
    lines = read_metrics(folder / "run")
    return [(x.loss_hex, x.grad_norm_hex) for x in lines], read_summary(folder / "run")["weights_sha256"]


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """The bits of a run that follows nothing."""
    folder = tmp_path_factory.mktemp("still") / "run"
    run(folder, "mesh=single", "schedule.microbatches=false", "schedule.layers=false")
    return bits(folder)


def test_a_slow_worker_gets_fewer_microbatches(tmp_path: Path, still: tuple[object, ...]) -> None:
    slow = "emulated.slow=[{rank: 0, speed: 0.3, step: 4}]"
    events = run(tmp_path / "dp", "mesh=dp2", "sharding=zero2", slow)
    # On a busy machine the other one may look slow for a moment, and so may this one before its step 4.
    assert [e for e in events if e["event"] == "slow" and e["ranks"] == [0] and int(str(e["step"])) > 4]
    assert "micro-batches assigned by speed" in " ".join(str(e.get("reason")) for e in events)
    assert bits(tmp_path / "dp") == still


def test_layers_move_to_where_they_cost_least(tmp_path: Path, still: tuple[object, ...]) -> None:
    costly = "mesh=pp2", "sharding=zero1", "emulated.layer_costs=[0.5,1,1,6]"
    events = run(tmp_path / "pp", *costly)
    moved = [e for e in events if e["event"] == "rebalance" and "layers by cost" in str(e["reason"])]
    assert moved and moved[-1]["stages"] == [[0], [1]] and moved[-1]["microbatch_counts"] == [[8], [8]]
    assert moved[-1]["layer_cuts"] != [0, 2, 4]
    # What was measured can be planned with: then nothing has to move.
    found = CostModel.from_json((tmp_path / "pp" / "run" / "costs.json").read_text())
    assert found.layers[3].seconds > 2 * found.layers[1].seconds
    assert all(layer.activation_bytes and layer.boundary_bytes for layer in found.layers), "weighed on the workers"
    assert found.bandwidth != 1e9 and found.latency_s != 1e-4, "links are measured, too"
    events = run(tmp_path / "planned", *costly, f"schedule.profile={tmp_path / 'pp' / 'run' / 'costs.json'}")
    again = [str(e["reason"]) for e in events if e["event"] == "rebalance"]  # how many in flight, noise may decide
    assert all(reason.startswith("other limits in flight: ") for reason in again), again
    assert bits(tmp_path / "planned") == bits(tmp_path / "pp") == still


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    write_text(tmp_path)
    layer = '{"index": 0, "name": "a", "forward_s": 1, "backward_s": 1}'
    (tmp_path / "costs.json").write_text(f'{{"bandwidth": 1e9, "layers": [{layer}]}}')
    done = train(tmp_path, *SMALL, "schedule.profile=costs.json")
    assert done.code == 2 and "schedule.profile=costs.json" in done.err
    assert not (tmp_path / "run").exists()
