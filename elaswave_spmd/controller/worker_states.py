"""The state of each worker in words, for the live view. It only listens; nothing is decided here."""

from __future__ import annotations

from collections import deque

from elaswave_spmd.controller.replacements import Replacements
from elaswave_spmd.controller.rescheduler import Rescheduler
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.run_dir import workers_now as states
from elaswave_spmd.run_dir.workers_now import WorkerNow, WorkersNow

_MOST_GONE = 16  # workers that have gone and are still shown: the last ones


class WorkerStates:
    """The states of the workers of a run, as far as they are known on the controller's thread."""

    def __init__(
        self, protocol: ControllerProtocol, roster: Roster, replacements: Replacements, rescheduler: Rescheduler
    ) -> None:
        self._protocol = protocol
        self._roster = roster
        self._replacements = replacements
        self._rescheduler = rescheduler
        self._gone: deque[WorkerNow] = deque(maxlen=_MOST_GONE)
        self._stage_of: dict[int, int] = {}  # of each member, when it was asked for last

    def removed(self, rank: int, *, lost: bool) -> None:
        """A worker is no member any more: it was lost, or has left. Its process may not have ended yet."""
        mesh = self._protocol.placement.mesh
        stage = mesh.stage_of(rank) if rank in mesh else self._stage_of.get(rank)
        if stage is not None:
            self._gone.append(WorkerNow(rank, states.LOST if lost else states.LEFT, stage))

    def now(self) -> WorkersNow:
        """All workers."""
        protocol = self._protocol
        placement = protocol.placement
        mesh = placement.mesh
        gone = {worker.rank for worker in self._gone}
        workers, self._stage_of = [], {}
        known = _Known(protocol, self._rescheduler)
        for stage, ranks in enumerate(mesh.stages):
            for rank, microbatches in zip(ranks, placement.microbatch_counts[stage], strict=True):
                self._stage_of[rank] = stage
                if rank not in gone:
                    workers.append(WorkerNow(rank, known.state(rank), stage, microbatches, known.speeds.get(rank)))
        # Where there are fewer stages by now, those of the last ones are shown with the last one.
        last = mesh.num_stages - 1
        workers += [WorkerNow(worker.rank, worker.state, min(worker.stage or 0, last)) for worker in self._gone]
        spares = self._replacements.spares
        for rank in sorted(set(self._roster.pids) - set(self._stage_of) - gone):
            ready = spares.get(rank, rank in protocol.addresses)
            state = states.STARTING if not ready else states.SPARE if rank in spares else states.JOINING
            workers.append(WorkerNow(rank, state))
        return WorkersNow(
            mesh.shape.name, mesh.epoch, placement.layer_cuts, tuple(workers), is_changing=bool(protocol.changing)
        )


class _Known:
    """The facts about members, gathered once for all of them."""

    def __init__(self, protocol: ControllerProtocol, rescheduler: Rescheduler) -> None:
        self._members = set(protocol.members)
        self._not_ready = set(protocol.not_ready)
        self._started = protocol.started
        self._leaving = set(protocol.leaving)
        self._learners = protocol.learners
        self._slow = rescheduler.slow
        self.speeds = rescheduler.speeds

    def state(self, rank: int) -> str:
        """The state of a member of the mesh."""
        if rank not in self._members:
            return states.LOST
        if not self._started:
            return states.STARTING if rank in self._not_ready else states.READY
        for state, ranks in (
            (states.LEAVING, self._leaving),
            (states.LEARNER, self._learners),
            (states.SLOW, self._slow),
        ):
            if rank in ranks:
                return state
        return states.TRAINING
