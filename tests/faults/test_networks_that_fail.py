"""Networks that fail between hosts which all reach the controller, that lose frames, and that fail at a bad moment."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.namespaces import CUT, Way, host_name, why_not
from elaswave_spmd.controller.admin_client import ask
from elaswave_spmd.errors import ControlError
from tests.faults import runs_on_hosts
from tests.faults.runs_on_hosts import IMPATIENT, RunOnHosts, run_on_hosts

ONE, OTHER = 1, 2
LOSSY = Way(lost=0.03, delay_s=0.001, jitter_s=0.003)
"""Three frames of a hundred are lost, and many overtake others."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the same run on one worker."""
    if reason := why_not():
        pytest.skip(reason)
    return runs_on_hosts.undisturbed(tmp_path_factory.mktemp("alone"))


MADE_AGAIN = ["link"]
"""What is told of links that the network has cut: they are made again once."""
GIVEN_UP = ["lost", "joined", "unused"]
"""What is told first of an agent that is given up for its links. It is used a minute after it is back."""


def assert_given_up_for_its_links(ours: RunOnHosts) -> None:
    """The network was back within the pause, so nobody else was lost."""
    assert ours.ranks("fail") == {4, 5} and not ours.agent_states(ONE)
    (lost,) = [event for event in ours.events("agent") if event["state"] == "lost"]
    assert "its workers and those of node1 cannot reach each other (the link between" in lost["reason"]


def test_of_two_hosts_that_cannot_reach_each_other_from_the_begin_one_goes(undisturbed: Path) -> None:
    """Both reach the controller, so no worker is silent. An administrator knows when the network is back."""
    with run_on_hosts() as ours:
        ours.network.cut(ONE, OTHER)
        ours.start("mesh=dp6", "sharding=zero3", *IMPATIENT)
        ours.wait(lambda: ours.agent_states(OTHER)[:3] == GIVEN_UP and ours.watch.step >= 2)
        ours.network.mend(ONE, OTHER)
        with suppress(ControlError):  # the pause has just ended, and its places are taken
            ask(str(ours.run_dir), {"command": "add", "count": 2, "host": host_name(OTHER)})
        ours.wait(lambda: len(ours.ranks("join")) >= 2)
        ours.finish(undisturbed, {ONE: 0, OTHER: 0}, mends=MADE_AGAIN)
        assert_given_up_for_its_links(ours)


def test_of_two_hosts_one_of_which_does_not_hear_the_other_one_goes(undisturbed: Path) -> None:
    """In the middle of a step. The run stood still, for as long as the cut."""
    with run_on_hosts() as ours:
        ours.start("mesh=dp6", "sharding=zero3", *IMPATIENT)
        ours.wait(lambda: ours.watch.step >= 2)
        ours.network.set_way(ONE, OTHER, CUT)
        ours.wait(lambda: ours.agent_states(OTHER)[:3] == GIVEN_UP)
        ours.network.set_way(ONE, OTHER, Way())
        ours.finish(undisturbed, {ONE: 0, OTHER: 0}, mends=MADE_AGAIN)
        assert_given_up_for_its_links(ours)


def test_hosts_that_reach_each_other_again_are_linked_again_and_nobody_is_lost(undisturbed: Path) -> None:
    with run_on_hosts() as ours:
        ours.start("mesh=dp6", "sharding=zero3", "timeouts.suspect=5", "timeouts.status=7")
        ours.wait(lambda: ours.watch.step >= 2)
        ours.network.cut(ONE, OTHER)
        ours.wait(lambda: ours.events("link"))
        ours.network.mend(ONE, OTHER)
        step = ours.watch.step
        ours.wait(lambda: ours.watch.step > step)
        ours.finish(undisturbed, {ONE: 0, OTHER: 0}, mends=MADE_AGAIN)
        assert not ours.events("fail") and not ours.events("agent")


def test_a_run_over_a_network_that_loses_and_reorders_frames(tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := why_not():
        pytest.skip(reason)
    steps = "train.steps=40"
    wanted = runs_on_hosts.undisturbed(tmp_path_factory.mktemp("alone"), steps)
    with run_on_hosts() as ours:
        ours.network.disturb(LOSSY)
        ours.start("mesh=dp3_pp2", "sharding=zero1", "timeouts.suspect=8", "timeouts.status=9", steps)
        ours.finish(wanted, {ONE: 0, OTHER: 0})
        assert not ours.events("fail") and not ours.events("link")


def test_a_host_that_is_cut_off_while_the_mesh_changes(undisturbed: Path) -> None:
    """A worker of one host is killed, and the other host is cut off before the change is made."""
    with run_on_hosts() as ours:
        ours.start("mesh=dp6", "sharding=zero3", "mirror.count=3", *IMPATIENT)
        ours.wait(lambda: ours.watch.step >= 2)
        ours.network.cut(OTHER)
        os.kill(ours.agents[ONE].workers()[0], signal.SIGKILL)
        ours.wait(lambda: len(ours.ranks("fail")) == 3)
        ours.network.mend(OTHER)
        ours.wait(lambda: len(ours.ranks("join")) == 2)
        ours.finish(undisturbed, {ONE: 0, OTHER: 0})
        assert ours.ranks("fail") >= {4, 5}


def test_a_host_that_is_cut_off_while_it_drains_says_what_was_lost(undisturbed: Path) -> None:
    with run_on_hosts() as ours:
        ours.start("mesh=dp6", "sharding=zero3", *IMPATIENT, options=["--drain", "250"])
        ours.wait(lambda: ours.watch.step >= 2)
        ours.network.cut(OTHER)
        ours.agents[OTHER].process.send_signal(signal.SIGTERM)
        ours.wait(lambda: ours.ranks("fail") == {4, 5})
        ours.network.mend(OTHER)
        ours.wait(lambda: ours.agents[OTHER].process.poll() is not None)  # the run tells it, so it must still be there
        ours.finish(undisturbed, {ONE: 0, OTHER: 1})
        assert "the run had given this agent up before its workers had left" in ours.output_of(OTHER)
