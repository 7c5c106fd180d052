"""Launcher: makes, signals and reports a run's workers, on this machine by the fork server, on others by agents."""

from __future__ import annotations

import contextlib
import heapq
import selectors
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.runtime.processes.agents import Agent, Agents
from elaswave_spmd.runtime.processes.fork_server_client import Exited, ForkServerClient, NotStartedError

NO_PLACE = "no agent has a free place, and runtime.local_workers=0 lets none start on the controller's machine"
"""Why a worker cannot be started for now, in words."""


@dataclass(frozen=True)
class Machine:
    """A machine of a run and what it offers: the controller's own machine, or an agent's.

    Args:
        agent: the peer id of its agent; None for the controller's machine.
        host: its name, which is its failure domain. Agents that fail together have the same name.
        places: the number of workers that it has room for; None if there is no limit, as on the controller's machine.
            That has 0 with runtime.local_workers=0.
        ranks: the workers there whose end has not been reported. For the controller's machine it is empty.
        is_ready: True if workers can be started there.
        is_leaving: True if its workers leave, so that none is started there any more.
        is_doubtful: True if a worker there fell silent and its end is not reported yet. Until it is, no worker is
            started there.
    """

    agent: int | None
    host: str
    places: int | None
    ranks: frozenset[int] = frozenset()
    is_ready: bool = True
    is_leaving: bool = False
    is_doubtful: bool = False

    @property
    def free(self) -> int:
        """The number of places to start workers on. It is 0 for a machine without a limit."""
        if self.places is None or not self.is_ready or self.is_leaving or self.is_doubtful:
            return 0
        return max(0, self.places - len(self.ranks))


