"""Hosts that are lost as a whole: agents in network namespaces, of which one is cut off or stands still."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from benchmarks.bits import Outcome
from benchmarks.namespaces import why_not
from benchmarks.processes import new_directory
from benchmarks.soak_hosts import CUT, CUT_20, CUT_SHORT, STOPPED, HostRun
from benchmarks.soak_runs import Place, Watch
from elaswave_spmd.runtime.transport.tcp_retries import bound_retries
from tests.faults.fault_runs import made_once
from tests.multiprocess import patient_model

STEPS = 120
PATIENCE = "timeouts.suspect=5", "timeouts.status=6"
"""With workers that a busy machine lets be silent for a moment."""


def place_in(folder: Path) -> Place:
    """A place for runs whose steps take longer and longer until the file `go` is there: none ends before it is struck.

    They are started in the folder of this repository, where they find the model.
    """
    target = f"model.target={patient_model.__name__}.{patient_model.PatientGPT.__name__}"
    return Place(folder, STEPS, (target, f"+model.args.go={folder / 'go'}", "+model.args.growth=1.1", *PATIENCE))


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    if reason := why_not():
        pytest.skip(reason)
    with new_directory("h-") as folder:
        (folder / "go").touch()
        return place_in(folder).undisturbed()


@pytest.mark.parametrize(("mesh", "fault"), [("dp6", CUT), ("dp3_pp2", CUT_20), ("dp3_pp2", STOPPED)])
def test_a_run_outlives_a_host(undisturbed: Outcome, mesh: str, fault: str) -> None:
    with new_directory("h-") as folder:  # its path is short, for sockets
        run = folder / "run"
        run.mkdir()
        watch = Watch(run / "run")
        with made_once(folder / "go", lambda: watch.count("fail")):
            report = HostRun(mesh, fault, place_in(folder), run).carry_out(undisturbed)
    assert not report.problems and report.told["fail"], report


def test_a_cut_that_is_shorter_than_the_patience_with_silence_costs_nobody(undisturbed: Outcome) -> None:
    if not bounds_retries():
        pytest.skip("this kernel cannot bound the time between two tries of TCP (Linux 6.15 can)")
    with new_directory("h-") as folder:
        run = folder / "run"
        run.mkdir()
        (folder / "go").touch()
        report = HostRun("dp3_pp2", CUT_SHORT, place_in(folder), run).carry_out(undisturbed)
    assert not report.problems and not report.told["fail"] and report.agent_end == "0", report


def bounds_retries() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        return bound_retries(client.fileno(), 1.0)
