"""The product with one rule of docs/protocol.md taken out, for each rule whose loss would not be seen at once.

Each mutant replaces methods of the real classes, inside a `with`. It is the smallest damage that breaks the one rule: a
mutant that crashes by itself would prove nothing about the schedules that have to find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from elaswave_spmd.controller import verification
from elaswave_spmd.controller.replacements import Replacements
from elaswave_spmd.controller.sum_verification import SumVerifier
from elaswave_spmd.recovery import controller_protocol, partial_step, peers
from elaswave_spmd.recovery.actions import RemoveMember
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.recovery.messages import (
    AT_ONCE,
    Damaged,
    LinkClosed,
    Message,
    PairSent,
    PartialSum,
    Publish,
    Ready,
    Reconfigure,
    ReducedGradient,
    StepReport,
    Vote,
)
from elaswave_spmd.recovery.partial_step import WEIGHTS_ONLY
from elaswave_spmd.recovery.vote_exchange import added
from elaswave_spmd.recovery.worker_protocol import Apply, Effect, Install, SendVote, WorkerProtocol
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.replicas import ReplicaMap, ReplicaSet, joined
from elaswave_spmd.sharding.reshard import ReshardPlan
from elaswave_spmd.worker import configuration, sum_exchange
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.channel import ForwardingChannel
from elaswave_spmd.worker.direct_channel import DirectChannel
from elaswave_spmd.worker.gradient_exchange import GradientExchange
from elaswave_spmd.worker.gradient_reduction import GradientReducer
from elaswave_spmd.worker.loop import Executor
from elaswave_spmd.worker.microbatches import MicrobatchRunner
from elaswave_spmd.worker.partial_step import StepUnderWay
from elaswave_spmd.worker.ready_order import KeptLimits
from elaswave_spmd.worker.stage_boundary import Crossing
from elaswave_spmd.worker.stage_collectives import StageCollectives
from elaswave_spmd.worker.state import HeldState
from elaswave_spmd.worker.state_replica import StateReplica
from elaswave_spmd.worker.state_soundness import StateSoundness
from elaswave_spmd.worker.step import StepRunner
from elaswave_spmd.worker.sum_checks import SumChecks
from elaswave_spmd.worker.sum_exchange import Exchange, ExchangePlan, LayerSum, StageExchanges, SumExchange, Way
from elaswave_spmd.worker.waiting import Waits
from tests.cluster import cluster
from tests.cluster.link_breaks import RECONFIGURED, LinkBreak
from tests.cluster.schedules import Schedule, run, undisturbed

_MOST_TURNS = 30_000  # many times what a schedule takes that comes to its end
_OF_A_MUTANT = f" in {Path(__file__).name}:"  # in the failures of exceptions that a mutant raises by itself
Patches = Mapping[tuple[Any, str], Callable[..., Any]]
"""(class or module, name) -> what takes its place."""


def _applies_after_prepare() -> Patches:
    """A worker that has answered a Prepare still decides a step in the old epoch."""
    decide = WorkerProtocol._decide

    def _decide(self: WorkerProtocol, step: int, votes: Sequence[Vote]) -> list[Effect]:
        promised, self.promised = self.promised, self.epoch
        try:
            return decide(self, step, votes)
        finally:
            self.promised = promised

    return {(WorkerProtocol, "_decide"): _decide}


def _reuses_a_report() -> Patches:
    """The controller takes a worker's last StepReport for its answer to every later Prepare."""
    begin, status = ControllerProtocol._begin, ControllerProtocol.report_received

    def _begin(self: ControllerProtocol, after: int) -> list[Any]:
        effects = begin(self, after)
        if self._change is not None and after == AT_ONCE:
            reports: dict[int, StepReport] = vars(self).get("reports", {})
            self._change.reports |= {rank: status for rank, status in reports.items() if rank in self.members}
        return effects

    def _status(self: ControllerProtocol, message: StepReport) -> list[Any]:
        vars(self).setdefault("reports", {})[message.rank] = message
        return status(self, message)

    return {(ControllerProtocol, "_begin"): _begin, (ControllerProtocol, "report_received"): _status}


def _votes_before_mirrored_gradients() -> Patches:
    """A vote speaks for pages that the worker is the primary of; gradients of those that it mirrors may come later."""
    vote_if_complete, decide = WorkerProtocol._vote_if_complete, WorkerProtocol._decide

    def _vote_if_complete(self: WorkerProtocol, step: int) -> list[Effect]:
        missing = self._missing_of(step)
        mirrored = missing - self._primary
        missing -= mirrored
        try:
            effects = vote_if_complete(self, step)
        finally:
            if step > self.version:
                self._missing_of(step).update(mirrored)
        return effects or self._advance(step)

    def _decide(self: WorkerProtocol, step: int, votes: Sequence[Vote]) -> list[Effect]:
        return [] if self._missing_of(self.version + 1) else decide(self, step, votes)

    return {(WorkerProtocol, "_vote_if_complete"): _vote_if_complete, (WorkerProtocol, "_decide"): _decide}


