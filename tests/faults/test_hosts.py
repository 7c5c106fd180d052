"""Hosts that are lost as a whole: agents in network namespaces, of which one is cut off or stands still."""

from __future__ import annotations

import socket

import pytest

from benchmarks.bits import Outcome
from benchmarks.namespaces import why_not
from benchmarks.processes import new_directory
from benchmarks.soak_hosts import CUT, CUT_20, CUT_SHORT, STOPPED, HostRun
from benchmarks.soak_runs import Place
from elaswave_spmd.runtime.transport.tcp_retries import bound_retries

STEPS = 120


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    if reason := why_not():
        pytest.skip(reason)
    with new_directory("h-") as folder:
        return Place(folder, STEPS).undisturbed()


@pytest.mark.parametrize(("mesh", "fault"), [("dp6", CUT), ("dp3_pp2", CUT_20), ("dp3_pp2", STOPPED)])
def test_a_run_outlives_a_host(undisturbed: Outcome, mesh: str, fault: str) -> None:
    with new_directory("h-") as folder:  # its path is short, for sockets
        run = folder / "run"
        run.mkdir()
        report = HostRun(mesh, fault, Place(folder, STEPS), run).carry_out(undisturbed)
    assert not report.problems and report.told["fail"], report


def test_a_cut_that_is_shorter_than_the_patience_with_silence_costs_nobody(undisturbed: Outcome) -> None:
    if not bounds_retries():
        pytest.skip("this kernel cannot bound the time between two tries of TCP (Linux 6.15 can)")
    with new_directory("h-") as folder:
        run = folder / "run"
        run.mkdir()
        report = HostRun("dp3_pp2", CUT_SHORT, Place(folder, STEPS), run).carry_out(undisturbed)
    assert not report.problems and not report.told["fail"] and report.agent_end == "0", report


def bounds_retries() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        return bound_retries(client.fileno(), 1.0)
