"""The controller's side of the agents: who has come, what they are told, what they report.

Everything is sent without waiting for an answer, so an agent that is stopped holds up nobody; only `look` waits, and
not for long.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elaswave_spmd.conf.format_version import version_mismatch
from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.runtime.processes import agent_messages as am
from elaswave_spmd.runtime.processes.fork_server_client import Exited
from elaswave_spmd.runtime.processes.rendezvous import Rendezvous
from elaswave_spmd.runtime.transport.agent_links import AgentLinks
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.runtime.transport.mailbox import Envelope, Item, PeerClosed, SelectableMailbox

_CONNECT_TIMEOUT_S = 5.0
_LOOK_TIMEOUT_S = 2.0  # a run that ends for another reason waits no longer for a machine that says nothing
_GOODBYE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class RemoteExited(Exited):
    """As `Exited`, on another machine. With a `reason` nobody saw it end: the agent is gone, and its workers with it;
    `signal` is SIGKILL then and `pid` 0."""

    host: str = ""
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"worker {self.rank} was lost with the agent on {self.host}: {self.reason}"
        return f"{Exited.__str__(self)}, on {self.host}"


@dataclass
class Agent:
    """One agent. `ranks` are its workers that have not ended."""

    peer: int
    host: str
    capacity: int
    prepared: bool = False
    ranks: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return f"the agent on {self.host}"


class Agents:
    """All agents of a run. For one thread.

    Args:
        rendezvous: (host, port) of the store.
        host: address of this machine on which links listen.
        wanted: how many agents the run takes; later ones are refused.

    Raises:
        ConfigError: an address that is taken, or none of this machine.
    """

    def __init__(self, rendezvous: tuple[str, int], secret: bytes, host: str, wanted: int) -> None:
        import torch

        self._torch = str(torch.__version__)
        self._wanted, self._where = wanted, ":".join(map(str, rendezvous))
        self._agents: dict[int, Agent] = {}
        self._refused: list[str] = []
        self._exits: list[Exited] = []
        self._looked: set[int] = set()
        self._problem: Exception | None = None
        self._preparing = self._started = False  # a lost agent ends the start; later it is a loss of workers
        self._mailbox = SelectableMailbox()
        self._store = Rendezvous(*rendezvous, secret)
        try:
            self._links = AgentLinks(CONTROLLER, self._mailbox, token=self._store.token, host=host)
        except BaseException:
            self._store.close()
            raise
        self._store.announce(self._links.address)

    def __iter__(self) -> Iterator[Agent]:
        """The living agents, by host and then in the order in which they came."""
        return iter(sorted(self._agents.values(), key=lambda agent: (agent.host, -agent.peer)))

    def wait_for_all(self, timeout_s: float) -> None:
        """Returns when as many agents as wanted have come.

        Raises:
            RunError: not within `timeout_s` seconds.
        """
        if self._until(lambda: len(self._agents) == self._wanted, timeout_s):
            return
        dropped = self._links.wrong_tokens
        refused = [*self._refused, f"{dropped} messages with another token"] if dropped else self._refused
        raise RunError(
            f"{len(self._agents)} of {self._wanted} agents came to {self._where} within {timeout_s:g} s"
            + "".join(f"\n  refused: {line}" for line in refused)
        )

    def prepare(self, num_workers: int, settings: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Have all agents prepare the data; returns when they have, however long it takes.

        Raises:
            UserError: what the agent says of its data.
            RunError: an agent failed or is gone.
        """
        self._preparing = True
        for agent in self:
            self._send(agent, am.Prepare(num_workers, dict(settings), dict(data)))
        self._until(lambda: all(agent.prepared for agent in self), float("inf"))
        self._preparing, self._started = False, True

    def spawn(self, agent: Agent, rank: int, spec: Mapping[str, Any]) -> None:
        """Have `agent` start a worker. That it cannot is reported by `poll`."""
        agent.ranks.add(rank)
        if agent.peer not in self._agents:
            self._lose(agent, "it was gone before")
        self._send(agent, am.Spawn(rank, dict(spec)))

    def signal(self, agent: Agent, rank: int, number: int) -> bool:
        """Have `agent` send a signal; False when the worker is known to have ended."""
        if rank not in agent.ranks:
            return False
        self._send(agent, am.Signal(rank, number))
        return True

    def look(self) -> None:
        """Hear of all workers that have ended by now, for `poll`; gives agents up to 2 seconds to say so."""
        self._looked.clear()
        for agent in self:
            self._send(agent, am.Look())
        self._until(lambda: self._looked >= self._agents.keys(), _LOOK_TIMEOUT_S)

    def fileno(self) -> int:
        """Readable when `poll` may have something to say."""
        return self._mailbox.fileno()

    def poll(self) -> list[Exited]:
        """The workers that have ended since the last call; never blocks."""
        for item in self._mailbox.take_all():
            self._take(item)
        exits, self._exits = self._exits, []
        return exits

    def end(self, grace_s: float) -> None:
        """Tell all agents to end their workers and themselves."""
        for agent in self:
            self._send(agent, am.Stop(grace_s))

    def close(self, timeout_s: float = _GOODBYE_TIMEOUT_S) -> list[Exited]:
        """After `end`: wait for the agents to be gone, and close everything. Returns what `poll` has not reported."""
        self._problem = None
        self._until(lambda: not self._agents, timeout_s, heed=False)
        self._links.close(100)
        self._store.close()
        self._mailbox.close()
        return self._exits

    def _send(self, agent: Agent, message: am.AgentMessage) -> None:
        self._links.send(agent.peer, am.encode(message))

    def _until(self, done: Callable[[], bool], timeout_s: float, *, heed: bool = True) -> bool:
        """Take what comes until `done`, for up to `timeout_s` seconds. Raises an agent's problem, if it is `heed`ed."""
        deadline = time.monotonic() + timeout_s
        while True:
            if heed and self._problem is not None:
                raise self._problem
            if done():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            item = self._mailbox.get(min(left, 1.0))
            if item is not None:
                self._take(item)

    def _take(self, item: Item) -> None:
        if isinstance(item, PeerClosed):
            if (agent := self._agents.pop(item.peer, None)) is not None:
                self._lose(agent, "its connection closed")
            return
        if not isinstance(item, Envelope):
            return
        message = am.decode(item.header)
        if isinstance(message, am.Hello):
            self._hello(item.sender, message)
            return
        agent = self._agents.get(item.sender)
        if agent is None:  # refused, or lost already
            return
        match message:
            case am.Prepared():
                agent.prepared = True
            case am.Looked():
                self._looked.add(agent.peer)
            case am.WorkerExited(rank, pid, code, number):
                agent.ranks.discard(rank)
                self._exits.append(RemoteExited(rank, pid, code, number, agent.host))
            case am.AgentFailed(problem):
                del self._agents[agent.peer]
                self._send(agent, am.Stop(0.0))
                self._lose(agent, problem.what, problem.error(str(agent)))
            case _:
                raise AssertionError(f"the controller got {message} from {agent}")

    def _hello(self, peer: int, hello: am.Hello) -> None:
        """Take the agent, or tell it why not."""
        self._links.connect(peer, hello.address)
        full = self._preparing or self._started or len(self._agents) == self._wanted
        if not full and self._links.wait_connected([peer], _CONNECT_TIMEOUT_S):
            self._refused.append(f"{hello.host}, which cannot be reached at {hello.address} (its option --host)")
            return
        if full:
            got = f"runtime.agents={self._wanted}"
            refusal = ConfigError("the run at this rendezvous has all its agents", got=got, where=self._where)
        elif mismatch := version_mismatch(hello.format):
            refusal = ConfigError(
                f"the agent on {hello.host} {mismatch}",
                rule="agents and controller have the same format version",
                where=hello.host,
                fix="install the same version of elaswave_spmd on all machines",
            )
        elif hello.torch != self._torch:
            got = f"torch {hello.torch}, the controller has {self._torch}"
            refusal = ConfigError("all machines have the same torch, for the same bits", got=got, where=hello.host)
        else:
            self._agents[peer] = Agent(peer, hello.host, hello.capacity)
            return
        self._refused.append(f"{hello.host}: {refusal.got or refusal.what}")
        self._links.send(peer, am.encode(am.Refused(am.Problem.of(refusal))))

    def _lose(self, agent: Agent, reason: str, problem: Exception | None = None) -> None:
        """`agent` is gone, and its workers with it. While it prepares, that ends the start of the run."""
        for rank in sorted(agent.ranks):
            self._exits.append(RemoteExited(rank, 0, None, int(signal.SIGKILL), agent.host, reason))
        agent.ranks.clear()
        if self._preparing and self._problem is None:
            self._problem = problem or RunError(f"{agent} is gone: {reason}")