def _drops_future_epochs() -> Patches:
    """A vote of an epoch that this worker has not entered yet is dropped."""
    vote_received = WorkerProtocol.vote_received

    def _vote_received(self: WorkerProtocol, vote: Vote) -> list[Effect]:
        return [] if vote.epoch > self.epoch else vote_received(self, vote)

    return {(WorkerProtocol, "vote_received"): _vote_received}


def _installs_on_receipt() -> Patches:
    """Published parameters are written into the compute buffers when they arrive, whatever is being computed."""

    def _publish_received(self: WorkerProtocol, publish: Publish) -> list[Effect]:
        return [Install(publish)] if publish.step >= self.version else []

    return {(WorkerProtocol, "publish_received"): _publish_received}


def _no_version_check() -> Patches:
    """A micro-batch runs as soon as the compute buffers hold parameters, of whichever version."""

    def _is_at(self: ValueBuffer, version: int) -> bool:
        return self.flat.untyped_storage().nbytes() > 0

    return {(ValueBuffer, "is_at"): _is_at}


def _applies_twice() -> Patches:
    """A reduced gradient is applied to the state of its pages even if that state is at its version already."""
    apply = HeldState.apply

    def _apply(self: HeldState, layer: int, entries: Mapping[Any, Any], **how: Any) -> None:
        for part in self.layers.get(layer, ()):
            if part.version == how["step"] and part.pages.key in entries:
                part.version -= 1
        apply(self, layer, entries, **how)

    return {(HeldState, "apply"): _apply}


def _votes_two_ahead() -> Patches:
    """A worker that has all gradients of the step after next votes for it, before it has applied the step between."""
    gradient_complete = WorkerProtocol.gradient_complete

    def _gradient_complete(self: WorkerProtocol, step: int, *rest: Any) -> list[Effect]:
        effects = gradient_complete(self, step, *rest)
        ahead = step == self.version + 2 and self._computed >= self.version + 1 and not self._missing_of(step)
        if ahead and not self._has_voted(step) and self.promised <= self.epoch:
            effects = [*effects, *self._cast(self._vote(step))]
        return effects

    return {(WorkerProtocol, "gradient_complete"): _gradient_complete}


def _no_fence() -> Patches:
    """A vote of an older epoch counts in the present one."""
    vote_received = WorkerProtocol.vote_received

    def _vote_received(self: WorkerProtocol, vote: Vote) -> list[Effect]:
        if vote.epoch < self.epoch and self._is_expected(vote):
            vote = Vote(vote.step, self.epoch, vote.sender, vote.norm, vote.loss)
        return vote_received(self, vote)

    return {(WorkerProtocol, "vote_received"): _vote_received}


def _puts_off_without_limit() -> Patches:
    """A worker puts off the weight gradients of any number of micro-batches."""
    return {(configuration, "KeptLimits"): lambda in_flight, put_off: KeptLimits(in_flight, 99 if put_off else 0)}


def _makes_weights_twice() -> Patches:
    """Weight gradients that were put off, and made since the StepReport, are made once more."""
    backward_weights, note = MicrobatchRunner.backward_weights, StepUnderWay.note
    last = [-1]

    def _backward_weights(self: MicrobatchRunner, step: int, microbatch: int, **how: Any) -> None:
        backward_weights(self, step, microbatch, **how)
        last[0] = microbatch

    def _note(self: StepUnderWay, microbatch: int, *, alone: bool) -> None:
        if last[0] != microbatch:
            note(self, microbatch, alone=alone)
        last[0] = -1

    return {(MicrobatchRunner, "backward_weights"): _backward_weights, (StepUnderWay, "note"): _note}


def _reports_what_has_left() -> Patches:
    """Weight gradients count as put off although sums of some layers have been made and given up."""

    def _put_off(self: StepRunner) -> tuple[int, ...]:
        found = (u for u, left in self._work.items() if not left.forward and left.backward == WEIGHTS_ONLY)
        return tuple(sorted(found))

    return {(StepRunner, "_awaiting_weight_gradients"): _put_off}


