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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from elaswave_spmd.conf.schema import ElasticSettings
from elaswave_spmd.controller.events import Action, AdmitAgent, DoubtAgent, GiveUpAgent, Record, RefuseAgent, Spawn
from elaswave_spmd.controller.replacements import Replacements
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.mesh.mesh import named_workers
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.runtime.processes.agents import AgentCame, AgentGone, AgentReady
from elaswave_spmd.runtime.processes.fd_limit import fits_fd_limit
from elaswave_spmd.runtime.processes.launcher import Machine

AGENT = "agent"
"""The event in which a run tells of its agents."""


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

    def came(self, event: AgentCame) -> list[Action]:
        """An agent asks to join."""
        if not (why_not := self._why_not()):
            return [AdmitAgent(event.peer)]
        what, rule = why_not
        error = ConfigError(what, rule=rule, where=f"the agent on {event.host}")
        return [RefuseAgent(event.peer, error), _record(event, "refused", f"{event.host} is refused: {what}", what)]

    def ready(self, event: AgentReady) -> list[Action]:
        """An agent has the run's data, and workers can be started there. `use_places` follows."""
        self._arrived.append(event)
        places = f"{event.places} place{'s' * (event.places > 1)}"
        return [_record(event, "joined", f"{event.host} has joined, with {places} for workers")]

    def gone(self, event: AgentGone) -> list[Action]:
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
        return actions

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
