"""What a run on Ray is made of, and what follows when nodes come, drain and are lost. Ray itself is in tests/on_ray."""

from __future__ import annotations

import errno
import io
import itertools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from elaswave_spmd.conf.compose import settings_from
from elaswave_spmd.controller.address_note import take_note
from elaswave_spmd.controller.on_ray import cluster, decisions, node, supervisor, vendor
from elaswave_spmd.controller.on_ray.decisions import (
    REFUSED,
    ActorState,
    AddAgent,
    After,
    AgentActor,
    Begin,
    Drain,
    Fleet,
    Move,
    Node,
    Progress,
    RemoveAgent,
    StartAgent,
    Tell,
    after_controller,
    how_to_begin,
    is_in_vain,
    to_start,
    workers_wait,
)
from elaswave_spmd.controller.on_ray.files import JobFiles
from elaswave_spmd.controller.on_ray.job import (
    MARK,
    Job,
    controller_settings,
    differing,
    hand_over,
    process_environment,
    words_at,
)
from elaswave_spmd.controller.on_ray.node import NodeReport
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.run_dir import atomic_write
from elaswave_spmd.run_dir.lock import LOCK, lock_run_dir
from elaswave_spmd.runtime.processes.agent_messages import refused_name
from tests.full_disk import room_for

WORDS = ["mesh=dp4", "run.dir=runs/one", "runtime.launcher=ray"]
HERE = "10.0.0.1:20001"


def job(*words: str, environment: dict[str, str] | None = None, folder: str = "/home/me") -> Job:
    found = hand_over([*WORDS, *words], environment or {}, folder)
    assert found is not None
    return found.job


def cpus(*numbers: float) -> list[dict[str, float]]:
    return [{"CPU": number, "memory": 1e9} for number in numbers]


def test_only_its_launcher_hands_a_run_to_ray() -> None:
    assert hand_over(["mesh=dp4"], {}, "/") is None and hand_over(["runtime.launcher=torchrun"], {}, "/") is None
    assert hand_over(WORDS, {MARK: "[]"}, "/") is None, "the controller's own command"
    found = job()
    assert (found.run_dir, found.files, found.token_file) == (
        "/home/me/runs/one",
        Path("/home/me/runs/one.ray"),
        "/home/me/runs/one.ray/token",
    )
    assert (found.workers, found.aim, found.agents, found.places) == (4, 4, 0, 0)
    assert job("runtime.token_file=secret").token_file == "/home/me/secret"
    assert job("elastic.max_workers=9").aim == 9


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["runtime.launcher=ray"], "run.dir is not"),
        ([*WORDS, "runtime.rendezvous=node0:1"], "runtime.rendezvous is given with runtime.launcher=ray"),
        ([*WORDS, "runtime.local_workers=2"], "runtime.local_workers is given with runtime.launcher=ray"),
        ([*WORDS, "runtime.host=10.0.0.5"], "runtime.host=10.0.0.5 is given with runtime.launcher=ray"),
        ([*WORDS, "runtime.transport=shm"], "runtime.transport=shm"),
        ([*WORDS, "runtime.agents=-1"], "runtime.agents=-1"),
    ],
)
def test_words_that_cannot_be_are_refused(words: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        hand_over(words, {}, "/")


@pytest.mark.parametrize(
    ("words", "nodes", "agents", "places"),
    [
        ([], cpus(8, 8), 2, 2),
        ([], cpus(0, 8, 8, 8), 3, 2),
        ([], cpus(*[8] * 9), 4, 1),
        (["runtime.agents=3"], cpus(8), 3, 2),
        (["runtime.agent_workers=4"], cpus(8, 8), 2, 4),
        (["runtime.threads_per_worker=4"], cpus(2, 8), 1, 4),
    ],
)
def test_workers_are_shared_out_among_the_nodes(
    words: list[str], nodes: list[dict[str, float]], agents: int, places: int
) -> None:
    found = job(*words).shared_out(nodes)
    assert (found.agents, found.places) == (agents, places)


def test_what_agents_ask_ray_for() -> None:
    found = job("runtime.threads_per_worker=3", "runtime.agent_workers=2", "runtime.agents=2").shared_out([])
    assert found.resources == {"CPU": 6.0} and found.has_room({"CPU": 6}) and not found.has_room({"CPU": 5})
    assert "2 nodes, on each an agent with places for 2 workers (6 CPU)" in found.described()
    on_gpus = job("runtime.device=cuda", "runtime.agent_workers=2").shared_out([{"CPU": 8, "GPU": 8}])
    assert on_gpus.resources == {"CPU": 2.0, "GPU": 2.0}
    with pytest.raises(ConfigError, match="none of the 2 nodes of the Ray cluster has room for a worker"):
        job("runtime.device=cuda").shared_out(cpus(8, 8))


def test_the_controllers_command_has_the_users_words_and_those_that_are_handed_to_it() -> None:
    found = job("runtime.agents=2", "train.steps=7").shared_out([])
    environment = {MARK: json.dumps(words_at(found, HERE, 2, are_all=True)), "HOME": "/home/me"}
    settings = controller_settings(found.words, environment)
    assert settings is not None and environment == {"HOME": "/home/me"}
    runtime = settings.runtime
    assert (runtime.rendezvous, runtime.agents, runtime.local_workers, runtime.transport) == (HERE, 2, 0, "tcp")
    assert (runtime.launcher, runtime.token_file) == ("ray", found.token_file)
    assert settings.train.steps == 7 and controller_settings(found.words, environment) is None
    fewer = settings_from([*found.words, *words_at(found, HERE, 1, are_all=False)]).runtime
    assert (fewer.agents, fewer.local_workers) == (1, None)


@pytest.mark.parametrize(
    ("words", "adopt_s", "not_adopted"),
    [
        ([], 120.0, ""),
        (["timeouts.adopt=7"], 7.0, ""),
        (["timeouts.adopt=null"], None, ""),
        (["mirror.verify_every=5"], None, "mirror.verify_every=5: the controller has the hashes of replicas"),
        (["mirror.verify_every=5", "timeouts.adopt=null"], None, ""),
    ],
)
def test_workers_wait_for_the_next_controller_where_nobody_says_something_else(
    words: list[str], adopt_s: float | None, not_adopted: str
) -> None:
    """A default refuses no command that was good without it."""
    handed = hand_over([*WORDS, *words], {}, "/home/me")
    assert handed is not None and handed.settings.timeouts.adopt == adopt_s
    found = handed.job.shared_out(cpus(8, 8))
    assert (found.adopt_s, found.not_adopted) == (adopt_s, not_adopted)
    settings = settings_from([*found.words, *words_at(found, HERE, 2, are_all=True)])
    assert settings.timeouts.adopt == adopt_s


def test_workers_that_were_to_wait_and_cannot_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"timeouts.adopt is given with mirror.verify_every=5"):
        job("mirror.verify_every=5", "timeouts.adopt=120")


