"""Machines that stand still with free places: they are given up, and nobody is started on them meanwhile."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from elaswave_spmd.run_dir import read_events, read_metrics
from tests.multiprocess.real_runs import Launched, eventually
from tests.multiprocess.test_agents import Site, assert_same_bits, end_of
from tests.multiprocess.test_agents import site as site
from tests.multiprocess.test_agents import undisturbed as undisturbed
from tests.multiprocess.test_agents_that_come import events_of, patient, told

SUSPECT_S = 4.0


def tree_of(run: Launched, root: int) -> list[int]:
    """A process and all of its descendants, which come after it."""
    parents, found = run.processes(), [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def test_a_frozen_machine_with_free_places_is_given_up_and_gets_no_replacements(site: Site, undisturbed: Path) -> None:
    """Its workers are found silent one after the other; the first one's replacement must not go there."""
    go, words = patient(site)
    words = [*(word for word in words if not word.startswith("mesh=")), "mesh=dp4"]
    arguments = [*words, "runtime.local_workers=2", "elastic.replace=true"]
    options = ("--workers", "4", "--name", "elsewhere")
    with site.run(*arguments, options=options) as (run, agent):
        run.wait_for_steps(2)
        frozen = tree_of(run, agent.pid)
        assert len(frozen) >= 4, "the agent, its fork server, two workers"
        *others, last = frozen  # one worker is still heard when the replacement of the other one is placed
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        eventually(lambda: events_of(site, "fail"), run.process)
        os.kill(last, signal.SIGSTOP)
        eventually(lambda: told(site, "lost"), run.process)
        eventually(lambda: sum(len(event["ranks"]) for event in events_of(site, "join")) == 2, run.process)
        for pid in reversed(frozen):  # children first: an agent that goes on ends its workers
            os.kill(pid, signal.SIGCONT)
        eventually(lambda: told(site, "joined"), run.process)
        go.touch()
        of_agent, of_run = end_of(agent), run.finish()
    assert (of_run.code, of_run.err, of_agent.code) == (0, "", 0), (of_run, of_agent)
    assert_same_bits(site.here / "run", undisturbed)
    events = list(read_events(site.here / "run"))
    fails = [event for event in events if event["event"] == "fail"]
    assert [event["phase"] for event in fails] == ["run", "run"], "no replacement was lost"
    assert sorted(rank for event in fails for rank in event["ranks"]) == [2, 3]
    assert read_metrics(site.here / "run")[-1].workers == 4


def sockets_of(pid: int) -> list[str]:
    """The names of the sockets by which a process gathers heartbeats, or hands its own on."""
    mine = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return [Path(words[-1]).name for words in lines if f"socket:[{words[6]}]" in mine and "/beats" in words[-1]]


def test_an_agent_that_stands_still_costs_no_worker_though_heartbeats_go_by_it(site: Site, undisturbed: Path) -> None:
    """For longer than a worker may be silent."""
    go, words = patient(site)
    with site.run(*words, f"timeouts.suspect={SUSPECT_S:g}") as (run, agent):
        run.wait_for_steps(2)
        assert [name for pid in tree_of(run, agent.pid) for name in sockets_of(pid)] == ["beats", "beats-1"]
        os.kill(agent.pid, signal.SIGSTOP)
        time.sleep(2 * SUSPECT_S)
        os.kill(agent.pid, signal.SIGCONT)
        go.touch()
        of_agent, of_run = end_of(agent), run.finish()
    assert (of_run.code, of_run.err, of_agent.code) == (0, "", 0), (of_run, of_agent)
    assert_same_bits(site.here / "run", undisturbed)
    assert not events_of(site, "fail")
