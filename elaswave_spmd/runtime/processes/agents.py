"""The controller's side of the agents: which agents have joined, orders to them, and their reports.

Orders are sent without waiting for an answer, so that an agent that hangs does not block the others. Only
`request_exits` waits, and not for long.

The run waits for its first agents, which prepare their data before it begins; if one of them is lost, the start ends.
An agent that asks later is a *late* agent. The controller admits or refuses it, and it prepares while the run goes on.
The run never waits for it, but learns what happens to it from `take_news`.

If a controller dies, its agents keep their workers and may come *back* with them to the next controller, if that one
continues the same life of the run. Otherwise they are told to join again as new agents, without workers.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from elaswave_spmd.conf.format_version import version_mismatch
from elaswave_spmd.errors import ConfigError, LinksError, RunError, UserError
from elaswave_spmd.runtime.processes import agent_messages as am
from elaswave_spmd.runtime.processes.fork_server_client import Exited
from elaswave_spmd.runtime.processes.rendezvous import Rendezvous, is_loopback, resolve_address
from elaswave_spmd.runtime.transport.agent_links import AgentLinks
from elaswave_spmd.runtime.transport.credentials import Credentials
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.runtime.transport.mailbox import Envelope, Item, PeerClosed, SelectableMailbox

_CONNECT_TIMEOUT_S = 5.0
_MOST_REFUSED = 100  # refused agents that an error message lists
_REQUEST_TIMEOUT_S = 2.0  # a silent machine must not delay the end of a run that has another reason to end
_GOODBYE_TIMEOUT_S = 10.0
_NO_WORKER = "no worker was here"
_NOT_TAKEN_BACK = "the run goes on without the workers that it has kept"
_CANNOT_BE = "what it says of its workers cannot be"
_PEERS = 1_000_000  # peer ids that each controller of a life has for its agents; the next controller gives other ids
_UNKNOWN_RANKS = 100_000  # ranks that a controller may have given to newcomers since the last line of the journal


@dataclass(frozen=True, slots=True)
class RemoteExited(Exited):
    """A worker's process on another machine has ended; see `Exited`.

    Args:
        host: the name of the machine.
        reason: why the agent was lost, if the worker is lost with it and its end was not observed. Then `signal` is
            SIGKILL and `pid` is 0. Else empty.
        not_started: why the worker could not be started; then `pid` is 0. Else empty.
    """

    host: str = ""
    reason: str = ""
    not_started: str = ""

    def __str__(self) -> str:
        if self.not_started:
            return f"worker {self.rank} could not be started on {self.host}: {self.not_started}"
        if self.reason:
            return f"worker {self.rank} was lost with the agent on {self.host}: {self.reason}"
        return f"{Exited.__str__(self)}, on {self.host}"


@dataclass
class Agent:
    """One agent, as the controller knows it.

    Args:
        peer: the id of its links, which is never given to another agent of the run.
        host: the name of its machine.
        capacity: the number of workers that it has room for.
        address: the address at which its links listen.
        prepared: True once it has the run's data, so that workers can be started on it.
        late: True if it came after all of the first agents: the run neither waits for it nor ends with it.
        leaving: True if its workers leave, so that none is started on it.
        returned: True if it was in the run before, and has joined again by itself.
        ranks: its workers whose end has not been reported.
        silent: those of its workers that were declared lost since nothing was heard of them.
        addresses: rank -> address, of the workers that it had when it came back; "" for a worker that was not a member
            of the mesh yet.
    """

    peer: int
    host: str
    capacity: int
    address: str = ""
    prepared: bool = False
    late: bool = False
    leaving: bool = False
    returned: bool = False
    ranks: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    addresses: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"the agent on {self.host}"

    @property
    def is_doubtful(self) -> bool:
        """True until it has reported the ends of all silent workers: its machine may hang, or be cut off."""
        return not self.silent.isdisjoint(self.ranks)

    @property
    def is_preparing_late(self) -> bool:
        """True while it prepares as a late agent: it has no workers, may be busy for minutes, and is not waited for."""
        return self.late and not self.prepared


@dataclass(frozen=True, slots=True)
class AgentCame:
    """An agent asks to join, with room for `places` workers. It waits to be admitted or refused."""

    peer: int
    host: str
    places: int


@dataclass(frozen=True, slots=True)
class AgentBack:
    """An agent of the controller before this one is back, with the workers that it has kept.

    Args:
        workers: the ranks of its workers that live.
        newcomers: the ranks of its workers that were not members of the mesh yet, whether they live or have ended.
        made: the ranks of all workers that it has ever had.
        seconds: for how many seconds there was no controller.
    """

    peer: int
    host: str
    workers: frozenset[int]
    newcomers: frozenset[int]
    made: frozenset[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class AgentReady:
    """A late agent has prepared: workers can be started on it."""

    peer: int
    host: str
    places: int


@dataclass(frozen=True, slots=True)
class AgentGone:
    """An agent is lost or has failed, and its workers with it; or it was not admitted.

    Args:
        joined: True if it had prepared, so that workers could have been started on it.
        reason: the reason in words.
    """

    peer: int
    host: str
    places: int
    joined: bool
    reason: str


@dataclass(frozen=True, slots=True)
class AgentNotice:
    """An agent was asked to end by SIGTERM. It ends within `within_s` seconds, whether its workers have left or not."""

    peer: int
    host: str
    within_s: float


@dataclass(frozen=True, slots=True)
class AdoptedLife:
    """The life of a run whose workers a controller adopts from the one before it.

    Args:
        run: the id of the run.
        incarnation: the number of the life within the run.
        generation: the number of the controller within the life.
        here: the ranks of all workers that the controller's machine has ever had. No agent can have one of them.
        next_rank: all ranks below this one have been given to workers. Some above it may have been, which the journal
            does not know yet: of newcomers, and of members of the first mesh.
    """

    run: str
    incarnation: int
    generation: int
    here: frozenset[int] = frozenset()
    next_rank: int = 0


AgentNews: TypeAlias = AgentCame | AgentBack | AgentReady | AgentGone | AgentNotice


class Agents:
    """All agents of a run. Not thread-safe.

    Args:
        rendezvous: (host, port) at which agents look for the run.
        secret: the secret that is shared with the agents.
        credentials: the credentials of the run's links.
        host: the address of this machine on which the controller's links listen.
        wanted: the number of agents that the run waits for before it begins.
        life: the life of the run whose workers are adopted; None if none are.

    Raises:
        ConfigError: the address is in use, or is not one of this machine.
    """

    def __init__(
        self,
        rendezvous: tuple[str, int],
        secret: bytes,
        credentials: Credentials,
        host: str,
        wanted: int,
        life: AdoptedLife | None = None,
    ) -> None:
        import torch

        self._torch = str(torch.__version__)  # agents must have the same one
        self.credentials = credentials
        self._wanted = wanted
        self._where = ":".join(map(str, rendezvous))
        self._agents: dict[int, Agent] = {}
        self._asking: dict[int, Agent] = {}  # late agents that are neither admitted nor refused yet
        # Agents that are given up, and why. They stay here until their links have closed.
        self._given_up: dict[int, tuple[Agent, str]] = {}
        self._order: am.PrepareRun | None = None  # the order for agents that join; None until the run is known
        self._news: list[AgentNews] = []
        self._refused: list[str] = []
        self._exits: list[Exited] = []
        self._beats: list[tuple[int, bytes]] = []
        self._refusals: dict[int, Counter[str]] = {}  # peer -> reason -> connections and messages that it has refused
        self._reported: set[int] = set()  # peers that have answered `request_exits`
        self._problem: Exception | None = None
        # While the first agents prepare, the loss of one ends the start of the run; later it is a loss of workers.
        self._preparing = False
        self._ending = False
        self._closed = False
        self._life = life
        self._owners: dict[int, int] = {}  # rank -> the peer that has come back with it
        # By peer: agents whose connection was lost while workers are taken over. They may be back before long.
        self._away: dict[int, AgentGone] = {}
        self._mailbox = SelectableMailbox()
        given = 0 if life is None else (life.generation - 1) * _PEERS
        self._rendezvous = Rendezvous(_listening_address(*rendezvous, host), rendezvous[1], secret, given)
        try:
            self._links = AgentLinks(CONTROLLER, self._mailbox, credentials=credentials, host=host)
        except BaseException:
            self._rendezvous.close()
            raise
        self._rendezvous.announce(self._links.address, credentials)

    def __iter__(self) -> Iterator[Agent]:
        """The living agents of the run, by host and then in the order in which they came."""
        return iter(sorted(self._agents.values(), key=lambda agent: (agent.host, -agent.peer)))

    def take_news(self) -> list[AgentNews]:
        """What has happened to agents since the last call. Ends of workers are not among this; see `poll`."""
        news, self._news = self._news, []
        return news

    def take_beats(self) -> list[tuple[int, bytes]]:
        """The heartbeats that agents have sent on since the last call: (rank, the worker's encoded message)."""
        beats, self._beats = self._beats, []
        return beats

    @property
    def rejected(self) -> Mapping[str, int]:
        """Reason -> number of connections and messages refused, by these links, the rendezvous and all agents."""
        return sum(self._refusals.values(), Counter(self._links.rejected) + Counter(self._rendezvous.rejected))

    def wait_for_all(self, timeout_s: float) -> None:
        """Wait until as many agents as wanted have joined.

        Raises:
            RunError: they have not joined within `timeout_s` seconds.
        """
        if self._wait_until(lambda: len(self._agents) >= self._wanted, timeout_s):
            return
        refused = [*self._refused, *(f"{number} x {reason}" for reason, number in sorted(self.rejected.items()))]
        raise RunError(
            f"{len(self._agents)} of {self._wanted} agents came to {self._where} within {timeout_s:g} s"
            + "".join(f"\n  refused: {line}" for line in refused)
        )

    def prepare(self, num_workers: int, settings: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Order the first agents to prepare their data, and wait until they have, however long it takes.

        Raises:
            UserError: an agent's data is missing or differs.
            RunError: an agent failed or was lost.
        """
        self._preparing = True
        self._order = am.PrepareRun(num_workers, dict(settings), dict(data))
        for agent in self:
            self._send(agent, self._order)
        self._wait_until(lambda: all(agent.prepared for agent in self), float("inf"))
        self._preparing = False

    def go_on(self, num_workers: int, settings: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Note how agents are to prepare, as the run goes on under this controller. Never waits.

        Used in place of `prepare` by a controller that adopts workers.
        """
        self._order = am.PrepareRun(num_workers, dict(settings), dict(data))

    def settle(self) -> None:
        """End the adoption: workers of agents that come back later are lost to the run.

        All agents are told, even those whose workers have all ended. Otherwise they would report these workers to the
        next controller once more.
        """
        self._life = None
        self._news += self._away.values()
        self._away.clear()
        for agent in self:
            self._send(agent, am.Settled())

    def give_back(self) -> None:
        """Close all links as if this process had died: agents keep their workers for another controller."""
        if not self._closed:
            self._closed = True
            self._close(0)

    def dismiss(self, reason: str) -> None:
        """Have all agents look for the run again, as it begins again; `end` ends agents that did not get this order."""
        for agent in (*self, *self._asking.values()):
            self._send(agent, am.JoinAgain(agent.peer, reason))
        self._agents.clear()
        self._asking.clear()

    def admit(self, peer: int) -> None:
        """Have an agent that has asked prepare for the run; `AgentReady` or `AgentGone` follows. Never waits."""
        assert self._order is not None, "nothing is decided about agents before the run is known"
        if (agent := self._asking.pop(peer, None)) is not None:  # if it is None, the agent has gone meanwhile
            self._agents[peer] = agent
            self._send(agent, self._order)

    def refuse(self, peer: int, error: UserError) -> None:
        """Refuse an agent that has asked to join: it ends with this error.

        An agent that was in the run before ends without an error, as the agents of a run that is over do.
        """
        if (agent := self._asking.pop(peer, None)) is not None:
            problem = am.Problem.from_error(error)
            self._send(agent, am.LetGo(error.what) if agent.returned else am.Refused(problem))

    def spawn(self, agent: Agent, rank: int, spec: Mapping[str, Any]) -> None:
        """Order `agent` to start a worker. A failure is reported by `poll`."""
        agent.ranks.add(rank)
        if agent.peer in self._agents:
            self._send(agent, am.Spawn(rank, dict(spec)))
        else:  # the agent was lost after the launcher chose it: `poll` reports the worker as lost
            self._report_lost(agent, "it was lost before")

    def signal(self, agent: Agent, rank: int, number: int) -> bool:
        """Order `agent` to send a signal; False if the worker is known to have ended."""
        if rank not in agent.ranks:
            return False
        self._send(agent, am.Signal(rank, number))
        return True

    def drain(self, peer: int, within_s: float | None, says: str) -> None:
        """Note that the workers of an agent leave, so that none is started there, and tell the agent. Never waits."""
        if (agent := self._agents.get(peer)) is not None:
            agent.leaving = True
            self._send(agent, am.Drain(within_s, says))

    def let_go(self, peer: int, says: str, *, lost: bool) -> None:
        """Have an agent end that has no workers any more, or none that matters. This is no loss. Never waits.

        Args:
            peer: the agent.
            says: what it prints.
            lost: True if workers of it were lost before they had left.
        """
        if (agent := self._agents.pop(peer, None)) is not None:
            self._send(agent, am.LetGo(says, lost))
            self._report_lost(agent, "its machine has left")

    def doubt(self, peer: int, ranks: Collection[int]) -> None:
        """Note that workers of an agent fell silent. None is started there until the ends of all these are reported."""
        if (agent := self._agents.get(peer)) is not None:
            agent.silent |= agent.ranks.intersection(ranks)

    def give_up(self, peer: int, reason: str) -> None:
        """Treat an agent as lost, with its workers, though its connection is not closed. Never waits.

        It is sent the order to join again, which reaches it when it goes on or the network is back. If the connection
        ends before that, the order is sent again.
        """
        if (agent := self._agents.pop(peer, None)) is not None:
            self._given_up[peer] = agent, reason
            self._send(agent, am.JoinAgain(peer, reason))
            self._lose(agent, reason)

    def request_exits(self) -> None:
        """Collect the exits of all workers that have ended by now, for `poll`; waits up to 2 seconds for agents."""
        self._reported.clear()
        for agent in self:
            if not agent.is_preparing_late:
                self._send(agent, am.ReportExits())
        self._wait_until(
            lambda: all(agent.peer in self._reported for agent in self if not agent.is_preparing_late),
            _REQUEST_TIMEOUT_S,
        )

    def fileno(self) -> int:
        """The descriptor that is readable when `poll` may have something to return."""
        return self._mailbox.fileno()

    def poll(self) -> list[Exited]:
        """The workers that have ended since the last call; never blocks."""
        for item in _last_words_first(self._mailbox.take_all()):
            self._handle(item)
        exits, self._exits = self._exits, []
        return exits

    def end(self, grace_s: float) -> None:
        """Order all agents to end their workers and themselves. Agents that ask to join from now on are refused."""
        self._ending = True
        for peer in [*self._asking]:
            self.refuse(peer, self._is_ending())
        for agent in self:
            self._send(agent, am.Stop(grace_s))

    def close(self, timeout_s: float = _GOODBYE_TIMEOUT_S) -> list[Exited]:
        """After `end`: wait until all agents have ended, and close all links. Returns exits that `poll` has not.

        A late agent that still prepares has no workers, and is not waited for.
        """
        if self._closed:
            return []
        self._closed = True
        self._problem = None
        with contextlib.suppress(LinksError):  # the links have failed: no message can come any more
            self._wait_until(lambda: all(agent.is_preparing_late for agent in self), timeout_s, raise_problem=False)
        self._close(100)
        return self._exits

    def _close(self, linger_ms: int) -> None:
        self._links.close(linger_ms)
        self._rendezvous.close()
        self._mailbox.close()

    def _send(self, agent: Agent, message: am.AgentMessage) -> None:
        self._links.send(agent.peer, am.encode(message))

    def _wait_until(self, done: Callable[[], bool], timeout_s: float, *, raise_problem: bool = True) -> bool:
        """Handle messages until `done`, for up to `timeout_s` seconds; True if done. Raises an agent's problem."""
        deadline = time.monotonic() + timeout_s
        while True:
            if raise_problem and self._problem is not None:
                raise self._problem
            if done():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            item = self._mailbox.get(min(left, 1.0))
            if item is not None:
                behind = self._mailbox.take_all() if isinstance(item, PeerClosed) else []
                for each in _last_words_first([item, *behind]):
                    self._handle(each)

    def _handle(self, item: Item) -> None:
        if isinstance(item, PeerClosed):
            self._links.drop(item.peer)  # free what the links keep for this peer
            if (agent := self._agents.pop(item.peer, None)) is not None:
                self._lose(agent, "its connection closed")
                self._tell_lost(agent, "the connection to it closed")
            elif (given_up := self._given_up.pop(item.peer, None)) is not None:
                self._tell_lost(*given_up)
            elif (agent := self._asking.pop(item.peer, None)) is not None:
                reason = "its connection closed before it had an answer"
                self._news.append(AgentGone(agent.peer, agent.host, agent.capacity, False, reason))
            return
        if not isinstance(item, Envelope):
            return
        message = am.try_decode(item.header)
        agent = self._agents.get(item.sender)
        if agent is not None:
            self._handle_message(agent, message)
        elif isinstance(message, am.Notice) and item.sender in self._asking:
            self._send(self._asking.pop(item.sender), am.LetGo(_NO_WORKER))
        elif isinstance(message, am.Hello | am.Back) and item.sender < CONTROLLER:
            self._handle_newcomer(item.sender, message)
        elif message is None or isinstance(message, am.Hello | am.Back):
            self._links.reject(am.UNEXPECTED)
        # Any other message is from an agent that was refused, or is lost already.

    def _handle_message(self, agent: Agent, message: am.AnyAgentMessage | None) -> None:
        """Handle a message of an agent of the run; None: one that could not be decoded."""
        match message:
            case am.Prepared() if self._order is not None and not agent.prepared:
                agent.prepared = True
                if agent.late:
                    self._news.append(AgentReady(agent.peer, agent.host, agent.capacity))
            case am.Notice(within_s) if self._order is not None and not self._preparing:
                self._news.append(AgentNotice(agent.peer, agent.host, within_s))
            case am.Notice():  # the run has not begun
                del self._agents[agent.peer]
                self._send(agent, am.LetGo(_NO_WORKER))
                self._lose(agent, "it was asked to end by SIGTERM")
            case am.Refusals(counts):
                self._refusals[agent.peer] = Counter(counts)
            case am.Beats(beats):
                self._send(agent, am.BeatsHeard())
                own = [beat for beat in beats if beat[0] in agent.ranks]
                self._beats += own
                if len(own) < len(beats):
                    self._links.reject(am.UNEXPECTED)
            case am.ExitsReported():
                self._reported.add(agent.peer)
            case am.WorkerExited(rank, pid, code, number, why_not) if rank in agent.ranks:
                agent.ranks.discard(rank)
                self._exits.append(RemoteExited(rank, pid, code, number, agent.host, not_started=why_not))
            case am.AgentFailed(problem):
                del self._agents[agent.peer]
                self._send(agent, am.Stop(0.0))
                self._lose(agent, problem.what, problem.to_error(str(agent)))
            case _:
                self._links.reject(am.UNEXPECTED)

    def _handle_newcomer(self, peer: int, message: am.Hello | am.Back) -> None:
        """Answer the first message of an agent."""
        hello = message.hello if isinstance(message, am.Back) else message
        if hello.capacity < 1:
            self._links.reject(am.UNEXPECTED)
        elif (refusal := am.refused_name(hello.host, f"agent {peer}")) is not None:
            self._refuse_name(peer, hello, refusal)
        elif isinstance(message, am.Back):
            self._take_back_or_not(peer, message)
        else:
            self._accept_or_refuse(peer, hello)

    def _refuse_name(self, peer: int, hello: am.Hello, refusal: ConfigError) -> None:
        """Refuse an agent whose name is not printable, before the name gets into a log or onto a terminal."""
        try:
            self._links.connect(peer, hello.address)
        except RunError:
            self._links.reject(am.UNEXPECTED)
            return
        if self._order is not None:
            self._news.append(AgentGone(peer, am.shown_name(hello.host), hello.capacity, False, refusal.what))
        elif len(self._refused) < _MOST_REFUSED:
            self._refused.append(f"agent {peer}: {refusal.what}")
        self._links.send(peer, am.encode(am.Refused(am.Problem.from_error(refusal))))

    def _accept_or_refuse(self, peer: int, hello: am.Hello) -> None:
        """Answer an agent's first message."""
        if not self._connects(peer, hello):
            return
        late = self._order is not None or len(self._agents) >= self._wanted
        # The run does not wait for the link to a late agent: if the agent cannot be reached, the link closes.
        if not late and self._links.wait_connected([peer], _CONNECT_TIMEOUT_S):
            # There is no link over which it could be refused.
            self._refused.append(f"{hello.host}, which cannot be reached at {hello.address} (its option --host)")
            return
        refusal = self._is_ending() if self._ending else self._mismatch(hello)
        if refusal is None:
            returned = bool(hello.before)
            if late:
                new = Agent(peer, hello.host, hello.capacity, hello.address, late=True, returned=returned)
                self._asking[peer] = new
                self._news.append(AgentCame(peer, hello.host, hello.capacity))
            else:
                self._agents[peer] = Agent(peer, hello.host, hello.capacity, hello.address)
            return
        if late:
            self._news.append(AgentGone(peer, hello.host, hello.capacity, False, refusal.what))
        elif len(self._refused) < _MOST_REFUSED:
            self._refused.append(refusal.what)
        is_over = self._ending and hello.before
        answer = am.LetGo(refusal.what) if is_over else am.Refused(am.Problem.from_error(refusal))
        self._links.send(peer, am.encode(answer))

    def _mismatch(self, hello: am.Hello) -> ConfigError | None:
        """Why an agent cannot join this run; None if it can."""
        if mismatch := version_mismatch(hello.format):
            return ConfigError(
                f"the agent on {hello.host} {mismatch}",
                rule="agents and controller have the same format version",
                where=hello.host,
                fix="install the same version of elaswave_spmd on all machines",
            )
        if hello.torch != self._torch:
            return ConfigError(
                f"the agent on {hello.host} has torch {hello.torch}, the controller has {self._torch}",
                rule="all machines have the same torch: another one may compute other bits",
                where=hello.host,
                fix=f"pip install torch=={self._torch} on {hello.host}",
            )
        return None

    def _connects(self, peer: int, hello: am.Hello, kept: Collection[int] | None = None) -> bool:
        """Open the link to an agent that joins or comes back. Returns False if its address is not valid.

        Args:
            peer: the id of its links.
            hello: its first message.
            kept: the workers with which it is taken back; None if it is a new agent, whose earlier workers are lost.
        """
        try:
            self._links.connect(peer, hello.address)
        except RunError:
            self._links.reject(am.UNEXPECTED)
            return False
        # The agent says which of its earlier links are gone. This process may not have noticed that they have closed.
        for former in hello.before:
            self._given_up.pop(former, None)
            if kept is not None:
                self._away.pop(former, None)
            if (lost := self._agents.pop(former, None) or self._asking.pop(former, None)) is None:
                continue
            if kept is None:
                self._lose(lost, "it has joined again")
            else:  # only its connection was lost, during the adoption
                lost.ranks.difference_update(kept)
                self._report_lost(lost, "it has come back without it")
        return True

    def _take_back_or_not(self, peer: int, back: am.Back) -> None:
        """Answer an agent that has kept its workers: take them over, or have it join again without them."""
        hello, refusal, why_not = back.hello, self._mismatch(back.hello), self._why_not_taken_back(peer, back)
        is_taken = not self._ending and refusal is None and not why_not
        if not self._connects(peer, hello, back.workers.keys() if is_taken else None):
            return
        agent = Agent(peer, hello.host, hello.capacity, hello.address, prepared=True, late=True, returned=True)
        if self._ending:
            self._send(agent, am.Stop(0.0))
        elif refusal is not None:
            self._news.append(AgentGone(peer, hello.host, hello.capacity, False, refusal.what))
            self._send(agent, am.Refused(am.Problem.from_error(refusal)))
        elif why_not:
            self._send(agent, am.JoinAgain(peer, why_not))
        else:
            agent.addresses, agent.ranks = dict(back.workers), set(back.workers)
            self._agents[peer] = agent
            newcomers = frozenset({*back.newcomers, *(rank for rank, at in back.workers.items() if not at)})
            made = frozenset({*back.workers, *back.newcomers, *back.gone})
            self._owners.update(dict.fromkeys(made, peer))
            self._news.append(AgentBack(peer, agent.host, frozenset(back.workers), newcomers, made, back.seconds))

    def _why_not_taken_back(self, peer: int, back: am.Back) -> str:
        """Why an agent that has kept its workers has to join again without them; empty if they are taken over."""
        life = self._life
        if life is None or (life.run, life.incarnation) != (back.run, back.incarnation):
            return _NOT_TAKEN_BACK
        ranks, peers = [*back.workers, *back.newcomers, *back.gone], {peer, *back.hello.before}
        is_sound = (
            len({*ranks}) == len(ranks)
            and all(0 <= rank < life.next_rank + _UNKNOWN_RANKS for rank in ranks)
            and life.here.isdisjoint(ranks)
            and all(self._owners.get(rank, peer) in peers for rank in ranks)
            and 0 <= back.seconds < math.inf
        )
        if not is_sound:
            self._links.reject(am.UNEXPECTED)
        return "" if is_sound else _CANNOT_BE

    def _report_lost(self, agent: Agent, reason: str) -> None:
        # If the news that it is back was not taken yet, it is out of date.
        self._news = [news for news in self._news if not (isinstance(news, AgentBack) and news.peer == agent.peer)]
        for rank in sorted(agent.ranks):
            self._exits.append(RemoteExited(rank, 0, None, int(signal.SIGKILL), agent.host, reason))
        if agent.ranks:
            self._mailbox.interrupt("workers are lost")  # makes `fileno` readable, as `poll` has something to return
        agent.ranks.clear()

    def _tell_lost(self, agent: Agent, reason: str) -> None:
        """Tell an agent that it is lost to the run, in case it lives: perhaps only one of two connections has ended."""
        if self._ending or self._order is None:
            return
        with contextlib.suppress(RunError):  # the links are closed
            self._links.connect(agent.peer, agent.address)
            is_awaited = self._life is not None  # during the adoption it may still come back with its workers
            self._send(agent, am.ConnectAgain(agent.peer) if is_awaited else am.JoinAgain(agent.peer, reason))

    def _is_ending(self) -> ConfigError:
        return ConfigError(
            f"the run at {self._where} is ending",
            rule="an agent joins a run that goes on",
            where=self._where,
            fix="the agent again, when the run is resumed",
        )

    def _lose(self, agent: Agent, reason: str, problem: Exception | None = None) -> None:
        """Report the workers of a lost agent as lost. While agents prepare, its loss ends the start of the run."""
        self._report_lost(agent, reason)
        if self._order is not None:
            gone = AgentGone(agent.peer, agent.host, agent.capacity, agent.prepared, reason)
            if self._life is None:
                self._news.append(gone)
            else:  # perhaps only its connection has ended: it counts as lost if it is not back when the adoption ends
                self._away[agent.peer] = gone
        if self._preparing and not agent.late and self._problem is None:
            self._problem = problem or RunError(f"{agent} was lost: {reason}")


def _last_words_first(items: Collection[Item]) -> list[Item]:
    """The items in an order in which messages of agents whose connection has ended come first.

    An agent's messages come by another connection than the one whose end is reported. After a pause of this process the
    end may be first in the mailbox.
    """
    closed = {item.peer for item in items if isinstance(item, PeerClosed)}

    def is_of_closed(item: Item) -> bool:
        return isinstance(item, Envelope) and item.sender in closed

    return sorted(items, key=lambda item: not is_of_closed(item)) if closed else [*items]


def _listening_address(name: str, port: int, host: str) -> str:
    """The address on which the rendezvous listens: the address of its name, or else `host`, where the links listen.

    `host` is used if the name is known only to other machines, or means the loopback interface on this one.
    """
    try:
        address = resolve_address(name, where=f"runtime.rendezvous={name}:{port}")
    except ConfigError:
        return host
    return host if is_loopback(address) and not is_loopback(name) else address