def _weights_alone_of_the_lost() -> Patches:
    """Of a lost worker's micro-batches, the weight gradients alone are asked of others."""
    put_off = partial_step._Survey.put_off

    def _put_off(self: Any) -> tuple[dict[int, int], ...]:
        everything = range(self.placement.num_microbatches)
        return tuple(
            {**dict.fromkeys((u for u in everything if u not in self.claims[stage]), -1), **found}
            for stage, found in enumerate(put_off.func(self))
        )

    return {(partial_step._Survey, "put_off"): property(_put_off)}  # type: ignore[dict-item]


def _first_replicas_unsent() -> Patches:
    """Workers of a first mesh that was not planned take the replicas from the plan."""
    reconfigure_message = ControllerProtocol._reconfigure_message

    def _reconfigure_message(self: ControllerProtocol, *about: Any, as_planned: bool = False) -> Reconfigure:
        return reconfigure_message(self, *about, as_planned=not self.placement.mesh.epoch)

    return {(ControllerProtocol, "_reconfigure_message"): _reconfigure_message}


def _waits_for_the_lost() -> Patches:
    """The first mesh waits for workers that were lost while they started."""

    def _lost_at_the_start(self: ControllerProtocol, rank: int, reason: str, replacement: int | None) -> list[Any]:
        return [RemoveMember(rank, lost=True)]

    return {(ControllerProtocol, "_lost_at_the_start"): _lost_at_the_start}


def _spares_that_are_gone() -> Patches:
    """A spare that was lost while it waited takes a lost worker's place."""
    lost = Replacements.lost

    def _lost(self: Replacements, rank: int) -> Ready | None:
        return None if rank in self._waiting else lost(self, rank)

    return {(Replacements, "lost"): _lost}


def _frozen_pages_age() -> Patches:
    """A frozen page stays at the version at which its values came."""

    def keep_frozen(self: ValueBuffer, version: int) -> None:
        pass

    return {(ValueBuffer, "keep_frozen"): keep_frozen}


def _votes_unchecked() -> Patches:
    """A worker votes before its checks have agreed."""

    def _until_checked(self: StepRunner, step: int) -> Waits:
        yield from ()

    return {(StepRunner, "_until_checked"): _until_checked}


def _keeps_what_may_be_wrong() -> Patches:
    """A worker goes on with its sums and tensors when another attempt begins."""
    return {(StepRunner, "forget_beyond"): lambda self, version: None}


def _recovers_what_may_be_wrong() -> Patches:
    """The step in which a worker computed wrongly is recovered in part."""
    return {(controller_protocol, "begins_anew"): lambda rate, **_: False}


def _votes_uncompared() -> Patches:
    """A worker votes for a step that it has computed from state that was not compared."""

    def _until_compared(self: StepRunner, version: int) -> Waits:
        yield from ()

    return {(StepRunner, "_until_compared"): _until_compared}


def _keeps_wrong_parameters() -> Patches:
    """A worker goes on with the parameters that a wrong replica had published."""
    repair = StateReplica.repair

    def _repair(self: StateReplica) -> None:
        values, self._values = self._values, {}
        try:
            repair(self)
        finally:
            self._values = values

    return {(StateReplica, "repair"): _repair}


def _learns_wrong_state() -> Patches:
    """A worker that learns pages keeps the state that a wrong replica has sent it."""

    def _repair(self: StateReplica) -> None:
        for values in self._values.values():
            values.keep_only(())
        self.parameters.forget_filed()

    return {(StateReplica, "repair"): _repair}


def _votes_before_sums() -> Patches:
    """A worker votes before the sums that it checks have agreed."""
    return {(SumChecks, "is_settled"): property(lambda self: True)}  # type: ignore[dict-item]


def _recovers_what_was_not_checked() -> Patches:
    """At rate 1 a step is recovered in part that a loss meets, and what was not checked of it by then never is."""
    return {(controller_protocol, "begins_anew"): lambda rate, *, is_begun, results_differ: is_begun and results_differ}


def _blames_the_checker() -> Patches:
    """Of two workers that differ the checker is wrong, whatever others have computed."""
    return {(verification, "verdict"): lambda pair, first, again: (pair.checker,)}


def _votes_of_applied_steps_stay() -> Patches:
    """A worker does not pass on votes for a step that it has applied, though others have not."""
    vote_received = WorkerProtocol.vote_received

    def _vote_received(self: WorkerProtocol, vote: Vote) -> list[Effect]:
        return [] if vote.step <= self.version and vote.epoch <= self.epoch else vote_received(self, vote)

    return {(WorkerProtocol, "vote_received"): _vote_received}


