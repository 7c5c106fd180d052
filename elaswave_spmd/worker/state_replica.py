"""One worker's replica of the training state: the pages that it holds, and the reduced gradients that change them.

A page has a primary and mirrors, together its *replicas*. All of them apply the same reduced gradient to the same state
and so stay equal bit for bit. A *learner*, as in Raft, gets the reduced gradients as well but does not have the state
yet. Frozen pages have replicas and learners like others, but no gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.checks import CheckDraw
from elaswave_spmd.recovery.worker_protocol import Apply, WorkerProtocol
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import LOSS
from elaswave_spmd.sharding.replicas import PageIndex, PageRange, ReplicaMap, ReplicaSet
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.context import WorkerContext
from elaswave_spmd.worker.digests import Digester
from elaswave_spmd.worker.fault_points import FaultPoint
from elaswave_spmd.worker.gradient_exchange import ReducedPages
from elaswave_spmd.worker.gradient_reduction import GradientReducer, ReductionForm
from elaswave_spmd.worker.optimizers import clip_divisor
from elaswave_spmd.worker.page_norms import page_norm_values
from elaswave_spmd.worker.parameters import Parameters
from elaswave_spmd.worker.programs.scores import mixed_weights
from elaswave_spmd.worker.stage_collectives import NoCollectives, StageCollectives
from elaswave_spmd.worker.state import LEARNING, BackgroundCopies, HeldState, Saved, contains, cut
from elaswave_spmd.worker.state_soundness import StateSoundness
from elaswave_spmd.worker.state_transfer import receive_state, send_state
from elaswave_spmd.worker.sum_checks import SumChecks

if TYPE_CHECKING:
    from elaswave_spmd.worker.step_commit import StepCommit


class StateReplica:
    """The pages of state that one worker holds, through all configurations, and the reduced gradients for them.

    It decides nothing: `StepCommit` says when a step's reduced gradients are applied.

    Args:
        context: what all parts of the worker share.
        values: layer -> compute buffer, of the layers that this worker computes; the dict changes between
            configurations.
        protocol: knows the version, the epoch and which reduced gradients are complete. It is only read here, with one
            exception: state that is received brings the norms that a learner may have to vote with.
        collectives: exchanges through the process group of the worker's stage; None if that option is off.
        commit: is told of every reduced gradient that is complete here.
    """

    def __init__(
        self,
        context: WorkerContext,
        values: Mapping[int, ValueBuffer],
        protocol: WorkerProtocol,
        collectives: StageCollectives | None,
        commit: StepCommit,
    ) -> None:
        job, shardings = context.job, context.placement.shardings
        self.rank = context.rank
        self.protocol = protocol
        self.placement = context.placement
        self._context = context
        self._job = job
        self._layout = context.model.layout
        self._values = values
        self._commit = commit
        self._send = context.channel.send
        grouped = collectives if collectives is not None else NoCollectives()
        self.drops_params = bool(shardings.params.axes)
        """Sharded parameters are dropped after this worker's last micro-batch of a step, and published anew."""
        # Masters are fp32. They can be the compute buffer itself only if that is fp32 too and is never dropped.
        separate = self.drops_params or job.torch_dtype != torch.float32
        self.state = HeldState(self._layout, job.optimizer, context.device, separate_master=separate)
        draw, digester = CheckDraw(job.seed, job.verify_rate), Digester(context.device)
        collects = collectives is not None
        self.sums = SumChecks(self.rank, self._layout, draw, digester, context.hooks, self._send, collects=collects)
        form = ReductionForm(
            job.num_microbatches,
            sharded=bool(shardings.grads.axes),
            add_in_place=job.torch_dtype == torch.float32,
            copies_payloads=context.channel.copies_payloads,
        )
        self.reducer = GradientReducer(
            self.rank,
            self._layout,
            context.device,
            form,
            send=self._send,
            gradient_done=self._gradient_reduced,
            exchanges=grouped.exchanges,
            observer=self.sums,
        )
        self.reducer.step_decided(protocol.version)
        self._exchanges = grouped.exchanges
        self._sum_requests: list[m.AddAgain] = []  # requests about a step that this worker has not begun yet
        self._unsure: set[int] = set()  # peers that may lack what they were sent, for example as a link was lost
        self.soundness = StateSoundness(context, values, self.state, protocol)
        may_answer = self.soundness.may_answer
        self.parameters = Parameters(context, values, self.state, protocol, self._unsure, grouped, may_answer)
        self.background = BackgroundCopies()
        """Copies of state that is sent and received, done in small pieces whenever this worker waits."""
        self._gradients: dict[int, dict[PageRange, Tensor]] = {}  # step -> the reduced gradients that are here, fp32
        # (step, pages, receiver) of the reduced gradients that were sent over links or given to an exchange.
        self._gradients_sent: set[tuple[int, PageRange, int]] = set()
        self._sent_state: set[tuple[PageRange, int]] = set()  # (pages, learner) whose state was sent
        self._sends_state_at = 0  # the version after which this epoch's learners are sent their state (`send_state`)
        # (sender, message) -> payload, of messages for page ranges that this worker does not hold yet.
        self._early: dict[tuple[int, m.PageState | m.ReducedGradient], Tensor] = {}
        self._reported_epoch = -1  # the epoch in which this worker has reported last that it has caught up
        self._held: dict[PageRange, ReplicaSet] = {}  # the page ranges that it is a replica or learner of
        # Held range -> the version at which this worker became a replica or learner of it. Older state is of no use
        # here, as this worker did not get the reduced gradients in between.
        self._since: dict[PageRange, int] = {}
        self._loss_range: PageRange | None = None  # the held range that contains the loss page
        self._loss_received = -1  # the version of the loss that this worker was sent as a learner of the loss page

    # ---- configurations

    def enter_epoch(
        self,
        placement: Placement,
        replica_map: ReplicaMap,
        held: Sequence[ReplicaSet],
        highest_version: int,
        begun: int,
        *,
        has_missed: bool,
    ) -> None:
        """Become a member of a newer configuration, which the protocol has entered already.

        Args:
            replica_map: the replicas of the layers that this worker computes, whose parameters it reads, or whose pages
                it holds.
            held: the page ranges that this worker is a replica or learner of: ranges that it held before, parts of
                them, several of them joined, or new ones.
            highest_version: the highest version of any member.
            begun: the last step that this worker has begun.
            has_missed: other members may have entered an epoch that this worker has not, after its last one.
        """
        self.placement = placement
        self._sends_state_at = max(begun, self.protocol.version, highest_version)
        # Before ranges are cut and hashed anew, and before state is sent: otherwise damage that came after this
        # worker's StepReport would be hashed as if it had been written (H5).
        self.soundness.report_damage()
        is_hashed = self.state.is_hashed
        before = self._held
        self._loss_range = next((r.key for r in held if self.is_loss(r)), None)
        if self._loss_range is None:
            self._loss_received = -1
        self._held = {r.key: r for r in held}
        self._since = self._since_when(highest_version)
        if has_missed:
            # In an epoch that this worker has missed, other members may have ceased to hold or to learn pages, or to be
            # their primary, and may have given up what this worker had sent them. They get it again (C8).
            others = (peer for peer in placement.mesh.members if peer != self.rank)
            self._unsure.update(peer for peer in others if self._context.channel.reaches(peer))
        learning = {(key, rank) for key, pages in self._held.items() for rank in pages.learners - self._unsure}
        self._sent_state &= learning
        # A worker that ceased to hold or learn a range has dropped its gradients, and may learn the range again later.
        sure = (sent for sent in self._gradients_sent if sent[2] not in self._unsure)
        self._gradients_sent = {sent for sent in sure if (pages := self._held.get(sent[1])) and pages.reaches(sent[2])}
        self._split_gradients()
        self.state.rebind((r for r in held if not self.is_loss(r)), self._values)
        if is_hashed:
            self.state.fingerprints()
        self.parameters.enter_epoch(placement, replica_map)
        self.parameters.forget_beyond(highest_version)
        self._take_back_gradients(self.protocol.version + 1)  # they are sent again below, to the present receivers
        self.sums.enter_epoch(placement, replica_map, self.protocol.version)
        layers = placement.layers_of_stage(placement.mesh.stage_of(self.rank))
        self.reducer.enter_epoch(replica_map, layers, self.protocol.version + 1, self._unsure)
        for step, gradients in self._gradients.items():
            for key, gradient in gradients.items():
                self.reducer.gradient_known(step, key)
                pages, was = self._held[key], next((r.primary for k, r in before.items() if contains(k, key)), None)
                was = self.rank if pages.primary in self._unsure else was
                self._relay_gradient(step, pages, gradient, self.protocol.norms_at(step, key), was)
        # A link that was made for this configuration may have been lost again before this worker entered it. Then what
        # was sent above is lost as well. It is sent again in the next configuration (C11).
        lost = {peer for peer in self._unsure if peer in placement.mesh and not self._context.channel.reaches(peer)}
        self._unsure.intersection_update(lost)

    def repair(self) -> None:
        """Replicas have differed: give up everything that may have come from a wrong one (H3). It is sent again.

        That is published parameters and, for pages that this worker learns, their state. If the wrong worker itself
        stays, it learns its pages anew.
        """
        for part in self.state:
            if self.rank not in part.pages.replicas:
                part.at(LEARNING)
        for values in self._values.values():
            values.keep_only(())
        self.parameters.forget_filed()
        self._early = {key: payload for key, payload in self._early.items() if not isinstance(key[1], m.PageState)}
        self._sent_state.clear()

    def _since_when(self, now: int) -> dict[PageRange, int]:
        """The value of `_since` for the ranges that are held now. A joined range is as new as its newest part.

        Args:
            now: the version for ranges that are new here.
        """
        before, index = self._since, PageIndex(self._since)
        return {key: max((before[part] for part in index.covering(key)), default=now) for key in self._held}

    def _split_gradients(self) -> None:
        """Cut reduced gradients as page ranges were cut. Gradients of ranges that are not held any more are dropped.

        So are those of ranges that were joined. They came from members that had entered this epoch first, for whole
        ranges of this epoch, and are in `_early` too: they are handled again from there.
        """
        for step, gradients in self._gradients.items():
            found: dict[PageRange, Tensor] = {}
            for key, gradient in gradients.items():
                found |= cut(self._layout, self._held, key, gradient)
            self._gradients[step] = found

    def is_loss(self, pages: ReplicaSet) -> bool:
        """True for the range that contains the loss page: it has a reduced gradient, but no state."""
        return self._layout.layers[pages.layer].block_of(pages.first).kind == LOSS

    def is_frozen(self, pages: ReplicaSet) -> bool:
        """True for pages that are not trained: they have a master, but no gradient and no optimizer state."""
        return self.state.is_frozen(pages.layer, pages.first)

    # ---- the state at the start

    def initialize(self) -> None:
        """Fill all held pages for version 0, and publish them.

        The values are the given weights (`model.init_from`), or those that constructors of the model have made, or are
        drawn by the model's `init`.
        """
        model = self._context.model
        if model.given is not None:
            self.state.initialise(model.given.part)
            model.given.close()
        else:
            if model.made is not None:
                model.made.prepare([self._layout.layers[layer].name for layer in self.state.layers])
            self.state.initialise(partial(model.initial, self._job.seed))
        if model.made is not None:
            model.made.clear()
        for layer in self.parameters.layers:
            self.parameters.publish(layer, 0, frozen=True)
        self.soundness.compare()

    def restore(self, saved: Saved) -> None:
        """Read all held pages from the checkpoint that the run resumes from, and publish them."""
        self.state.restore(saved, self.protocol.version)
        for layer in self.parameters.layers:
            self.parameters.publish(layer, self.protocol.version, frozen=True)
        self.soundness.compare()

    # ---- messages

    def handle(self, sender: int, message: m.Message, payload: Tensor | None) -> None:
        """Handle a message about state that is neither a vote nor a published page."""
        match message:
            case m.PartialSum():
                assert payload is not None
                self.reducer.node_received(message, payload)
            case m.ReducedGradient():
                assert payload is not None
                self._gradient_received(sender, message, payload)
            case m.Addend():
                assert payload is not None
                self.sums.received(sender, message, payload)
            case m.Need():
                self.parameters.needed(sender, message)
            case m.GroupLost():
                self.parameters.group_lost(message)
                self._send_returned()
            case m.PageState():
                assert payload is not None
                self._state_received(sender, message, payload)
            case m.LinkClosed():  # in the next configuration the peer is sent again what it may lack (C11)
                self._unsure.add(message.peer)
                self.parameters.link_lost(message.peer)
            case _:
                raise AssertionError(f"worker {self.rank} got {message}")

    def pop_early(self) -> list[tuple[int, m.Message, Tensor]]:
        """Return the messages for pages that this worker did not hold yet, as (sender, message, payload), and clear
        them. The caller handles them again: those that are still early are kept again."""
        early, self._early = self._early, {}
        return [(sender, message, payload) for (sender, message), payload in early.items()]

    def collect(self) -> None:
        """Take what has come through the process group of the stage, if there is one, and begin the next exchanges.

        If the group has failed, send over links what it may not have brought, and ask for what has not come.
        """
        grouped = self.parameters.grouped
        if grouped.is_off:
            return
        was_idle = grouped.idle
        grouped.check()
        step = grouped.exchanges.step  # read before anything is handled: that may decide the step and change it
        for what, values in grouped.arrived() if not was_idle else ():
            if isinstance(what, m.Publish):
                self.parameters.install_arrived(what, values)
                continue
            for reduced in self.reducer.exchanged(what, values):
                message = _as_message(step, reduced)
                self._gradient_received(reduced.pages.primary, message, reduced.gradient)
        grouped.begin_exchanges()
        if not grouped.serves:
            if not was_idle:
                self.parameters.ask_for_rest()
            self._send_returned()
        grouped.update_offer()

    def _send_returned(self) -> None:
        """The group has failed within the mesh epoch: send over links what it may not have brought (E4, E7)."""
        self.reducer.send_returned()
        step = self.protocol.version + 1
        for reduced in self._take_back_gradients(step):
            self._relay_gradient(step, reduced.pages, reduced.gradient, reduced.norms)

    def _take_back_gradients(self, step: int) -> list[ReducedPages]:
        """The reduced gradients that the group may not have brought to all mirrors. They count as not sent now."""
        found = self._exchanges.take_back_gradients()
        self._gradients_sent -= {(step, one.pages.key, mirror) for one, mirrors in found for mirror in mirrors}
        return [one for one, _ in found]

    # ---- reduced gradients

    def _gradient_reduced(self, step: int, pages: ReplicaSet, gradient: Tensor) -> None:
        """The reduced gradient of a page range that this worker is the primary of is complete.

        Called by the reducer. The step may be ahead of this worker's own, if other workers compute all of its
        micro-batches.
        """
        key = pages.key
        if step <= self.protocol.version or self.protocol.has_gradient(step, key):
            return
        gradient = self._context.hooks.computed(FaultPoint.NORM, step, gradient)
        self._gradients.setdefault(step, {})[key] = gradient
        loss, weight = self._loss_in(key, gradient)
        # If the sums of this layer are checked (V7), the checker refuses a wrong count (`refuse_mixed_weights`).
        if loss is not None and not self.sums.draws(step, pages.layer):
            self._refuse_count(step, gradient)
        norms = page_norm_values(gradient, self._layout.page_size) if loss is None else []
        self._context.hooks.on_point(FaultPoint.NORM, step)
        self.sums.gradient(step, key, gradient, norms)
        self._relay_gradient(step, pages, gradient, norms)
        self._commit.gradient_complete(step, key, norms, loss, weight)

    def _gradient_received(self, sender: int, message: m.ReducedGradient, payload: Tensor) -> None:
        if message.step <= self.protocol.version:
            return
        parts = cut(self._layout, self._held, (message.layer, message.first, message.stop), payload)
        if (message.layer, message.first, message.stop) not in parts:
            # The sender may be an epoch ahead, in which this worker holds more pages, or has these pages in one range.
            # So the message is kept for the next epoch.
            self._early[sender, message] = payload
        norms = np.frombuffer(message.norms, "<f4").tolist()
        for key, gradient in parts.items():
            # It is kept even if this epoch needs nothing of the step any more: the next epoch may fall back to the
            # version before.
            if key not in self._gradients.setdefault(message.step, {}):
                self._gradients[message.step][key] = gradient
                own = norms[key[1] - message.first : key[2] - message.first]
                self.reducer.gradient_known(message.step, key)
                # The sender may be the primary of an older epoch. If this worker is the primary now, it sends the
                # gradient to the mirrors of this epoch, which may be others. If not, the present primary may lack it.
                self._relay_gradient(message.step, self._held[key], gradient, own, was=sender)
                self.sums.gradient(message.step, key, gradient, own)
                self._commit.gradient_complete(message.step, key, own, *self._loss_in(key, gradient))

    def _relay_gradient(
        self, step: int, pages: ReplicaSet, gradient: Tensor, norms: Sequence[float], was: int | None = None
    ) -> None:
        """As primary, send a reduced gradient to the other replicas and to learners; as mirror, to a new primary.

        In a step whose gradients are exchanged through the group, mirrors in this stage get it there.

        Args:
            was: who has sent the gradient, or the primary of the pages in the older epoch: that may be another one than
                now. This worker's own rank, if the primary is the same but may have missed what it was sent. None: the
                primary has it.
        """
        reduced = ReducedPages(pages, gradient, norms)
        if pages.primary == self.rank:
            receivers, by_group = pages.receivers, self._exchanges.mirrors(step, pages.key)
        else:
            receivers, by_group = () if was in (None, pages.primary) else (pages.primary,), frozenset[int]()
        if by_group:
            self._exchanges.add_gradient(reduced)
        for receiver in receivers:
            if (step, pages.key, receiver) in self._gradients_sent:
                continue
            if receiver in pages.learners:
                if self._waits_for_state(step, pages, receiver):
                    continue  # `send_state` calls this again once it has sent the state
                self.background.finish_sending(pages.key)
            self._gradients_sent.add((step, pages.key, receiver))
            if receiver not in by_group:
                self._send(receiver, _as_message(step, reduced), gradient)

    def _waits_for_state(self, step: int, pages: ReplicaSet, learner: int) -> bool:
        """True if this primary has still to send a learner the state that the step changes (C9).

        The state goes before the gradient on the link. So no learner applies the step without the state, even if it
        gets the votes from other members first.
        """
        is_sent = pages.primary != self.rank or (pages.key, learner) in self._sent_state
        return not is_sent and step > self._sends_state_at

    def _loss_in(self, key: PageRange, gradient: Tensor) -> tuple[float | None, float | None]:
        """(loss, weight) in a reduced gradient: (None, None) unless it is that of the loss page, (loss, None) if losses
        have no weight.

        The weight is NaN if only some micro-batches have one, so that the step can never be applied.
        """
        if key != self._loss_range:
            return None, None
        loss, weight, number = gradient[:3].tolist()  # as GradientBuffer.add_loss puts them there
        if not number:
            return loss, None
        return loss, weight if number == self._job.num_microbatches else math.nan

    def _refuse_count(self, step: int, gradient: Tensor) -> None:
        """Check the number of micro-batches that have a weight, in the reduced gradient of the loss page.

        Raises:
            ModelError: the losses of some micro-batches have a weight, and those of others have none.
            RunError: it is no possible number of micro-batches. No model causes that: a device or memory has failed.
        """
        number, of = gradient[2].item(), self._job.num_microbatches
        if number in (0, of):
            return
        if number in range(of):
            raise mixed_weights(
                f"loss(output, batch) has returned a weight for {number:.0f} of {of} micro-batches in step {step}"
            )
        raise RunError(
            f"the loss page of step {step} says that {number:g} of {of} micro-batches have a weight, which no sum over "
            "micro-batches does: a device or memory has changed it, here or where its parts were added up; verify.rate "
            "finds out whose"
        )

    def refuse_mixed_weights(self, step: int) -> None:
        """If this worker has checked the sums of the loss page, and found them right, check the number of weights.

        Where sums are checked nobody looks before that: a wrong number may come from a device, not from the model.

        Raises:
            ModelError: the losses of some micro-batches have a weight, and those of others have none.
            RunError: as for `_refuse_count`.
        """
        if self._loss_range is None or not self.sums.has_checked(step, self._loss_range):
            return
        if (gradient := self._gradients.get(step, {}).get(self._loss_range)) is not None:
            self._refuse_count(step, gradient)

    def reduced_gradients(self, step: int) -> tuple[PageRange, ...]:
        """The page ranges whose reduced gradient of this step is here."""
        return tuple(sorted(self._gradients.get(step, {})))

    # ---- checks of sums (`verify.rate`)

    def begin_checks(self, step: int) -> None:
        """Begin to check the sums of a step. Not called for a step that is recovered in part."""
        self.sums.begin(step)
        for key, gradient in self._gradients.get(step, {}).items():
            self.sums.gradient(step, key, gradient, self.protocol.norms_at(step, key))
        requests, self._sum_requests = self._sum_requests, []
        for request in requests:
            self.add_again(request)

    def forget_checks(self) -> None:
        """Drop the checks of the step under way, which is recovered in part or begins anew."""
        self.sums.forget()
        self._sum_requests.clear()

    def add_again(self, message: m.AddAgain) -> None:
        """Handle AddAgain: report digests of the sums that this worker has made, and make them again if asked to (V8).

        A request about a step that this worker has not begun is kept until then.
        """
        if message.step > self.sums.step:
            self._sum_requests.append(message)
        elif message.step == self.sums.step:
            key = message.layer, message.first, message.stop
            gradient = self._gradients.get(message.step, {}).get(key)
            own = None
            if gradient is not None and self._held[key].primary == self.rank:
                own = gradient, self.protocol.norms_at(message.step, key)
            self.sums.asked(message, own)

    # ---- the update

    def update(self, decided: Apply) -> None:
        """Apply a step's reduced gradients to all held pages, and publish the new parameters layer by layer."""
        step = decided.step
        self.background.finish()  # background copies read the state that is about to be overwritten
        lr = self._job.learning_rate.at(step)
        divisor = decided.divisor * clip_divisor(decided.norm, self._job.clip) if decided.finite else 1.0
        gradients = self._gradients.pop(step, {})
        self.soundness.give_up_damaged(step)
        for part in self.state:
            if self.state.is_frozen(part.pages.layer, part.pages.first):
                continue  # frozen pages are not updated: there is no result to inject a fault into
            if (wrong := self._context.hooks.computed(FaultPoint.APPLY, step, part.master)) is not part.master:
                part.master.copy_(wrong)
        for values in self._values.values():
            values.keep_frozen(step)
        # Layer by layer, so that the parameters of the first layers are sent while the last ones are being updated.
        for layer in self.parameters.layers:
            if decided.finite:
                self.state.apply(layer, gradients, step=step, lr=lr, divisor=divisor)
            else:
                self.state.keep(layer, step)
            self.parameters.publish(layer, step, extension=decided.extension)
            self._context.hooks.on_point(FaultPoint.PUBLISH, step)
        self.parameters.published(step, extension=decided.extension)
        self.soundness.compare()
        self.reducer.step_decided(step)
        self.sums.decided(step)
        self._gradients_sent = {sent for sent in self._gradients_sent if sent[0] > step}
        # State as of this step may still be needed, for pages that this worker learns; gradients of the step are not.
        self._early = {
            (sender, message): payload
            for (sender, message), payload in self._early.items()
            if message.step > step or (message.step == step and isinstance(message, m.PageState))
        }
        if decided.extension == m.GROUPED and self.parameters.grouped.serves:
            # All members have counted the same votes, so all know that the sums of the next step go through the group,
            # unless the group fails before.
            self.parameters.grouped.exchanges.agree(step + 1)

    def drop_undecided(self) -> None:
        """Drop everything that was computed, here or elsewhere, of steps that are not decided (C12)."""
        self.background.give_up()
        self.parameters.grouped.give_up()
        self.reducer.drop_undecided()
        self.forget_checks()
        self._gradients.clear()
        self._early.clear()
        self._gradients_sent = {sent for sent in self._gradients_sent if sent[0] <= self.protocol.version}

    def forget_beyond(self, version: int) -> None:
        """Drop what was computed of the steps after a version, and state that is newer than it (V5)."""
        self.soundness.begin_again()
        given_up = self.state.forget_beyond(version)
        self._sent_state = {sent for sent in self._sent_state if sent[0] not in given_up}
        for values in self._values.values():
            values.forget_beyond(version)
        self.reducer.drop_undecided()
        self.forget_checks()
        for step in [s for s in self._gradients if s > version]:
            del self._gradients[step]
        early = self._early.items()
        computed = {key for key, _ in early if isinstance(key[1], m.ReducedGradient) and key[1].step > version}
        self._early = {key: payload for key, payload in early if key not in computed}
        self._gradients_sent = {sent for sent in self._gradients_sent if sent[0] <= version}

    # ---- state transfer

    def send_state(self) -> None:
        """Begin to send the state of this primary's pages to their learners. Called between two steps.

        The copies are made in the background. They are finished before this worker's next vote, and before the reduced
        gradients of the next step, which may be here already, are sent to a learner (C9).
        """
        version = self.protocol.version
        state = {part.pages.key: part for part in self.state}
        for key, pages in self._held.items():
            part = state.get(key)  # None for the loss page, which has no state
            # A primary without state has given it up as damaged: another replica sends it, in the next epoch.
            if pages.primary != self.rank or (part is not None and part.version == LEARNING):
                continue
            learners = [rank for rank in sorted(pages.learners) if (key, rank) not in self._sent_state]
            if learners:
                self._sent_state.update((key, learner) for learner in learners)
                # State that this worker has learned itself may be one step ahead of it: its primary was ahead then.
                at = version if part is None else part.version
                norms = np.array(self.protocol.norms_at(at, key), "<f4").tobytes()
                message = m.PageState(at, *key, norms)
                source = self._loss_state() if part is None else part
                self.background.add(send_state(self.state, source, message, learners, self._context.channel), key)
                if (gradient := self._gradients.get(version + 1, {}).get(key)) is not None:
                    self._relay_gradient(version + 1, pages, gradient, self.protocol.norms_at(version + 1, key))

    def _loss_state(self) -> Tensor:
        """What a learner of the loss page is sent: fp32 [2], 1 and the loss of this version; or 0 and 0 if the loss is
        not known, as before the first step. If the loss has a weight, fp32 [3]: the weight follows."""
        loss, weight = (at(self.protocol.version) for at in (self.protocol.loss_at, self.protocol.weight_at))
        found = [0.0, 0.0] if loss is None else [1.0, loss]
        return torch.tensor(found if weight is None else [*found, weight], dtype=torch.float32)

    def _state_received(self, sender: int, message: m.PageState, payload: Tensor) -> None:
        layer, first, stop = message.layer, message.first, message.stop
        inside = [k for k in self._held if k[0] == layer and first <= k[1] < stop]
        if sum(key[2] - key[1] for key in inside if key[2] <= stop) < stop - first:
            # Some of these pages are not held here, or their ranges are cut otherwise. The message is kept for the
            # epoch in which this worker learns them, or has the ranges of the sender.
            self._early[sender, message] = payload
        if not inside:
            return
        # State that is too old is ignored: this worker does not have the reduced gradients that would bring it up to
        # date. There are two cases. This worker was a learner before, ceased to be one, and is one again: it did not
        # get the gradients in between. Or the primary that has sent the state is lost, and this worker has applied and
        # dropped those gradients already: the new primary sends the state anew. (A living primary sends state before
        # the gradients of its next step, so that state is never behind.) Frozen pages are never too old.
        if not self.state.is_frozen(layer, first) and message.step < max(
            self.protocol.version, *(self._since[key] for key in inside)
        ):
            return
        if (layer, first, stop) == self._loss_range:
            known, loss, *weight = payload.tolist()
            self.protocol.state_received(message.step, (layer, first, stop), (), loss if known else None, *weight)
            self._loss_received = max(message.step, self._loss_received)
            self.report_caught_up()
            return
        hashed = self._job.compares_at(message.step)
        self.background.add(
            receive_state(self.state, message, payload, self.protocol, self.report_caught_up, hashed=hashed)
        )

    def learns_from(self, sender: int, key: PageRange) -> bool:
        """True if this worker learns a page range, and the sender is its primary."""
        pages = self._held.get(key)
        return pages is not None and self.rank in pages.learners and pages.primary == sender

    def report_caught_up(self) -> None:
        """Report to the controller, once in an epoch, that this worker has the state of all pages that it learns."""
        epoch = self.protocol.epoch
        learns = any(self.rank in pages.learners for pages in self._held.values())
        complete = all(part.version != LEARNING for part in self.state) and not self._lacks_loss()
        if learns and self._reported_epoch < epoch and complete:
            self._reported_epoch = epoch
            self._send(CONTROLLER, m.CaughtUp(self.rank, epoch), None)

    def has_caught_up_in(self, epoch: int) -> bool:
        """True if this worker has reported to a controller that it has caught up in this mesh epoch."""
        return self._reported_epoch == epoch

    def _lacks_loss(self) -> bool:
        """True if this worker learns the loss page and lacks the loss that it needs in order to be its primary.

        The primary votes with the loss. In the next epoch all members vote again for the newest version (C7), so that
        is the loss which is needed, even if this worker is one step behind.
        """
        if self._loss_range is None or self.rank not in self._held[self._loss_range].learners:
            return False
        newest = self.protocol.newest_version
        return self._loss_received < newest and self.protocol.loss_at(newest) is None


def _as_message(step: int, reduced: ReducedPages) -> m.ReducedGradient:
    """The message with which a reduced gradient is sent over a link. The gradient itself is the payload."""
    return m.ReducedGradient(step, *reduced.pages.key, np.array(reduced.norms, "<f4").tobytes())
