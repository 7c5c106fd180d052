"""Machines that leave on notice: SIGTERM to an agent, `ctl drain --host`, deadlines, runs that cannot do without."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from elaswave_spmd.controller.admin_client import ask
from elaswave_spmd.errors import ControlError
from elaswave_spmd.run_dir import read_metrics
from elaswave_spmd.runtime.processes.stop_signals import SAME_SIGNAL_S
from tests.multiprocess.real_runs import Done, eventually
from tests.multiprocess.test_agents import ENDLESS, HOST, Site, assert_same_bits, end_of, remote_worker
from tests.multiprocess.test_agents import site as site
from tests.multiprocess.test_agents import undisturbed as undisturbed
from tests.multiprocess.test_agents_that_come import events_of, patient, told

PATIENT_WITH_SILENCE = [
    f"timeouts.{name}={seconds}"
    for name, seconds in {"suspect": 200, "status": 210, "progress": 220, "join": 220, "leave": 220}.items()
]


@pytest.mark.parametrize("way", ["SIGTERM", "ctl"])
def test_a_machine_leaves_between_two_steps_and_its_agent_proves_that_nothing_was_lost(
    site: Site, undisturbed: Path, way: str
) -> None:
    go, words = patient(site)
    with site.run(*words, options=("--name", "elsewhere", "--drain", "600")) as (run, agent):
        run.wait_for_steps(2)
        if way == "SIGTERM":
            agent.send_signal(signal.SIGTERM)
        else:
            with pytest.raises(ControlError, match="the controller runs there"):
                ask(str(site.here / "run"), {"command": "drain", "host": HOST})
            answer = ask(str(site.here / "run"), {"command": "drain", "host": "elsewhere", "within": 600})
            assert answer == {"host": "elsewhere", "leaving": [1]}
        of_agent = end_of(agent)
        assert told(site, "left"), "the agent has ended before the run"
        go.touch()
        of_run = run.finish()
    assert (of_run.code, of_run.err, of_agent.code, of_agent.err) == (0, "", 0, "")
    last = of_agent.out.splitlines()[-1]
    assert last.startswith("nothing was lost: worker 1 left between two steps; state version "), of_agent.out
    assert "is on 1 workers, replicas complete" in last
    assert_same_bits(site.here / "run", undisturbed)
    assert [event["ranks"] for event in events_of(site, "leave")] == [[1]] and not events_of(site, "fail")
    (notice,) = events_of(site, "notice")
    assert (notice["host"], notice["ranks"], notice["deadline"], notice["from"]) == ("elsewhere", [1], 600, way)
    assert f"notice: elsewhere is to leave within 600 s ({way})" in of_run.out
    assert read_metrics(site.here / "run")[-1].workers == 1


def test_an_agent_whose_output_nobody_reads_any_more_leaves_as_any_other(site: Site, undisturbed: Path) -> None:
    """As in a terminal that has closed: none of its lines ends its workers."""
    go, words = patient(site)
    with site.run(*words, options=("--name", "elsewhere", "--drain", "600")) as (run, agent):
        run.wait_for_steps(2)
        assert agent.stdout is not None and agent.stdout.readline()
        agent.stdout.close()
        agent.send_signal(signal.SIGTERM)
        of_agent = end_of(agent)
        go.touch()
        of_run = run.finish()
    assert (of_run.code, of_run.err, of_agent.code, of_agent.err) == (0, "", 0, "")
    assert [event["ranks"] for event in events_of(site, "leave")] == [[1]] and not events_of(site, "fail")
    assert_same_bits(site.here / "run", undisturbed)


def assert_lost_at_deadline(site: Site, of_run: Done, of_agent: Done, undisturbed: Path) -> None:
    """Worker 1 had not left when the 12 seconds of its agent were over. The run goes on without it, with equal bits."""
    assert of_run.code == 0, of_run.err
    assert of_agent.code == 1 and "the deadline of 12 s was over before worker 1 had left: lost" in of_agent.err, (
        of_agent
    )
    assert_same_bits(site.here / "run", undisturbed)
    (fail,) = events_of(site, "fail")
    # A controller that does not get to read for two seconds may find the connection closed before the last words.
    ways = "its deadline of 12 s was over", "its connection closed"
    lost = "worker 1 was lost with the agent on elsewhere: "
    assert fail["ranks"] == [1] and any(f"{lost}{way}" in fail["reason"] for way in ways), fail


def test_what_has_not_left_by_the_deadline_is_lost_as_if_killed(site: Site, undisturbed: Path) -> None:
    """A worker beside the controller stands still, so no step ends, and nobody can leave.

    The agent keeps 3 seconds of the deadline for its end, two of which its last words have to reach the controller.
    """
    go, words = patient(site)
    options = ("--name", "elsewhere", "--drain", "12")
    with site.run(*words, *PATIENT_WITH_SILENCE, options=options) as (run, agent):
        run.wait_for_steps(2)
        (stands_still,) = run.workers()
        os.kill(stands_still, signal.SIGSTOP)
        agent.send_signal(signal.SIGTERM)
        of_agent = end_of(agent)
        os.kill(stands_still, signal.SIGCONT)
        go.touch()
        of_run = run.finish()
    assert_lost_at_deadline(site, of_run, of_agent, undisturbed)


def test_the_deadline_does_not_wait_for_a_fork_server_that_hangs(site: Site, undisturbed: Path) -> None:
    """Its workers end with it. It would be waited for for a minute, and the run for the agent's workers."""
    go, words = patient(site)
    options = ("--name", "elsewhere", "--drain", "12")
    with site.run(*words, *PATIENT_WITH_SILENCE, options=options) as (run, agent):
        run.wait_for_steps(2)
        worker = remote_worker(run, agent)
        fork_server = run.processes()[worker]
        (stands_still,) = run.workers()
        os.kill(stands_still, signal.SIGSTOP)
        os.kill(fork_server, signal.SIGSTOP)
        agent.send_signal(signal.SIGTERM)
        of_agent = end_of(agent)
        eventually(lambda: not {worker, fork_server} & run.processes().keys(), run.process)
        os.kill(stands_still, signal.SIGCONT)
        go.touch()
        of_run = run.finish()
    assert_lost_at_deadline(site, of_run, of_agent, undisturbed)