def _passes_on_before_it_votes() -> Patches:
    """A worker passes on the votes of the others in its block as soon as they are there."""
    advance = WorkerProtocol._advance

    def _advance(self: WorkerProtocol, step: int) -> list[Effect]:
        tally, effects = self._tally_of(step), list[Effect]()
        came = [*tally.came[0].values()]
        if not tally.own and came and len(came) == len(self.voters[0]) and len(self.voters) > 1:
            effects.append(SendVote(added(came, self.rank, 1), self._rounds[1].receivers))
        return [*effects, *advance(self, step)]

    return {(WorkerProtocol, "_advance"): _advance}


def _exchanges_unagreed() -> Patches:
    """A worker exchanges the sums of a step if it has its group, whether or not all members said so in their votes."""
    update = StateReplica.update

    def _update(self: StateReplica, decided: Apply) -> None:
        update(self, decided)
        grouped = self.parameters.grouped
        if isinstance(grouped, StageCollectives) and grouped.ready and grouped.exchanges.step != decided.step + 1:
            grouped.exchanges.agree(decided.step + 1)

    return {(StateReplica, "update"): _update}


def _gives_up_at_its_own_end() -> Patches:
    """A sum is given up when the exchange that brings it is complete here, whatever has become of it elsewhere."""

    def _complete(self: StageExchanges) -> list[LayerSum]:
        assert self.plan is not None
        self._complete += 1
        exchange = self.plan.order[self._complete - 1]
        if isinstance(exchange, SumExchange):
            return self._known_everywhere(exchange)
        known = self._complete - sum_exchange.WINDOW
        if known > 0 and isinstance(gradients := self.plan.order[known - 1], GradientExchange):
            self._known_everywhere(gradients)
        return []

    return {(StageExchanges, "complete"): _complete}


def _hosts_are_believed() -> Patches:
    """A worker gives up its own sums when all have what was exchanged within hosts: its host will send them on."""
    known_everywhere = StageExchanges._known_everywhere

    def _known_everywhere(self: StageExchanges, exchange: Exchange) -> list[LayerSum]:
        if not isinstance(exchange, SumExchange) or exchange.way is Way.DIRECT:
            return known_everywhere(self, exchange)
        if exchange.way is Way.BETWEEN_HOSTS or self.plan is None:
            return []
        given_up = [(exchange.layer, node) for node in exchange.own[self.plan.rank]]
        for layer_sum in given_up:
            del self._given.sums[layer_sum]
        return given_up

    return {(StageExchanges, "_known_everywhere"): _known_everywhere}


def _failed_groups_are_believed() -> Patches:
    """What a group was given arrives, it is thought, also if the group fails within the epoch."""
    return {(GradientReducer, "send_returned"): lambda self: None}


def _older_groups_are_believed() -> Patches:
    """What the group of an older epoch was given has arrived, it is thought in the new one."""
    enter_epoch = StageExchanges.enter_epoch

    def _enter_epoch(self: StageExchanges, plan: ExchangePlan) -> None:
        enter_epoch(self, plan)
        self.take_back()

    return {(StageExchanges, "enter_epoch"): _enter_epoch}


def _exchanges_without_a_window() -> Patches:
    """All exchanges whose sums are complete here are issued at once."""
    following = StageExchanges.next

    def _next(self: StageExchanges) -> Exchange | None:
        complete, self._complete = self._complete, self._issued
        try:
            return following(self)
        finally:
            self._complete = complete

    return {(StageExchanges, "next"): _next}


def _nothing_for_some() -> Patches:
    """A member that has no sum for another one sends it nothing in an exchange."""
    return {(sum_exchange, "_PADDING"): 0}  # type: ignore[dict-item]


def _exchanges_in_any_order() -> Patches:
    """Exchanges are issued as what is sent in them gets complete, and not in the order of the plan."""

    def _next(self: StageExchanges) -> Exchange | None:
        if self.plan is None or not self._is_begun or self._issued - self._complete >= sum_exchange.WINDOW:
            return None
        for at, one in enumerate(self.plan.order[self._issued :], self._issued):
            if self._has_all_of(one):
                order = [*self.plan.order]
                order.insert(self._issued, order.pop(at))
                self.plan = replace(self.plan, order=tuple(order))
                return one
        return None

    return {(StageExchanges, "next"): _next}


def _gradients_before_their_sums() -> Patches:
    """The reduced gradients of a layer are exchanged before the last sums that they are made of."""
    return {(sum_exchange, "LAG"): -1}  # type: ignore[dict-item]


