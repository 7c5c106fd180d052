"""Machines that leave on notice: their workers leave between two steps, and then their agents end.

A notice comes from an administrator (`ctl RUN drain --host`) or from the machine itself (SIGTERM to its agent), and
mostly has a deadline. Members leave as after `ctl RUN drain RANK`: their state moves first. Workers that are no members
have none, and end at once. When the last one has gone, and every page of state has its replicas again, the agent is let
go: nothing was lost. The deadline is kept by the agent. What has not left by then ends with it, as if it were killed.
A step that takes longer is not broken off for it. Members that left at once would lose what those lose that are killed:
what they have computed of the step (the same micro-batches are computed again, but for a few with sharded gradients).
If the step ends in time after all, nothing is lost; and state that they alone have moves between two steps only.

Before the first step nobody has state that would have to move, so the machine goes at once, and workers that start
there are lost. If the run begins before that is done, they leave like all others.

Decides on the controller's thread, from facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elaswave_spmd.conf.schema import ElasticSettings
from elaswave_spmd.controller.actions import Action, DrainAgent, LetAgentGo, Record
from elaswave_spmd.controller.failures import FailureHandler
from elaswave_spmd.controller.machines import AGENT
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.mesh.mesh import named_workers
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.runtime.processes.launcher import Machine
from elaswave_spmd.sharding.replicas import all_replica_sets

NOTICE = "notice"
"""The event of a notice."""
_NO_WORKER = "nothing was lost, no worker of the mesh was there"
_RESERVE_S = 4.0  # of the deadline, in which new replicas are not waited for any more; or half of it


@dataclass
class _Notice:
    """A notice to one agent.

    Args:
        source: who wants it.
        until: the time from which new replicas are not waited for any more; None: there is no deadline.
        carried_out: the workers have been asked to leave, or the run to stop.
        members: the workers that are to leave.
        lost: those of them that were lost before they had left.
    """

    host: str
    source: str
    until: float | None = None
    carried_out: bool = False
    members: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)


class Notices:
    """The machines that are about to leave.

    Args:
        roster: knows which workers live.
        failures: withdraws workers that are no members.
    """

    def __init__(
        self, elastic: ElasticSettings, protocol: ControllerProtocol, roster: Roster, failures: FailureHandler
    ) -> None:
        self._elastic = elastic
        self._protocol = protocol
        self._roster = roster
        self._failures = failures
        self._notices: dict[int, _Notice] = {}  # by the agent's peer id

    @property
    def is_waiting(self) -> bool:
        """True while a machine is about to leave."""
        return bool(self._notices)

    def begin(self, machines: Sequence[Machine], within_s: float | None, source: str, now: float) -> list[Action]:
        """Have machines leave. They are agents', and have one name.

        Args:
            within_s: seconds until their agents end whatever has become of their workers; None: they wait.
            source: who wants it: "ctl", or the name of a signal.
        """
        host, ranks = machines[0].host, self._workers(machines)
        says = self._why_stop(ranks)
        actions: list[Action] = []
        for machine in machines:
            assert machine.agent is not None
            until = None if within_s is None else now + within_s - min(_RESERVE_S, within_s / 2)
            notice = self._notices.setdefault(machine.agent, _Notice(host, source))
            notice.until = min((time for time in (until, notice.until) if time is not None), default=None)
            actions.append(DrainAgent(machine.agent, within_s, says))
        when = "" if within_s is None else f" within {within_s:g} s"
        who = f"; {named_workers(ranks)} leave{'s' * (len(ranks) == 1)}"
        message = f"{host} is to leave{when} ({source}){who if ranks else ''}{'; ' if says else ''}{says}"
        about = {"host": host, "ranks": ranks, "deadline": within_s, "from": source}
        actions.append(Record(NOTICE, {**about, "message": message}))
        return [*actions, *(self._carry_out(machines, source, now) if self._protocol.started else ())]

    def _carry_out(self, machines: Sequence[Machine], source: str, now: float) -> list[Action]:
        """Have the workers leave, or the run stop, once it has begun."""
        protocol, ranks = self._protocol, self._workers(machines)
        members = [rank for rank in ranks if rank in protocol.members]
        reason = f"its machine {machines[0].host} leaves, {source}"
        for machine in machines:
            if machine.agent is not None:
                notice = self._notices[machine.agent]
                notice.carried_out = True
                notice.members |= machine.ranks.intersection(members)
        actions: list[Action] = []
        for rank in ranks:
            if rank not in members:
                actions += self._failures.withdrawn(rank, reason, now)
        if not self._elastic.enabled:
            return [*actions, *(protocol.stop(f"{reason}, and elastic.enabled is false") if members else [])]
        return [*actions, *(action for rank in members for action in protocol.drain(rank, reason))]

    def _workers(self, machines: Sequence[Machine]) -> list[int]:
        """The living workers of machines."""
        return sorted(self._roster.pids.keys() & {rank for machine in machines for rank in machine.ranks})

    def removed(self, rank: int, *, lost: bool) -> None:
        """A worker is no member any more: it has left, or was lost."""
        for notice in self._notices.values():
            if lost and rank in notice.members:
                notice.lost.add(rank)

    def check(self, machines: Sequence[Machine], now: float) -> list[Action]:
        """Let the machines go whose workers have left. With every tick while `is_waiting`.

        Args:
            machines: of the run, as they are now.
        """
        actions: list[Action] = []
        known = {machine.agent: machine for machine in machines}
        for peer, notice in list(self._notices.items()):
            machine = known.get(peer)
            if machine is None:  # it has ended, or is lost
                del self._notices[peer]
            elif self._protocol.started and not notice.carried_out:  # it came just before the first step
                actions += self._carry_out([machine], notice.source, now)
            elif self._protocol.started and (machine.ranks or self._waits(notice, now)):
                continue
            else:
                del self._notices[peer]
                actions += self._let_go(peer, machine, notice)
        return actions

    def _let_go(self, peer: int, machine: Machine, notice: _Notice) -> list[Action]:
        """The end of an agent. The event is written first: who sees the agent end finds it."""
        if self._protocol.started:
            lost, says = sorted(notice.lost), self._proof(notice)
        else:
            lost = self._workers([machine])
            says = self._proof_at_start(lost)
        left = sorted(notice.members - notice.lost)
        about = {"host": notice.host, "places": machine.places, "state": "left", "ranks": left, "reason": ""}
        return [
            Record(AGENT, {**about, "message": f"{notice.host} has left: {says}"}),
            LetAgentGo(peer, says, lost=bool(lost)),
        ]

    def _waits(self, notice: _Notice, now: float) -> bool:
        """True while new replicas are made, in place of those that have gone, and the deadline allows to wait."""
        return not self._protocol.settled and (notice.until is None or now < notice.until)

    def _why_stop(self, ranks: Sequence[int]) -> str:
        """Say what becomes of a run whose workers cannot all leave, by the protocol's rule; empty if they can.

        Args:
            ranks: of the workers that are to leave, members or not.
        """
        protocol = self._protocol
        members = [rank for rank in ranks if rank in protocol.members]
        if not members or not protocol.started:
            return ""
        if protocol.version >= protocol.steps:
            return "the run has done its last step, and ends"
        if protocol.stops:
            return "the run is about to stop"
        if not self._elastic.enabled:
            return "the run saves its state and stops, since elastic.enabled is false"
        stay = {*protocol.members, *protocol.joining} - set(protocol.leaving) - set(ranks)
        least = max(1, self._elastic.min_workers)
        if len(stay) >= least:
            return ""
        return f"the run saves its state and stops, since {len(stay)} workers would stay, elastic.min_workers={least}"

    def _proof_at_start(self, lost: Sequence[int]) -> str:
        """Say what is lost with a machine that goes before the first step, or that nothing is."""
        if not lost:
            return _NO_WORKER
        state = "" if self._elastic.enabled else ". The run ends, since elastic.enabled is false"
        return f"{named_workers(lost)} {_was(lost)} lost before the first step, when no worker had state{state}"

    def _proof(self, notice: _Notice) -> str:
        """Say what was lost, or that nothing was."""
        protocol = self._protocol
        if not notice.members:
            return _NO_WORKER
        lost, left = sorted(notice.lost), sorted(notice.members - notice.lost)
        parts = []
        if left:
            parts.append(f"{named_workers(left)} left between two steps")
        if lost:
            parts.append(
                f"{named_workers(lost)} {_was(lost)} lost before {'they' if len(lost) > 1 else 'it'} could leave"
            )
        sets = list(all_replica_sets(protocol.placement.replica_map(protocol.layout)))
        fewest = min(len(pages.replicas) for pages in sets)
        state = f"state version {protocol.version} is on {len(protocol.members)} workers"
        if protocol.settled:
            state += f", replicas complete ({fewest} or more of each page)"
        else:
            learning = sum(bool(pages.learners) for pages in sets)
            state += f", {fewest} or more replicas of each page, and more are still made of {learning} page ranges"
        return f"{'' if lost else 'nothing was lost: '}{'; '.join(parts)}; {state}"


def _was(ranks: Sequence[int]) -> str:
    return "were" if len(ranks) > 1 else "was"
