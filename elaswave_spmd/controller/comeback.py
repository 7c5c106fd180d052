"""A controller that comes back: it adopts the workers of one that has died, and the step under way goes on.

The rules are A1 to A12 of docs/protocol.md. `Comeback` (resume.py) has the facts with which such a controller begins,
from the run's directory and the fork server. `Takeover` is its first act: it asks every living worker what its
predecessor may not have written down, and makes of the answers the actions after which it is a controller as any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from elaswave_spmd.controller.events import (
    Action,
    AdoptWorker,
    CameBack,
    End,
    Event,
    FindShards,
    Kill,
    Received,
    Record,
    RestartFrom,
    Settled,
    Spawn,
    Tick,
    WorkerEnded,
)
from elaswave_spmd.controller.failures import FailureHandler
from elaswave_spmd.controller.resume import Comeback
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.controller.supervision import Supervision
from elaswave_spmd.mesh.mesh import named_workers
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, Predecessor
from elaswave_spmd.recovery.packed_reconfigure import reconfigure_of
from elaswave_spmd.worker.configuration import Configuration

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan


@dataclass
class _Gathered:
    """The workers that have been asked, and what has come of it."""

    awaited: set[int]
    until: float
    answers: dict[int, m.Adopted] = field(default_factory=dict)


class Takeover:
    """The first act of a controller that comes back, on its thread: events in, actions out, until `is_over`.

    Args:
        comeback: the facts with which the controller begins.
        validated: the newest step whose validation is written down; 0: none is.
        ended_at: the step after which the run ends early by its validations; None: it does not, by those so far.
    """

    def __init__(
        self,
        comeback: Comeback,
        plan: RunPlan,
        protocol: ControllerProtocol,
        roster: Roster,
        supervision: Supervision,
        failures: FailureHandler,
        validated: int,
        ended_at: int | None,
    ) -> None:
        self._comeback = comeback
        self._plan = plan
        self._protocol = protocol
        self._roster = roster
        self._supervision = supervision
        self._failures = failures
        self._validated = validated
        self._ended_at = ended_at
        self._gathered = _Gathered(set(comeback.pids), 0.0)
        self.is_over = False
        """True once the controller is one as any other."""

    @property
    def last_epoch(self) -> int:
        """The newest mesh epoch that there can be."""
        return self._comeback.last_epoch

    def postpones(self, event: Event) -> bool:
        """True if an event has nothing to do with it, and is to be decided about afterwards."""
        if isinstance(event, Received):
            return not isinstance(event.message, m.Adopted | m.Heartbeat)
        return not isinstance(event, WorkerEnded | Tick)

    def start(self, now: float) -> list[Action]:
        """Ask all workers that live."""
        # Asked in the middle of an action, which may take as long as this. The dead are known to the fork server.
        self._gathered.until = now + self._plan.settings.timeouts.progress
        return [AdoptWorker(rank) for rank in sorted(self._gathered.awaited)]

    def decide(self, event: Event, now: float) -> list[Action]:
        """The actions that follow from an event, while workers are asked."""
        gathered = self._gathered
        match event:
            case Received(message=m.Adopted() as answer):
                if answer.generation == self._comeback.generation and answer.rank in gathered.awaited:
                    gathered.awaited.remove(answer.rank)
                    gathered.answers[answer.rank] = answer
                    self._supervision.watch(answer.rank, now)
            case Received(message=m.Heartbeat() as beat):
                if beat.rank in gathered.answers:
                    self._supervision.heartbeat(beat, now)
            case WorkerEnded(rank):
                gathered.awaited.discard(rank)
                if gathered.answers.pop(rank, None) is not None:
                    self._supervision.forget(rank)
            case Tick():
                self._supervision.postpone(now)
                if now > gathered.until:
                    late, gathered.awaited = sorted(gathered.awaited), set()
                    return [*(Kill(rank) for rank in late), *self._finish(now)]
            case _:
                raise AssertionError(f"{event} is for later")
        return [] if gathered.awaited else self._finish(now)

    def _finish(self, now: float) -> list[Action]:
        """All have answered, or are lost: the state of the run is known."""
        self.is_over = True
        answers, comeback, protocol = self._gathered.answers, self._comeback, self._protocol
        if (reconfigure := self._newest()) is None:
            return self._give_up("no worker is left")
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
        placement = Configuration.from_message(self._plan.placement, reconfigure).placement
        members = placement.mesh.members
        actions: list[Action] = [
            CameBack(len(members), len(steps), comeback.seconds),
            *(Kill(rank) for rank in comeback.pids if rank not in members),  # it was lost, or has left
        ]
        for rank in members:
            self._roster.add(rank, comeback.pids.get(rank))
        for report in reports:
            actions += protocol.applied(report)
        before = Predecessor(
            placement=placement,
            reconfigure=reconfigure,
            versions={rank: answers[rank].version for rank in members if rank in answers},
            lacking=tuple(rank for rank in members if rank in answers and answers[rank].epoch < reconfigure.epoch),
            prepared=comeback.prepared,
            last_epoch=comeback.last_epoch,
            validated=self._validated,
            ended_at=self._ended_at,
        )
        actions += protocol.come_back(before)
        dead = [rank for rank in members if rank not in answers]
        actions += self._record(reconfigure.epoch, len(members) - len(dead), dead)
        for rank in dead:
            ended = WorkerEnded(rank, "its process ended while there was no controller", now)
            actions += self._failures.worker_ended(ended)
        for rank, answer in answers.items():
            if rank in members:
                actions += self._told(rank, answer, answers)
        actions.append(FindShards())
        if unborn := [rank for rank in comeback.newcomers if rank not in members]:
            actions.append(Spawn(self._roster.allocate(len(unborn))))
        return [*actions, Settled(), *protocol.begin_generation(before)]

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

    def _told(self, rank: int, answer: m.Adopted, answers: Mapping[int, m.Adopted]) -> list[Action]:
        """What a member has told nobody yet: state that it has given up, links that ended, a wish to leave."""
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
        comeback = self._comeback
        lost = f"; {named_workers(dead)} ended meanwhile" if dead else ""
        fields = {
            "generation": comeback.generation,
            "seconds": round(comeback.seconds, 3),
            "workers": adopted,
            "mesh_epoch": epoch,
            "after_step": self._protocol.version,
            "message": f"controller came back as generation {comeback.generation} after {comeback.seconds:.1f} s, "
            f"adopted {adopted} workers{lost}",
        }
        return [Record("controller", fields)]

    def _give_up(self, why: str) -> list[Action]:
        """The workers cannot be adopted: the run begins again at its newest checkpoint."""
        settings, comeback = self._plan.settings, self._comeback
        step = comeback.newest_checkpoint
        message = f"the controller came back and cannot go on ({why}): the run begins again at its newest checkpoint"
        fields = {"step": step, "lost_after": self._protocol.version, "reason": why, "message": message}
        return [Record("restart", fields), End(RestartFrom(comeback.run_dir, settings.mesh, step))]
