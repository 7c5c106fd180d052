"""A controller that comes back: it adopts the workers of one that has died, and the step under way goes on.

The rules are A1 to A12 of docs/protocol.md. `Adoption` (resume.py) has the facts with which such a controller begins,
from the run's directory and the fork server. `Adopter` is what it does first: it asks every living worker for what the
previous controller may not have written down, and turns the answers into actions. Then it works like any other
controller. Workers on other machines are asked when their agents come back. The answers are complete when every member
of the newest mesh epoch has answered or is known to have ended; a member that has done neither by the deadline is lost.
Workers that are no members are awaited only as long as there may be a newer mesh epoch that they know of.
"""

from __future__ import annotations

import contextlib
import math
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


_UNKNOWN = ("?",)  # the failure domain of members whose agents have not come back, who are lost


@dataclass
class _Gathered:
    """The workers that were asked, and their answers so far.

    Args:
        awaited: rank -> deadline in seconds of `Supervision.clock`, of the workers that have not answered yet.
        made: ranks of all workers, living or not, that were ever started on the machines that are known by now.
        newcomers: ranks of the workers that were about to join, whether they live or have ended meanwhile.
        seconds: how long there was no controller.
        hosts: rank -> machine, of the workers of agents.
        answers: rank -> its answer, of the workers that live.
        late: ranks of the workers that did not answer in time.
        doubted: rank -> deadline as in `awaited`, of the workers whose agent's connection has ended. They may live, and
            the agent may come back. Beyond the deadline nobody waits for their answers.
    """

    awaited: dict[int, float]
    made: set[int]
    newcomers: set[int]
    seconds: float
    hosts: dict[int, str] = field(default_factory=dict)
    answers: dict[int, m.Adopted] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    doubted: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Newest:
    """The newest mesh epoch by the answers so far.

    Args:
        epoch: its number; -1 if no answer has one.
        members: its members.
        is_last: True if there is no newer one, and members alone may have reports of steps that have no line yet.
    """

    epoch: int = -1
    members: frozenset[int] = frozenset()
    is_last: bool = False


