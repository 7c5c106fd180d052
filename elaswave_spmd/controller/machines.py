"""Machines that join or are lost while the run goes on: which agents are admitted, and what their places are used for.

A place of a machine is room for one worker. Everything here takes facts and returns actions, on the controller's
thread. An agent that asks to join is admitted unless the run is about to end. It prepares while the run goes on, and
nothing waits for it. When it is ready its places are used in this order:

1. With elastic.replace or elastic.spares, lost workers are replaced on the machine with the most room, which is now the
   new one (Replacements does that).
2. Workers are started there until the run has as many as it was started with, or elastic.max_workers. So a machine that
   was lost and comes back gives the run its size again. That is decided once, when the agent is ready: a worker that is
   lost later is a loss like any other.
3. The places that are left serve for later replacements and spares, and for `ctl add`.

All of these starts count towards the limit of elastic.replacements_per_minute; starts beyond it wait.

If a machine is cut off or stops, its workers are lost because they fall silent. That is noticed long before the
connection to its agent ends, which may even survive the failure. So if none of an agent's workers is heard any more,
the agent is given up with them; when it hears of that, it joins again as a new one. Workers that are still starting say
nothing about their machine until their time to be ready is over, and are given up with it. If an agent has a single
worker, a worker that hangs cannot be told from a machine that is gone, so the agent is given up as well. Until this is
decided, no worker is started on a machine where one has fallen silent.

The network may also fail between two machines that both reach the controller. Their workers cannot work together, so
one machine has to go, with all of its workers at once. If they went one after the other, each loss would make the run
wait once more, and workers of both machines might go. The agent of that machine still has its connection and joins
again within a second. Its places are used only after a pause, which doubles each time, since every attempt makes the
run wait while the network is still broken. The pause begins when the agent is back, so a machine that takes long to
come back is not used at once either.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from elaswave_spmd.conf.schema import ElasticSettings
from elaswave_spmd.controller.actions import (
    Action,
    AdmitAgent,
    DoubtAgent,
    GiveUpAgent,
    LinkFailed,
    Record,
    RefuseAgent,
    Spawn,
)
from elaswave_spmd.controller.replacements import Replacements
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.mesh.mesh import named_workers
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.runtime.processes.agents import AgentCame, AgentGone, AgentReady
from elaswave_spmd.runtime.processes.fd_limit import fits_fd_limit
from elaswave_spmd.runtime.processes.launcher import Machine

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 3600.0

AGENT = "agent"
"""The kind of the events about agents."""


@dataclass(frozen=True)
class _Pause:
    """A machine is not used for some time after it has come back.

    Args:
        seconds: the length of the pause.
        reason: why, in words.
        until: the end of the pause, in seconds of the controller's clock; infinite while the machine is not back.
    """

    seconds: float
    reason: str
    until: float = math.inf


@dataclass(frozen=True)
class Whereabouts:
    """Which worker is on which machine, looked up once for many workers.

    Args:
        own: the controller's machine; None if the run can have no other machine.
        of_agents: rank -> its machine, of the workers on machines with an agent.
    """

    own: Machine | None
    of_agents: Mapping[int, Machine]

    @classmethod
    def on(cls, machines: Sequence[Machine]) -> Whereabouts:
        """The workers of these machines, as they are now."""
        own = next((machine for machine in machines if machine.agent is None), None)
        return cls(own, {rank: it for it in machines if it.agent is not None for rank in it.ranks})


class Machines:
    """The agents of a run that come and go.

    Args:
        roster: gives new ranks, and knows which workers live.
        num_workers: the number of workers that the run was started with.
    """

    def __init__(
        self,
        elastic: ElasticSettings,
        protocol: ControllerProtocol,
        roster: Roster,
        replacements: Replacements,
        num_workers: int,
    ) -> None:
        self._elastic = elastic
        self._protocol = protocol
        self._roster = roster
        self._replacements = replacements
        self._aim = elastic.max_workers or num_workers
        self._arrived: deque[AgentReady] = deque()  # agents that are ready and whose places were not used yet
        self._paused: dict[str, _Pause] = {}  # by host
        self._severed: set[int] = set()  # agents that were given up because their workers cannot reach others

    def agent_came(self, event: AgentCame) -> list[Action]:
        """An agent asks to join."""
        if not (why_not := self._why_not()):
            return [AdmitAgent(event.peer)]
        what, rule = why_not
        error = ConfigError(what, rule=rule, where=f"the agent on {event.host}")
        return [RefuseAgent(event.peer, error), _record(event, "refused", f"{event.host} is refused: {what}", what)]

    def agent_ready(self, event: AgentReady, now: float) -> list[Action]:
        """An agent has the run's data, and workers can be started there. `use_places` follows."""
        self._arrived.append(event)
        places = f"{event.places} place{'s' * (event.places > 1)}"
        records: list[Action] = [_record(event, "joined", f"{event.host} has joined, with {places} for workers")]
        if (pause := self._paused.get(event.host)) is not None and pause.until == math.inf:
            pause = self._paused[event.host] = replace(pause, until=now + pause.seconds)
        if pause is not None and now < pause.until:
            message = f"{event.host} is not used for {pause.until - now:.0f} s: {pause.reason}"
            records.append(_record(event, "unused", message, pause.reason))
        return records

    def agent_gone(self, event: AgentGone) -> list[Action]:
        """An agent is lost, or did not get in. The ends of its workers are events of their own."""
        for arrived in [arrived for arrived in self._arrived if arrived.peer == event.peer]:
            self._arrived.remove(arrived)
        state, what = ("lost", "is lost") if event.joined else ("refused", "has not joined")
        return [_record(event, state, f"{event.host} {what}: {event.reason}", event.reason)]

    @property
    def has_arrivals(self) -> bool:
        """True if `use_places` may have something to do."""
        return bool(self._arrived)

    def use_places(self, machines: Sequence[Machine], now: float) -> list[Action]:
        """Start workers on the agents that have become ready, up to the number of workers that the run is to have.

        Before the first mesh is formed, and while the limit on starts is reached, they wait for a later call.

        Args:
            machines: the machines of the run, as they are now.
            now: the time in seconds, by the controller's clock.
        """
        if not self._protocol.started or self._why_not():
            return []
        actions: list[Action] = []
        starts = 0
        paused = [event for event in self._arrived if self._is_paused(event.host, now)]
        for event in paused:
            self._arrived.remove(event)
        while self._arrived:
            event = self._arrived.popleft()
            free = sum(machine.free for machine in machines if machine.agent == event.peer)
            number = min(free, self._aim - self.num_workers - starts)
            if number < 1:
                continue
            if not fits_fd_limit(len(self._roster) + starts + number):
                why = f"{number} more beside {len(self._roster) + starts} workers exceed the limit of open files"
                actions.append(_record(event, "unused", f"{event.host} is not used: {why} (ulimit -n)", why))
                continue
            allowed, held_back = self._replacements.allow(number, now)
            if allowed:
                starts += allowed
                ranks = self._roster.allocate(allowed)
                message = f"{event.host} starts {named_workers(ranks)}, for the {self._aim} that the run is to have"
                actions += [Spawn(ranks, host=event.host), _record(event, "used", message, ranks=ranks)]
            actions += held_back
            if allowed < number:
                self._arrived.appendleft(event)
                break
        self._arrived.extend(paused)
        return actions

    def _is_paused(self, host: str, now: float) -> bool:
        return host in self._paused and now < self._paused[host].until

    def link_failed(self, failed: LinkFailed, where: Whereabouts) -> list[Action] | None:
        """Two workers cannot reach each other. If they are on two machines, one of the machines is given up.

        It is a machine with an agent, and the one with fewer living workers.

        Args:
            where: the workers of all machines, as they are now.

        Returns:
            The actions; empty if one of the machines is being given up already. None if both workers are on the same
            machine, so that no network between machines has failed.
        """
        pids, own = self._roster.pids, where.own
        # A worker without a process id here that no machine lists is of a machine that was given up: its end follows.
        ends = {rank: where.of_agents.get(rank) or (None if pids[rank] is None else own) for rank in failed.ends}
        if own is None or len({*ends.values()}) == 1:
            return None
        if None in ends.values() or any(machine and machine.agent in self._severed for machine in ends.values()):
            return []
        agents = [
            (rank, machine) for rank, machine in ends.items() if machine is not None and machine.agent is not None
        ]

        def worth(end: tuple[int, Machine]) -> tuple[int, bool]:
            return len(end[1].ranks & pids.keys()), end[0] != failed.rank

        _, machine = min(agents, key=worth)
        (other,) = {end for end in ends.values() if end is not None and end != machine}
        assert machine.agent is not None
        reason = f"its workers and those of {other.host} cannot reach each other ({failed.reason})"
        before = self._paused.get(machine.host)
        seconds = _FIRST_PAUSE_S if before is None else min(2 * before.seconds, _LONGEST_PAUSE_S)
        self._paused[machine.host] = _Pause(seconds, reason)
        self._severed.add(machine.agent)
        return [GiveUpAgent(machine.agent, reason)]

    def fallen_silent(
        self, ranks: Collection[int], machines: Sequence[Machine], ready: Collection[int]
    ) -> list[Action]:
        """These workers are lost because they fell silent. Their machines may be cut off, or stopped.

        The actions must be carried out before those that start workers in their place.

        Args:
            machines: the machines of the run, as they are now.
            ready: all workers that have ever been ready. Only of these does it say something about the machine that
                they live or are silent.
        """
        if not self._elastic.enabled:
            return []  # the run ends with its workers
        actions: list[Action] = []
        reason = "none of its workers is heard any more (timeouts.suspect)"
        for machine in machines:
            silent = machine.ranks.intersection(ranks)
            if machine.agent is None or not silent:
                continue
            watched, living = machine.ranks.intersection(ready), machine.ranks & self._roster.pids.keys()
            # A worker of the machine lives, or none was ready yet: then it is not known whether the machine is lost.
            if living and (not watched or living & watched):
                actions.append(DoubtAgent(machine.agent, silent))
            else:
                actions.append(GiveUpAgent(machine.agent, reason))
        return actions

    @property
    def num_workers(self) -> int:
        """The workers that the run has or is about to have: without spares, and without those that leave."""
        num_spares, num_leaving = len(self._replacements.spares), len(self._protocol.leaving)
        return len(self._roster) - num_spares - num_leaving + self._replacements.num_unfilled

    def _why_not(self) -> tuple[str, str] | None:
        """The reason why no agent may join the run, and the rule; None if agents may join."""
        protocol = self._protocol
        if not self._elastic.enabled:
            return "the run has elastic.enabled=false", "the machines of a run that is not elastic stay the same"
        if protocol.stops:
            return "the run is about to stop", "nobody joins a run that is about to stop"
        if protocol.version >= protocol.steps:
            return f"the run has done its last step, {protocol.version}", "nobody joins after the last step"
        return None


def _record(
    event: AgentCame | AgentReady | AgentGone, state: str, message: str, reason: str = "", ranks: Sequence[int] = ()
) -> Record:
    about = {"host": event.host, "places": event.places, "state": state, "ranks": list(ranks), "reason": reason}
    return Record(AGENT, {**about, "message": message})
