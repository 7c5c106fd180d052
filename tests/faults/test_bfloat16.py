"""Faults in runs that compute in bfloat16, with fp32 master parameters: the bits of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.fault_runs import Bits, chaos, run_undisturbed, run_with

BF16 = "runtime.dtype=bf16"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    """The bits of that run on one worker."""
    return run_undisturbed(tmp_path_factory.mktemp("bf16"), BF16)


@pytest.mark.parametrize(
    ("mesh", "sharding", "event"),
    [
        ("mesh=dp3", "zero1", "step: 4, kind: kill, rank: 1, point: backward"),
        ("mesh=dp2_pp2", "zero2", "step: 5, kind: kill, rank: 3, point: norm"),
        ("mesh=dp2_pp2", "zero3", "step: 6, kind: kill, rank: 0, point: publish"),
        ("mesh.stages=[3,2]", "zero0", "step: 3, kind: kill, rank: 4, point: apply"),
    ],
)
def test_a_kill_changes_no_bit(tmp_path: Path, undisturbed: Bits, mesh: str, sharding: str, event: str) -> None:
    changes = run_with(tmp_path, mesh, f"sharding={sharding}", BF16, chaos(event))
    assert len(changes.of_kind("fail")) == 1
    assert Bits.of(tmp_path / "run") == undisturbed
