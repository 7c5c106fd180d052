"""What a run on Ray does when nodes come, drain and are lost, and when its controller ends: facts in, actions out.

The first agents are in one placement group, which Ray places on different nodes, and places again when a node of them
is lost and another one has room. Further agents have a group of their own, on one node: they are added while the places
of all agents are fewer than the run may have workers. Nothing here knows Ray.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_MOST_FAILURES = 3
"""Starts of one agent that fail in a row, and starts of a controller that bring the run no further."""

REFUSED = 2
"""The exit code of a command that was refused before it began."""

_SHORTEST_S = 1.0
_SETTLED_S = 2.0


@dataclass(frozen=True)
class Node:
    """A node of the cluster, as Ray tells of it.

    Args:
        name: for people, and the agent's name in the run.
        alive: False once Ray has given it up.
        has_room: it has the resources of an agent, whether or not they are free.
        drain_by: the time at which it is to leave; None: it stays. Infinite: without a deadline.
        reason: why it is dead, in Ray's words.
    """

    id: str
    name: str
    alive: bool = True
    has_room: bool = True
    drain_by: float | None = None
    reason: str = ""

    @property
    def stays(self) -> bool:
        """True if it is there and Ray does not drain it."""
        return self.alive and self.drain_by is None


class State(enum.Enum):
    """The state of an agent of the run, or rather of the actor that starts it."""

    PLACING = "placing"  # Ray has not started the actor, or starts it again
    IDLE = "idle"  # the actor is there, and has no agent
    SERVING = "serving"
    ENDED = "ended"


@dataclass(frozen=True)
class Agent:
    """The actor of one node.

    Args:
        key: its number in the run.
        node: the id of the node that it is on, or was on last; "": none yet.
        is_first: it is in the placement group of the first agents, and may come to another node.
        serves: the rendezvous that its agent was started with.
        process: the process id of its agent.
        code: the exit code of its agent.
        said: the last line of its agent.
        has_workers: workers of the run live on the node.
    """

    key: int
    node: str
    is_first: bool
    state: State
    serves: str = ""
    process: int = 0
    code: int | None = None
    said: str = ""
    has_workers: bool = False


@dataclass(frozen=True)
class StartAgent:
    """Start the agent of this actor, in place of one that it still has."""

    key: int


@dataclass(frozen=True)
class AddAgent:
    """Have an actor on this node."""

    node: Node


@dataclass(frozen=True)
class RemoveAgent:
    """Remove an actor, and what it has reserved."""

    key: int


@dataclass(frozen=True)
class Drain:
    """Have the workers of this agent leave the run. `within_s` None: without a deadline."""

    key: int
    name: str
    within_s: float | None


@dataclass(frozen=True)
class Move:
    """Have the controller save the run's state and end: it goes on on another node."""


@dataclass(frozen=True)
class Tell:
    """A line for the log."""

    line: str


Action: TypeAlias = StartAgent | AddAgent | RemoveAgent | Drain | Move | Tell


