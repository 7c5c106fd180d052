"""Decisions of a run on Ray: nodes come, drain and are lost, and its controller ends. Facts in, actions out.

The first agents are in one placement group, which Ray places on different nodes, and places again when a node of them
is lost and another one has room. Further agents have a group of their own, on one node: they are added while the places
of all agents are fewer than the run may have workers. Nothing here knows Ray.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeAlias

_MOST_FAILURES = 3
"""Starts of one agent that fail in a row, and starts of a controller that bring the run no further."""

_FIRST_PAUSE_S = 10.0
"""Between tries to start an agent: 10, then 20."""

_SERVED_S = 1200.0
"""After which an agent has not failed at its start: twice as long as one looks for the run that it cannot find."""

REFUSED = 2
"""The exit code of a command that was refused before it began."""

_SHORTEST_S = 1.0
_SETTLED_S = 2.0
_PLACING_S = 60.0
"""How long Ray may take to start an actor on a node that something else may use, if another node could have it."""
_SKIPPED_S = 300.0
_ANSWERS_S = 15.0
"""How long actors have to say whether they have workers, when no other one has any."""

_REFUSED_S = 300.0
"""How long a controller that goes on may be refused: the one before may live, cut off, and a lock may last longer."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster, as Ray tells of it.

    Args:
        name: for people, and the agent's name in the run.
        alive: False once Ray has given it up.
        has_room: it has the resources of an agent, whether or not they are free.
        drain_by: the time (time.monotonic) at which it is to leave; None: it stays. Infinite: without a deadline.
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


class ActorState(enum.Enum):
    """The state of an agent of the run, or rather of the actor that starts it."""

    PLACING = "placing"  # Ray has not started the actor, or starts it again
    IDLE = "idle"  # the actor is there, and has no agent
    SERVING = "serving"
    ENDED = "ended"


@dataclass(frozen=True)
class AgentActor:
    """The actor of one node.

    Args:
        key: its number in the run.
        node: the id of the node that it is on, or was on last; "": none yet.
        is_first: it is in the placement group of the first agents, and may come to another node.
        serves: the rendezvous that its agent was started with.
        start: identifies the start of its agent.
        code: the exit code of its agent.
        said: the last line of its agent.
        has_workers: workers of the run live on the node.
    """

    key: int
    node: str
    is_first: bool
    state: ActorState
    serves: str = ""
    start: str = ""
    code: int | None = None
    said: str = ""
    has_workers: bool = False


