"""One worker's replica of the state: the pages that it holds, the log that it applies to them, its votes.

Drives the protocol (ids and norms, no tensors) with what arrives, and does to tensors what the protocol says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.determinism import Init, materialize
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.worker_protocol import Apply, Effect, Install, SendVote, WorkerProtocol, held_runs
from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import LOSS, ModelLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap, ReplicaSet
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.fault_points import FaultPoint, OnFaultPoint
from elaswave_spmd.worker.gradient_reduction import GradientReducer
from elaswave_spmd.worker.optimizers import clip_divisor
from elaswave_spmd.worker.page_norms import page_norm_values
from elaswave_spmd.worker.parameter_broadcast import StageGroup
from elaswave_spmd.worker.parameters import Parameters
from elaswave_spmd.worker.spec import Job
from elaswave_spmd.worker.stage_boundary import Send
from elaswave_spmd.worker.state import LEARNING, Chores, HeldState, Saved, contains, cut
from elaswave_spmd.worker.state_transfer import learn, teach


class StateReplica:
    """The held pages of one worker, from mesh epoch to mesh epoch.

    Args:
        values: compute buffers of the layers that this worker computes; the executor changes it between epochs.
        version: the step that the state is at when this worker becomes a member.
        device: where state and sums lie.
        group: of this worker's stage, for parameters; None: links alone.
        visit: told of the points that a step passes (for faults to be injected, and progress).
    """

    def __init__(
        self,
        rank: int,
        job: Job,
        layout: ModelLayout,
        values: Mapping[int, ValueBuffer],
        placement: Placement,
        version: int,
        device: Device,
        send: Send,
        visit: OnFaultPoint,
        group: StageGroup | None = None,
    ) -> None:
        self.rank, self._job, self._layout, self._values = rank, job, layout, values
        self._send, self._visit = send, visit
        self.drops_params = bool(placement.shardings.params.axes)
        separate = self.drops_params or job.torch_dtype != torch.float32
        self.state = HeldState(layout, job.optimizer, device, separate_master=separate)
        self.reducer = GradientReducer(
            rank,
            layout,
            job.num_microbatches,
            device.place,
            sharded=bool(placement.shardings.grads.axes),
            add_in_place=job.torch_dtype == torch.float32,
            send=send,
            entry_done=self._entry_done,
        )
        self.reducer.decided = version
        # All members of the first mesh begin at the version that a checkpoint had.
        restored = version if placement.mesh.epoch == 0 else 0
        self.protocol = WorkerProtocol(rank, -1, (), (), version=version, restored=restored)
        self._entries: dict[int, dict[PageRange, Tensor]] = {}
        self._forwarded: set[tuple[int, PageRange, int]] = set()  # (step, run, receiver) of entries sent
        self._taught: set[tuple[PageRange, int]] = set()  # (run, learner) whose state was sent
        self._unsure: set[int] = set()  # peers that may not have got what was sent to them
        ways = device.place, job.torch_dtype, send, self._unsure, self.protocol, group
        self.parameters = Parameters(rank, layout, values, self.state, *ways)
        self._early: list[tuple[int, m.Message, Tensor]] = []
        self.chores = Chores()
        """Copies of state that is taught and learned, for whenever this worker waits."""
        self._written: dict[PageRange, bytes] = {}  # hashes of the state when it was written last
        self._reported_learned = -1
        self._runs: dict[PageRange, ReplicaSet] = {}
        self._since: dict[PageRange, int] = {}  # the version at which it began to hold or learn a run
        self._loss_taught = False  # whether the primary of the loss page, which this worker learns, has sent its loss
        self.applied: Callable[[m.Applied], None] = lambda report: None
        """Told of every version, once it is complete: the state may be copied, and changes after the call."""

    # ---- mesh epochs

    def bind(self, placement: Placement, replica_map: ReplicaMap, highest_version: int, validating: bool) -> None:
        """Takes its place in a (newer) mesh epoch. No chore is left from the one before.

        Args:
            replica_map: of the layers that this worker computes, or reads parameters of, and of all that it holds.
        """
        self.placement = placement
        self._written.clear()
        held, before = held_runs(replica_map, self.rank), self._runs
        self._loss_key = next((r.key for r in held if self._is_loss(r)), None)
        self._loss_taught = self._loss_taught and self._loss_key is not None
        self._runs = {r.key: r for r in held}
        self._since = {key: self._since_when(key, highest_version) for key in self._runs}
        # Of an epoch that it never was in, it does not know who learned: who learned before may have to begin again.
        known = self._taught if placement.mesh.epoch == self.protocol.epoch + 1 else ()
        learning = {(key, rank) for key, run in self._runs.items() for rank in run.learners - self._unsure}
        self._taught = learning.intersection(known)
        # Who does not hold or learn a run any more has dropped its entries, and may learn it again later.
        sure = (sent for sent in self._forwarded if sent[2] not in self._unsure)
        self._forwarded = {sent for sent in sure if (run := self._runs.get(sent[1])) and run.reaches(sent[2])}
        self._split_entries()
        members = placement.mesh.members
        self.protocol.enter(placement.mesh.epoch, members, held, self._loss_key, highest_version)
        self.state.rebind((r for r in held if not self._is_loss(r)), self._values)
        self.parameters.bind(placement, replica_map)
        layers = placement.layers_of_stage(placement.mesh.stage_of(self.rank))
        self.reducer.bind(replica_map, layers, self.protocol.version + 1, self._unsure)
        for step, entries in self._entries.items():
            for key, entry in entries.items():
                self.reducer.entry_known(step, key)
                run, was = self._runs[key], next((r.primary for k, r in before.items() if contains(k, key)), None)
                was = self.rank if run.primary in self._unsure else was
                self._forward_entry(step, run, entry, self.protocol.norms_at(step, key), was)
        self._unsure.clear()

    def _since_when(self, key: PageRange, now: int) -> int:
        if key in self._since:
            return self._since[key]
        return next((since for whole, since in self._since.items() if contains(whole, key)), now)

    def resume(self) -> None:
        """When everything is in place: what came early, and its votes again."""
        early, self._early = self._early, []
        for sender, message, payload in early:
            self.handle(sender, message, payload)
        self.parameters.answer()
        self._perform(self.protocol.votes_again())
        self.report_learned()

    def initialise(self, inits: Mapping[str, Init]) -> None:
        """Initial values of all held pages: version 0, published."""

        def draw(name: str, first: int, stop: int) -> Tensor:
            return torch.from_numpy(materialize(inits[name], self._job.seed, name, first, stop))

        self.state.initialise(draw)
        for layer in self.parameters.layers:
            self.parameters.publish(layer, 0)

    def restore(self, saved: Saved) -> None:
        """All held pages as they were saved at the version that the run goes on from, published."""
        self.state.restore(saved, self.protocol.version)
        for layer in self.parameters.layers:
            self.parameters.publish(layer, self.protocol.version)

    def teach(self) -> None:
        """Between two steps: the state of primary runs goes to those who are to learn them, before the next vote."""
        version = self.protocol.version
        state = {part.run.key: part for part in self.state}
        for key, run in self._runs.items():
            learners = [it for it in sorted(run.learners) if run.primary == self.rank and (key, it) not in self._taught]
            if learners:
                self._taught.update((key, learner) for learner in learners)
                norms = np.array(self.protocol.norms_at(version, key), "<f4").tobytes()
                message = m.PageState(version, *key, norms)
                what = state[key] if key in state else self._loss()
                self.chores.add(teach(self.state, what, message, learners, self._send))

    def _loss(self) -> Tensor:
        """What there is to learn of the loss page: whether there is a loss yet, and which."""
        loss = self.protocol.loss_at(self.protocol.version)
        return torch.tensor([0.0, 0.0] if loss is None else [1.0, loss], dtype=torch.float32)

    def report_learned(self) -> None:
        """Tells the controller, once an epoch, that nothing is left to learn."""
        epoch = self.protocol.epoch
        learns = any(self.rank in run.learners for run in self._runs.values())
        complete = all(part.version != LEARNING for part in self.state) and not self._lacks_loss()
        if learns and self._reported_learned < epoch and complete:
            self._reported_learned = epoch
            self._send(CONTROLLER, m.CaughtUp(self.rank, epoch), None)

    def _lacks_loss(self) -> bool:
        """Whether it could not vote with the loss of its version, as the primary of the loss page would have to."""
        learns = self._loss_key is not None and self.rank in self._runs[self._loss_key].learners
        return learns and not self._loss_taught and self.protocol.loss_at(self.protocol.version) is None

    def _is_loss(self, run: ReplicaSet) -> bool:
        return self._layout.layers[run.layer].block_of(run.first).kind == LOSS

    def _split_entries(self) -> None:
        """Entries of runs that were cut follow the cuts; of runs that are not held here any more they go."""
        for step, entries in self._entries.items():
            found: dict[PageRange, Tensor] = {}
            for key, entry in entries.items():
                found |= cut(self._layout, self._runs, key, entry)
            self._entries[step] = found

    def collect(self) -> None:
        """Whatever has come through the group of the stage."""
        self.parameters.collect()
        self.protocol.group_ready = self.parameters.grouped.ready

    # ---- messages

    def handle(self, sender: int, message: m.Message, payload: Tensor | None) -> None:
        """Whatever concerns state. Data is valid in any epoch; what this worker has no use for yet is kept."""
        match message:
            case m.PartialSum():
                assert payload is not None
                self.reducer.node_received(message, payload)
            case m.ReducedGradient():
                assert payload is not None
                self._entry_received(sender, message, payload)
            case m.Vote():
                self._perform(self.protocol.vote_received(message))
            case m.Publish():
                assert payload is not None
                self.parameters.file(message, payload)
                self._perform(self.protocol.publish_received(message))
            case m.Need():
                self.parameters.needed(sender, message)
            case m.GroupLost():
                self.parameters.group_lost(message)
            case m.PageState():
                assert payload is not None
                self._state_received(sender, message, payload)
            case m.LinkClosed():  # what the peer may lack is sent again in the next mesh epoch
                self._unsure.add(message.peer)
            case _:
                raise AssertionError(f"worker {self.rank} got {message}")

    def _entry_received(self, sender: int, message: m.ReducedGradient, payload: Tensor) -> None:
        if message.step <= self.protocol.version:
            return
        parts = cut(self._layout, self._runs, (message.layer, message.first, message.stop), payload)
        if sum(stop - first for _, first, stop in parts) < message.stop - message.first:
            self._early.append((sender, message, payload))  # of an epoch in which more is held here, perhaps
        norms = np.frombuffer(message.norms, "<f4").tolist()
        for key, entry in parts.items():
            # Kept even if this epoch needs none of the step any more: the next one may fall back to the version before.
            if key not in self._entries.setdefault(message.step, {}):
                self._entries[message.step][key] = entry
                own = norms[key[1] - message.first : key[2] - message.first]
                self.reducer.entry_known(message.step, key)
                # From the primary of an older epoch, perhaps: its mirrors need not be those of this one.
                self._forward_entry(message.step, self._runs[key], entry, own)
                self._perform(self.protocol.entry_complete(message.step, key, own, self._loss_of(key, entry)))

    def _state_received(self, sender: int, message: m.PageState, payload: Tensor) -> None:
        layer, first, stop = message.layer, message.first, message.stop
        inside = [k for k in self._runs if k[0] == layer and first <= k[1] < stop]
        if not inside:
            self._early.append((sender, message, payload))  # of an epoch in which it is learned here
            return
        # It was to be learned here before, and is again: entries since then did not come here. Or it is what a lost
        # primary sent, and the entries that would bring it up to date have been used: the new primary teaches anew.
        # (What a living one sends comes before its next vote, and so is never behind.)
        if message.step < max(self.protocol.version, *(self._since[key] for key in inside)):
            return
        if (layer, first, stop) == self._loss_key:
            known, loss = payload.tolist()
            self.protocol.learned(message.step, (layer, first, stop), (), loss if known else None)
            self._loss_taught = True
            self.report_learned()
            return
        self.chores.add(learn(self.state, message, payload, self.protocol, self.report_learned))

    # ---- reduction, commit, publication

    def _entry_done(self, step: int, run: ReplicaSet, entry: Tensor) -> None:
        """A run of this worker's primary pages is reduced: forward it, tell the protocol.

        `step` can be ahead of this worker's own: others' micro-batches may be all of a step.
        """
        key = run.key
        if step <= self.protocol.version or self.protocol.has_entry(step, key):
            return
        self._entries.setdefault(step, {})[key] = entry
        loss = self._loss_of(key, entry)
        norms = page_norm_values(entry, self._layout.page_size) if loss is None else []
        self._visit(FaultPoint.NORM, step)
        self._forward_entry(step, run, entry, norms)
        self._perform(self.protocol.entry_complete(step, key, norms, loss))

    def _forward_entry(
        self, step: int, run: ReplicaSet, entry: Tensor, norms: Sequence[float], was: int | None = None
    ) -> None:
        """Gives an entry to whoever else holds or learns the run; a mirror gives it to a primary that is a new one.

        Args:
            was: the primary in the older epoch, if this is a new one or may have missed what it was sent.
        """
        receivers = run.receivers if run.primary == self.rank else () if was in (None, run.primary) else (run.primary,)
        for receiver in receivers:
            if (step, run.key, receiver) not in self._forwarded:
                self._forwarded.add((step, run.key, receiver))
                self._send(receiver, m.ReducedGradient(step, *run.key, np.array(norms, "<f4").tobytes()), entry)

    def _loss_of(self, key: PageRange, entry: Tensor) -> float | None:
        return float(entry[0]) if key == self._loss_key else None

    def computed(self, step: int) -> None:
        """This worker has done its part of the step."""
        self._perform(self.protocol.computed(step))

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendVote(vote):
                    self.chores.finish()  # a learner that applies a step has no use for state of the version before it
                    for peer in self.placement.mesh.members:
                        if peer != self.rank:
                            self._send(peer, vote, None)
                case Apply():
                    self._apply(effect)
                case Install(publish):
                    self.parameters.install(publish)

    def _apply(self, decided: Apply) -> None:
        self._visit(FaultPoint.APPLY, decided.step)
        self.chores.finish()
        lr = self._job.learning_rate.at(decided.step)
        divisor = clip_divisor(decided.norm, self._job.clip) if decided.finite else 1.0
        entries = self._entries.pop(decided.step, {})
        if damaged := self.state.disown_damaged(self._written):
            self._send(CONTROLLER, m.Damaged(self.rank, self.protocol.epoch, decided.step, tuple(damaged)), None)
        for layer in self.parameters.layers:
            if decided.finite:
                self.state.apply(layer, entries, step=decided.step, lr=lr, divisor=divisor)
            else:
                self.state.keep(layer, decided.step)
            self.parameters.publish(layer, decided.step, grouped=decided.grouped)
            self._visit(FaultPoint.PUBLISH, decided.step)
        self.parameters.published(decided.step, grouped=decided.grouped)
        self._fingerprint(decided.step)
        self.reducer.step_decided(decided.step)
        self._forwarded = {key for key in self._forwarded if key[0] > decided.step}
        self._early = [e for e in self._early if getattr(e[1], "step", 0) >= decided.step]
        epoch = self.protocol.epoch
        what = decided.loss, decided.norm, decided.finite, decided.grouped
        report = m.Applied(decided.step, epoch, self.rank, *what)
        self._send(CONTROLLER, report, None)
        self.applied(report)

    def _fingerprint(self, version: int) -> None:
        """Hashes what was written, if the next Apply is to verify it; the controller compares the copies."""
        every = self._job.verify_every
        self._written = self.state.fingerprints() if every and (version + 1) % every == 0 else {}
        if self._written:
            rows = tuple((*key, digest) for key, digest in sorted(self._written.items()))
            self._send(CONTROLLER, m.Fingerprints(self.rank, version, rows), None)

    def forget(self) -> None:
        """Gives up what has been computed, here or elsewhere, of steps that are not decided."""
        self.chores.give_up()
        self.protocol.forget()
        self.parameters.grouped.give_up()
        self.reducer.forget()
        self._entries.clear()
        self._early.clear()
        self._forwarded = {sent for sent in self._forwarded if sent[0] <= self.protocol.version}

    # ---- reports

    def entries_held(self, step: int) -> tuple[PageRange, ...]:
        return tuple(sorted(self._entries.get(step, {})))