class Adopter:
    """What a controller that comes back does first. Events go in, actions come out, until `is_over`.

    All methods are called by the controller's thread. `Controller` passes it only the events that concern the adoption
    (`postpones`), and handles the others afterwards.

    A worker may be in the middle of an action when it is asked. So it has as long to answer as the failure detector
    allows for the longest action, a worker's first one. Machines that have not come back are awaited as long as any
    other action may take (timeouts.progress). Time is counted by the failure detector's clock: a tick counts as one
    heartbeat period at most. So a pause of this process or of its machine, in which answers cannot be read, uses up
    nobody's time.

    Args:
        adoption: the facts with which the controller begins.
        validated: the newest step whose validation is written down; 0 if none is.
        ended_at: the step after which the run ends early, by the validations so far; None if it does not.
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
        self._clock = supervision.clock
        self._machines_until = self._clock.now + self._timeouts.progress  # then other machines are not awaited any more
        made = {*adoption.pids, *adoption.made}
        self._gathered = _Gathered({}, made, set(adoption.newcomers), adoption.seconds)
        self._known: _Newest | None = None  # None if it has to be found again
        self.is_over = False
        """True once the adoption is complete, and the controller works like any other one."""
        self.unheard = frozenset[int]()
        """Workers that may live, are no members, and were not waited for when the adoption was complete."""

    @property
    def last_epoch(self) -> int:
        """The number that the adoption has in the journal. All mesh epochs of the previous controller are below it."""
        return self._adoption.last_epoch

    @property
    def longest_s(self) -> float:
        """The number of seconds that a worker may take to answer, after which it is lost."""
        # The fork server knows which workers of this machine have died, so nobody waits for those. A living worker may
        # be in the middle of an action: timeouts.progress bounds any action, timeouts.start the first one.
        return max(self._timeouts.progress, self._timeouts.start)

    def postpones(self, event: Event) -> bool:
        """True if an event does not concern the adoption, and has to wait until it is over."""
        if isinstance(event, Received):
            return not isinstance(event.message, m.Adopted | m.Heartbeat)
        return not isinstance(event, WorkerEnded | AgentBack | BeatsReceived | Tick)

    def start(self) -> list[Action]:
        """Ask all workers that live."""
        return self._ask(self._adoption.pids)

    def decide(self, event: Event, now: float) -> list[Action]:
        """The actions that follow from an event, while workers are asked."""
        gathered = self._gathered
        actions: list[Action] = []
        match event:
            case AgentBack():
                actions = self._agent_back(event, now)
            case Received(message=m.Adopted() as answer):
                if answer.generation == self._adoption.generation and answer.rank in gathered.awaited:
                    del gathered.awaited[answer.rank]
                    gathered.answers[answer.rank] = answer
                    if self._known is not None and answer.epoch > self._known.epoch:
                        self._known = None
                    self._supervision.watch(answer.rank, now)
            case Received(message=m.Heartbeat() as beat):
                self._heard([beat], now)
            case BeatsReceived(beats):
                self._heard(beats, now)
            case WorkerEnded(rank, exited=RemoteExited(reason=reason)) if reason:
                gathered.doubted.setdefault(rank, self._clock.now + self._timeouts.progress)
            case WorkerEnded(rank):
                self._ended(rank)
            case Tick(read_until):
                actions = self._tick(now, read_until)
            case _:
                raise AssertionError(f"{event} is for later")
        return [*actions, *(self._finish(now) if self._are_all_here() else [])]

    def _ask(self, ranks: Collection[int]) -> list[Action]:
        """Ask workers for what they know. The deadline of a worker that was asked before stays as it is."""
        until = self._clock.now + self.longest_s
        for rank in ranks:
            self._gathered.awaited.setdefault(rank, until)
        return [AdoptWorker(rank) for rank in sorted(ranks)]

    def _agent_back(self, event: AgentBack, now: float) -> list[Action]:
        """An agent has come back with its workers, which are asked like those of this machine.

        It may have come back before, if only its connection was lost since. Then workers that have answered already are
        not asked again. While it was away nothing was heard of them, so their silence counts from now on.
        """
        gathered = self._gathered
        for rank in event.workers & gathered.answers.keys():
            self._supervision.forget(rank)
            self._supervision.watch(rank, now)
        for rank in event.made - event.workers:
            self._ended(rank)
        for rank in event.made & gathered.doubted.keys():
            del gathered.doubted[rank]
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
        """A worker has ended. If it has answered before, its answer does not count any more."""
        gathered = self._gathered
        gathered.awaited.pop(rank, None)
        gathered.doubted.pop(rank, None)
        if gathered.answers.pop(rank, None) is not None:
            self._known = None
            self._supervision.forget(rank)

    def _tick(self, now: float, read_until: float) -> list[Action]:
        """Let the clock tick, and kill the workers whose deadline has passed without an answer."""
        gathered = self._gathered
        self._supervision.postpone(now, read_until)
        late = sorted(rank for rank, until in gathered.awaited.items() if self._clock.now > until)
        for rank in late:
            del gathered.awaited[rank]
        gathered.late.update(late)
        return [Kill(rank) for rank in late]

    def _are_all_here(self) -> bool:
        """True if no answer is missing any more.

        With agents that is so when all members of the newest mesh epoch are of machines that are here, or when it has
        taken too long. An answer of a worker whose agent has been away for too long is not missing; nor is that of a
        worker that is no member, if there is no newer mesh epoch.
        """
        gathered, newest = self._gathered, self._newest_mesh()
        for rank in gathered.awaited:
            may_answer = self._clock.now <= gathered.doubted.get(rank, math.inf)
            if may_answer and (rank in newest.members or not newest.is_last):
                return False
        if not self._adoption.has_agents or self._clock.now > self._machines_until:
            return True
        return bool(newest.members) and newest.members <= gathered.made - gathered.doubted.keys()

    def _newest_mesh(self) -> _Newest:
        """The newest mesh epoch by the answers so far. It is looked for only when it may have changed."""
        if self._known is not None:
            return self._known
        self._known = _Newest()
        if (reconfigure := self._newest()) is not None:
            # Each mesh epoch but the first is in the journal before anybody hears of it. And lines up to the version at
            # which this one began leave nothing that a worker that was in older ones alone might have to report.
            prepared, version = self._adoption.prepared, self._protocol.version
            is_last = (prepared is None or reconfigure.epoch >= prepared.epoch) and reconfigure.version <= version
            self._known = _Newest(reconfigure.epoch, frozenset(reconfigure.addresses), is_last)
        return self._known

    def _finish(self, now: float) -> list[Action]:
        """End the adoption: all workers have answered or are lost, so the state of the run is known.

        Returns the actions by which training goes on; or, if it cannot, those by which the run begins again at its
        newest checkpoint.
        """
        self.is_over = True
        for rank in sorted(missing := set(self._gathered.doubted)):  # their agents did not come back a second time
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
        # One whose agent's connection has ended may live, and write on. The agent may be back in time for that.
        self.unheard = frozenset(self._gathered.awaited) | missing.difference(members)
        living = sorted({*adoption.pids, *answers} - self.unheard)
        actions: list[Action] = [
            CameBack(len(members), len(steps), self._gathered.seconds),
            *(Kill(rank) for rank in living if rank not in members),  # the previous controller had lost or released it
        ]
        # The journal has the ranks with each Prepare, and none comes before the first mesh. So a member of that mesh
        # that has replaced another one may be known by its Reconfigure alone.
        self._roster.begin_at(1 + max(members))
        for rank in members:
            self._roster.add(rank, adoption.pids.get(rank))
        for report in reports:
            actions += protocol.applied(report)
        known = {rank: answers[rank] for rank in members if rank in answers}
        before = Predecessor(
            placement=placement,
            reconfigure=reconfigure,
            versions={rank: answer.version for rank, answer in known.items()},
            lacking=tuple(rank for rank, answer in known.items() if answer.epoch < reconfigure.epoch),
            caught_up=tuple(r for r, answer in known.items() if answer.caught_up and answer.epoch == reconfigure.epoch),
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
        """The number of workers to start in place of those that were about to join, which are not adopted.

        Nothing distinguishes a spare from a worker that was about to join. Spares are started again by the settings
        (elastic.spares), so only workers beyond their number count here. With replacements (elastic.replaces) the
        places of dead members are filled as well, and so count as taken under elastic.max_workers.
        """
        elastic = self._plan.settings.elastic
        number = sum(rank not in members for rank in self._gathered.newcomers) - elastic.spares
        if elastic.max_workers is not None:
            taken = len(members) - (0 if elastic.replaces else num_dead)
            number = min(number, elastic.max_workers - taken)
        return max(0, number)

    def _why_lost(self, rank: int) -> str:
        """The reason why a member is lost, in words."""
        if self._adoption.has_agents and rank not in self._gathered.made:
            return "its machine has not come back"
        if rank in self._gathered.late:
            return "it has not answered the controller that came back"
        return "its process ended while there was no controller"

    def _with_domains(self, placement: Placement) -> Placement:
        """The placement with the topology of the machines, which a Reconfigure does not contain.

        Without agents there is only one machine, and nothing to add. All machines that have not come back count as one.
        The hosts affect only where replicas go, not how micro-batches are assigned (`Placement.by_groups`): settings
        with process groups refuse controllers that come back.
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
        """True if metrics.jsonl has lines beyond the workers that an earlier life of the run wrote.

        Then this life was resumed at an older checkpoint, and its workers do those steps a second time (A6). A single
        line ahead of the workers usually has a simpler cause: the workers that had applied and reported that step have
        died. But if the step that the workers are at is validated, they may still wait for that validation, and the
        controller that wrote the next line must have had it: that line is from an earlier life as well.
        """
        ahead = self._protocol.version - reached
        return ahead > 1 or (ahead == 1 and self._plan.job.validates_at(reached))

    def _newest(self) -> m.Reconfigure | None:
        """The Reconfigure of the newest mesh epoch; None if there is none.

        A worker whose answer contains no valid Reconfigure, although it says that it is in an epoch, is dropped from
        the answers: it has gone wrong.
        """
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
        """Actions for what a member could not report while there was no controller.

        These are damaged state, results that differed, links that ended, and a request to leave.
        """
        actions: list[Action] = []
        for report in answer.damaged:
            actions += self._protocol.damaged(report)
        if answer.results_differ:
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
            why: the reason, in words.
            mesh: the mesh on which it begins again; None for the mesh of the settings.
        """
        settings, adoption = self._plan.settings, self._adoption
        step = adoption.newest_checkpoint
        message = f"the controller came back and cannot go on ({why}): the run begins again at its newest checkpoint"
        fields = {"step": step, "lost_after": self._protocol.version, "reason": why, "message": message}
        return [Record("restart", fields), End(RestartFrom(adoption.run_dir, mesh or settings.mesh, step))]
