"""A worker's part in the commit of a step: drives its half of the step protocol, and carries out what that decides.

Here a step is voted for, decided and applied. For the run it is committed once the controller has the first Applied.

`recovery.WorkerProtocol` knows ids and norms and never a tensor; `StateReplica` has the tensors and decides nothing.
`StepCommit` is between them. Facts ("the reduced gradient of these pages is complete") and messages (votes, published
pages) go into the protocol; the effects that it returns are carried out before the next message is handled. So deciding
a step and applying it are one transition (docs/protocol.md, S2), whichever message happens to be the last one
that was missing: mostly the last vote, sometimes this worker's own last gradient.

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
        context: of the worker.
        values: compute buffers of the layers that this worker computes; they change between configurations.
        first: the configuration in which the worker becomes a member.
    """

    def __init__(self, context: WorkerContext, values: Mapping[int, ValueBuffer], first: Configuration) -> None:
        self._context = context
        # All members of the first mesh begin at the version of the checkpoint, if there is one: none is behind it, and
        # none has the gradients of that step, so that its votes could not be sent again.
        restored = first.version if first.epoch == 0 else 0
        collectives = collectives_of(context)
        # Epoch -1 precedes all: the first configuration is entered like every later one.
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
        """A decided step is being applied: until it is over, the state is of no version."""

    @property
    def version(self) -> int:
        """The step last applied."""
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
        """Become a member of a newer configuration. No background copy is left from the one before.

        Args:
            replica_map: of the layers that this worker computes, or reads parameters of, and of all that it holds.
            highest_version: of any member.
            begun: the last step that this worker has begun.
            has_missed: others may have entered an epoch between this one and the one before.
        """
        held = held_ranges(replica_map, self._context.rank)
        # The protocol first: the replica asks it for versions and for norms, cut as the new configuration cuts pages.
        loss_range = next((r.key for r in held if self.replica.is_loss(r)), None)
        # Frozen pages have no gradients: the protocol, which waits for these, does not know them.
        trained = [pages for pages in held if not self.replica.is_frozen(pages)]
        self.protocol.enter_epoch(placement.mesh.epoch, placement.mesh.members, trained, loss_range, highest_version)
        self.replica.enter_epoch(placement, replica_map, held, highest_version, begun, has_missed=has_missed)

    def resume(self) -> None:
        """Once everything else is in place: handle what came early for this configuration, and vote again in it.

        Votes of an older epoch are void. Whoever has not applied the step that others have completes it by the new
        votes, by the normal rule.
        """
        for sender, message, payload in self.replica.pop_early():
            self.handle(sender, message, payload)
        self.replica.parameters.answer()
        self._perform(self.protocol.votes_again())
        self.replica.report_caught_up()

    # ---- facts and messages

    def vote(self, step: int) -> None:
        """This worker has done its part of the step. The vote is sent as soon as all of its reduced gradients are here.

        That may be now, or in the handler of the last ReducedGradient that is missing.
        """
        self._perform(self.protocol.computed(step))

    def gradient_complete(
        self, step: int, pages: PageRange, norms: Sequence[float], loss: float | None, weight: float | None
    ) -> None:
        """A reduced gradient of this worker's replica is here, summed up or received."""
        self._perform(self.protocol.gradient_complete(step, pages, norms, loss, weight))

    def handle(self, sender: int, message: m.Message, payload: Tensor | None) -> None:
        """Handle a message about state.

        Data is valid in any epoch: a message for pages that this worker does not have yet is kept until it does.
        """
        match message:
            case m.Vote():
                self._perform(self.protocol.vote_received(message))
            case m.Publish():
                assert payload is not None
                self.replica.parameters.file(message, payload)
                self._perform(self.protocol.publish_received(message))
            case _:
                self.replica.handle(sender, message, payload)

    def drop_undecided(self) -> None:
        """Give up everything that was computed, here or elsewhere, of steps that are not decided."""
        self.protocol.drop_undecided()
        self.replica.drop_undecided()

    def forget_beyond(self, version: int) -> None:
        """Give up what was computed of the steps after a version, here or elsewhere: another attempt of them begins."""
        self.protocol.forget_beyond(version)
        self.replica.forget_beyond(version)

    # ---- effects of the protocol

    def _perform(self, effects: Sequence[Effect]) -> None:
        # In order: a page that was published at the new version is installed after this worker has applied the step.
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
            # State is copied to learners at the version before: once the step is applied, that version is gone.
            self.replica.background.finish()
        for peer in effect.receivers:
            self._context.channel.send(peer, effect.vote, None)

    def _apply(self, decided: Apply) -> None:
        """Apply a decided step and report it. It cannot be undone, and cannot wait: nothing yields in here."""
        hooks, step = self._context.hooks, decided.step
        self.is_applying = True
        # Faults are injected here as well: a worker may die between its decision and its report.
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
