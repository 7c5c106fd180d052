"""What makes, signals and reports a run's workers, wherever they run: on this machine by the fork server, on others by
agents. Without agents it is the fork server and nothing else."""

from __future__ import annotations

import heapq
import selectors
import socket
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.processes.agents import Agent, Agents
from elaswave_spmd.runtime.processes.fork_server_client import Exited, ForkServerClient


class Launcher:
    """For one thread; `fileno` and `poll` fit into a select loop.

    Args:
        fork server: makes the workers of this machine; stopped by `stop`.
        agents: those of other machines, or None.
    """

    def __init__(self, fork_server: ForkServerClient, agents: Agents | None = None) -> None:
        self._fork_server, self._agents = fork_server, agents
        self._homes: dict[int, Agent | None] = {}  # where the living ranks are; None: here. Unused without agents
        self._selector: selectors.BaseSelector | None = None
        if agents is not None:
            self._selector = selectors.DefaultSelector()
            self._selector.register(fork_server, selectors.EVENT_READ)
            self._selector.register(agents, selectors.EVENT_READ)

    @property
    def agents(self) -> Agents | None:
        """The agents, for what is theirs alone."""
        return self._agents

    def deal(self, ranks: Sequence[int], num_local: int | None) -> None:
        """Decide where `ranks` will run: the first `num_local` here, the others in runs on the agents.

        Args:
            num_local: None: as many as the agents have no place for.

        Raises:
            ConfigError: the agents have too few places.
        """
        agents = list(self._agents or ())
        places = sum(agent.capacity for agent in agents)
        local = max(0, len(ranks) - places) if num_local is None else num_local
        if len(ranks) - local > places:
            offers = ", ".join(f"{agent.host} {agent.capacity}" for agent in agents)
            raise ConfigError(
                "the mesh's workers have places here and on the agents",
                got=f"{len(ranks)} workers, {local} here",
                where=f"runtime.local_workers={local}",
                exists=f"{places} places on agents: {offers}",
                fix=f"runtime.local_workers={len(ranks) - places}, or agents with more --workers",
            )
        self._homes.update(dict.fromkeys(ranks[:local]))
        rest = iter(ranks[local:])
        shares = share(len(ranks) - local, [agent.capacity for agent in agents])
        for agent, number in zip(agents, shares, strict=True):
            for _ in range(number):
                self._homes[next(rest)] = agent

    def host_of(self, rank: int) -> str:
        """The machine on which `rank` runs."""
        home = self._homes.get(rank)
        return socket.gethostname() if home is None else home.host

    def domain_of(self, rank: int) -> tuple[str, ...] | None:
        """The failure domain of `rank`: its machine. None without agents: there is one machine."""
        return None if self._agents is None else (self.host_of(rank),)

    def _find_place(self, rank: int) -> None:
        """For a newcomer: on the agent with the largest share of free ones, else here."""
        taken = {agent.peer: 0 for agent in self._agents or ()}
        for agent in self._homes.values():
            if agent is not None:
                taken[agent.peer] = taken.get(agent.peer, 0) + 1
        free = [agent for agent in self._agents or () if taken[agent.peer] < agent.capacity]
        self._homes[rank] = min(free, key=lambda agent: Fraction(taken[agent.peer] + 1, agent.capacity), default=None)

    def ready(self) -> None:
        """Wait until this machine's fork server has imported everything.

        Raises:
            RunError: an import failed.
        """
        self._fork_server.ready()

    def spawn(self, rank: int, spec: Mapping[str, Any]) -> int | None:
        """Start worker `rank` where it has its place; a newcomer gets one. `spec` is plain data.

        Returns: its process id, if it is one of this machine.
        """
        if self._agents is not None and rank not in self._homes:
            self._find_place(rank)
        home = self._homes.get(rank)
        if home is None:
            return self._fork_server.spawn(rank, spec)
        assert self._agents is not None
        self._agents.spawn(home, rank, spec)
        return None

    def signal(self, rank: int, number: int) -> bool:
        """Send a signal to worker `rank`; False when it has ended already.

        Signal 0 does nothing to it, but when this returns, `poll` knows of all that have ended until now.
        """
        if self._agents is not None and number == 0:
            self._agents.look()
        home = self._homes.get(rank)
        if home is None:
            return self._fork_server.signal(rank, number)
        assert self._agents is not None
        if number == 0:
            self._fork_server.signal(rank, 0)
            return rank in home.ranks
        return self._agents.signal(home, rank, number)

    def fileno(self) -> int:
        """Readable when `poll` may have something to say."""
        return self._fork_server.fileno() if self._selector is None else self._selector.fileno()  # pyright: ignore

    def poll(self) -> list[Exited]:
        """The workers that have ended since the last call; never blocks. RunError when this machine's fork server
        died.
        """
        exits = self._fork_server.poll()
        if self._agents is not None:
            exits += self._agents.poll()
            self._forget(exits)
        return exits

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
            self._homes.pop(exited.rank, None)


def share(num: int, capacities: Sequence[int]) -> list[int]:
    """How many of `num` workers each agent gets: one after the other goes where the taken share of the places is the
    lowest with it, at ties to the first. `num` is at most the sum of `capacities`."""
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