def _all_receivers_by_the_group() -> Patches:
    """A reduced gradient that the group takes goes over no link, to mirrors in other stages and learners neither."""
    relay = StateReplica._relay_gradient

    def _relay(self: StateReplica, step: int, pages: ReplicaSet, *reduced: Any) -> None:
        if pages.primary == self.rank and self._exchanges.mirrors(step, pages.key):
            self._gradients_sent.update((step, pages.key, receiver) for receiver in pages.receivers)
        relay(self, step, pages, *reduced)

    return {(StateReplica, "_relay_gradient"): _relay}


def _gradients_are_known_at_once() -> Patches:
    """A gradient counts as brought when its exchange is complete here, whatever has become of it elsewhere."""

    def _complete(self: StageExchanges) -> list[LayerSum]:
        assert self.plan is not None
        self._complete += 1
        if isinstance(exchange := self.plan.order[self._complete - 1], GradientExchange):
            return self._known_everywhere(exchange)
        known = self._complete - sum_exchange.WINDOW
        if known > 0 and isinstance(sums := self.plan.order[known - 1], SumExchange):
            return self._known_everywhere(sums)
        return []

    return {(StageExchanges, "complete"): _complete}


def _failed_groups_have_brought_gradients() -> Patches:
    """The gradients that a group was given arrive, it is thought, also if the group fails within the epoch."""
    return {(StateReplica, "_send_returned"): lambda self: self.reducer.send_returned()}


def _older_groups_have_brought_gradients() -> Patches:
    """The gradients that the group of an older epoch was given have arrived, it is thought in the new one."""
    enter_epoch = StageExchanges.enter_epoch

    def _enter_epoch(self: StageExchanges, plan: ExchangePlan) -> None:
        enter_epoch(self, plan)
        self.take_back_gradients()

    return {(StageExchanges, "enter_epoch"): _enter_epoch}


def _no_links_to_inputs() -> Patches:
    """The worker of a recovery plan's line is no peer of those that may have its inputs, or want its outputs."""

    def _hands(placement: Placement, recovery: peers.Recovery) -> peers.Pairs:
        return np.empty((0, 2), np.int64)

    return {(peers, "_hands"): _hands}


def _no_links_to_other_stages() -> Patches:
    """A primary is no peer of replicas and learners of its pages in other stages."""

    def _mirrors(placement: Placement, replica_map: ReplicaMap) -> Iterator[tuple[int, int]]:
        return iter(())

    return {(peers, "_mirrors"): _mirrors}


def _answers_before_there_is_a_link() -> Patches:
    """Who asks for parameters is answered at once, also if it has entered an epoch that brings the link to it."""

    def reaches(self: ForwardingChannel, peer: int) -> bool:
        return True

    return {(ForwardingChannel, "reaches"): reaches}


def _anybody_adds_once_more() -> Patches:
    """Sums that differ are added once more by any member, also by one that some who have gradients have no link to."""
    more = SumVerifier._more

    def _more(self: SumVerifier, question: Any) -> tuple[int, ...]:
        with mock.patch.object(self._protocol, "peers", None):
            return more(self, question)

    return {(SumVerifier, "_more"): _more}


def _any_payload_is_the_next() -> Patches:
    """A worker takes the next payload of a pair for that of the next message, also if one before it has not come."""
    sent = DirectChannel._sent

    def _sent(self: DirectChannel, sender: int, message: PairSent, payload: Any) -> None:
        arriving = self._arriving.get(sender)
        if arriving is not None and not message.resent:
            arriving.number = max(arriving.number, message.number - 1)
        sent(self, sender, message, payload)

    return {(DirectChannel, "_sent"): _sent}


def _failed_pairs_are_believed() -> Patches:
    """What a pair was given arrives, it is thought, also if the pair fails within the epoch."""
    give_up = DirectChannel._give_up

    def _give_up(self: DirectChannel, *arguments: Any, **options: Any) -> None:
        with mock.patch.object(self, "_send_again"):
            give_up(self, *arguments, **options)

    return {(DirectChannel, "_give_up"): _give_up}


def _older_pairs_are_believed() -> Patches:
    """What a pair of an older epoch was given has arrived, it is thought in the new one."""
    enter_epoch = DirectChannel.enter_epoch

    def _enter_epoch(self: DirectChannel, *arguments: Any) -> None:
        with mock.patch.object(self, "_send_again"):
            enter_epoch(self, *arguments)

    return {(DirectChannel, "enter_epoch"): _enter_epoch}


def _losses_of_later_pairs_are_forgotten() -> Patches:
    """A worker does not note that a pair was lost in an epoch that it has not entered yet."""
    enter_epoch = DirectChannel.enter_epoch

    def _enter_epoch(self: DirectChannel, *arguments: Any) -> None:
        self._lost_later.clear()
        enter_epoch(self, *arguments)

    return {(DirectChannel, "enter_epoch"): _enter_epoch}


