"""A worker that is killed in the middle of a validation: the losses are those that it would have had anyway."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import validation_killer
from tests.faults.conftest import Undisturbed
from tests.faults.fault_runs import STEPS, Bits, run_with


@pytest.mark.parametrize(
    ("mesh", "sharding", "at"),
    [("mesh=dp3", "zero2", 0), ("mesh=dp2_pp2", "zero1", 0), ("mesh=dp2_pp2", "zero3", -1), ("mesh=pp3", "zero0", 1)],
)
def test_a_validation_that_a_worker_does_not_survive_is_run_again(
    tmp_path: Path, undisturbed: Undisturbed, mesh: str, sharding: str, at: int
) -> None:
    model = validation_killer.write(tmp_path, at)
    (tmp_path / "allowed").touch()
    changes = run_with(tmp_path, mesh, f"sharding={sharding}", *model)
    assert not (tmp_path / "allowed").exists(), "nobody was killed"
    (lost,) = changes.of_kind("fail")
    assert len(lost["ranks"]) == 1 and "SIGKILL" in lost["reason"]
    assert Bits.of(tmp_path / "run") == undisturbed(STEPS)