def test_a_run_all_of_whose_workers_are_on_the_machine_saves_its_state_first(site: Site) -> None:
    options = ("--workers", "2", "--name", "elsewhere", "--drain", "600")
    with site.run(*ENDLESS, "runtime.local_workers=0", options=options) as (run, agent):
        run.wait_for_steps(2)
        with pytest.raises(ControlError, match="0 workers would stay"):
            ask(str(site.here / "run"), {"command": "drain", "host": "elsewhere"})
        agent.send_signal(signal.SIGTERM)
        of_agent, of_run = end_of(agent), run.finish()
    assert of_agent.code == 0 and "the run saves its state and stops, since 0 workers would stay" in of_agent.out
    assert of_agent.out.splitlines()[-1].endswith("whether its state is saved is told there, not here"), of_agent.out
    steps = len(read_metrics(site.here / "run"))
    assert of_run.code == 1 and f"Its state after step {steps} is in " in of_run.err, of_run
    assert not events_of(site, "fail")


def test_a_second_sigterm_ends_an_agent_at_once(site: Site, undisturbed: Path) -> None:
    go, words = patient(site)
    options = ("--name", "elsewhere", "--drain", "600")
    with site.run(*words, *PATIENT_WITH_SILENCE, options=options) as (run, agent):
        run.wait_for_steps(2)
        (stands_still,) = run.workers()
        os.kill(stands_still, signal.SIGSTOP)
        agent.send_signal(signal.SIGTERM)
        eventually(lambda: events_of(site, "notice"), run.process)
        time.sleep(SAME_SIGNAL_S)
        agent.send_signal(signal.SIGTERM)
        of_agent = end_of(agent)
        os.kill(stands_still, signal.SIGCONT)
        go.touch()
        of_run = run.finish()
    assert (of_run.code, of_agent.code, of_agent.err) == (0, 143, "interrupted by SIGTERM\n"), (of_run, of_agent)
    assert_same_bits(site.here / "run", undisturbed)
    assert [event["ranks"] for event in events_of(site, "fail")] == [[1]]
