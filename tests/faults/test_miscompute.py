"""Devices that compute wrongly, in real processes: found in the same step and evicted, without another bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from tests.faults.conftest import Undisturbed
from tests.faults.fault_runs import STEPS, TINY, Bits, chaos, run_with
from tests.multiprocess.real_runs import train, write_text

pytestmark = pytest.mark.mends("corrupt", "mismatch")


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
    run_with(tmp_path, mesh, "verify.rate=0", chaos(f"step: 4, kind: miscompute, rank: {rank}, point: forward"))
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


# ---- updates, and what was committed before a fault was found


def of_kind(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(tmp_path / "run") if event["event"] == kind]


@pytest.mark.parametrize("action", ["evict", "report"])
@pytest.mark.parametrize(
    ("mesh", "sharding", "rank", "step"),
    [("mesh=dp3", "zero1", 0, 4), ("mesh=dp4", "zero3", 2, 5), ("mesh.stages=[3,1]", "zero2", 1, 10)],
)
def test_a_wrong_update_is_found_before_anything_comes_of_it(
    tmp_path: Path, undisturbed: Undisturbed, mesh: str, sharding: str, rank: int, step: int, action: str
) -> None:
    wrong = chaos(f"step: {step}, kind: miscompute, rank: {rank}, point: apply")
    compared = "mirror.count=2", "mirror.verify_every=1", f"verify.action={action}"
    changes = run_with(tmp_path, mesh, f"sharding={sharding}", *compared, wrong)
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)
    assert changes.ranks("fail") == ([[rank]] if action == "evict" else [])
    (found,) = of_kind(tmp_path, "corrupt")
    assert (found["ranks"], found["step"], found["tensor"]) == ([rank], step, "state")
    assert found["checked"] == step - 1 and found["unsure_steps"] == []
    summary = read_summary(tmp_path / "run")["replicas"]
    assert summary == {"every": 1, "compared": STEPS + 1, "wrong": 1, "fewest": 3}


def test_of_two_copies_nobody_can_tell_and_the_run_goes_back_once(tmp_path: Path, undisturbed: Undisturbed) -> None:
    wrong = chaos("step: 6, kind: miscompute, rank: 1, point: apply")
    run_with(tmp_path, "mesh=dp2", "sharding=zero1", "mirror.verify_every=1", "checkpoint.every=4", wrong)
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)
    (found,), (back,) = of_kind(tmp_path, "mismatch"), of_kind(tmp_path, "rollback")
    assert (found["ranks"], found["step"]) == ([0, 1], 6)
    assert back["given_up"] in (5, 6), "hashes may come before the first word that the step is committed"
    assert back["ranks"] == []
    assert back["step"] in (0, 4), "the newest checkpoint that is whole by then, or the begin"


def test_of_two_copies_that_differ_again_the_run_ends_and_names_both(tmp_path: Path) -> None:
    write_text(tmp_path)
    wrong = chaos(
        "step: 6, kind: miscompute, rank: 1, point: apply", "step: 9, kind: miscompute, rank: 0, point: apply"
    )
    done = train(tmp_path, *TINY, "mesh=dp2", "sharding=zero1", "mirror.verify_every=1", "checkpoint.every=4", wrong)
    assert done.code == 1 and "workers 0, 1 have different state after step 9" in done.err
    assert "nothing shows which of them is wrong, for the second time" in done.err


def test_a_rollback_makes_good_what_was_committed(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Replicas are compared at steps 4 and 8: steps 6 to 8 were computed from wrong state."""
    wrong = chaos("step: 5, kind: miscompute, rank: 2, point: apply")
    compared = "mirror.count=2", "mirror.verify_every=9", "verify.action=rollback", "checkpoint.every=4"
    run_with(tmp_path, "mesh=dp3", "sharding=zero1", *compared, wrong)
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)
    (found,), (back,) = of_kind(tmp_path, "corrupt"), of_kind(tmp_path, "rollback")
    assert (found["ranks"], found["step"], found["checked"], found["unsure_steps"]) == ([2], 8, 4, [6, 8])
    assert back["given_up"] in (7, 8), "hashes may come before the first word that the step is committed"
    assert (back["ranks"], back["mesh"]) == ([2], "dp2") and back["step"] in (0, 4)
    summary = read_summary(tmp_path / "run")
    counts = summary["faults"]
    assert (counts["corrupt"], counts["rollback"]) == (1, 1), "those of the life that has ended as well"
    assert summary["replicas"]["wrong"] == 1


def test_a_rollback_undoes_a_step_that_was_committed_unchecked(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Worker 1 is wrong in steps 4 and 5, and checked in steps 3 and 5: step 4 is committed with wrong weights."""
    wrong = chaos(*(f"step: {step}, kind: miscompute, rank: 1, point: forward" for step in (4, 5)))
    checked = "verify.rate=0.15", "verify.action=rollback", "checkpoint.every=2"
    run_with(tmp_path, "mesh=dp2", "sharding=zero1", *checked, wrong)
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)
    (found,), (back,) = of_kind(tmp_path, "corrupt"), of_kind(tmp_path, "rollback")
    assert (found["ranks"], found["step"], found["checked"], found["unsure_steps"]) == ([1], 5, 3, [4, 4])
    assert (back["ranks"], back["mesh"]) == ([1], "single")
    assert back["step"] in (0, 2), "the checkpoint of step 4 may be wrong; that of step 2 may not be whole yet"


@pytest.mark.parametrize("action", [("rollback", "elastic.min_workers=2"), ("stop",)], ids=" ".join)
def test_a_run_that_ends_in_place_of_going_back_goes_back_when_it_is_resumed(
    tmp_path: Path, undisturbed: Undisturbed, action: tuple[str, ...]
) -> None:
    """As above, but with checkpoints of steps 1 to 4: that of step 4 is wrong, and older ones than `keep` stay."""
    write_text(tmp_path)
    wrong = chaos(*(f"step: {step}, kind: miscompute, rank: 1, point: forward" for step in (4, 5)))
    checked = "verify.rate=0.15", f"verify.action={action[0]}", *action[1:], "checkpoint.every=1", "checkpoint.keep=1"
    done = train(tmp_path, *TINY, "mesh=dp2", "sharding=zero1", *checked, wrong)
    assert done.code == 1 and "steps 4 to 4 may be wrong" in done.err
    assert "step_00000004" not in done.err and "resume with: " in done.err
    (back,) = of_kind(tmp_path, "rollback")
    assert back["step"] in (1, 2, 3) and f"step_{back['step']:08d}" in done.err
    done = train(tmp_path, "train.resume=run", "run.display=plain", "elastic.min_workers=1")
    assert (done.code, done.err) == (0, ""), done.err
    assert f"the run was going back to step {back['step']} when its controller ended" in done.out
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)


@pytest.mark.parametrize("mesh", ["mesh=dp3", "mesh=dp2_pp2"])
def test_checks_over_encrypted_links(tmp_path: Path, undisturbed: Undisturbed, mesh: str) -> None:
    wrong = chaos("step: 4, kind: miscompute, rank: 2, point: forward")
    tcp = "runtime.transport=tcp", "runtime.encryption=true"
    changes = run_with(tmp_path, mesh, "sharding=zero2", "verify.rate=1", *tcp, wrong)
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS) and changes.ranks("fail") == [[2]]
    assert [event["ranks"] for event in of_kind(tmp_path, "corrupt")] == [[2]]