class Launcher:
    """All worker processes of a run, on all machines. Not thread-safe; `fileno` and `poll` fit a select loop.

    Args:
        fork_server: makes the workers of this machine. `stop` stops it.
        agents: make the workers of other machines; None if there are none. Then all calls go to the fork server.
        starts_here: False if no worker is ever started on this machine (runtime.local_workers=0). Has no effect without
            agents.
    """

    def __init__(
        self, fork_server: ForkServerClient, agents: Agents | None = None, *, starts_here: bool = True
    ) -> None:
        self._fork_server = fork_server
        self._agents = agents
        self._starts_here = starts_here
        self._hosts: dict[int, Agent | None] = {}  # living rank -> agent, None for this machine. Unused without agents
        self._selector: selectors.BaseSelector | None = None
        if agents is not None:
            self._selector = selectors.DefaultSelector()
            self._selector.register(fork_server, selectors.EVENT_READ)
            self._selector.register(agents, selectors.EVENT_READ)

    @property
    def agents(self) -> Agents | None:
        """The agents, for calls that concern no worker process."""
        return self._agents

    def assign(self, ranks: Sequence[int], num_local: int | None) -> None:
        """Assign machines to workers: the first `num_local` run here, the others on the agents in consecutive ranks.

        Args:
            ranks: the first workers of the run, in the order of their ranks.
            num_local: the number of workers on this machine; None for as many as do not fit on the agents.

        Raises:
            ConfigError: the agents have too little room.
        """
        agents = list(self._agents or ())
        room = sum(agent.capacity for agent in agents)
        local = max(0, len(ranks) - room) if num_local is None else num_local
        if len(ranks) - local > room:
            offers = ", ".join(f"{agent.host} {agent.capacity}" for agent in agents)
            raise ConfigError(
                f"of {len(ranks)} workers {local} run here and {len(ranks) - local} do not fit on the agents",
                rule="every worker of the mesh runs here or on an agent",
                where=f"runtime.local_workers={local}",
                exists=f"room for {room} workers on agents: {offers}",
                fix=f"runtime.local_workers={len(ranks) - room}, or agents with more --workers",
            )
        self._hosts.update(dict.fromkeys(ranks[:local]))
        rest = iter(ranks[local:])
        shares = divide_workers(len(ranks) - local, [agent.capacity for agent in agents])
        for agent, number in zip(agents, shares, strict=True):
            for _ in range(number):
                self._hosts[next(rest)] = agent

    def host_of(self, rank: int) -> str:
        """The machine on which `rank` runs."""
        agent = self._hosts.get(rank)
        return socket.gethostname() if agent is None else agent.host

    def domain_of(self, rank: int) -> tuple[str, ...] | None:
        """The failure domain of `rank`: its machine. None without agents, as there is only one machine then."""
        return None if self._agents is None else (self.host_of(rank),)

    @property
    def machines(self) -> tuple[Machine, ...]:
        """This machine, and the machines of all admitted agents; empty if the run cannot have agents."""
        if self._agents is None:
            return ()
        own = Machine(None, socket.gethostname(), None if self._starts_here else 0)
        used = self._used()
        agents = (
            Machine(
                agent.peer,
                agent.host,
                agent.capacity,
                frozenset(used[agent.peer]),
                is_ready=agent.prepared,
                is_leaving=agent.leaving,
                is_doubtful=agent.is_doubtful,
            )
            for agent in self._agents
        )
        return (own, *agents)

    def _used(self) -> dict[int, set[int]]:
        """The workers of each agent, by its peer id."""
        used: dict[int, set[int]] = {agent.peer: set() for agent in self._agents or ()}
        for rank, agent in self._hosts.items():
            if agent is not None:
                used.setdefault(agent.peer, set()).add(rank)
        return used

    def _assign_newcomer(self, rank: int, host: str | None) -> None:
        """Assign a machine to a joining worker: an agent with a free place, else this machine.

        Agents whose workers leave, and agents that may be hanging, get no worker.

        Args:
            rank: the joining worker.
            host: the name of the machine that was asked for. If several agents have this name, the newest one is taken:
                an older one may be lost without having been noticed yet. None for the agent that uses the smallest
                fraction of its capacity.

        Raises:
            NotStartedError: no such agent has a free place, and no worker is started on this machine.
        """
        used = {peer: len(ranks) for peer, ranks in self._used().items()}
        serving = [a for a in self._agents or () if a.prepared and not (a.leaving or a.is_doubtful)]
        free = [agent for agent in serving if used[agent.peer] < agent.capacity]
        if host is not None:
            named = [agent for agent in free if agent.host == host]
            found = min(named, key=lambda agent: agent.peer, default=None)
        else:
            found = min(free, key=lambda agent: Fraction(used[agent.peer] + 1, agent.capacity), default=None)
        if found is None and not self._starts_here:
            raise NotStartedError(NO_PLACE)
        self._hosts[rank] = found

    def ready(self) -> None:
        """Wait until this machine's fork server has imported everything.

        Raises:
            RunError: an import failed.
        """
        self._fork_server.ready()

    def hold(self, lock: Path) -> None:
        """Have the lock of a file held as long as a worker of this machine lives, even if this process ends before."""
        self._fork_server.hold(lock)

    def take_back(self, peer: int) -> None:
        """Note that the workers of an agent that is back, which an earlier controller had started, run there."""
        for agent in self._agents or ():
            if agent.peer == peer:
                self._hosts.update(dict.fromkeys(agent.ranks, agent))

    def address_of(self, rank: int) -> str | None:
        """The address of a worker that an agent has brought back: "" if it was not a member of the mesh yet.

        Returns None for a worker of this machine.
        """
        agent = self._hosts.get(rank)
        return None if agent is None else agent.addresses.get(rank)

    def settle(self) -> None:
        """Tell all machines that the ends of workers before the adoption are handled (`ForkServerClient.settle`)."""
        self._fork_server.settle()
        if self._agents is not None:
            self._agents.settle()

    def dismiss(self, reason: str) -> None:
        """Have the agents look for the run again, as it begins again. Call it before `stop`, which would end them."""
        if self._agents is not None:
            self._agents.dismiss(reason)

    def spawn(
        self, rank: int, spec: Mapping[str, Any], host: str | None = None, limit_s: float | None = None
    ) -> int | None:
        """Start worker `rank` on its machine, which is assigned now for a newcomer.

        Args:
            spec: plain JSON data for the worker's main function.
            host: for a newcomer, the name of the machine that was asked for.
            limit_s: as for ForkServerClient.spawn, if the worker runs on this machine. Agents are not waited for.

        Returns:
            The process id of the worker if it runs on this machine, else None.

        Raises:
            NotStartedError: this machine has no process, memory, descriptor or disk left, or `limit_s` is over; or no
                agent has a free place, and no worker is started on this machine.
        """
        if self._agents is not None and rank not in self._hosts:
            self._assign_newcomer(rank, host)
        agent = self._hosts.get(rank)
        if agent is None:
            try:
                return self._fork_server.spawn(rank, spec, limit_s)
            except NotStartedError:
                self._hosts.pop(rank, None)
                raise
        assert self._agents is not None
        self._agents.spawn(agent, rank, spec)
        return None

    def signal(self, rank: int, number: int, limit_s: float | None = None) -> bool:
        """Send a signal to worker `rank`; False if it has ended already.

        Signal 0 has no effect on the worker, but after it `poll` returns all workers that have ended until now.

        Args:
            limit_s: as for ForkServerClient.signal.
        """
        if self._agents is not None and number == 0:
            self._agents.request_exits()
        agent = self._hosts.get(rank)
        if agent is None:
            return self._fork_server.signal(rank, number, limit_s)
        assert self._agents is not None
        if number == 0:
            with contextlib.suppress(RunError):  # it has died, or hangs: that says nothing about this worker
                self._fork_server.signal(rank, 0, limit_s)
            return rank in agent.ranks
        return self._agents.signal(agent, rank, number)

    def order_signal(self, rank: int, number: int) -> None:
        """Order a signal to worker `rank` without waiting. The order has no effect if the worker has ended by then."""
        if (agent := self._hosts.get(rank)) is None:
            self._fork_server.order_signal(rank, number)
        else:
            assert self._agents is not None
            self._agents.signal(agent, rank, number)

    def keep_up(self) -> None:
        """Call it regularly; see `ForkServerClient.keep_up`."""
        self._fork_server.keep_up()

    def fileno(self) -> int:
        """The descriptor that is readable when `poll` may have something to return."""
        return self._fork_server.fileno() if self._selector is None else self._selector.fileno()  # pyright: ignore

    def poll(self) -> list[Exited]:
        """The workers that have ended since the last call; never blocks.

        Raises:
            RunError: this machine's fork server has died.
        """
        exits = self._fork_server.poll()
        if self._agents is not None:
            exits += self._agents.poll()
            self._forget(exits)
        return exits

    def may_live(self, ranks: Iterable[int]) -> list[int]:
        """Those of these workers that may still live: all; if this machine's fork server has died, those of agents.

        It takes note of the ends of workers, which `poll` does not report any more.
        """
        try:
            while exits := self._fork_server.poll():  # it raises when there are no more
                self._forget(exits)
        except RunError:
            return [rank for rank in ranks if self._hosts.get(rank) is not None]
        return list(ranks)

    def stop(self, grace_s: float = 2.0) -> list[Exited]:
        """End all workers (SIGTERM, after `grace_s` seconds SIGKILL), agents and the fork server; idempotent.

        Returns the exits that `poll` has not reported yet.
        """
        agents, self._agents = self._agents, None
        if agents is None:
            return self._fork_server.stop(grace_s)
        agents.end(grace_s)  # all machines at once
        try:
            exits = self._fork_server.stop(grace_s)
        finally:
            exits_elsewhere = agents.close()
            if self._selector is not None:
                self._selector.close()
        return exits + exits_elsewhere

    def _forget(self, exits: Iterable[Exited]) -> None:
        for exited in exits:
            self._hosts.pop(exited.rank, None)


def divide_workers(num: int, capacities: Sequence[int]) -> list[int]:
    """Divide workers among agents, in proportion to their capacities.

    One worker after the other goes to the agent that is then used to the smallest fraction of its capacity; ties go to
    the first.

    Args:
        num: number of workers, at most the sum of `capacities`.

    Returns:
        The number of workers of each agent.
    """
    assert 0 <= num <= sum(capacities), (num, capacities)
    shares = [0] * len(capacities)
    heap = [(Fraction(1, capacity), place) for place, capacity in enumerate(capacities) if capacity]
    heapq.heapify(heap)
    for _ in range(num):
        _, place = heap[0]
        shares[place] += 1
        if shares[place] < capacities[place]:
            heapq.heapreplace(heap, (Fraction(shares[place] + 1, capacities[place]), place))
        else:
            heapq.heappop(heap)
    return shares