def _closed_links_lose_nothing() -> Patches:
    """A worker takes what it sent on a link that it finds closed for arrived."""
    handle = StateReplica.handle

    def _handle(self: StateReplica, sender: int, message: Message, payload: Any) -> None:
        if not isinstance(message, LinkClosed):
            handle(self, sender, message, payload)

    return {(StateReplica, "handle"): _handle}


def _links_lost_before_an_epoch_are_forgotten() -> Patches:
    """A worker takes what it sends as a mesh epoch begins for arrived, also on a link that is closed by then."""
    enter_epoch = StateReplica.enter_epoch

    def _enter_epoch(self: StateReplica, *arguments: Any, **options: Any) -> None:
        enter_epoch(self, *arguments, **options)
        self._unsure.clear()

    return {(StateReplica, "enter_epoch"): _enter_epoch}


def _missed_epochs_change_nothing() -> Patches:
    """A worker that has missed a mesh epoch takes it that the others still have what it had sent to them before."""
    enter_epoch = StateReplica.enter_epoch

    def _enter_epoch(self: StateReplica, *arguments: Any, has_missed: bool) -> None:
        enter_epoch(self, *arguments, has_missed=False)

    return {(StateReplica, "enter_epoch"): _enter_epoch}


def _reports_are_of_the_newest_layers() -> Patches:
    """A StepReport is taken for one of the layers that its worker has by the newest Reconfigure, entered or not."""
    report_received = ControllerProtocol.report_received

    def _report_received(self: ControllerProtocol, message: StepReport) -> list[Any]:
        return report_received(self, msgspec.structs.replace(message, layers=()))

    return {(ControllerProtocol, "report_received"): _report_received}


def _changes_of_the_mesh_hash_anew() -> Patches:
    """At a change of the mesh state is hashed anew, whatever has become of it since it was written."""

    def report_damage(self: StateSoundness) -> None:
        for part in self.state:
            part.written = None

    return {(StateSoundness, "report_damage"): report_damage}


def _votes_unlooked() -> Patches:
    """A worker votes for what it has computed without a look at the parameters that it has computed it from."""
    return {(StateSoundness, "check"): lambda self, **how: True}


def _damage_taints_nothing() -> Patches:
    """What a worker has computed from damaged state, and sent, is kept by the others."""
    damaged = ControllerProtocol.damaged

    def _damaged(self: ControllerProtocol, message: Damaged) -> list[Any]:
        return damaged(self, msgspec.structs.replace(message, reason="damage of memory"))

    return {(ControllerProtocol, "damaged"): _damaged}


def _joins_under_way() -> Patches:
    """Page ranges are joined in every change that leaves nothing to copy, though a step may be under way."""
    plan_state = ControllerProtocol._plan_state

    def _plan_state(self: ControllerProtocol, *arguments: Any, **options: Any) -> ReshardPlan:
        plan = plan_state(self, *arguments, **options)
        if self._reshard is not None:
            return plan
        after = joined(plan.after, self.layout)
        return replace(plan, during=after, after=after)

    return {(ControllerProtocol, "_plan_state"): _plan_state}


def _takes_parts_alone() -> Patches:
    """What comes for pages that are several ranges here counts for these, and is not kept for ranges joined of them."""
    node_received, gradient_received = GradientReducer.node_received, StateReplica._gradient_received

    def _node_received(self: GradientReducer, message: PartialSum, payload: Any) -> None:
        was_early = message in self._early
        node_received(self, message, payload)
        ranges = [(a, a + pages.num_pages) for a, pages in self._ranges_by_use.get(message.layer, ())]
        inside = sum(b - a for a, b in ranges if message.first <= a and b <= message.stop)
        if not was_early and inside == message.stop - message.first:
            self._early.pop(message, None)

    def _gradient_received(self: StateReplica, sender: int, message: ReducedGradient, payload: Any) -> None:
        was_early = (sender, message) in self._early
        gradient_received(self, sender, message, payload)
        ranges = (key for key in self._held if key[0] == message.layer)
        inside = sum(b - a for _, a, b in ranges if message.first <= a and b <= message.stop)
        if not was_early and inside == message.stop - message.first:
            self._early.pop((sender, message), None)

    return {
        (GradientReducer, "node_received"): _node_received,
        (StateReplica, "_gradient_received"): _gradient_received,
    }