def test_processes_have_the_variables_of_the_command_and_nothing_of_rays() -> None:
    found = job(environment={"OMP_NUM_THREADS": "4", "PYTHONPATH": "/code"})
    given = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2", "RAY_AUTH_TOKEN": "x", "RAY_JOB_ID": "1", "HOME": "/"}
    made = process_environment(found, given)
    assert made == {"OMP_NUM_THREADS": "4", "PYTHONPATH": "/code", "HOME": "/"}
    assert differing(found, made) == []
    assert differing(found, given) == ["OMP_NUM_THREADS=1", "MKL_NUM_THREADS=2"]
    assert differing(found, {}) == ["OMP_NUM_THREADS not set"]


def fleet(places: int = 1, aim: int = 2) -> Fleet:
    return Fleet(places, aim, "home")


def nodes(*made: Node) -> dict[str, Node]:
    return {node.id: node for node in made}


def serving(key: int, node: str, **others: Any) -> AgentActor:
    is_first, state = others.pop("is_first", True), others.pop("state", ActorState.SERVING)
    return AgentActor(key, node, is_first, state, HERE, f"start {key}", **others)


A, B, C, HOME = Node("a", "a"), Node("b", "b"), Node("c", "c"), Node("home", "home", has_room=False)


def without_lines(actions: Sequence[object]) -> list[object]:
    return [action for action in actions if not isinstance(action, Tell)]


def test_nothing_follows_while_all_is_well() -> None:
    agents = [serving(0, "a"), serving(1, "b")]
    found = fleet()
    for now in (0.0, 10.0):
        assert found.turn(nodes(HOME, A, B, C), agents, HERE, now) == []


def test_an_agent_that_has_another_rendezvous_is_started_again_unless_its_node_leaves() -> None:
    agents = [
        AgentActor(0, "a", True, ActorState.SERVING, "10.0.0.9:1"),
        AgentActor(1, "b", True, ActorState.IDLE),
        serving(2, "c"),
    ]
    assert fleet(aim=3).turn(nodes(A, B, C), agents, HERE, 0.0) == [StartAgent(0), StartAgent(1)]
    leaves = Node("a", "a", drain_by=100.0)
    assert StartAgent(0) not in fleet(aim=3).turn(nodes(leaves, B, C), agents, HERE, 0.0)


def test_a_node_gets_an_agent_once_places_have_been_lacking_for_a_while() -> None:
    found, agents = fleet(places=2, aim=4), [serving(0, "a")]
    assert found.turn(nodes(HOME, A, B, C), agents, HERE, 0.0) == []
    actions = found.turn(nodes(HOME, A, B, C), agents, HERE, 5.0)
    assert without_lines(actions) == [AddAgent(B)], "and not on C: the run may have 4 workers"
    there = [*agents, AgentActor(1, "b", False, ActorState.PLACING)]
    assert found.turn(nodes(HOME, A, B, C), there, HERE, 6.0) == []


def test_agents_of_the_first_are_placed_again_by_ray_and_others_are_removed_with_their_node() -> None:
    dead = Node("b", "b", alive=False, reason="it has ended")
    found, agents = fleet(aim=3), [serving(0, "a"), serving(1, "b", is_first=False), serving(2, "b", is_first=True)]
    actions = found.turn(nodes(A, dead), agents, HERE, 0.0)
    assert actions == [Tell("node b is lost: it has ended"), RemoveAgent(1)]
    assert without_lines(found.turn(nodes(A, dead), [agents[0], agents[2]], HERE, 1.0)) == []
    assert Tell("node b is lost: it has ended") not in found.turn(nodes(A, dead), agents, HERE, 9.0), "told once"


def test_a_node_that_drains_has_its_agent_leave_by_rays_deadline_and_another_one_is_used() -> None:
    drains, found = Node("b", "b", drain_by=1060.0), fleet()
    agents = [serving(0, "a"), serving(1, "b")]
    actions = found.turn(nodes(A, drains, C), agents, HERE, 1000.0)
    assert actions == [Tell("node b is to leave within 60 s: Ray drains it"), Drain(1, "b", 60.0)]
    actions = found.turn(nodes(A, drains, C), agents, HERE, 1005.0)
    assert without_lines(actions) == [AddAgent(C)]
    endless = Node("b", "b", drain_by=float("inf"))
    assert Drain(1, "b", None) in fleet().turn(nodes(A, endless), agents, HERE, 1000.0)


def test_a_controller_moves_when_its_own_node_drains() -> None:
    drains, found = Node("home", "home", drain_by=1060.0), fleet()
    agents = [serving(0, "a"), serving(1, "home")]
    actions = found.turn(nodes(A, drains, C), agents, HERE, 1000.0)
    assert without_lines(actions) == [Move()]
    ended = [serving(0, "a", state=ActorState.ENDED, code=0), serving(1, "home", state=ActorState.ENDED, code=0)]
    assert found.turn(nodes(A, drains, C), ended, HERE, 1010.0) == [], "no new agent for a controller that leaves"


@pytest.mark.parametrize(("code", "again"), [(1, True), (-9, True), (2, False), (0, False)])
def test_an_agent_that_fails_is_started_again_and_one_that_is_refused_is_not(code: int, again: bool) -> None:
    found = fleet()
    ended = [serving(0, "a"), serving(1, "b", state=ActorState.ENDED, code=code, said="why")]
    actions = found.turn(nodes(A, B), ended, HERE, 0.0)
    assert without_lines(actions) == [StartAgent(1)] * again
    assert isinstance(actions[0], Tell) and actions[0].line.endswith("why" + "; it is started again" * again)
    assert found.turn(nodes(A, B), ended, HERE, 1.0) == [], "the same end"


def test_an_agent_that_fails_again_and_again_is_left_alone_and_another_node_is_used() -> None:
    found = fleet()
    ends = [AgentActor(1, "b", True, ActorState.ENDED, HERE, str(start), 1, "why") for start in range(5)]
    starts = [StartAgent(1) in found.turn(nodes(A, B), [serving(0, "a"), end], HERE, 0.0) for end in ends]
    assert starts == [True, True, False, False, False]
    assert without_lines(found.turn(nodes(A, B, C), [serving(0, "a"), ends[-1]], HERE, 9.0)) == [AddAgent(C)]


@pytest.mark.parametrize(("served_s", "again"), [(600.0, False), (1200.0, True)])
def test_ends_with_a_long_time_of_service_between_them_are_not_in_a_row(served_s: float, again: bool) -> None:
    """An agent that looks for its run for ten minutes, in vain, has not served."""
    found, now, other = fleet(), 0.0, serving(0, "a")
    for start in range(5):
        for at in (now, now + served_s):
            lives = AgentActor(1, "b", True, ActorState.SERVING, HERE, str(start))
            assert found.turn(nodes(A, B), [other, lives], HERE, at) == []
        now += served_s + 1.0
        end = AgentActor(1, "b", True, ActorState.ENDED, HERE, str(start), 1, "why")
        assert (StartAgent(1) in found.turn(nodes(A, B), [other, end], HERE, now)) == (again or start < 2)


def test_the_end_of_a_run_brings_no_new_agents() -> None:
    found = fleet()
    ended = [serving(0, "a", state=ActorState.ENDED, code=0), serving(1, "b", state=ActorState.ENDED, code=0)]
    assert [found.turn(nodes(A, B, C), ended, HERE, now) for now in (0.0, 9.0)] == [[], []]


def test_a_call_from_python_does_not_hand_a_run_to_ray() -> None:
    with pytest.raises(ConfigError, match="a run that no command hands to Ray"):
        settings_from(["runtime.launcher=ray"])


