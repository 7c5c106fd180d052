"""An agent's preparations for a run, with a made-up fork server and no controller."""

from __future__ import annotations

import fcntl
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller import agent as module
from elaswave_spmd.controller import agent_machine
from elaswave_spmd.controller.agent import Agent
from elaswave_spmd.controller.agent_search import Offer, check_host
from elaswave_spmd.controller.launching import data_spec
from elaswave_spmd.data import prepare_data
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices.selection import WorkerStart
from elaswave_spmd.runtime.processes import agent_messages as am
from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient, ForkServerSpec
from elaswave_spmd.runtime.processes.rendezvous import Found
from elaswave_spmd.runtime.processes.scratch import Scratch
from elaswave_spmd.runtime.processes.stop_signals import StopSignals
from elaswave_spmd.runtime.transport.credentials import RunToken
from tests.unit.controller.made_up_machines import agent_of
from tests.unit.controller.made_up_workers import settings_in
from tests.waiting import PATIENCE_S, eventually


def test_the_orphans_of_an_agent_have_the_time_that_the_settings_give_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fork server is started before anything is known of the run."""
    settings: Settings = settings_in(tmp_path, timeouts={"controller": 50.0, "shutdown": 70.0})
    data = prepare_data(data_spec(settings))
    told: list[Any] = []
    fork_server = SimpleNamespace(pid=0, ready=lambda: told.append("ready"), set_orphan_grace=told.append)
    links = SimpleNamespace(send=lambda peer, header: told.append(am.decode(header)))
    monkeypatch.setattr(module, "raise_fd_limit", lambda workers, *, strangers: None)
    agent = agent_of(links, None, fork_server)
    agent._prepare(2, settings, data)
    assert told == ["ready", 120.0, am.Prepared()]


def test_an_agent_that_is_given_up_does_not_say_that_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that is cut off from everybody gives up all agents, and may end before one of them hears of it."""
    stopped: list[float] = []
    links = SimpleNamespace(address="tcp://127.0.0.1:1", send=lambda peer, header: None)
    fork_server = SimpleNamespace(stop=stopped.append)
    agent = agent_of(links, None, fork_server)

    def hear(self: Agent) -> None:
        raise module._GivenUpError("none of its workers is heard any more")

    monkeypatch.setattr(Agent, "_serve_orders", hear)
    with pytest.raises(module.LostControllerError) as caught:
        agent.serve(Offer("b", 2, "node0:29400", None, 30.0))
    assert str(caught.value) == (
        "the run has given this agent up (none of its workers is heard any more); whether it goes on is not known here"
    )
    assert stopped == [0.0], "its workers are ended"


def test_each_fork_server_of_an_agent_has_a_directory_that_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent may be killed while its workers still write their state: their sockets stay as long as they live."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", (base := tempfile.mkdtemp(prefix="ew", dir="/tmp")))
    started: list[tuple[ForkServerClient, Path]] = []

    def start(_: WorkerStart, spec: ForkServerSpec) -> ForkServerClient:
        made = ForkServerClient.start("os:getpid", replace(spec, preload=(), here=False))
        made.ready()
        started.append((made, Path(spec.scratch[0])))
        return made

    monkeypatch.setattr(agent_machine, "start_fork_server", start)
    machine, neighbour = agent_machine.Machine(5.0, StopSignals(())), Scratch()
    scratch = machine.scratch
    for _ in range(2):
        machine.prepare(WorkerStart(method="spawn"), 5.0)
    folders = [folder for _, folder in started]
    assert [folder.is_dir() for folder in folders] == [False, False, True] and Path(neighbour.path).is_dir()
    assert len({*folders}) == 3 and folders[-1] == Path(scratch.path)
    assert scratch._held is not None
    os.close(scratch._held)  # as if the agent had been killed: its fork server holds the directory, too
    with (folders[-1] / "owner").open("r+") as owner, pytest.raises(BlockingIOError):
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    started[-1][0].release()
    eventually(lambda: not folders[-1].exists())
    remover = scratch._remover
    assert remover is not None
    remover.wait(PATIENCE_S)
    neighbour.remove()
    os.rmdir(base)


def test_an_agents_links_do_not_listen_where_the_controller_cannot_reach() -> None:
    keys = RunToken.make()
    elsewhere = Found(-2, "tcp://10.0.0.1:5000", keys, "10.0.0.7")
    with pytest.raises(ConfigError, match=r"--host names 127\.0\.0\.1, an address that other machines") as caught:
        check_host("127.0.0.1", elsewhere)
    assert caught.value.fix == "--host 10.0.0.7, or leave it out"
    check_host("10.0.0.8", elsewhere)
    for here in ("10.0.0.1", "127.0.0.1"):
        check_host("127.0.0.1", Found(-2, f"tcp://{here}:5000", keys, here))
