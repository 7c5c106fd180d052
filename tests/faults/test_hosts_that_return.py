"""Hosts that the run gives up, and that come back: their agents join again by themselves."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from benchmarks.namespaces import CUT, Way, why_not
from tests.faults import runs_on_hosts
from tests.faults.runs_on_hosts import IMPATIENT, LOST, RunOnHosts, run_on_hosts
from tests.waiting import PATIENCE_S

CONTROLLERS, THERE, LAST = 0, 1, 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the same run on one worker."""
    if reason := why_not():
        pytest.skip(reason)
    return runs_on_hosts.undisturbed(tmp_path_factory.mktemp("alone"))


def assert_given_up_and_used_again(ours: RunOnHosts, number: int) -> None:
    """A host has lost its workers, who were no others, and the run has its size again."""
    assert ours.ranks("fail") == {2 * number, 2 * number + 1} and ours.ranks("join") == {6, 7}
    assert ours.agent_states(number) == ["lost", "joined", "used"], ours.watch.events


def test_a_host_that_is_cut_off_until_its_connection_has_ended_joins_again(undisturbed: Path) -> None:
    """Its workers are given up when they have been silent for timeouts.suspect; TCP has half a minute."""
    with run_on_hosts() as ours:
        ours.start("mesh=dp6", "sharding=zero3")
        ours.wait(lambda: ours.watch.step >= 2)
        ours.network.cut(LAST)
        ours.wait(lambda: ours.ranks("fail") == {4, 5})
        ours.wait(lambda: LOST in ours.output_of(LAST))
        ours.network.mend(LAST)
        ours.wait(lambda: ours.ranks("join") == {6, 7})
        ours.finish(undisturbed, {THERE: 0, LAST: 0})
        assert_given_up_and_used_again(ours, LAST)


@pytest.mark.parametrize("way", [(LAST, CONTROLLERS), (CONTROLLERS, LAST)], ids=["is not heard", "hears nothing"])
def test_a_host_that_is_cut_off_from_the_controller_in_one_direction(undisturbed: Path, way: tuple[int, int]) -> None:
    """It reaches the third host all the time. Nobody there takes anything of it any more."""
    with run_on_hosts() as ours:
        ours.start("mesh=dp6", "sharding=zero3", *IMPATIENT)
        ours.wait(lambda: ours.watch.step >= 2)
        ours.network.set_way(*way, CUT)
        ours.wait(lambda: ours.ranks("fail") == {4, 5})
        ours.wait(lambda: ours.watch.step >= 6)
        ours.network.set_way(*way, Way())
        ours.wait(lambda: ours.ranks("join") == {6, 7})
        ours.finish(undisturbed, {THERE: 0, LAST: 0})
        assert_given_up_and_used_again(ours, LAST)


def test_a_host_whose_cable_is_pulled_joins_again_when_it_is_plugged_in(undisturbed: Path) -> None:
    """Its own programs are told that there is no way to the others."""
    with run_on_hosts() as ours:
        ours.start("mesh=dp3_pp2", "sharding=zero1", "mirror.count=2", *IMPATIENT)
        ours.wait(lambda: ours.watch.step >= 2)
        ours.network.pull_cable(LAST)
        ours.wait(lambda: ours.ranks("fail") == {4, 5})
        ours.network.plug_in(LAST)
        ours.wait(lambda: ours.ranks("join") == {6, 7})
        ours.finish(undisturbed, {THERE: 0, LAST: 0})
        assert_given_up_and_used_again(ours, LAST)


def test_a_host_that_stood_still_and_goes_on_after_it_was_given_up(undisturbed: Path) -> None:
    """Its workers go on in the middle of an old step. Whatever they send, or write, counts nowhere."""
    with run_on_hosts() as ours:
        ours.start("mesh=dp6", "sharding=zero3", "checkpoint.every=4", *IMPATIENT)
        ours.wait(lambda: ours.watch.step >= 2)
        ours.signal(LAST, signal.SIGSTOP)
        ours.wait(lambda: ours.ranks("fail") == {4, 5})
        ours.wait(lambda: ours.watch.step >= 6)
        ours.signal(LAST, signal.SIGCONT)
        ours.wait(lambda: ours.ranks("join") == {6, 7})
        ours.finish(undisturbed, {THERE: 0, LAST: 0})
        assert_given_up_and_used_again(ours, LAST)


def test_a_controller_that_is_cut_off_from_all_others_ends_and_gets_its_agents_back_when_it_is_resumed(
    undisturbed: Path,
) -> None:
    """It cannot tell its own network from theirs. They take nothing on: without it, no step is decided."""
    with run_on_hosts() as ours:
        ours.start("mesh=dp6", "sharding=zero3", "checkpoint.every=2", *IMPATIENT)
        ours.wait(lambda: ours.events("checkpoint"))
        ours.network.cut(CONTROLLERS)
        assert ours.run.process.wait(PATIENCE_S) == 1
        assert "the run cannot go on: all replicas of" in ours.run.log.read_text(errors="replace")
        ours.network.mend(CONTROLLERS)
        ours.let_go()
        ours.resume()
        ours.finish(undisturbed, {THERE: 0, LAST: 0})