@dataclass(frozen=True)
class StartAgent:
    """Have the agent of this actor serve the controller that there is now.

    One that is still there is told where that is, if it may have kept its workers; else it leaves, and another one is
    started.
    """

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
        self._reported: set[tuple[str, str]] = set()
        self._failures: dict[tuple[int, str], int] = {}  # ends of an agent on a node, in a row: key, node
        self._serving_since: dict[tuple[int, str], float] = {}  # starts of agents: key, start
        # Likewise: starts in a row that were none, and when the next one is due.
        self._not_started: dict[tuple[int, str], tuple[int, float]] = {}
        self._handled: set[tuple[int, str]] = set()  # ends of agents: key, start
        self._drained: set[tuple[int, str]] = set()
        self._refused: set[str] = set()  # nodes that cannot serve
        self._placing_since: dict[int, float] = {}
        self._skipped_until: dict[str, float] = {}  # nodes on which something else had what an agent needs
        self._lacks_since: float | None = None
        self._moves = False

    def turn(
        self, nodes: Mapping[str, Node], agents: Sequence[AgentActor], rendezvous: str, now: float
    ) -> list[Action]:
        """Decide what is to be done now.

        Args:
            nodes: all that Ray has known since the run began, by id.
            rendezvous: of the controller, HOST:PORT.
        """
        self._forget_failures(agents, now)
        actions: list[Action] = [*self._tell_of_nodes(nodes, agents, now)]
        useful = sum(self._is_useful(agent, nodes, rendezvous) for agent in agents)
        for agent in agents:
            node = nodes.get(agent.node)
            if node is not None and not node.alive and not agent.is_first:
                actions.append(RemoveAgent(agent.key))
            elif agent.state is ActorState.ENDED and agent.serves == rendezvous:
                actions += self._ended(agent, node)
            elif agent.state is not ActorState.PLACING and agent.serves != rendezvous and (node is None or node.stays):
                _, due = self._not_started.get((agent.key, agent.node), (0, now))
                actions += [] if now < due or self.cannot_start(agent) else [StartAgent(agent.key)]
        if self._moves:
            return actions
        stuck = self._stuck(nodes, agents, now)
        actions += stuck
        return [*actions, *self._add(nodes, agents, useful - sum(isinstance(did, RemoveAgent) for did in stuck), now)]

    def _forget_failures(self, agents: Sequence[AgentActor], now: float) -> None:
        """The ends of an agent before it has served for long: what it fails of later is something else."""
        serving = {(agent.key, agent.start): agent.node for agent in agents if agent.state is ActorState.SERVING}
        self._serving_since = {start: self._serving_since.get(start, now) for start in serving}
        for (key, start), node in serving.items():
            if now - self._serving_since[key, start] >= _SERVED_S:
                self._failures.pop((key, node), None)

    def _stuck(self, nodes: Mapping[str, Node], agents: Sequence[AgentActor], now: float) -> list[Action]:
        """Give up agents that Ray does not start on their nodes, where other nodes could have them."""
        actions: list[Action] = []
        placing = [agent for agent in agents if agent.state is ActorState.PLACING and not agent.is_first]
        self._placing_since = {agent.key: self._placing_since.get(agent.key, now) for agent in placing}
        others = len(self._usable(nodes, agents, now))
        for agent in placing:
            node = nodes.get(agent.node)
            if node is None or not node.stays or now - self._placing_since[agent.key] < _PLACING_S or not others:
                continue
            others -= 1
            self._skipped_until[node.id] = now + _SKIPPED_S
            line = f"node {node.name} has had nothing free for {_PLACING_S:.0f} s: another one is used"
            actions += [Tell(line), RemoveAgent(agent.key)]
        return actions

    def _usable(self, nodes: Mapping[str, Node], agents: Sequence[AgentActor], now: float) -> list[Node]:
        """The nodes that may get an agent."""
        taken = {agent.node for agent in agents} | self._refused
        return [
            node
            for node in nodes.values()
            if node.stays and node.has_room and node.id not in taken and now >= self._skipped_until.get(node.id, now)
        ]

    def _add(self, nodes: Mapping[str, Node], agents: Sequence[AgentActor], useful: int, now: float) -> list[Action]:
        """More agents, once places have been lacking for a while: at the end of a run its agents end one by one."""
        actions: list[Action] = []
        is_over = bool(agents) and all(agent.state is ActorState.ENDED and agent.code == 0 for agent in agents)
        if useful * self._places >= self._aim or is_over:
            self._lacks_since = None
            return actions
        if self._lacks_since is None:
            self._lacks_since = now
        for node in self._usable(nodes, agents, now) if now - self._lacks_since >= _SETTLED_S else ():
            if useful * self._places >= self._aim:
                break
            actions += [Tell(f"node {node.name} has room: it gets an agent"), AddAgent(node)]
            useful += 1
        return actions

    def failed(self, key: int, node: str, name: str, why: str) -> list[Action]:
        """A node cannot serve the run. It is not tried again: what it lacks comes with another start of the node.

        Args:
            node: its id.
        """
        self._refused.add(node)
        return [Tell(f"node {name} is not used: {why}"), RemoveAgent(key)]

    def not_started(self, key: int, node: str, name: str, why: str, now: float) -> list[Action]:
        """An agent could not be started on a node that the run can use: the turns that follow try it a few times.

        Args:
            node: its id.
        """
        times = self._not_started.get((key, node), (0, now))[0] + 1
        # What is lacking may come back.
        self._not_started[key, node] = times, now + _FIRST_PAUSE_S * 2 ** (times - 1)
        then = (
            "it is tried again" if times < _MOST_FAILURES else f"that has failed {times} times, and is not tried again"
        )
        return [Tell(f"the agent on node {name} could not be started: {why}; {then}")]

    def started(self, key: int, node: str, name: str, facts: str) -> list[Action]:
        """An agent was started.

        Args:
            node: its id.
            facts: what was checked there, in words.
        """
        self._not_started.pop((key, node), None)
        return [Tell(f"an agent is on node {name}: {facts}")]

    def cannot_start(self, agent: AgentActor) -> bool:
        """True if the agent could not be started on its node, and that is not tried again."""
        return self._not_started.get((agent.key, agent.node), (0, 0.0))[0] >= _MOST_FAILURES

    def _is_useful(self, agent: AgentActor, nodes: Mapping[str, Node], rendezvous: str) -> bool:
        """True if the agent serves the run or is about to."""
        node = nodes.get(agent.node)
        if self.cannot_start(agent) or self._failures.get((agent.key, agent.node), 0) >= _MOST_FAILURES:
            return False
        if node is not None and (node.drain_by is not None or (not node.alive and not agent.is_first)):
            return False
        return agent.state is not ActorState.ENDED or agent.serves != rendezvous or agent.code not in (0, REFUSED)

    def _tell_of_nodes(self, nodes: Mapping[str, Node], agents: Sequence[AgentActor], now: float) -> list[Action]:
        actions: list[Action] = []
        for node in nodes.values():
            here = [agent for agent in agents if agent.node == node.id]
            if not here and node.id != self._home:
                continue
            if not node.alive and self._once("lost", node):
                actions.append(Tell(f"node {node.name} is lost{': ' * bool(node.reason)}{node.reason}"))
            elif node.alive and node.drain_by is not None:
                within = None if node.drain_by == float("inf") else max(_SHORTEST_S, node.drain_by - now)
                when = "" if within is None else f" within {within:.0f} s"
                if self._once("drain", node):
                    actions.append(Tell(f"node {node.name} is to leave{when}: {node.reason or 'Ray drains it'}"))
                if node.id == self._home and not self._moves:
                    self._moves = True  # all agents are started again, on nodes that stay
                    actions += [Tell("the controller is there: it saves its state, and moves"), Move()]
                elif not self._moves:  # also agents whose start was under way when the drain began
                    serving = [agent for agent in here if agent.state is ActorState.SERVING]
                    new = [agent for agent in serving if (agent.key, agent.start) not in self._drained]
                    self._drained |= {(agent.key, agent.start) for agent in new}
                    actions += [Drain(agent.key, node.name, within) for agent in new]
        return actions

    def _once(self, what: str, node: Node) -> bool:
        is_new = (what, node.id) not in self._reported
        self._reported.add((what, node.id))
        return is_new

    def _ended(self, agent: AgentActor, node: Node | None) -> list[Action]:
        """The agent of a node has ended while the run goes on."""
        where = node.name if node is not None else agent.node
        if (agent.key, agent.start) in self._handled:
            return []
        self._handled.add((agent.key, agent.start))
        how = f"with exit code {agent.code}" if (agent.code or 0) >= 0 else f"by signal {-(agent.code or 0)}"
        line = f"the agent on node {where} has ended {how}{': ' * bool(agent.said)}{agent.said}"
        leaves = node is not None and not node.stays
        if agent.code == 0 and not agent.said:
            return []  # it ends with the run
        if agent.code in (0, REFUSED) or leaves:
            return [Tell(line)]  # it was let go, or what it is refused for stays
        of_agent = (agent.key, agent.node)
        self._failures[of_agent] = failures = self._failures.get(of_agent, 0) + 1
        if failures >= _MOST_FAILURES:
            return [Tell(f"{line}; it has failed {failures} times, and is not started again")]
        return [Tell(f"{line}; it is started again"), StartAgent(agent.key)]