def test_a_node_that_cannot_serve_is_not_tried_again() -> None:
    found, there = fleet(aim=3), nodes(HOME, A, B, C)
    agents = {0: serving(0, "a"), 1: AgentActor(1, "b", False, ActorState.IDLE)}
    assert StartAgent(1) in found.turn(there, [*agents.values()], HERE, 0.0)
    refused = found.failed(1, "b", "b", "no file")
    assert refused == [Tell("node b is not used: no file"), RemoveAgent(1)]
    added: list[Node] = []
    for now in range(100):
        for action in [*refused, *found.turn(there, [*agents.values()], HERE, float(now))]:
            match action:
                case RemoveAgent(key):
                    agents.pop(key, None)
                case AddAgent(node):
                    added.append(node)
                    agents[1 + len(added)] = serving(1 + len(added), node.id, is_first=False)
        refused = []
    assert added == [C]


def test_a_node_that_has_nothing_free_does_not_keep_another_one_from_being_used() -> None:
    found, agents = fleet(), [serving(0, "a"), AgentActor(1, "b", False, ActorState.PLACING)]
    assert [found.turn(nodes(A, B), agents, HERE, now) for now in (0.0, 900.0)] == [[], []], "there is no other one"
    found = fleet()
    assert [found.turn(nodes(A, B, C), agents, HERE, now) for now in (0.0, 30.0)] == [[], []]
    assert without_lines(found.turn(nodes(A, B, C), agents, HERE, 70.0)) == [RemoveAgent(1)]
    assert without_lines(found.turn(nodes(A, B, C), agents[:1], HERE, 71.0)) == []
    assert without_lines(found.turn(nodes(A, B, C), agents[:1], HERE, 75.0)) == [AddAgent(C)]
    assert without_lines(found.turn(nodes(A, B), agents[:1], HERE, 90.0)) == []
    assert without_lines(found.turn(nodes(A, B), agents[:1], HERE, 900.0)) == [AddAgent(B)], "skipped for a while"


def test_an_agent_whose_start_was_under_way_when_its_node_drains_leaves_too() -> None:
    drains, found = Node("b", "b", drain_by=1060.0), fleet()
    starts = [serving(0, "a"), AgentActor(1, "b", True, ActorState.PLACING)]
    assert without_lines(found.turn(nodes(A, drains), starts, HERE, 1000.0)) == []
    serves = [serving(0, "a"), serving(1, "b")]
    assert found.turn(nodes(A, drains), serves, HERE, 1010.0) == [Drain(1, "b", 50.0)]
    assert found.turn(nodes(A, drains), serves, HERE, 1011.0) == [], "once"


def test_agents_that_ended_with_a_refused_controller_are_started_for_the_next_one_at_its_address() -> None:
    agents = [
        serving(0, "a", state=ActorState.ENDED, code=0, said="the run has ended"),
        serving(1, "b"),
        AgentActor(2, "c", True, ActorState.SERVING, "10.0.0.9:1"),
        AgentActor(3, "d", True, ActorState.IDLE),
    ]
    assert to_start(agents, HERE) == [0, 2, 3]


PLACING = AgentActor(3, "", True, ActorState.PLACING)


@pytest.mark.parametrize(
    ("agents", "waited_s", "wait"),
    [
        ([serving(0, "a", has_workers=True), PLACING], 0.0, True),
        ([serving(0, "a"), PLACING], 1.0, None),
        ([serving(0, "a"), PLACING], 20.0, False),
        ([serving(0, "a"), serving(1, "b", state=ActorState.ENDED, code=0)], 0.0, False),
        ([AgentActor(0, "a", True, ActorState.IDLE, has_workers=True)], 0.0, True),
        ([], 0.0, False),
    ],
)
def test_workers_wait_where_an_agent_has_some_and_who_has_not_answered_may(
    agents: list[AgentActor], waited_s: float, wait: bool | None
) -> None:
    assert workers_wait(agents, waited_s) is wait


@pytest.mark.parametrize(
    ("facts", "shards", "in_vain", "begin"),
    [
        ("", "", "", Begin.AS_TYPED),
        ("", "a", "", Begin.AS_TYPED),
        ("has_begun", "", "", Begin.ANEW),
        ("has_begun are_waiting", "", "", Begin.RESUMING),
        ("has_begun are_waiting", "a", "a", Begin.RESUMING),
        ("has_begun has_checkpoint", "a", "", Begin.RESUMING),
        ("has_begun", "a", "", Begin.RESUMING),
        ("has_begun", "a", "a", Begin.ANEW),
        # What a worker has written since the last controller was started, which had nothing to go on with.
        ("has_begun", "ab", "a", Begin.RESUMING),
    ],
)
def test_how_a_controller_begins(facts: str, shards: str, in_vain: str, begin: Begin) -> None:
    told = {name: name in facts.split() for name in ("has_begun", "are_waiting", "has_checkpoint")}
    assert how_to_begin(**told, shards={*shards}, in_vain={*in_vain}) is begin


@pytest.mark.parametrize(
    ("code", "had", "has", "steps", "refusals", "in_vain"),
    [
        (1, False, False, 0, 0, True),
        (REFUSED, False, False, 0, 1, False),
        (REFUSED, False, False, 0, 2, True),
        (1, True, True, 0, 0, False),
        (1, False, True, 0, 0, False),
        (1, False, False, 3, 0, False),
        (-9, False, False, 0, 0, False),
        (0, False, False, 0, 0, False),
    ],
)
def test_a_controller_that_finds_nothing_to_go_on_with_was_started_in_vain(
    code: int, had: bool, has: bool, steps: int, refusals: int, in_vain: bool
) -> None:
    found = is_in_vain(code, had_checkpoint=had, has_checkpoint=has, steps=steps, refusals=refusals)
    assert found is in_vain
    if in_vain:
        known = {"goes_on": True, "in_vain": True}
        assert after_controller(code, moves=False, is_asked=False, **known) is After.AGAIN
        assert after_controller(code, moves=False, is_asked=True, **known) is After.END


def test_a_node_has_a_name_that_an_agent_may_have_however_long_its_hosts_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found, host = job("runtime.agents=1").shared_out([]), "n" * 64  # as long as Linux allows
    ray = RayOfNodes(found, [host])
    monkeypatch.setattr(cluster, "ray_module", lambda name="": ray)
    (there,) = cluster.RayCluster(found).nodes().values()
    assert there.name == f"{host}-nnnnnnnn" and refused_name(there.name, "") is None


def test_no_key_of_an_agent_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = MagicMock()
    monkeypatch.setattr(cluster, "ray_module", lambda name="": ray)
    made = cluster.RayCluster(job("runtime.agents=2").shared_out([]))
    for there in (A, B):
        made.add(there)
        made.remove(2 if there is A else 3)
    names = [call.kwargs["name"] for call in ray.remote.return_value.options.call_args_list]
    assert [name.partition("/agent/")[2] for name in names] == ["2/a", "3/b"]