def _refuses_tensors_of_checkers() -> Patches:
    """A worker expects boundary tensors of its own micro-batches alone through a pair, and none of those it checks."""
    expects = Executor._expects

    def _expects(self: Executor, sender: int, message: Any) -> bool:
        if isinstance(message, Crossing):
            stage = self.placement.mesh.stage_of(self.rank)
            if self.placement.worker_of_microbatch(stage, message.microbatch) != self.rank:
                return False
        return expects(self, sender, message)

    return {(Executor, "_expects"): _expects}


MUTANTS: dict[str, Callable[[], Patches]] = {
    "updates in an epoch after its Prepare was answered": _applies_after_prepare,
    "takes a StepReport for an answer to every later Prepare": _reuses_a_report,
    "votes before the mirrored gradients": _votes_before_mirrored_gradients,
    "drops messages of future epochs": _drops_future_epochs,
    "installs published parameters on receipt": _installs_on_receipt,
    "computes with parameters of any version": _no_version_check,
    "applies a reduced gradient twice": _applies_twice,
    "votes two steps ahead": _votes_two_ahead,
    "counts votes of older epochs": _no_fence,
    "leaves frozen pages at the version at which they came": _frozen_pages_age,
    "puts off without a limit": _puts_off_without_limit,
    "makes weight gradients twice that were put off": _makes_weights_twice,
    "reports as put off what has left in part": _reports_what_has_left,
    "asks for the weight gradients alone of a lost worker": _weights_alone_of_the_lost,
    "passes on no votes for a step that it has applied": _votes_of_applied_steps_stay,
    "passes on votes before it has voted": _passes_on_before_it_votes,
    "has no link to who has its inputs": _no_links_to_inputs,
    "has no link to mirrors in other stages": _no_links_to_other_stages,
    "answers before there is a link": _answers_before_there_is_a_link,
    "asks anybody to add once more": _anybody_adds_once_more,
    "exchanges sums without the votes of all": _exchanges_unagreed,
    "gives up a sum that only this worker has exchanged": _gives_up_at_its_own_end,
    "sends no sum again when a group has failed": _failed_groups_are_believed,
    "sends no sum again when the epoch of a group is over": _older_groups_are_believed,
    "issues exchanges without a limit": _exchanges_without_a_window,
    "sends nothing to a member that is to get no sum": _nothing_for_some,
    "issues exchanges in the order of its own sums": _exchanges_in_any_order,
    "exchanges reduced gradients before their sums": _gradients_before_their_sums,
    "leaves a gradient that the group takes to the group alone": _all_receivers_by_the_group,
    "takes a gradient for sent that only this worker has exchanged": _gradients_are_known_at_once,
    "sends no gradient again when a group has failed": _failed_groups_have_brought_gradients,
    "sends no gradient again when the epoch of a group is over": _older_groups_have_brought_gradients,
    "gives up its own sums when its host has them": _hosts_are_believed,
    "takes the next payload of a pair for that of any message": _any_payload_is_the_next,
    "sends no payload again when a pair has failed": _failed_pairs_are_believed,
    "sends no payload again when the epoch of a pair is over": _older_pairs_are_believed,
    "sends nothing again that was on a link that was lost": _closed_links_lose_nothing,
    "sends nothing again when a link was lost before its epoch was entered": _links_lost_before_an_epoch_are_forgotten,
    "takes what was run through older layers for the new ones": _reports_are_of_the_newest_layers,
    "sends nothing again when it has missed an epoch": _missed_epochs_change_nothing,
    "takes for written what has changed before a change of the mesh": _changes_of_the_mesh_hash_anew,
    "votes without a look at what it has computed with": _votes_unlooked,
    "keeps what was computed from damaged parameters": _damage_taints_nothing,
    "joins page ranges of a step under way": _joins_under_way,
    "keeps nothing for page ranges that are joined": _takes_parts_alone,
    "uses pairs that were lost in an epoch before it has entered that": _losses_of_later_pairs_are_forgotten,
    "refuses what a pair brings of a micro-batch that it checks": _refuses_tensors_of_checkers,
    "sends no replicas to a first mesh that was not planned": _first_replicas_unsent,
    "waits for workers that were lost while they started": _waits_for_the_lost,
    "gives a place to a spare that was lost": _spares_that_are_gone,
    "votes before its checks have agreed": _votes_unchecked,
    "keeps what it computed in an older attempt": _keeps_what_may_be_wrong,
    "recovers a step in part that is known to be wrong": _recovers_what_may_be_wrong,
    "votes before replicas are compared": _votes_uncompared,
    "keeps parameters of a wrong replica": _keeps_wrong_parameters,
    "keeps state learned from a wrong replica": _learns_wrong_state,
    "votes before its sums have agreed": _votes_before_sums,
    "recovers a step in part that a loss has met at rate 1": _recovers_what_was_not_checked,
    "blames the checker": _blames_the_checker,
}
STARTING = frozenset(list(MUTANTS)[-12:-9])
"""Mutants that show where workers are lost while they start, and are replaced: schedules with `starting`."""
REFUSING = "refuses what a pair brings of a micro-batch that it checks"
"""The bits stay the same: the message that is refused fails a schedule. Those with `miscompute` and `paired`."""
CHECKING = frozenset({"asks anybody to add once more", REFUSING, *list(MUTANTS)[-9:]})
"""Mutants that show where workers compute wrongly: schedules with `miscompute`."""