def to_start(agents: Sequence[AgentActor], rendezvous: str) -> list[int]:
    """The actors whose agents are to be started for a controller that begins, also at the address of the one before."""
    return [agent.key for agent in agents if agent.serves != rendezvous or agent.state is ActorState.ENDED]


def workers_wait(agents: Sequence[AgentActor], waited_s: float) -> bool | None:
    """True if workers wait for the next controller, which may adopt them; None: that is not known yet.

    Args:
        waited_s: for which the actors have been asked.
    """
    if any(agent.has_workers for agent in agents):
        return True
    # One that is lost does not answer. Its agent has ended with it, and its workers are not adopted.
    return None if waited_s < _ANSWERS_S and any(agent.state is ActorState.PLACING for agent in agents) else False


class Begin(enum.Enum):
    """The ways in which a controller may begin."""

    AS_TYPED = "as typed"
    RESUMING = "resuming"
    ANEW = "anew"  # once what the run has left is put aside


def how_to_begin(
    *, has_begun: bool, are_waiting: bool, has_checkpoint: bool, shards: Set[str], in_vain: Set[str]
) -> Begin:
    """Decide in which way the next controller of a run begins.

    Args:
        has_begun: the run has a directory.
        are_waiting: workers wait for it.
        has_checkpoint: one was completed.
        shards: the files of state that workers have written, which the next controller may complete.
        in_vain: those that there were when the last one was started, if it could not (`is_in_vain`). Workers that were
            still writing then may have ended since: the next one tries what there is now.
    """
    if not has_begun:
        return Begin.AS_TYPED
    return Begin.RESUMING if are_waiting or has_checkpoint or shards - in_vain else Begin.ANEW


