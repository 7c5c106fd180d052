"""Devices that compute wrongly, in real processes: found in the same step and evicted, without another bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from tests.faults.conftest import Undisturbed
from tests.faults.fault_runs import STEPS, TINY, Bits, chaos, run_with
from tests.multiprocess.real_runs import train, write_text


@pytest.mark.parametrize(
    ("mesh", "sharding", "rank", "point", "tensor"),
    [
        ("mesh=dp2", "zero1", 1, "forward", "output"),
        ("mesh=dp3", "zero3", 2, "reduce", "weight gradient"),
        ("mesh=dp2_pp2", "zero2", 3, "backward", "input gradient"),
        ("mesh=dp2", "zero1", 1, "sum", "sum"),
        ("mesh=dp2_pp2", "zero3", 2, "sum", "sum"),
        ("mesh=dp3", "zero2", 0, "norm", "reduced gradient"),
    ],
)
def test_a_wrong_worker_is_evicted_in_its_step(
    tmp_path: Path, undisturbed: Undisturbed, mesh: str, sharding: str, rank: int, point: str, tensor: str
) -> None:
    wrong = chaos(f"step: 4, kind: miscompute, rank: {rank}, point: {point}")
    changes = run_with(tmp_path, mesh, f"sharding={sharding}", "verify.rate=1", wrong)
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)
    assert changes.ranks("fail") == [[rank]]
    (found,) = [event for event in read_events(tmp_path / "run") if event["event"] == "corrupt"]
    assert (found["ranks"], found["step"], found["tensor"], found["elements"]) == ([rank], 4, tensor, 1)
    assert found["checked"] == 3 and found["unsure_steps"] == []
    checks = read_summary(tmp_path / "run")["checks"]
    assert checks["rate"] == 1 and checks["made"] and checks["transient_only_stages"] == []
    assert checks["sums"] and checks["transient_only_pages"] == 0


@pytest.mark.parametrize("mesh", ["mesh=dp2", "mesh=dp2_pp2"])
def test_without_checks_the_same_run_has_other_bits(tmp_path: Path, undisturbed: Undisturbed, mesh: str) -> None:
    rank = 1 if mesh == "mesh=dp2" else 3
    run_with(tmp_path, mesh, chaos(f"step: 4, kind: miscompute, rank: {rank}, point: forward"))
    found, right = Bits.of(tmp_path / "run"), undisturbed(STEPS)
    assert found.loss_hex[:3] == right.loss_hex[:3] and found != right


def test_a_wrong_worker_is_only_reported(tmp_path: Path, undisturbed: Undisturbed) -> None:
    wrong = chaos("step: 4, kind: miscompute, rank: 1, point: forward")
    changes = run_with(tmp_path, "mesh=dp3", "verify.rate=1", "verify.action=report", wrong)
    assert changes.events == () and Bits.of(tmp_path / "run") != undisturbed(STEPS)
    assert [e["ranks"] for e in read_events(tmp_path / "run") if e["event"] == "corrupt"] == [[1]]


def test_a_wrong_worker_ends_the_run(tmp_path: Path) -> None:
    wrong = chaos("step: 4, kind: miscompute, rank: 1, point: reduce")
    write_text(tmp_path)
    done = train(tmp_path, *TINY, "mesh=dp3", "verify.rate=1", "verify.action=stop", wrong)
    assert done.code == 1 and "worker 1 computed wrongly: 1 element of the weight gradient of layer" in done.err
    assert [line.step for line in read_metrics(tmp_path / "run")] == [1, 2, 3]