FROZEN = frozenset({"leaves frozen pages at the version at which they came"})
"""Mutants that show where some parameters are frozen: schedules with `frozen`."""


MISSING = "sends nothing again when it has missed an epoch"
"""Schedules meet it seldom: those with `links` and `votes`."""
LINKS = frozenset([*list(MUTANTS)[36:39], MISSING])
"""Mutants that show where links are lost between living workers: schedules with `links`."""
FLIPS = frozenset(list(MUTANTS)[40:43])
"""Mutants that show where bits flip in memory: schedules with `flips`."""
LATE = frozenset([*list(MUTANTS)[10:14], *list(MUTANTS)[37:39]])
"""Mutants that show where steps are interrupted with weight gradients put off: schedules with `late`."""
VOTING = frozenset([*list(MUTANTS)[14:16], MISSING])
"""Mutants that show where votes are passed on: schedules with `votes`."""
PEERS = frozenset(list(MUTANTS)[16:20])
"""Mutants that show where not everybody has a link to everybody: schedules with `peers`."""
MOVING = frozenset({"answers before there is a link"})
"""Mutants that show where workers change their stage: schedules with `moving`."""
GROUPED = frozenset(list(MUTANTS)[20:32])
"""Mutants that show where stages have process groups: schedules with `grouped`."""
SPREAD = frozenset(list(MUTANTS)[32:33])
"""Mutants that show where a stage has several workers on each of several hosts: schedules with `spread`."""
PAIRED = frozenset(
    [*list(MUTANTS)[33:36], "uses pairs that were lost in an epoch before it has entered that", REFUSING]
)
"""Mutants that show where workers have pairs: schedules with `paired`."""


UNENTERED = "sends nothing again when a link was lost before its epoch was entered"
"""Drawn schedules meet it seldom: in these, links are lost twice between a Reconfigure and its epoch."""


def schedule_for(name: str, seed: int) -> Schedule:
    """The schedule of a seed, of the kind that shows this mutant."""
    drawn = Schedule.draw(
        seed,
        moving=name in MOVING,
        starting=name in STARTING,
        frozen=name in FROZEN,
        miscompute=name in CHECKING,
        late=name in LATE,
        votes=name in VOTING,
        peers=name in PEERS,
        grouped=name in GROUPED,
        paired=name in PAIRED,
        links=name in LINKS,
        spread=name in SPREAD,
        flips=name in FLIPS,
    )
    if name != UNENTERED:
        return drawn
    workers = len(drawn.placement.mesh.members)  # each mesh epoch comes with as many Reconfigures
    breaks = LinkBreak(RECONFIGURED, workers + 3, "all"), LinkBreak(RECONFIGURED, 4 * workers, "one")
    return replace(drawn, breaks=breaks)


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Takes the rule out of the product, inside the `with`."""
    with ExitStack() as stack:
        for (owner, method), replacement in MUTANTS[name]().items():
            stack.enter_context(mock.patch.object(owner, method, replacement))
        yield


def short_run(schedule: Schedule) -> str:
    """What is wrong with the end of a schedule; empty: nothing. One that goes on and on is cut off sooner than others.

    Raises:
        AssertionError: a mutant has raised an exception by itself, which shows nothing of the rule that it takes out.
    """
    with mock.patch.object(cluster, "MOST_TURNS", _MOST_TURNS):
        ended = run(schedule)
    assert _OF_A_MUTANT not in ended.failure, ended.detail
    return ended.failure


def find(name: str, limit: int, enough: int = 3) -> list[int]:
    """The first seeds below `limit` whose schedules show the damage."""
    found = []
    for seed in range(limit):
        schedule = schedule_for(name, seed)
        undisturbed(schedule.run.key)
        if short_run(schedule):
            continue  # of a fault of the product
        with planted(name):
            if short_run(schedule):
                found.append(seed)
        if len(found) == enough:
            break
    return found


if __name__ == "__main__":
    for mutant in MUTANTS:
        print(f"{mutant}: {find(mutant, 1000)}", flush=True)