@pytest.mark.parametrize(
    ("code", "moves", "is_asked", "goes_on", "after"),
    [
        (0, False, False, True, After.END),
        (1, False, False, True, After.END),
        (2, False, False, False, After.END),
        (2, False, False, True, After.AGAIN),
        (2, False, True, True, After.END),
        (-9, False, False, False, After.AGAIN),
        (143, True, False, False, After.MOVE),
        (1, True, False, True, After.MOVE),
        (0, True, False, False, After.END),
        (143, True, True, False, After.END),
        (-15, False, True, False, After.END),
    ],
)
def test_what_follows_the_end_of_a_controller(
    code: int, moves: bool, is_asked: bool, goes_on: bool, after: After
) -> None:
    assert after_controller(code, moves=moves, is_asked=is_asked, goes_on=goes_on) is after


def test_starts_that_bring_a_run_no_further_come_to_an_end() -> None:
    progress = Progress()
    for steps, vain in ((0, 0), (3, 0), (3, 1), (5, 0), (5, 1), (5, 2), (5, 3)):
        progress = progress.started(steps, 20001, "a")
        assert progress.vain == vain
    assert progress.starts == 7 and progress.is_vain


def test_refused_starts_are_bounded_by_time_and_not_by_number() -> None:
    progress = Progress().started(0, 20001, "a").started(50, 20001, "b")
    for start in range(20):
        progress = progress.ended(REFUSED, 1000.0 + start).started(50, 20001, "b")
        assert not progress.is_vain and not progress.is_refused(1000.0 + start)
    assert progress.ended(REFUSED, 1301.0).is_refused(1301.0)
    assert not progress.ended(-9, 1301.0).is_refused(1301.0)
    assert not progress.started(51, 20001, "b").is_refused(1301.0)


class Ended(BaseException):
    """Of the supervisor's process."""


