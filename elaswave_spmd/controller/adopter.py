"""A controller that comes back: it adopts the workers of one that has died, and the step under way goes on.

The rules are A1 to A12 of docs/protocol.md. `Adoption` (resume.py) has the facts with which such a controller begins,
from the run's directory and the fork server. `Adopter` is its first act: it asks every living worker for what its
predecessor may not have written down, and turns the answers into actions. After these it works like any other
controller. Workers of other machines are asked when their agents come back with them. The answers are complete when
every member of the newest mesh epoch has answered or is known to have ended; a member that has done neither by the
deadline is lost.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from elaswave_spmd.conf.schema import MeshSettings
from elaswave_spmd.controller.actions import (
    Action,
    AdoptWorker,
    CameBack,
    End,
    FindShards,
    Kill,
    Record,
    Settled,
    Spawn,
)
from elaswave_spmd.controller.events import AgentBack, BeatsReceived, Event, Received, Tick, WorkerEnded
from elaswave_spmd.controller.failures import FailureHandler
from elaswave_spmd.controller.outcomes import RestartFrom
from elaswave_spmd.controller.resume import Adoption
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.controller.supervision import Supervision
from elaswave_spmd.mesh.mesh import named_workers
from elaswave_spmd.mesh.topology import Topology
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, Predecessor
from elaswave_spmd.recovery.packed_reconfigure import reconfigure_of
from elaswave_spmd.runtime.processes.agents import RemoteExited
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.worker.configuration import Configuration

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan


_UNKNOWN = ("?",)  # the failure domain of a member whose agent has not come back: it is lost


@dataclass
class _Gathered:
    """The workers that have been asked, and what has come of it.

    Args:
        awaited: they have not answered: rank -> the time until which an answer counts, by the clock of the adoption.
        made: ranks of all workers, living or not, of the machines that are known by now.
        newcomers: those that were about to join, whether they live or have ended meanwhile.
        seconds: for how long there has been no controller.
        hosts: rank -> machine, of those of agents.
        late: they have not answered in time.
        doubted: the connections to their agents have ended, which may be back with them: they may live.
    """

    awaited: dict[int, float]
    made: set[int]
    newcomers: set[int]
    seconds: float
    hosts: dict[int, str] = field(default_factory=dict)
    answers: dict[int, m.Adopted] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    doubted: set[int] = field(default_factory=set)


class Adopter:
    """The first act of a controller that comes back, on its thread: events in, actions out, until `is_over`.

    A worker that is asked has as long to answer as the failure detector gives to the longest action, its first one, as
    it may be in the middle of one. Machines that have not come back are waited for as long as for any other action.
    Both are counted as the failure detector counts: a tick is one heartbeat period at most. So a pause of this process
    or of its machine, in which answers wait to be read, is no time that anybody has had.

    Args:
        adoption: the facts with which the controller begins.
        validated: the newest step whose validation is written down; 0: none is.
        ended_at: the step after which the run ends early by its validations; None: it does not, by those so far.
    """

    def __init__(
        self,
        adoption: Adoption,
        plan: RunPlan,
        protocol: ControllerProtocol,
        roster: Roster,
        supervision: Supervision,
        failures: FailureHandler,
        validated: int,
        ended_at: int | None,
    ) -> None:
        self._adoption = adoption
        self._plan = plan
        self._protocol = protocol
        self._roster = roster
        self._supervision = supervision
        self._failures = failures
        self._validated = validated
        self._ended_at = ended_at
        self._timeouts = plan.settings.timeouts
        self._clock = 0.0  # in seconds since the begin
        self._ticked = 0.0  # when it was counted last, by the controller's clock
        made = {*adoption.pids, *adoption.made}
        self._gathered = _Gathered({}, made, set(adoption.newcomers), adoption.seconds)
        self._members: frozenset[int] | None = None  # of the newest mesh epoch; None: not known since the last answer
        self.is_over = False
        """True once the controller is one as any other."""

    @property
    def last_epoch(self) -> int:
        """The newest mesh epoch that there can be."""
        return self._adoption.last_epoch

    @property
    def longest_s(self) -> float:
        """Seconds that a worker may take to answer: by then all have, or are lost."""
        # The dead of this machine are known to the fork server. Of the living one may be in the middle of an action.
        return max(self._timeouts.progress, self._timeouts.start)

    def postpones(self, event: Event) -> bool:
        """True if an event has nothing to do with it, and is to be decided about afterwards."""
        if isinstance(event, Received):
            return not isinstance(event.message, m.Adopted | m.Heartbeat)
        return not isinstance(event, WorkerEnded | AgentBack | BeatsReceived | Tick)

    def start(self, now: float) -> list[Action]:
        """Ask all workers that live."""
        self._ticked = now
        return self._ask(self._adoption.pids)

    def decide(self, event: Event, now: float) -> list[Action]:
        """The actions that follow from an event, while workers are asked."""
        gathered = self._gathered
        actions: list[Action] = []
        match event:
            case AgentBack():
                actions = self._agent_back(event)
            case Received(message=m.Adopted() as answer):
                if answer.generation == self._adoption.generation and answer.rank in gathered.awaited:
                    del gathered.awaited[answer.rank]
                    gathered.answers[answer.rank] = answer
                    self._members = None
                    self._supervision.watch(answer.rank, now)
            case Received(message=m.Heartbeat() as beat):
                self._heard([beat], now)
            case BeatsReceived(beats):
                self._heard(beats, now)
            case WorkerEnded(rank, exited=RemoteExited(reason=reason)) if reason:
                gathered.doubted.add(rank)
            case WorkerEnded(rank):
                self._ended(rank)
            case Tick():
                actions = self._tick(now)
            case _:
                raise AssertionError(f"{event} is for later")
        return [*actions, *(self._finish(now) if self._are_all_here() else [])]

    def _ask(self, ranks: Collection[int]) -> list[Action]:
        """Ask workers for what they know. One that was asked before has no more time by that."""
        until = self._clock + self.longest_s
        for rank in ranks:
            self._gathered.awaited.setdefault(rank, until)
        return [AdoptWorker(rank) for rank in sorted(ranks)]

    def _agent_back(self, event: AgentBack) -> list[Action]:
        """An agent has kept its workers: they are asked as those of this machine.

        It may have been here before, if its connection alone was lost. Then those that have answered live as before.
        """
        gathered = self._gathered
        for rank in event.made - event.workers:
            self._ended(rank)
        gathered.doubted -= event.made
        gathered.made |= event.made
        gathered.newcomers |= event.newcomers
        gathered.hosts.update(dict.fromkeys(event.made, event.host))
        gathered.seconds = max(gathered.seconds, event.seconds)
        return self._ask(event.workers.difference(gathered.answers))

    def _heard(self, beats: Iterable[m.Heartbeat], now: float) -> None:
        for beat in beats:
            if beat.rank in self._gathered.answers:
                self._supervision.heartbeat(beat, now)

    def _ended(self, rank: int) -> None:
        """A worker has ended, whatever it had answered."""
        gathered = self._gathered
        gathered.awaited.pop(rank, None)
        gathered.doubted.discard(rank)
        if gathered.answers.pop(rank, None) is not None:
            self._members = None
            self._supervision.forget(rank)

    def _tick(self, now: float) -> list[Action]:
        """Count the time, and give up those who have not answered in theirs."""
        gathered = self._gathered
        self._clock += min(now - self._ticked, self._timeouts.heartbeat)
        self._ticked = now
        self._supervision.postpone(now)
        late = sorted(rank for rank, until in gathered.awaited.items() if self._clock > until)
        for rank in late:
            del gathered.awaited[rank]
        gathered.late.update(late)
        return [Kill(rank) for rank in late]

    def _are_all_here(self) -> bool:
        """True if nobody who could answer is missing."""
        gathered = self._gathered
        if gathered.awaited:
            return False
        if not self._adoption.has_agents or self._clock > self._timeouts.progress:
            return True
        if self._members is None:
            newest = self._newest()
            self._members = frozenset(newest.addresses) if newest is not None else frozenset[int]()
        return bool(self._members) and self._members <= gathered.made - gathered.doubted

    def _finish(self, now: float) -> list[Action]:
        """All have answered, or are lost: the state of the run is known."""
        self.is_over = True
        for rank in sorted(missing := set(self._gathered.doubted)):  # their agents are not back once more
            self._ended(rank)
        self._gathered.made -= missing
        answers, adoption, protocol = self._gathered.answers, self._adoption, self._protocol
        if (reconfigure := self._newest()) is None:
            return self._give_up("no worker is left", adoption.mesh)
        reports = sorted(
            (r for a in answers.values() for r in a.applied), key=lambda report: (report.step, report.rank)
        )
        steps = sorted({report.step for report in reports if report.step > protocol.version})
        reached = max(answer.version for answer in answers.values())
        if self._is_done_again(reached):
            return self._give_up(f"workers did steps up to {protocol.version} a second time, and are at {reached}")
        most = max(protocol.version, reached)
        if steps != list(range(protocol.version + 1, most + 1)):
            return self._give_up(f"workers that had reports of the steps {protocol.version + 1} to {most} are lost")
        placement = self._with_domains(Configuration.from_message(self._plan.placement, reconfigure).placement)
        members = placement.mesh.members
        living = sorted({*adoption.pids, *(rank for rank in self._gathered.hosts if rank in answers)})
        actions: list[Action] = [
            CameBack(len(members), len(steps), self._gathered.seconds),
            *(Kill(rank) for rank in living if rank not in members),  # it was lost, or has left
        ]
        for rank in members:
            self._roster.add(rank, adoption.pids.get(rank))
        for report in reports:
            actions += protocol.applied(report)
        before = Predecessor(
            placement=placement,
            reconfigure=reconfigure,
            versions={rank: answers[rank].version for rank in members if rank in answers},
            lacking=tuple(rank for rank in members if rank in answers and answers[rank].epoch < reconfigure.epoch),
            prepared=adoption.prepared,
            last_epoch=adoption.last_epoch,
            validated=self._validated,
            ended_at=self._ended_at,
        )
        actions += protocol.come_back(before)
        dead = [rank for rank in members if rank not in answers]
        actions += self._record(reconfigure.epoch, len(members) - len(dead), dead)
        for rank in dead:
            actions += self._failures.worker_ended(WorkerEnded(rank, self._why_lost(rank), now))
        for rank, answer in answers.items():
            if rank in members:
                actions += self._unreported(rank, answer, answers)
        actions.append(FindShards())
        if number := self._number_anew(members, len(dead)):
            actions.append(Spawn(self._roster.allocate(number)))
        return [*actions, Settled(), *protocol.begin_generation(before)]

    def _number_anew(self, members: Collection[int], num_dead: int) -> int:
        """The number of workers that are started anew, in place of those that were about to join.

        Spares are among the latter, as nothing tells them apart, and are started with the others that the settings
        name: only what goes beyond their number was to join. With replacements the places of the dead are taken.
        """
        elastic = self._plan.settings.elastic
        number = sum(rank not in members for rank in self._gathered.newcomers) - elastic.spares
        if elastic.max_workers is not None:
            taken = len(members) - (0 if elastic.replaces else num_dead)
            number = min(number, elastic.max_workers - taken)
        return max(0, number)

    def _why_lost(self, rank: int) -> str:
        """Why a member has not answered, in words."""
        if rank in self._gathered.late:
            return "it has not answered the controller that came back"
        if self._adoption.has_agents and rank not in self._gathered.made:
            return "its machine has not come back"
        return "its process ended while there was no controller"

    def _with_domains(self, placement: Placement) -> Placement:
        """The placement with the machine of each worker, which only controllers know, where there are several.

        Machines that are missing count as one. No micro-batches are dealt by host then (`Placement.by_groups`): the
        settings refuse process groups where controllers come back.
        """
        if not self._adoption.has_agents:
            return placement
        here, hosts = (socket.gethostname(),), self._gathered.hosts
        domains = {
            rank: (hosts[rank],) if rank in hosts else here if rank in self._gathered.made else _UNKNOWN
            for rank in placement.mesh.members
        }
        return replace(placement, mesh=replace(placement.mesh, topology=Topology.of(domains)))

    def _is_done_again(self, reached: int) -> bool:
        """True if the workers are at lines that an earlier life of the run has written: it was resumed before them.

        The newest line may be one ahead of the workers for another cause, as whoever had reported it has died. What is
        further ahead they do a second time, and so it is where they may still wait for a validation that whoever wrote
        the next line must have answered.
        """
        ahead = self._protocol.version - reached
        return ahead > 1 or (ahead == 1 and self._plan.job.validates_at(reached))

    def _newest(self) -> m.Reconfigure | None:
        """The Reconfigure of the newest mesh epoch; a worker whose message is none has gone wrong, and is lost."""
        answers = self._gathered.answers
        for answer in sorted(answers.values(), key=lambda answer: answer.epoch, reverse=True):
            with contextlib.suppress(msgspec.MsgspecError, ValueError, TypeError):
                reconfigure = reconfigure_of(answer.reconfigure)
                if reconfigure.epoch == answer.epoch and answer.rank in reconfigure.addresses:
                    return reconfigure
            if answer.epoch >= 0:
                del answers[answer.rank]
                self._supervision.forget(answer.rank)
        return None

    def _unreported(self, rank: int, answer: m.Adopted, answers: Mapping[int, m.Adopted]) -> list[Action]:
        """Actions for what a member has reported to nobody yet: damaged state, links that ended, a request to leave."""
        actions: list[Action] = []
        for report in answer.damaged:
            actions += self._protocol.damaged(report)
        if answer.is_suspect:
            actions += self._protocol.attempt_again()
        for peer in answer.closed:
            if peer in answers:
                self._failures.link_closed(rank, peer)
        if answer.leaves and self._plan.settings.elastic.enabled:
            self._supervision.wants_to_leave(rank)
            actions += self._protocol.drain(rank, "asked to leave")
        return actions

    def _record(self, epoch: int, adopted: int, dead: list[int]) -> list[Action]:
        adoption, seconds = self._adoption, self._gathered.seconds
        missing = {*dead} - self._gathered.made if adoption.has_agents else set[int]()
        silent = self._gathered.late.intersection(dead) - missing
        ended = [rank for rank in dead if rank not in missing and rank not in silent]
        lost = f"; {named_workers(ended)} ended meanwhile" if ended else ""
        lost += f"; {named_workers(sorted(silent))} did not answer" if silent else ""
        lost += f"; {named_workers(sorted(missing))} did not come back" if missing else ""
        fields = {
            "generation": adoption.generation,
            "seconds": round(seconds, 3),
            "workers": adopted,
            "mesh_epoch": epoch,
            "after_step": self._protocol.version,
            "message": f"controller came back as generation {adoption.generation} after {seconds:.1f} s, "
            f"adopted {adopted} workers{lost}",
        }
        return [Record("controller", fields)]

    def _give_up(self, why: str, mesh: MeshSettings | None = None) -> list[Action]:
        """The workers cannot be adopted: the run begins again at its newest checkpoint.

        Args:
            mesh: on which it begins; None: on that of its begin.
        """
        settings, adoption = self._plan.settings, self._adoption
        step = adoption.newest_checkpoint
        message = f"the controller came back and cannot go on ({why}): the run begins again at its newest checkpoint"
        fields = {"step": step, "lost_after": self._protocol.version, "reason": why, "message": message}
        return [Record("restart", fields), End(RestartFrom(adoption.run_dir, mesh or settings.mesh, step))]