def is_in_vain(code: int, *, had_checkpoint: bool, has_checkpoint: bool, steps: int, refusals: int) -> bool:
    """True if a controller that was to go on has ended by itself as there was nothing to go on with.

    Neither could it adopt workers, nor complete a checkpoint of what they had written. It may have been refused for
    another reason, such as a port that was taken: only what is refused twice counts.

    Args:
        code: as `subprocess` has it.
        had_checkpoint, has_checkpoint: at its begin, and now.
        steps: that it has brought the run further.
        refusals: of controllers that were started, in a row, with this one.
    """
    ends_so = code == 1 or (code == REFUSED and refusals > 1)
    return ends_so and not had_checkpoint and not has_checkpoint and steps <= 0


@dataclass(frozen=True)
class Progress:
    """The memory of a supervisor about its run, in a file that outlives it.

    Args:
        starts: of the controller, so far.
        vain: of them in a row that ended without a step more than the one before.
        steps: lines in metrics.jsonl when the last one was started.
        port: of the rendezvous.
        node: the controller's.
        refused_since: the time of the first of the starts in a row that were refused; 0: the last one was not.
        crashes: of the supervisor by errors of its own, since the run got further.
    """

    starts: int = 0
    vain: int = 0
    steps: int = 0
    port: int = 0
    node: str = ""
    refused_since: float = 0.0
    crashes: int = 0

    def started(self, steps: int, port: int, node: str) -> Progress:
        """After one more start."""
        is_further = steps > self.steps
        vain = 0 if not self.starts or is_further else self.vain + 1
        since, crashes = (0.0, 0) if is_further else (self.refused_since, self.crashes)
        return Progress(self.starts + 1, vain, steps, port, node, since, crashes)

    def ended(self, code: int, now: float, *, was_started: bool = True) -> Progress:
        """After the end of a controller. One that was refused has not tried to bring the run further.

        Args:
            was_started: False if it was refused before its command was started.
        """
        if code != REFUSED:
            return replace(self, refused_since=0.0)
        vain = max(0, self.vain - 1) if was_started else self.vain
        return replace(self, vain=vain, refused_since=self.refused_since or now)

    def crashed(self) -> Progress:
        """After an error of the supervisor."""
        return replace(self, crashes=self.crashes + 1)

    def is_refused(self, now: float) -> bool:
        """True if controllers have been refused for so long that another try would be, too."""
        return bool(self.refused_since) and now - self.refused_since > _REFUSED_S

    @property
    def is_broken(self) -> bool:
        """True if the supervisor is not to be started again."""
        return self.crashes > _MOST_FAILURES

    @property
    def is_vain(self) -> bool:
        """True if one more start would be the next of several that have brought the run no further."""
        return self.vain >= _MOST_FAILURES


class After(enum.Enum):
    """The things that may follow the end of a controller."""

    END = "end"
    AGAIN = "again"
    MOVE = "move"


def after_controller(code: int, *, moves: bool, is_asked: bool, goes_on: bool, in_vain: bool = False) -> After:
    """Decide what follows when the controller's command has ended.

    Args:
        code: as `subprocess` has it: negative for a signal.
        moves: it was asked to end, as its node is to leave.
        is_asked: a person wants the run to end.
        goes_on: it was not the first one of the run.
        in_vain: it was to go on, and found nothing to go on with (`is_in_vain`).
    """
    if in_vain and not moves and not is_asked:
        return After.AGAIN  # and anew
    if code == REFUSED and goes_on and not is_asked:
        return After.AGAIN  # the one before may still be ending, where Ray was cut off from it, and have the directory
    if is_asked or (code >= 0 and not moves) or code in (0, REFUSED):
        return After.END  # what a run says by itself stays: another try would end in the same way
    return After.MOVE if moves else After.AGAIN