class Supervised:
    """A supervisor whose cluster and controller are made up.

    Args:
        lives: what each life of it does: its exit code, what it raises, or a function that is called.
    """

    def __init__(
        self, found: Job, monkeypatch: pytest.MonkeyPatch, *lives: int | BaseException | Callable[[], int]
    ) -> None:
        self.job = found
        self.saved = self.removed = self.killed = 0
        self._lives = [*lives]
        report = NodeReport("a", "", "")
        replaced = {
            "ray_module": lambda name="": self,
            "check_node": lambda job: report,
            "RayCluster": lambda job: self,
            "SupervisorLife": lambda *arguments: self,
            "_ELSEWHERE_S": 0.0,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(supervisor, name, value)
        monkeypatch.setattr(supervisor.os, "_exit", self._exit)
        monkeypatch.setattr(supervisor.threading, "Thread", MagicMock())

    def live(self) -> bool:
        """One life of the actor; True if Ray is to start it again."""
        try:
            supervisor.Supervisor(self.job)._run(self.job)  # pyright: ignore[reportPrivateUsage]
        except Ended:
            return True
        return False

    def _exit(self, code: int) -> None:
        raise Ended

    def run(self) -> int:
        life = self._lives.pop(0)
        if isinstance(life, BaseException):
            raise life
        return life() if callable(life) else life

    def save(self) -> None:
        self.saved += 1

    def remove_all(self) -> None:
        self.removed += 1
        raise RuntimeError("Ray's head is gone")

    def get_runtime_context(self) -> Any:
        return MagicMock()

    def kill(self, actor: object, *, no_restart: bool) -> None:
        self.killed += 1


def test_an_error_of_the_supervisor_has_it_started_again_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = job(folder=str(tmp_path))
    files = JobFiles(found)
    files.make()
    made = Supervised(found, monkeypatch, OSError("no space"), 0)
    assert made.live() and files.code is None and not made.removed
    assert "no space" in files.log.read_text()
    assert not made.live() and files.code == 0, "also where nothing can be removed"
    assert made.removed and made.killed == 1


def test_a_supervisor_that_fails_again_and_again_saves_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = job(folder=str(tmp_path))
    files = JobFiles(found)
    files.make()
    made = Supervised(found, monkeypatch, *[ValueError("a fault")] * 9)
    assert [made.live() for _ in range(4)] == [True, True, True, False]
    assert (files.code, made.saved, made.killed) == (1, 1, 1)
    assert files.progress.started(5, 1, "a").crashes == 0, "a run that gets further is not one that fails for ever"


def test_a_disk_that_is_full_has_the_supervisor_try_again_until_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = job(folder=str(tmp_path))
    files = JobFiles(found)
    files.make()

    def controller_ends_with_1() -> int:
        files.progress = files.progress.ended(1, 0.0)  # as SupervisorLife.run writes it
        return 1

    made = Supervised(found, monkeypatch, *[controller_ends_with_1] * 9)
    with open("/dev/full", "wb", buffering=0) as nowhere, io.TextIOWrapper(nowhere, write_through=True) as no_output:
        monkeypatch.setattr(sys, "stdout", no_output)
        with room_for(0):
            assert [made.live() for _ in range(6)] == [True] * 6, "and not counted: there were more than a few"
        monkeypatch.undo()
    made = Supervised(found, monkeypatch, controller_ends_with_1)
    assert files.progress.crashes == 0 and files.code is None and not made.saved
    assert not made.live() and files.code == 1


def test_an_end_that_cannot_be_written_has_the_supervisor_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = job(folder=str(tmp_path))
    files = JobFiles(found)
    files.make()
    files.progress = Progress(crashes=9)
    made = Supervised(found, monkeypatch, *[ValueError("a fault")] * 2)
    real = os.replace
    full = {"ended.json"}

    def replace(source: Path, target: Path) -> None:
        if target.name in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    assert made.live() and files.code is None and not made.removed, "the command would follow for ever"
    full.clear()
    assert not made.live() and files.code == 1 and made.removed


def test_a_node_whose_mount_is_stale_is_refused_with_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = job(folder=str(tmp_path))

    def stale(path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "is_dir", stale)
    monkeypatch.setattr(node, "node_id", lambda: "a")
    monkeypatch.setenv(node.MONITOR, "0")
    monkeypatch.setenv(node.AUTH, "token")
    problem = node.check_node(found).problem
    assert "cannot be looked at there" in problem and "Stale file handle" in problem and str(tmp_path) in problem


def test_a_supervisor_that_cannot_check_its_node_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = job(folder=str(tmp_path))
    JobFiles(found).make()
    made = Supervised(found, monkeypatch, 0)
    checks = [OSError(errno.ESTALE, "Stale file handle"), NodeReport("a", "", "")]
    monkeypatch.setattr(supervisor, "check_node", MagicMock(side_effect=checks))
    assert made.live() and not made.killed, "an actor whose thread has died would answer for ever"
    assert not made.live() and made.killed == 1


class RayError(Exception):
    """As ray.exceptions has it."""


class RayTaskError(RayError):
    """What a call of an actor has raised."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("a traceback of many lines")
        self.cause = cause


class RayOfNodes:
    """A Ray that runs the calls of actors on made-up nodes at once, in this process.

    Args:
        names: of the nodes; each of the first `agents` ones has the actor of a first agent already.
    """

    RayError, RayTaskError = RayError, RayTaskError

    def __init__(self, found: Job, names: Sequence[str]) -> None:
        self._job = found
        self._names = names
        self.here = names[0]

    def __getattr__(self, name: str) -> Any:
        return MagicMock() if not name.startswith("__") else object.__getattribute__(self, name)

    def list_named_actors(self) -> list[str]:
        return [f"{self._job.name}/agent/{key}" for key in range(self._job.agents)]

    def get_actor(self, name: str) -> Any:
        return ActorOfNode(self, self._job, self._names[int(name.rpartition("/")[2])])

    def remote(self, kind: object) -> Any:
        made = MagicMock()
        made.options = lambda **options: MagicMock(
            remote=lambda found: ActorOfNode(self, found, options["name"].rpartition("/")[2])
        )
        return made

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "NodeManagerHostname": name, "Alive": True, "Resources": {"CPU": 8.0}}
            for name in self._names
        ]

    @property
    def state(self) -> Any:
        return MagicMock(get_draining_nodes=lambda: {})

    def get_runtime_context(self) -> Any:
        return MagicMock(get_node_id=lambda: self.here)

    def wait(self, asked: list[Any], **options: object) -> tuple[list[Any], list[Any]]:
        return asked, []

    def get(self, answer: Any) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer


class ActorOfNode:
    """The handle of a NodeAgent on a node."""

    def __init__(self, ray: RayOfNodes, found: Job, on: str) -> None:
        self._ray, self._agent, self._on = ray, node.NodeAgent(found), on

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: object) -> object:
            self._ray.here = self._on
            try:
                return getattr(self._agent, method)(*arguments)
            except Exception as error:
                return RayTaskError(error)

        return MagicMock(remote=call)


def test_an_agent_that_cannot_be_started_is_a_failure_of_its_node_and_another_node_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = job("runtime.agents=2", "runtime.agent_workers=2", folder=str(tmp_path)).shared_out([])
    files = JobFiles(found)
    files.make()
    ray = RayOfNodes(found, ["a", "b", "c"])
    for module in (cluster, node, supervisor):
        monkeypatch.setattr(module, "ray_module", lambda name="": ray)
    monkeypatch.setattr(node, "check_node", lambda job: NodeReport(ray.here, "", "all is well"))
    monkeypatch.setattr(node, "_environment_of", lambda process, otherwise: otherwise)
    monkeypatch.setattr(node.tied, "start", lambda *arguments: MagicMock(pid=2**30, poll=lambda: None))
    for name in ("_SETTLED_S", "_FIRST_PAUSE_S"):
        monkeypatch.setattr(decisions, name, 0.0)
    (found.files / "agent-a-a.log").mkdir()  # the log of the agent there cannot be opened
    there = cluster.RayCluster(found)
    made = supervisor.SupervisorLife(found, files, there, threading.Event())
    made._rendezvous = HERE  # pyright: ignore[reportPrivateUsage]
    for _ in range(12):
        made._turn()  # pyright: ignore[reportPrivateUsage]
    lines = files.log.read_text().splitlines()
    failed = [line for line in lines if "agent on node a-a could not be started: IsADirectoryError" in line]
    assert [line.rpartition("; ")[2] for line in failed] == [
        *["it is tried again"] * 2,
        "that has failed 3 times, and is not tried again",
    ]
    states = {agent.node: agent.state for agent in there.agents()}
    assert states == {"a": ActorState.IDLE, "b": ActorState.SERVING, "c": ActorState.SERVING}, lines
    ready = [agent.node for agent in there.agents() if made._is_ready(agent)]  # pyright: ignore[reportPrivateUsage]
    assert ready == ["b", "c"], "the next controller does not wait for it"


def test_a_clock_that_is_set_keeps_no_node_from_being_used_and_moves_no_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = job("runtime.agents=1", "runtime.agent_workers=2", folder=str(tmp_path)).shared_out([])
    files, ray, of_day = JobFiles(found), RayOfNodes(found, ["a", "b"]), itertools.count(1e6, -3600.0)
    files.make()
    for module in (cluster, node, supervisor):
        monkeypatch.setattr(module, "ray_module", lambda name="": ray)
    monkeypatch.setattr(node, "check_node", lambda job: NodeReport(ray.here, "", "all is well"))
    monkeypatch.setattr(node, "_environment_of", lambda process, otherwise: otherwise)
    monkeypatch.setattr(node.tied, "start", lambda *arguments: MagicMock(pid=2**30, poll=lambda: None))
    monkeypatch.setattr(decisions, "_SETTLED_S", 0.0)
    there = cluster.RayCluster(found)
    made = supervisor.SupervisorLife(found, files, there, threading.Event())
    made._rendezvous = HERE  # pyright: ignore[reportPrivateUsage]
    clocks = SimpleNamespace(time=lambda: next(of_day), monotonic=itertools.count(50.0).__next__, sleep=time.sleep)
    monkeypatch.setattr(supervisor, "time", clocks)
    for _ in range(12):
        made._turn()  # pyright: ignore[reportPrivateUsage]
    assert {agent.node: agent.state for agent in there.agents()} == dict.fromkeys("ab", ActorState.SERVING)
    monkeypatch.setattr(RayOfNodes, "state", MagicMock(get_draining_nodes=lambda: {"a": 1_060_000, "b": 0}))
    monkeypatch.setattr(cluster, "time", SimpleNamespace(time=lambda: 1000.0, monotonic=lambda: 50.0))
    assert {name: there.nodes()[name].drain_by for name in "ab"} == {"a": 110.0, "b": math.inf}


class OneNode:
    """The actor of a node, whose agent is made up.

    Attributes:
        started: the words of each agent.
        code: the exit code of the last one; None: it lives.
        now: by the clock of the actor.
    """

    def __init__(self, found: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[list[str]] = []
        self.ended = 0
        self.code: int | None = None
        self.now = 0.0
        monkeypatch.setattr(node, "node_id", lambda: "a")
        monkeypatch.setattr(node, "check_node", lambda job: NodeReport("a", "", "all is well"))
        monkeypatch.setattr(node, "_environment_of", lambda process, otherwise: otherwise)
        monkeypatch.setattr(node.tied, "start", self._start)
        monkeypatch.setattr(node.time, "monotonic", lambda: self.now)
        self.actor = node.NodeAgent(found)
        self._files = JobFiles(found)

    @property
    def note(self) -> Path:
        """That of the agent that was started last."""
        return self._files.note_for("a-1", self.actor.state().start)

    def _start(self, words: list[str], *_: object) -> Any:
        self.started.append(words)
        self.code = None
        return MagicMock(pid=2**30, poll=lambda: self.code, terminate=self._end)

    def _end(self) -> None:
        self.ended += 1

    def start(self, rendezvous: str) -> str:
        return self.actor.start(rendezvous, "a-1").facts

    @property
    def serves(self) -> str:
        return self.actor.state().serves

    @property
    def notes(self) -> list[Path]:
        """All notes of the run that have not been read."""
        return [*self.note.parent.glob("agent-*.moved")]


THERE = "10.0.0.2:20002"


@pytest.fixture
def one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneNode:
    found = job(folder=str(tmp_path)).shared_out(cpus(8))
    JobFiles(found).make()
    return OneNode(found, monkeypatch)


def test_an_agent_that_may_keep_its_workers_is_told_where_the_next_controller_is(one_node: OneNode) -> None:
    one_node.start(HERE)
    assert one_node.started[0][-2:] == ["--moved-file", str(one_node.note)]
    assert one_node.start(THERE) == f"told that the controller is at {THERE}; it keeps its workers"
    assert one_node.serves == THERE and len(one_node.started) == 1 and not one_node.ended
    assert take_note(one_node.note) == THERE
    one_node.now = 1e6
    assert one_node.serves == THERE, "it has read that"
    one_node.start(THERE)
    assert not one_node.note.exists(), "as it is there"


def test_an_agent_that_ends_before_it_has_heard_is_started_where_the_controller_is(one_node: OneNode) -> None:
    """The controller before had ended it in order."""
    one_node.start(HERE)
    one_node.start(THERE)
    one_node.code = 0
    assert one_node.serves == ""
    one_node.start(THERE)
    assert one_node.serves == THERE and len(one_node.started) == 2 and THERE in one_node.started[1]
    assert not one_node.notes, "the one before has left none"
    one_node.code = 0
    assert one_node.serves == THERE, "it ends with the run"


def test_an_agent_that_does_not_hear_for_a_minute_leaves_and_is_started_again(one_node: OneNode) -> None:
    one_node.start(HERE)
    one_node.start(THERE)
    one_node.now = 59.0
    assert one_node.serves == THERE
    one_node.now = 61.0
    assert one_node.serves == "" and not one_node.ended
    one_node.start(THERE)
    assert one_node.serves == THERE and len(one_node.started) == 2 and one_node.ended == 1


def test_a_note_that_cannot_be_written_is_a_failure_of_the_start(
    one_node: OneNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted, told, and tried again later. An error would be taken for the loss of the actor."""
    one_node.start(HERE)

    def refuse(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(atomic_write, "open_private", refuse)
    report = one_node.actor.start(THERE, "a-1")
    assert "cannot be told where the controller is (Read-only file system)" in report.failure and not report.problem
    assert one_node.serves == HERE and len(one_node.started) == 1 and not one_node.ended


def test_two_agents_of_one_node_have_notes_of_their_own(one_node: OneNode, tmp_path: Path) -> None:
    """Ray may place one of the first agents on a node that has an agent which was added."""
    other = node.NodeAgent(job(folder=str(tmp_path)).shared_out(cpus(8)))
    for actor in (one_node.actor, other):
        actor.start(HERE, "a-1")
        actor.start(THERE, "a-1")
    assert [take_note(note) for note in one_node.notes] == [THERE] * 2


def test_without_adoption_an_agent_leaves_before_another_one_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = job("timeouts.adopt=null", folder=str(tmp_path)).shared_out(cpus(8))
    JobFiles(found).make()
    one_node = OneNode(found, monkeypatch)
    one_node.start(HERE)
    one_node.start(THERE)
    assert len(one_node.started) == 2 and one_node.ended == 1
    assert not [word for words in one_node.started for word in words if "moved" in word]


def test_tries_to_start_an_agent_are_counted_in_a_row_and_for_each_node() -> None:
    found, idle, now = fleet(), AgentActor(1, "b", True, ActorState.IDLE), 0.0
    for _ in range(4):
        for _ in range(2):
            assert found.not_started(1, "b", "b", "why", now) == [
                Tell("the agent on node b could not be started: why; it is tried again")
            ]
            assert not found.turn(nodes(A, B), [serving(0, "a"), idle], HERE, now + 9), "what is lacking may come back"
            now += 100
            assert StartAgent(1) in found.turn(nodes(A, B), [serving(0, "a"), idle], HERE, now)
        assert found.started(1, "b", "b", "facts") == [Tell("an agent is on node b: facts")]
    for _ in range(3):
        found.not_started(1, "b", "b", "why", now)
    assert found.cannot_start(idle) and not found.turn(nodes(A, B), [serving(0, "a"), idle], HERE, now + 1000)
    moved = AgentActor(1, "c", True, ActorState.IDLE)
    assert found.turn(nodes(A, B, C), [serving(0, "a"), moved], HERE, now) == [StartAgent(1)]


def test_an_actor_that_is_lost_while_it_starts_its_agent_is_no_failure_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = job("runtime.agents=1", folder=str(tmp_path)).shared_out([])
    ray = RayOfNodes(found, ["a"])
    monkeypatch.setattr(cluster, "ray_module", lambda name="": ray)
    there = cluster.RayCluster(found)
    lost = MagicMock(start=MagicMock(remote=lambda *arguments: RayError("the actor died")))
    there._actors[0] = lost  # pyright: ignore[reportPrivateUsage]
    there.start(0, HERE, "a")
    assert there.answers() == []


def test_notes_that_nobody_has_read_are_removed_with_the_next_begin(tmp_path: Path) -> None:
    files = JobFiles(job(folder=str(tmp_path)))
    files.make()
    note = files.note_for("a", "1f")
    for left in (note, note.with_name(f".{note.name}.taken")):
        left.touch()
    files.make()
    assert not [path for path in note.parent.iterdir() if "moved" in path.name]


def test_a_run_that_cannot_be_begun_on_a_full_disk_is_refused(tmp_path: Path) -> None:
    found = job(folder=str(tmp_path))
    with room_for(0), pytest.raises(ConfigError, match=r"cannot write .*one\.ray \(File too large\)"):
        JobFiles(found).make()


def test_a_stop_is_seen_by_a_supervisor_that_is_started_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = job(folder=str(tmp_path))
    files = JobFiles(found)
    files.make()
    files.progress = Progress().started(0, 20001, "a")
    files.ask_to_stop()
    monkeypatch.setattr(supervisor, "ray_module", MagicMock())
    monkeypatch.setattr(supervisor, "node_id", lambda: "a")
    there = MagicMock()
    there.agents.side_effect = [
        [AgentActor(0, "a", True, ActorState.PLACING)],
        [serving(0, "a", has_workers=True)],
        [serving(0, "a")],
    ]
    assert supervisor.SupervisorLife(found, files, there, threading.Event()).run() == 143
    assert there.agents.call_count == 3, "the workers have written their state"
    files.make()
    assert not files.is_asked_to_stop, "it was for the run before"


class Controllers:
    """A supervisor in its only life, whose cluster is made up, and whose controllers do what a test says.

    Args:
        lives: what each controller does, which returns its exit code as `subprocess` has it.

    Attributes:
        cluster: made up.
        agents: as the cluster tells of them.
        words: of each controller, without the program.
        added: to them by the supervisor: how many agents, and workers beside the controller.
        left: what was in the file of the lock when each one began.
    """

    def __init__(self, found: Job, monkeypatch: pytest.MonkeyPatch, *lives: Callable[[], int]) -> None:
        self.files = JobFiles(found)
        self.files.make()
        self.run_dir = Path(found.run_dir)
        self.agents = [serving(0, "a", has_workers=True)]
        self.words: list[list[str]] = []
        self.added: list[list[str]] = []
        self.left: list[str | None] = []
        self.terminated: list[int] = []
        self._lives = [*lives]
        self.cluster = cluster = MagicMock()
        cluster.nodes.side_effect = lambda: nodes(A)
        cluster.agents.side_effect = lambda: self.agents
        cluster.check.return_value = [NodeReport("a", "", "")]
        cluster.answers.return_value = []
        cluster.terminate.side_effect = self._terminate
        ray = MagicMock(get_node_ip_address=lambda: "127.0.0.1")
        monkeypatch.setattr(supervisor, "ray_module", lambda name="": ray)
        monkeypatch.setattr(supervisor, "node_id", lambda: "a")
        monkeypatch.setattr(supervisor.tied, "start", self._start)
        for name in ("_TURN_S", "_ELSEWHERE_S", "_SETTLED_S"):
            monkeypatch.setattr(supervisor, name, 0.0)
        self.stop = threading.Event()
        self.life = supervisor.SupervisorLife(found, self.files, cluster, self.stop)

    def _start(self, command: list[str], environment: dict[str, str], *_: object) -> Any:
        self.added.append([word for word in json.loads(environment[MARK]) if ".agents=" in word or ".local_" in word])
        self.words.append(command[command.index("train") + 1 :])
        lock = self.run_dir / LOCK
        self.left.append(lock.read_text() if lock.exists() else None)
        code = self._lives.pop(0)()
        return MagicMock(poll=lambda: code)

    def _terminate(self, key: int) -> None:
        self.terminated.append(key)
        self.agents = [serving(0, "a", state=ActorState.ENDED, code=143)]

    def begin(self) -> None:
        """What a controller does that has begun the run."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / LOCK).write_text(KILLED)

    def killed(self) -> int:
        self.begin()
        return -9

    def killed_with_all_workers(self) -> int:
        self.agents = [serving(0, "a")]
        return self.killed()

    def adopts_nobody(self) -> int:
        self.agents = [serving(0, "a")]
        return 1

    def write_shard(self, step: int) -> None:
        """What a worker does that has lost its controller: the checkpoint has no manifest."""
        shard = self.run_dir / "checkpoints" / f"step_{step:08}" / "shard_0_1-1.safetensors"
        shard.parent.mkdir(parents=True)
        shard.touch()

    def step(self) -> None:
        with (self.run_dir / "metrics.jsonl").open("a") as file:
            file.write("{}\n")

    def resumes(self, number: int) -> bool:
        return f"train.resume={self.run_dir}" in self.words[number]


KILLED = "123456789\n"
"""What a controller that was killed has left in the file of its lock."""


@pytest.fixture
def on_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Controllers]:
    found = job("runtime.agents=1", folder=str(tmp_path)).shared_out([])
    made: list[Controllers] = []

    def controllers(*lives: str | Callable[[], int]) -> Controllers:
        """Each life is a method's name, or a function."""

        def life_of(life: str | Callable[[], int]) -> Callable[[], int]:
            return (lambda: getattr(made[0], life)()) if isinstance(life, str) else life

        made.append(Controllers(found, monkeypatch, *map(life_of, lives)))
        return made[0]

    return controllers


def test_the_next_controller_adopts_workers_that_wait_also_where_there_is_no_checkpoint(
    on_one_node: Callable[..., Controllers],
) -> None:
    made = on_one_node("killed", lambda: 0)
    assert made.life.run() == 0
    assert [made.resumes(number) for number in range(2)] == [False, True]
    assert made.left == [None, KILLED], "so that it looks for agents with workers"
    log = made.files.log.read_text()
    assert "ray: workers wait for the next controller, which adopts them" in log
    assert not made.terminated and not [*made.run_dir.parent.glob("*.without_checkpoint.*")]


def test_where_nobody_waits_the_run_goes_on_from_what_workers_have_written(
    on_one_node: Callable[..., Controllers],
) -> None:
    """Their checkpoint has no manifest: the next controller completes it, or says that it cannot."""

    def begins_with_shards() -> int:
        made.write_shard(3)
        return made.killed_with_all_workers()

    made = on_one_node(begins_with_shards, *[lambda: REFUSED] * 2, lambda: 0)
    assert made.life.run() == 0
    assert [made.resumes(number) for number in range(4)] == [False, True, True, False], "one refusal may be by chance"
    assert made.left == [None, "", "", None], "nobody has to be waited for; then another directory"
    assert len([*made.run_dir.parent.glob("*.without_checkpoint.*")]) == 1
    assert "workers wait for" not in made.files.log.read_text()


def test_a_run_whose_workers_could_not_be_adopted_and_that_has_no_checkpoint_begins_anew(
    on_one_node: Callable[..., Controllers],
) -> None:
    made = on_one_node("killed", "adopts_nobody", lambda: 1)
    assert made.life.run() == 1, "what a run says that has begun anew stays"
    assert [made.resumes(number) for number in range(3)] == [False, True, False]
    assert "the run has no checkpoint, and begins again" in made.files.log.read_text()


def test_what_workers_write_while_a_controller_is_started_in_vain_is_tried_by_the_next_one(
    on_one_node: Callable[..., Controllers],
) -> None:
    """It came too early: what they had to say was not whole. When it has ended it is."""

    def looks_too_early() -> int:
        made.write_shard(1)
        return made.adopts_nobody()

    made = on_one_node("killed", looks_too_early, "adopts_nobody", lambda: 0)
    assert made.life.run() == 0
    assert [made.resumes(number) for number in range(4)] == [False, True, True, False], "and once more in vain"
    assert len([*made.run_dir.parent.glob("*.without_checkpoint.*")]) == 1


def test_what_workers_have_written_is_tried_also_after_a_controller_that_was_started_in_vain(
    on_one_node: Callable[..., Controllers],
) -> None:
    def trains_anew() -> int:
        made.begin()
        made.step()
        made.write_shard(1)
        return -9

    made = on_one_node("killed", "adopts_nobody", trains_anew, lambda: 0)
    assert made.life.run() == 0
    assert [made.resumes(number) for number in range(4)] == [False, True, False, True]


def test_workers_of_which_an_actor_tells_late_are_adopted(
    on_one_node: Callable[..., Controllers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was busy, or Ray is slow. Nothing is put aside under them, and the file of the lock is not emptied."""
    made = on_one_node("killed", lambda: 0)
    monkeypatch.setattr(decisions, "_ANSWERS_S", 0.0)
    late = iter([[AgentActor(0, "a", True, ActorState.PLACING)]] * 3)

    def agents() -> list[AgentActor]:
        return made.agents if len(made.words) != 1 else next(late, made.agents)

    made.cluster.agents.side_effect = agents
    assert made.life.run() == 0
    assert [made.resumes(number) for number in range(2)] == [False, True] and made.left[1] == KILLED
    assert not [*made.run_dir.parent.glob("*.without_checkpoint.*")]


@pytest.mark.parametrize(
    ("node", "looks", "adopts"),
    [
        ("a", [True] * 99, True),
        ("a", [True], False),
        ("b", [True] * 99, False),
    ],
    ids=["they wait", "they were just ending", "they are on another node"],
)
def test_workers_beside_the_controller_are_adopted_on_the_same_node(
    on_one_node: Callable[..., Controllers], monkeypatch: pytest.MonkeyPatch, node: str, looks: list[bool], adopts: bool
) -> None:
    def killed() -> int:
        made.files.progress = replace(made.files.progress, node=node)
        monkeypatch.setattr(JobFiles, "has_workers", property(lambda self: next(found, False)))
        return made.killed_with_all_workers()

    made, found = on_one_node(killed, lambda: 0), iter(looks)
    assert made.life.run() == 0
    assert made.resumes(1) is adopts and made.left[1] == (KILLED if adopts else None)


def test_workers_beside_the_controller_are_waited_for_before_a_run_ends(
    on_one_node: Callable[..., Controllers], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed_when_it_was_asked() -> int:
        made.stop.set()
        return made.killed_with_all_workers()

    made, looks = on_one_node(killed_when_it_was_asked), iter([True] * 5)
    monkeypatch.setattr(JobFiles, "has_workers", property(lambda self: next(looks, False)))
    assert made.life.run() == 128 + 9 and next(looks, None) is None


def test_refusals_before_a_start_do_not_hide_that_a_run_gets_no_further(
    on_one_node: Callable[..., Controllers], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, looks = on_one_node(*["killed"] * 12), iter(range(100))
    real = made.files.check_free

    def check_free(*, nobody_waits: bool) -> None:
        if next(looks) % 2 == 0:
            raise ConfigError("run.dir is in use", rule="", where="", fix="")
        real(nobody_waits=nobody_waits)

    monkeypatch.setattr(made.files, "check_free", check_free)
    assert made.life.run() == 1 and len(made.words) == 4


@pytest.mark.parametrize(
    ("is_reserved", "added"),
    [
        (True, ["runtime.agents=2", "runtime.local_workers=0"]),
        (False, ["runtime.agents=1", "runtime.local_workers=null"]),
    ],
)
def test_a_controller_that_adopts_would_wait_for_all_agents_should_it_begin_again(
    is_reserved: bool, added: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with those that are there in three seconds. If Ray has no room for the rest they are not waited for."""
    found = job("runtime.agents=2", folder=str(tmp_path)).shared_out([])
    made = Controllers(found, monkeypatch, lambda: made.killed(), lambda: 0)
    for name in ("_WAITING_S", "_REGATHER_S"):
        monkeypatch.setattr(supervisor, name, 0.0)
    made.cluster.are_reserved.side_effect = lambda: is_reserved or not made.words
    assert made.life.run() == 0 and made.added[1] == added


def test_what_a_run_says_that_has_got_further_stays(on_one_node: Callable[..., Controllers]) -> None:
    def trains() -> int:
        made.step()
        return 1

    made = on_one_node("killed", trains)
    assert made.life.run() == 1 and made.resumes(1)


def test_a_controller_is_not_started_while_another_one_has_the_directory(
    on_one_node: Callable[..., Controllers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be cut off from Ray. Whether there is something to go on with is not known before it is gone."""
    made = on_one_node("killed", lambda: 0)
    tries: list[bool] = []
    real = made.files.check_free

    def check_free(*, nobody_waits: bool) -> None:
        if len(tries) < 3:
            tries.append(nobody_waits)
            with lock_run_dir(made.run_dir):
                real(nobody_waits=nobody_waits)
        real(nobody_waits=nobody_waits)

    monkeypatch.setattr(made.files, "check_free", check_free)
    assert made.life.run() == 0
    assert tries == [False] * 3 and len(made.words) == 2
    assert made.files.log.read_text().count("is in use by process") == 3


def test_workers_that_wait_save_their_state_before_a_run_ends_that_was_asked_to(
    on_one_node: Callable[..., Controllers],
) -> None:
    def killed_when_it_was_asked() -> int:
        made.stop.set()
        return made.killed()

    made = on_one_node(killed_when_it_was_asked)
    assert made.life.run() == 128 + 9 and made.terminated == [0] and len(made.words) == 1


def test_workers_that_wait_save_their_state_before_a_run_ends_that_gets_no_further(
    on_one_node: Callable[..., Controllers],
) -> None:
    made = on_one_node(*["killed"] * 9)
    assert made.life.run() == 1 and len(made.words) == 4 and made.terminated == [0]
    assert "the run got no further" in made.files.log.read_text()


def test_a_controller_that_is_killed_when_the_result_is_written_is_not_started_again(
    on_one_node: Callable[..., Controllers],
) -> None:
    def finishes() -> int:
        made.begin()
        (made.run_dir / "summary.json").touch()
        return -9

    made = on_one_node(finishes)
    assert made.life.run() == 0 and len(made.words) == 1


def test_one_command_at_a_time_begins_a_run(tmp_path: Path) -> None:
    found = job(folder=str(tmp_path))
    with JobFiles(found).beginning() as is_new:
        assert is_new
        with pytest.raises(ConfigError, match="another command begins a run"), JobFiles(found).beginning():
            pass
    with JobFiles(found).beginning() as is_new:
        assert not is_new


def test_workers_on_devices_are_never_beside_the_controller() -> None:
    assert not job().needs_device and job("runtime.device=cuda").needs_device and job("runtime.device=npu").needs_device


def test_files_of_a_run_are_private_and_tell_who_shares_them(tmp_path: Path) -> None:
    found = job(folder=str(tmp_path))
    files = JobFiles(found)
    assert "cannot be read there (No such file or directory)" in files.why_not_shared()
    files.make()
    assert files.why_not_shared() == "" and files.words() == [*WORDS] and files.progress == Progress()
    assert all(path.stat().st_mode & 0o077 == 0 for path in [found.files, *found.files.iterdir()])
    token = Path(found.token_file).read_text()
    files.end(3)
    files.progress = Progress(2, 1, 7, 20001, "a")
    assert (files.code, files.progress.steps) == (3, 7)
    again = job(folder=str(tmp_path))
    assert "is another folder there, or of another run" in JobFiles(again).why_not_shared()
    JobFiles(again).make()
    assert JobFiles(again).code is None and Path(found.token_file).read_text() == token


def test_a_run_of_which_the_file_system_does_not_tell_is_not_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = JobFiles(job(folder=str(tmp_path)))
    assert not files.has_checkpoint and not files.shards, "there is no run yet"
    run = tmp_path / "runs" / "one"
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    list_folder = Path.iterdir

    def stale(path: Path) -> Any:
        if path.name == "checkpoints":
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return list_folder(path)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Stale file handle"):
        patch.setattr(Path, "iterdir", stale)
        files.put_aside()
    assert run.is_dir()


def test_a_run_without_a_checkpoint_is_put_aside(tmp_path: Path) -> None:
    files = JobFiles(job(folder=str(tmp_path)))
    run_dir = tmp_path / "runs" / "one"
    (run_dir / "checkpoints").mkdir(parents=True)
    assert files.has_begun and not files.has_checkpoint and not files.has_result
    aside = files.put_aside()
    assert aside is not None and aside.name == "one.without_checkpoint.1" and not files.has_begun
    unfinished = run_dir / "checkpoints" / "step_00000001"
    unfinished.mkdir(parents=True)
    assert not files.has_checkpoint and not files.shards, "its manifest is written last"
    (unfinished / "shard_0_1-1.safetensors").touch()
    assert not files.has_checkpoint and files.shards
    with lock_run_dir(run_dir), pytest.raises(ConfigError, match="is in use by process"):
        files.put_aside()
    (unfinished / "manifest.json").touch()
    assert files.has_checkpoint and files.put_aside() is None and files.has_begun


def test_ray_that_is_missing_is_an_error_of_the_user() -> None:
    with pytest.raises(ConfigError, match=r"needs Ray, which cannot be imported") as caught:
        vendor.ray_module("no_such_module_of_it")
    assert caught.value.fix is not None and "elaswave-spmd[ray]" in caught.value.fix
