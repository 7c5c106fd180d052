"""The part of the launcher that talks to Ray: nodes, placement groups and actors. It decides nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from elaswave_spmd.controller.on_ray.decisions import ActorState, AgentActor, Node
from elaswave_spmd.controller.on_ray.job import Job
from elaswave_spmd.controller.on_ray.node import NodeAgent, NodeReport
from elaswave_spmd.controller.on_ray.vendor import ray_module
from elaswave_spmd.errors import headline_of

NAMESPACE = "elaswave_spmd"
_ANSWER_S = 0.3
_MS = 1e3


class RayCluster:
    """The cluster as one run sees it. For one thread, in a process that is connected to Ray.

    Args:
        job: whose actors these are.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._prefix = f"{job.name}/agent/"
        self._actors: dict[int, Any] = {}
        self._homes: dict[int, str] = {}  # of agents that were added: the node that they were added for
        self._asked: dict[int, Any] = {}  # questions for their state that are not answered yet
        self._starts: dict[int, Any] = {}  # orders to start that are not answered yet
        self._states: dict[int, AgentActor] = {}
        self._find()
        self._next_key = max([job.agents - 1, *self._actors]) + 1  # none is used twice: what is known of it stays known

    def _find(self) -> None:
        """The actors that are there already, if this supervisor was started again."""
        ray = ray_module()
        for name in ray_module("util").list_named_actors():
            if name.startswith(self._prefix):
                key, _, home = name.removeprefix(self._prefix).partition("/")
                self._actors[int(key)] = ray.get_actor(name)
                if home:
                    self._homes[int(key)] = home

    def nodes(self) -> dict[str, Node]:
        """All nodes that Ray knows or has known, by id."""
        ray = ray_module()
        # Which nodes drain is told nowhere else; Ray's own libraries ask there, too.
        drains = ray_module("_private.state").state.get_draining_nodes()
        found = {}
        for node in ray.nodes():
            by = drains.get(node["NodeID"])
            found[node["NodeID"]] = Node(
                node["NodeID"],
                f"{node['NodeManagerHostname']}-{node['NodeID'][:8]}",
                node["Alive"],
                self._job.has_room(node["Resources"]) if node["Alive"] else False,
                None if by is None else _here(by) if by else float("inf"),
                node.get("DeathReasonMessage", ""),
            )
        return found

    @property
    def first_group(self) -> str:
        return f"{self._job.name}/first"

    def reserve_first(self) -> None:
        """Ask Ray for the resources of the first agents, each on a node of its own, if that was not done."""
        if _group(self.first_group) is None:
            bundles = [self._job.resources] * self._job.agents
            ray_module("util").placement_group(
                bundles, strategy="STRICT_SPREAD", name=self.first_group, lifetime="detached"
            )

    def are_reserved(self) -> bool:
        """True once they are there."""
        group = _group(self.first_group)
        return group is not None and group.wait(_ANSWER_S)

    def make_first(self) -> None:
        """Make the actors of the first agents that are not there."""
        group = _group(self.first_group)
        for key in range(self._job.agents):
            if key not in self._actors:
                self._make(key, "", group, key)

    def add(self, node: Node) -> None:
        """Make an actor on this node, as soon as its resources are free there."""
        key, self._next_key = self._next_key, self._next_key + 1
        name = self._group_on(node.id)
        group = _group(name) or ray_module("util").placement_group(
            [self._job.resources],
            strategy="STRICT_PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[{"ray.io/node-id": node.id}],
        )
        self._make(key, node.id, group, 0)

    def _make(self, key: int, home: str, group: Any, bundle: int) -> None:
        ray, strategies = ray_module(), ray_module("util.scheduling_strategies")
        assert group is not None, "reserved before"
        resources = self._job.resources
        rest = {name: need for name, need in resources.items() if name not in ("CPU", "GPU")}
        self._actors[key] = (
            ray.remote(NodeAgent)
            .options(
                name=f"{self._prefix}{key}{'/' * bool(home)}{home}",
                lifetime="detached",
                max_restarts=-1,
                max_task_retries=0,
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                resources=rest,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, bundle),
            )
            .remote(self._job)
        )
        if home:
            self._homes[key] = home

    def check(self, keys: Sequence[int], timeout_s: float) -> list[NodeReport]:
        """The reports of actors about their nodes.

        Raises:
            ray.exceptions.RayError: one of them does not answer in time.
        """
        ray = ray_module()
        return ray.get([self._actors[key].check.remote() for key in keys], timeout=timeout_s)

    def agents(self) -> list[AgentActor]:
        """All agents of the run, as their actors tell, or told last."""
        ray, errors = ray_module(), ray_module("exceptions")
        for key, actor in self._actors.items():
            if key not in self._asked:
                self._asked[key] = actor.state.remote()
        if self._asked:
            ray.wait([*self._asked.values()], num_returns=len(self._asked), timeout=_ANSWER_S)
        for key, question in [*self._asked.items()]:
            if not ray.wait([question], timeout=0)[0]:
                continue
            del self._asked[key]
            try:
                found = ray.get(question)
            except errors.RayError:  # the actor is lost, and is started again where and when that is possible
                before = self._states.get(key)
                self._states[key] = self._placing(key, before.node if before is not None else "")
                self._starts.pop(key, None)
                continue
            state = ActorState.SERVING if found.code is None else ActorState.ENDED
            state = state if found.serves else ActorState.IDLE
            self._states[key] = AgentActor(
                *(key, found.node, key not in self._homes, state, found.serves, found.start, found.code, found.said),
                found.has_workers,
            )
        return [self._state(key) for key in sorted(self._actors)]

    def _state(self, key: int) -> AgentActor:
        known = self._states.get(key)
        if known is None or key in self._starts:
            return self._placing(key, known.node if known is not None else "")
        return known

    def _placing(self, key: int, node: str) -> AgentActor:
        return AgentActor(key, self._homes.get(key, node), key not in self._homes, ActorState.PLACING)

    def start(self, key: int, rendezvous: str, name: str) -> None:
        """Order an actor to start its agent; `answers` has what became of it."""
        self._starts[key] = self._actors[key].start.remote(rendezvous, name)

    def answers(self) -> list[tuple[int, NodeReport]]:
        """The answers to `start` that have come since the last call."""
        ray, errors = ray_module(), ray_module("exceptions")
        found = []
        for key, order in [*self._starts.items()]:
            if ray.wait([order], timeout=0)[0]:
                del self._starts[key]
                before = self._states.pop(key, None)  # it tells of the time before
                self._asked.pop(key, None)
                try:
                    found.append((key, ray.get(order)))
                except errors.RayTaskError as error:  # the actor lives, and has raised it
                    node = before.node if before is not None else self._homes.get(key, "")
                    found.append((key, NodeReport(node, "", "", headline_of(error.cause))))
                except errors.RayError:
                    continue  # the actor is lost; its state tells that
        return found

    def terminate(self, key: int) -> None:
        """Have an agent leave by SIGTERM. Never waits."""
        self._actors[key].terminate.remote()

    def remove(self, key: int) -> None:
        """Remove an actor, and its placement group if it has one of its own."""
        ray = ray_module()
        ray.kill(self._actors.pop(key), no_restart=True)
        for known in (self._asked, self._starts, self._states):
            known.pop(key, None)
        if (home := self._homes.pop(key, "")) and home not in self._homes.values():
            _remove(self._group_on(home))

    def remove_all(self) -> None:
        """Remove everything of the run but its supervisor."""
        for key in [*self._actors]:
            self.remove(key)
        _remove(self.first_group)

    def _group_on(self, node: str) -> str:
        return f"{self._job.name}/on/{node}"


def _here(day_ms: int) -> float:
    """A time of day in milliseconds, as Ray has deadlines, by the clock of this process, which nobody sets."""
    return time.monotonic() + day_ms / _MS - time.time()


def _group(name: str) -> Any:
    """A placement group by its name; None: there is none."""
    try:
        return ray_module("util").get_placement_group(name)
    except ValueError:
        return None


def _remove(name: str) -> None:
    if (group := _group(name)) is not None:
        ray_module("util").remove_placement_group(group)
