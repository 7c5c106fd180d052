"""A worker's part in the commit of a step: drives its half of the step protocol, and carries out what that decides.

Here a worker votes for a step, decides it and applies it. The run counts a step as committed once the controller has
the first Applied of it.

`recovery.WorkerProtocol` knows ids and norms and never a tensor; `StateReplica` has the tensors and decides nothing.
`StepCommit` stands between them. It reports facts ("the reduced gradient of these pages is complete") and messages
(votes, published pages) to the protocol, and carries out the effects that the protocol returns before the next message
is handled. So deciding a step and applying it are one transition (docs/protocol.md, S2), whatever was missing last:
mostly it is a vote, sometimes this worker's own last reduced gradient.

All of it runs on the training thread, inside `Executor.handle_messages` or inside `StepRunner.train_step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.worker_protocol import Apply, Effect, Install, SendVote, WorkerProtocol, held_ranges
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.configuration import Configuration
from elaswave_spmd.worker.context import WorkerContext
from elaswave_spmd.worker.fault_points import FaultPoint
from elaswave_spmd.worker.parameters import collectives_of
from elaswave_spmd.worker.state_replica import StateReplica


class StepCommit:
    """Votes for steps, and applies those that all members have voted for.

    Args:
        context: what all parts of the worker share.
        values: layer -> compute buffer, of the layers that this worker computes; the dict changes between
            configurations.
        first: the configuration in which the worker becomes a member.
    """

    def __init__(self, context: WorkerContext, values: Mapping[int, ValueBuffer], first: Configuration) -> None:
        self._context = context
        # All members of a run's first mesh begin at the version of the checkpoint, or at 0. No member is behind that
        # version, and none has the reduced gradients of that step, so nobody could vote for it again (C7).
        restored = first.version if first.epoch == 0 else 0
        collectives = collectives_of(context)
        # The protocol begins in epoch -1, so that the first configuration is entered like every later one.
        self.protocol = WorkerProtocol(
            context.rank,
            -1,
            (),
            (),
            version=first.version,
            restored=restored,
            extension=collectives,
            whole_weight=context.job.tokens_per_step,
            widest=context.widest_votes,
        )
        self.replica = StateReplica(context, values, self.protocol, collectives, self)
        self.is_applying = False
        """True while a decided step is being applied. Until that is done, the state is of no version."""

    @property
    def version(self) -> int:
        """The step that this worker applied last."""
        return self.protocol.version

    # ---- configurations

    def enter_epoch(
        self,
        placement: Placement,
        replica_map: ReplicaMap,
        highest_version: int,
        begun: int,
        *,
        has_missed: bool = False,
    ) -> None:
        """Become a member of a newer configuration. The caller has finished all background copies of the older one.

        Args:
            placement: the mesh and what runs where, in the new configuration.
            replica_map: the replicas of the layers that this worker computes, whose parameters it reads, or whose pages
                it holds.
            highest_version: the highest version of any member.
            begun: the last step that this worker has begun.
            has_missed: other members may have entered an epoch that this worker has not, after its last one.
        """
        held = held_ranges(replica_map, self._context.rank)
        # The protocol comes first: the replica asks it for versions, and for norms by the new page ranges.
        loss_range = next((r.key for r in held if self.replica.is_loss(r)), None)
        # The protocol waits for a reduced gradient of every range that it knows. Frozen pages have none.
        trained = [pages for pages in held if not self.replica.is_frozen(pages)]
        self.protocol.enter_epoch(placement.mesh.epoch, placement.mesh.members, trained, loss_range, highest_version)
        self.replica.enter_epoch(placement, replica_map, held, highest_version, begun, has_missed=has_missed)

    def resume(self) -> None:
        """Handle messages that came early for this configuration, and vote again in it.

        Called last when a configuration is entered. Votes of older epochs are void. If a member has not applied the
        step that others have, it completes the step with the new votes, by the normal rules (C7).
        """
        for sender, message, payload in self.replica.pop_early():
            self.handle(sender, message, payload)
        self.replica.parameters.answer()
        self._perform(self.protocol.votes_again())
        self.replica.report_caught_up()

    # ---- facts and messages

    def vote(self, step: int) -> None:
        """This worker has done its part of the step: vote as soon as all reduced gradients that it needs are here.

        The vote may be sent now, or later by the handler of the last reduced gradient that is missing.
        """
        self._perform(self.protocol.computed(step))

    def gradient_complete(
        self, step: int, pages: PageRange, norms: Sequence[float], loss: float | None, weight: float | None
    ) -> None:
        """A reduced gradient of pages that this worker holds or learns is complete here: added up by it, or received.

        Args:
            norms: the squared norm of each page; none for the loss page.
            loss, weight: of the step, if the range contains the loss page; the weight is None if losses have none.
        """
        self._perform(self.protocol.gradient_complete(step, pages, norms, loss, weight))

    def handle(self, sender: int, message: m.Message, payload: Tensor | None) -> None:
        """Handle a message about state: votes, gradients, parameters, state transfer, lost links.

        Data messages are valid in any epoch. If one is for pages that this worker does not hold yet, it is kept until
        the worker does.
        """
        match message:
            case m.Vote():
                self._perform(self.protocol.vote_received(message))
            case m.Publish() | m.PageState() if not self.protocol.counts(sender, message.step):
                pass
            case m.Publish():
                assert payload is not None
                self.replica.parameters.file(message, payload)
                self._perform(self.protocol.publish_received(message))
            case _:
                self.replica.handle(sender, message, payload)

    def drop_undecided(self) -> None:
        """Drop everything that was computed, here or elsewhere, of steps that are not decided (C12)."""
        self.protocol.drop_undecided()
        self.replica.drop_undecided()

    def forget_beyond(self, version: int) -> None:
        """Drop what was computed of the steps after a version, here or elsewhere: another attempt of them begins."""
        self.protocol.forget_beyond(version)
        self.replica.forget_beyond(version)

    # ---- effects of the protocol

    def _perform(self, effects: Sequence[Effect]) -> None:
        # The order matters: Install comes after the Apply of its step (S3).
        for effect in effects:
            match effect:
                case SendVote():
                    self._send_vote(effect)
                case Apply():
                    self._apply(effect)
                case Install(publish):
                    self.replica.parameters.install(publish)

    def _send_vote(self, effect: SendVote) -> None:
        if effect.vote.level == 0:
            # Learners are sent the state of the version before this step. After this vote the step may be decided, and
            # applying it overwrites that version. A vote of a higher level is a sum of votes: this worker has voted.
            self.replica.background.finish()
        for peer in effect.receivers:
            self._context.channel.send(peer, effect.vote, None)

    def _apply(self, decided: Apply) -> None:
        """Apply a decided step and report it. This cannot be undone or interrupted: nothing yields in here."""
        hooks, step = self._context.hooks, decided.step
        self.is_applying = True
        # A fault point, since a worker may die between its decision and its report.
        hooks.on_point(FaultPoint.APPLY, step)
        self.replica.update(decided)
        report = m.Applied(
            step,
            self.protocol.epoch,
            self._context.rank,
            decided.loss,
            decided.norm,
            decided.finite,
            decided.extension,
            decided.weight,
        )
        self._context.channel.send(CONTROLLER, report, None)
        hooks.applied(report, self.replica)
        self.is_applying = False
