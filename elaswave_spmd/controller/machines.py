"""Machines that come while the run goes on: which agents get in, and what their places are used for.

Everything here takes facts and returns actions, on the controller's thread. An agent that asks is admitted unless the
run is about to end; it prepares beside the run, and nothing waits for it. When it is ready its places are used in this
order:

1. Empty places of the mesh, with elastic.replace or elastic.spares, are filled where there is most room, which is there
   now (Replacements does that).
2. Workers are started there until the run has as many as it was started with, or elastic.max_workers. So a machine that
   was lost and comes back gives the run its size again. That is decided once, when the agent is ready: a worker that is
   lost later is a loss like any other.
3. The places that are left serve for later replacements and spares, and for `ctl add`.

All of these starts count in the limit of elastic.replacements_per_minute; what it holds back waits.

A machine that is cut off or stands still loses its workers by their silence, long before its agent's connection ends,
which may even outlive the cut. So an agent none of whose workers is heard any more is given up with them: when it hears
of that, it joins again as a new one. Workers that are still starting tell nothing of their machine until they should
have been ready, and go with it. Of an agent with one worker nobody can tell whether the worker hangs or the machine is
gone; it is given up as well. Until that is known, nobody is started where a worker has fallen silent.

The network may also fail between two machines that both reach the controller. Their workers cannot work together, so
one machine has to go, and all of its workers at once: were it one worker after the other, each loss would cost the run
another wait, and some of both machines might go. Its agent can be heard and joins again within a second. Its places are
used after a pause, which is twice as long each time: while the network is as it was, each try costs the run a wait. The
pause begins when the agent is back: a machine that takes long to come back is not used at once either.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
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
"""The event in which a run tells of its agents."""


@dataclass(frozen=True)
class _Pause:
    """A machine is not used for so many seconds since it is back, for a reason."""

    seconds: float
    reason: str
    until: float = math.inf  # until it is back


class Machines:
    """The agents of a run that come and go.

    Args:
        roster: gives new ranks, and knows which workers live.
        num_workers: that the run was started with.
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
        self._arrived: deque[AgentReady] = deque()  # agents whose places have not been looked at
        self._paused: dict[str, _Pause] = {}  # by host
        self._severed: set[int] = set()  # agents that were given up since workers there cannot reach others

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
        """Start workers on the agents that are ready since the last call. Before the first step they wait.

        They also wait while the limit on starts holds workers back.

        Args:
            machines: of the run, as they are now.
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

    def link_failed(self, failed: LinkFailed, machines: Sequence[Machine], now: float) -> list[Action] | None:
        """Two workers cannot reach each other. If they are on two machines, one of these is given up.

        That is an agent's, the one with fewer workers. None: they are on one machine, and so their network is.

        Args:
            machines: of the run, as they are now.
        """
        pids = self._roster.pids
        own = next((machine for machine in machines if machine.agent is None), None)
        places = {rank: machine for machine in machines if machine.agent is not None for rank in machine.ranks}
        # A worker elsewhere that no machine has is one of a machine that was given up: its end is the next event.
        ends = {rank: places.get(rank) or (None if pids[rank] is None else own) for rank in failed.ends}
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
        """These workers are lost, as nothing is heard of them. Their machines may be cut off, or stand still.

        The actions come before those that start workers in their place.

        Args:
            machines: of the run, as they are now.
            ready: all workers that have ever been ready: since then their silence, or their life, tells something.
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
            if living and (not watched or living & watched):  # one lives, or nobody can tell yet
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
        """Why nobody joins the run, and by which rule; None: agents may."""
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
