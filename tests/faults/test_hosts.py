"""Hosts that are lost as a whole: agents in network namespaces, of which one is cut off or stands still."""

from __future__ import annotations

import pytest

from benchmarks.bits import Outcome
from benchmarks.processes import new_directory
from benchmarks.soak_hosts import CUT, STOPPED, HostRun, why_not
from benchmarks.soak_runs import Place

STEPS = 120


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    if reason := why_not():
        pytest.skip(reason)
    with new_directory("h-") as folder:
        return Place(folder, STEPS).undisturbed()


@pytest.mark.parametrize(("mesh", "fault"), [("dp6", CUT), ("dp3_pp2", STOPPED)])
def test_a_run_outlives_a_host(undisturbed: Outcome, mesh: str, fault: str) -> None:
    with new_directory("h-") as folder:  # its path is short, for sockets
        run = folder / "run"
        run.mkdir()
        report = HostRun(mesh, fault, Place(folder, STEPS), run).carry_out(undisturbed)
    assert not report.problems and report.told["fail"], report