class Fleet:
    """Keeps the agents of a run where its nodes are. Remembers what was done, so that it is done once.

    Args:
        places: of each agent.
        aim: the workers that the run may have.
        home: the id of the controller's node.
    """

    def __init__(self, places: int, aim: int, home: str) -> None:
        self._places = places
        self._aim = aim
        self._home = home
        self._told: set[tuple[str, str]] = set()
        self._failures: dict[int, int] = {}
        self._handled: set[tuple[int, int]] = set()  # ends of agents: key, process
        self._lacks_since: float | None = None
        self._moves = False

    def turn(self, nodes: Mapping[str, Node], agents: Sequence[Agent], rendezvous: str, now: float) -> list[Action]:
        """What is to be done now.

        Args:
            nodes: all that Ray has known since the run began, by id.
            rendezvous: of the controller, HOST:PORT.
        """
        actions: list[Action] = [*self._tell_of_nodes(nodes, agents, now)]
        useful = sum(self._is_useful(agent, nodes, rendezvous) for agent in agents)
        for agent in agents:
            node = nodes.get(agent.node)
            if node is not None and not node.alive and not agent.is_first:
                actions.append(RemoveAgent(agent.key))
            elif agent.state is State.ENDED and agent.serves == rendezvous:
                actions += self._ended(agent, node)
            elif agent.state is not State.PLACING and agent.serves != rendezvous and (node is None or node.stays):
                actions.append(StartAgent(agent.key))
        return actions if self._moves else [*actions, *self._add(nodes, agents, useful, now)]

    def _add(self, nodes: Mapping[str, Node], agents: Sequence[Agent], useful: int, now: float) -> list[Action]:
        """More agents, once places have been lacking for a while: at the end of a run its agents end one by one."""
        actions: list[Action] = []
        is_over = bool(agents) and all(agent.state is State.ENDED and agent.code == 0 for agent in agents)
        if useful * self._places >= self._aim or is_over:
            self._lacks_since = None
            return actions
        if self._lacks_since is None:
            self._lacks_since = now
        taken = {agent.node for agent in agents}
        for node in nodes.values() if now - self._lacks_since >= _SETTLED_S else ():
            if useful * self._places >= self._aim:
                break
            if node.stays and node.has_room and node.id not in taken:
                actions += [Tell(f"node {node.name} has room: it gets an agent"), AddAgent(node)]
                useful += 1
        return actions

    def failed(self, key: int, name: str, why: str) -> list[Action]:
        """A node cannot serve the run."""
        self._failures[key] = _MOST_FAILURES
        return [Tell(f"node {name} is not used: {why}")]

    def _is_useful(self, agent: Agent, nodes: Mapping[str, Node], rendezvous: str) -> bool:
        """True if the agent serves the run or is about to."""
        node = nodes.get(agent.node)
        if self._failures.get(agent.key, 0) >= _MOST_FAILURES:
            return False
        if node is not None and (node.drain_by is not None or (not node.alive and not agent.is_first)):
            return False
        return agent.state is not State.ENDED or agent.serves != rendezvous or agent.code not in (0, REFUSED)

    def _tell_of_nodes(self, nodes: Mapping[str, Node], agents: Sequence[Agent], now: float) -> list[Action]:
        actions: list[Action] = []
        for node in nodes.values():
            here = [agent for agent in agents if agent.node == node.id]
            if not here and node.id != self._home:
                continue
            if not node.alive and self._once("lost", node):
                actions.append(Tell(f"node {node.name} is lost{': ' * bool(node.reason)}{node.reason}"))
            elif node.alive and node.drain_by is not None and self._once("drain", node):
                within = None if node.drain_by == float("inf") else max(_SHORTEST_S, node.drain_by - now)
                when = "" if within is None else f" within {within:.0f} s"
                actions.append(Tell(f"node {node.name} is to leave{when}: {node.reason or 'Ray drains it'}"))
                if node.id == self._home and not self._moves:
                    self._moves = True  # all agents are started again, on nodes that stay
                    actions += [Tell("the controller is there: it saves its state, and moves"), Move()]
                elif not self._moves:
                    actions += [Drain(agent.key, node.name, within) for agent in here if agent.state is State.SERVING]
        return actions

    def _once(self, what: str, node: Node) -> bool:
        is_new = (what, node.id) not in self._told
        self._told.add((what, node.id))
        return is_new

    def _ended(self, agent: Agent, node: Node | None) -> list[Action]:
        """The agent of a node has ended while the run goes on."""
        where = node.name if node is not None else agent.node
        if (agent.key, agent.process) in self._handled:
            return []
        self._handled.add((agent.key, agent.process))
        how = f"with exit code {agent.code}" if (agent.code or 0) >= 0 else f"by signal {-(agent.code or 0)}"
        line = f"the agent on node {where} has ended {how}{': ' * bool(agent.said)}{agent.said}"
        leaves = node is not None and not node.stays
        if agent.code == 0 and not agent.said:
            return []  # it ends with the run
        if agent.code in (0, REFUSED) or leaves:
            return [Tell(line)]  # it was let go, or what it is refused for stays
        self._failures[agent.key] = failures = self._failures.get(agent.key, 0) + 1
        if failures >= _MOST_FAILURES:
            return [Tell(f"{line}; it has failed {failures} times, and is not started again")]
        return [Tell(f"{line}; it is started again"), StartAgent(agent.key)]


@dataclass(frozen=True)
class Progress:
    """What a supervisor remembers of a run, in a file that outlives it.

    Args:
        starts: of the controller, so far.
        vain: of them in a row that ended without a step more than the one before.
        steps: lines in metrics.jsonl when the last one was started.
        port: of the rendezvous.
        node: the controller's.
    """

    starts: int = 0
    vain: int = 0
    steps: int = 0
    port: int = 0
    node: str = ""

    def started(self, steps: int, port: int, node: str) -> Progress:
        """After one more start."""
        vain = 0 if not self.starts or steps > self.steps else self.vain + 1
        return Progress(self.starts + 1, vain, steps, port, node)

    @property
    def is_vain(self) -> bool:
        """True if one more start would be the next of several that have brought the run no further."""
        return self.vain >= _MOST_FAILURES


class After(enum.Enum):
    """What follows the end of a controller."""

    END = "end"
    AGAIN = "again"
    MOVE = "move"


def after_controller(code: int, *, moves: bool, is_asked: bool, goes_on: bool) -> After:
    """What follows when the controller's command has ended.

    Args:
        code: as `subprocess` has it: negative for a signal.
        moves: it was asked to end, as its node is to leave.
        is_asked: a person wants the run to end.
        goes_on: it was not the first one of the run.
    """
    if code == REFUSED and goes_on and not is_asked:
        return After.AGAIN  # the one before may still be ending, where Ray was cut off from it, and have the directory
    if is_asked or (code >= 0 and not moves) or code in (0, REFUSED):
        return After.END  # what a run says by itself stays: another try would end in the same way
    return After.MOVE if moves else After.AGAIN
