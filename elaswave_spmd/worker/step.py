"""A training step on one worker: micro-batches through its stage, parameters, the vote, the update.

`StepRunner.train_step` is the step from top to bottom. A worker runs the micro-batches that the placement gives it; if
the mesh changes in the middle of the step, it then runs what the recovery plan leaves for it (docs/protocol.md, "A
change of the mesh"). In both cases it runs whichever action is ready (`worker.ready_order`).

The other parts of a step are elsewhere: `GradientReducer` reduces gradients and is called after each layer's backward;
`StepCommit` updates the state and publishes parameters, and is called by the handler of the last vote. So `train_step`
has no call of the optimizer: the update runs while `train_step` waits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.checks import CheckDraw
from elaswave_spmd.recovery.partial_step import FULL, INPUT_GRADIENT, WEIGHTS_ONLY
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, WEIGHTS, turns
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.worker.activations import tensors_of
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.checks import StepChecks
from elaswave_spmd.worker.configuration import Configuration
from elaswave_spmd.worker.context import WorkerContext
from elaswave_spmd.worker.digests import Digester
from elaswave_spmd.worker.microbatches import MicrobatchRunner
from elaswave_spmd.worker.pacing import PlannedPace
from elaswave_spmd.worker.partial_step import (
    RecoveryPlan,
    StepUnderWay,
    remaining_of_begun_step,
    remaining_of_new_step,
)
from elaswave_spmd.worker.programs.scores import ScoreForm
from elaswave_spmd.worker.ready_order import KeptLimits, MicrobatchWork, is_ready, next_ready
from elaswave_spmd.worker.stage_boundary import ACTIVATION, GRADIENT, Boundaries, Crossing
from elaswave_spmd.worker.step_commit import StepCommit
from elaswave_spmd.worker.waiting import Reason, Waiting, Waits


@dataclass(frozen=True)
class MicrobatchAction:
    """One micro-batch through the worker's stage, in one direction.

    Args:
        forward: True for a forward, False for a backward.
        microbatch: number of the micro-batch within the step.
        saves: for a forward: keep what its backward needs, since this worker runs the backward too.
        backward: for a backward: FULL; INPUT_GRADIENT, if only the gradient of its input is wanted; or WEIGHTS_ONLY.
        alone: for a backward: send the weight gradients by themselves, not added to those of other micro-batches here.
        last: no later action of this worker in this step needs parameters.
    """

    forward: bool
    microbatch: int
    saves: bool = True
    backward: int = FULL
    alone: bool = False
    last: bool = False


@dataclass(frozen=True)
class _Order:
    """The order in which one worker prefers its actions in a mesh epoch, among those that are ready.

    Args:
        turns: micro-batch -> its turn (the lowest runs first), for the micro-batches that the placement gives this
            worker.
        num_microbatches: the number of micro-batches of a step.
        limits: how many micro-batches a worker of this stage may keep anything of.
    """

    turns: Mapping[int, float]
    num_microbatches: int
    limits: KeptLimits

    @classmethod
    def of(cls, placement: Placement, rank: int, limits: KeptLimits) -> _Order:
        """The order of a worker with these limits."""
        return cls(turns(placement, placement.microbatches_of(rank)), placement.num_microbatches, limits)

    def turn(self, microbatch: int) -> float:
        """The turn of a micro-batch. If it was taken over from another worker, its position in the step is its turn."""
        return self.turns.get(microbatch, (2 * microbatch + 1) / (2 * self.num_microbatches))


class StepRunner:
    """Runs one step after another on whatever stage the worker belongs to.

    Args:
        context: of the worker.
        commit: casts this worker's vote, and applies the step once it is decided.
        values: layer -> compute buffer.
        waiting: the worker's loop, which handles messages while a step waits.
    """

    def __init__(
        self, context: WorkerContext, commit: StepCommit, values: dict[int, ValueBuffer], waiting: Waiting
    ) -> None:
        self._context = context
        self._commit = commit
        self._replica = commit.replica
        self._values = values
        self._waiting = waiting
        first_trained = context.model.layout.first_trained
        self._boundaries = Boundaries(context.rank, context.channel.send, context.device, first_trained)
        self._microbatches = MicrobatchRunner(context, values, self._replica.reducer, self._boundaries, waiting)
        draw = CheckDraw(context.job.seed, context.job.verify_rate)
        self.checks = StepChecks(context.rank, draw, Digester(context.device), context.channel.send)
        # The stage that the worker is on. `enter_epoch` sets all five, and is called before anything else.
        self._configuration: Configuration
        self._placement: Placement
        self._stage: int
        self._is_last: bool
        self._layers: range
        self._under_way: StepUnderWay | None = None
        self._recovery: RecoveryPlan | None = None
        self._work: dict[int, MicrobatchWork] = {}  # micro-batch -> what is left of it in the step under way
        self._order: _Order | None = None  # None: to be made again, for the present mesh epoch and limits
        self._limits = KeptLimits(1)
        self.pacing = self._microbatches.pacing
        self._next_pace: m.Pace | None = None  # the pace of a mesh epoch that is not entered yet
        self._next_limits: m.Limits | None = None  # limits to use from the next step of their mesh epoch on
        self._validated = -1  # the newest version of which the controller has all validation losses
        self._agreed = -1, -1  # the newest (mesh epoch, version) at which all replicas were the same
        self._unchecked = 0  # a step that is not checked, as it is recovered in part (V6); 0: there is none

    # ---- a step, from top to bottom

    def train_step(self, step: int) -> Waits:
        """Run this worker's part of a step until the step is applied here.

        Afterwards this worker's version is `step`. It advances in the middle of a wait, when the last missing vote or
        reduced gradient is handled (StepCommit).

        Raises:
            ConfigurationChanged: a new configuration has arrived. The caller enters it and calls this again, which then
                runs what is left of the step.
        """
        if self._recovery is not None and self._recovery.step > step:
            # Other members have applied this step. So this worker has voted for it, and has all reduced gradients. It
            # only lacks votes, which all members send again in the new epoch (C7).
            yield from self._until_applied(step)
            return
        if self._recovery is None or self._recovery.step < step:  # this step has no recovery plan: it runs as placed
            placed = self._placement.microbatches_of(self._context.rank)
            self._work = {microbatch: MicrobatchWork(True, FULL, alone=False) for microbatch in placed}
        yield from self._before_step(step)
        self._begin(step)
        while (action := (yield from self._next_action(step))) is not None:
            # Messages are handled after each layer (MicrobatchRunner) and in every wait. So a Prepare is answered
            # within the time of one layer.
            yield from self._run_action(step, action)
            self._waiting.check_configuration()
        yield from self._until_parameters_arrived(step - 1)
        yield from self._until_checked(step)
        self._replica.refuse_mixed_weights(step)
        yield from self._until_compared(step - 1)
        self._microbatches.report_data_wait(step)
        yield from self._until_sound(step)
        # After this vote the step may be decided: whichever member has the votes of all members applies it.
        self._commit.vote(step)
        yield from self._until_applied(step)
        self._boundaries.drop_decided(step)
        # Times are read after the step, not in it: on a device with streams, reading a time waits until its program
        # has run.
        times, memory = self._microbatches.pop_times(), self._microbatches.programs.memory.pop_rows()
        self._context.hooks.step_measured(step, *times, memory)

    def _begin(self, step: int) -> None:
        """Begin a step with the micro-batches of this worker. Does nothing if the step has begun here.

        After a change of the mesh an interrupted step counts as begun, unless this worker has changed its stage.
        """
        if self.step_under_way == step:
            return
        self._change_limits()
        if (recovery := self._context.hooks.device_recovery) is not None:
            recovery.begin_step(step, self._replica)
        microbatches = {microbatch for microbatch, left in self._work.items() if left.backward == FULL}
        reducer = self._replica.reducer
        # If the reducer still has sums, they are sums of this step over the layers of another stage, from which this
        # worker has moved in the middle of the step. The tree over its micro-batches is open there, so the gradients
        # that it computes here are sent micro-batch by micro-batch.
        self._under_way = StepUnderWay(step, microbatches, frozenset(microbatches), alone=reducer.has_sums)
        if self._under_way.alone:
            for left in self._work.values():
                left.alone = True
        reducer.begin_step(step, () if self._under_way.alone else microbatches)
        if step != self._unchecked:
            self.checks.begin(step, self._stage, self._placement, is_compared=self.is_compared(step - 1))
            self._replica.begin_checks(step)
        self._microbatches.begin_step(step, sorted(microbatches))
        if self._recovery is None or self._recovery.step < step:
            self.pacing.begin_step()  # a pace is planned for whole steps, so a recovered step has none

    def _next_action(self, step: int) -> Generator[Reason, None, MicrobatchAction | None]:
        """The next action of the step, once its input is here; None when nothing is left.

        While no action has its input, this worker computes checks (`verify.rate`).

        Raises:
            ConfigurationChanged: a new configuration has arrived meanwhile.
        """
        if not self._work:
            return None
        microbatch: int | None = None

        def has_ready() -> bool:
            nonlocal microbatch
            microbatch = self._ready(step)
            return microbatch is not None

        made = self.checks.num_made
        yield from self._check_until(step, has_ready, "an input for an action of step")
        self.checks.num_idle += self.checks.num_made - made
        yield from self._waiting.until(has_ready, "an input for an action of step", step)
        assert microbatch is not None
        left = self._work[microbatch]
        if left.forward:
            return MicrobatchAction(True, microbatch, saves=left.backward > 0)
        others = (other for u, other in self._work.items() if u != microbatch)
        last = not any(other.forward or other.needs_gradient for other in others)
        return MicrobatchAction(False, microbatch, backward=left.backward, alone=left.alone, last=last)

    def _ready(self, step: int) -> int | None:
        """The micro-batch to run next, of those whose next action has its input; None if there is none."""
        if self._order is None:
            self._order = _Order.of(self._placement, self._context.rank, self._limits)
        has = self._boundaries.arrived
        activation = has(ACTIVATION, step, self._layers.start) if self._stage else lambda _: True
        gradient = (lambda _: True) if self._is_last else has(GRADIENT, step, self._layers.stop - 1)
        limits, work = self._order.limits, self._work
        found = next_ready(work, self._order.turn, activation, gradient, limits)
        return self.pacing.choose(found, lambda action: is_ready(*action, work, activation, gradient, limits))

    def _run_action(self, step: int, action: MicrobatchAction) -> Waits:
        """Run an action, and take it off the work that is left of the step."""
        microbatch = action.microbatch
        neighbour = self._stage + 1 if action.forward else self._stage - 1
        receivers = partial(self._receivers, step, neighbour, microbatch)
        digests, run = self.checks.digests_of(microbatch), self._microbatches
        left, full, alone = self._work[microbatch], action.backward == FULL, action.alone
        # ZeRO-3: after the last action that needs parameters they are dropped until they are published at the next
        # version. A check that is still to be computed needs them as well.
        drop = action.last and self._replica.drops_params and not self.checks.pending(step)
        kind = FORWARD if action.forward else WEIGHTS if action.backward == WEIGHTS_ONLY else BACKWARD
        self.pacing.begin_action((kind, microbatch))
        if action.forward:
            yield from run.forward(step, microbatch, receivers, saves=action.saves, digests=digests)
            left.forward = False
            if left.backward:
                return
        elif action.backward == WEIGHTS_ONLY:
            run.backward_weights(step, microbatch, alone=alone, digests=digests)
        elif full and self._splits_backward():
            yield from run.backward_input(step, microbatch, receivers, drop=drop, digests=digests)
            left.backward = WEIGHTS_ONLY
            return
        else:
            yield from run.backward(step, microbatch, receivers, weights=full, alone=alone, drop=drop, digests=digests)
        if not action.forward:
            self.checks.computed(microbatch)
            if action.backward != INPUT_GRADIENT:
                assert self._under_way is not None
                self._under_way.note(microbatch, alone=alone)
        del self._work[microbatch]

    def _splits_backward(self) -> bool:
        """True if backwards run in two parts: the gradient of the input first, which the stage before waits for, and
        the weight gradients later."""
        return self._limits.put_off > 0 and self._microbatches.programs.has_split_layers

    def _receivers(self, step: int, stage: int, microbatch: int) -> tuple[int | None, ...]:
        """The receivers of a micro-batch's tensor on another stage: its worker there, and its checker if it has one."""
        own = self._worker_of(step, stage, microbatch)
        return own, *(checker for checker in self.checks.receivers(stage, microbatch) if checker != own)

    def _worker_of(self, step: int, stage: int, microbatch: int) -> int | None:
        """The worker that runs a micro-batch on another stage in this step; None if its part there is done."""
        if self._recovery is not None and self._recovery.step == step:
            return self._recovery.worker_of(stage, microbatch)
        return self._placement.worker_of_microbatch(stage, microbatch)

    # ---- checks

    def _check_until(self, step: int, ready: Callable[[], bool], what: str) -> Generator[Reason, None, bool]:
        """Compute checks until `ready()` is true or no check is left. Without `verify.rate` there are none.

        Returns:
            True if at least one check was computed.
        """
        ran = False
        while self.checks.pending(step):
            self._ask_for_dropped(step)
            yield from self._waiting.until(lambda: ready() or self._next_check(step) is not None, what, step)
            if ready() or (microbatch := self._next_check(step)) is None:
                break
            digests = self.checks.new_digests()
            self._microbatches.check(step, microbatch, digests)
            self.checks.checked(step, microbatch, digests.rows)
            ran = True
            self._waiting.check_configuration()
        return ran

    def _next_check(self, step: int) -> int | None:
        """The micro-batch of a check that can be computed now; None: none can."""
        return self.checks.ready(step, partial(self._microbatches.has_inputs, step))

    def _until_checked(self, step: int) -> Waits:
        """Compute all checks of this worker, and wait until they have agreed with the results of the others.

        Meanwhile the controller may ask this worker to compute another micro-batch, to find out who is wrong (V4).
        """
        while not self._are_checks_settled() or self.checks.pending(step):
            if (yield from self._check_until(step, lambda: False, "inputs to check step")):
                self._drop_parameters(step)
            yield from self._waiting.until(
                lambda: self._are_checks_settled() or bool(self.checks.pending(step)),
                "results that are checked in step",
                step,
            )

    def _are_checks_settled(self) -> bool:
        """True if all checks of this worker have agreed, both those of micro-batches and those of sums."""
        return self.checks.is_settled and self._replica.sums.is_settled

    def _ask_for_dropped(self, step: int) -> None:
        """Ask for sharded parameters that were dropped after this worker's last action: a check needs them again."""
        if dropped := [layer for layer in self._layers if self._values[layer].dropped_at == step - 1]:
            self._replica.parameters.refresh(dropped, step - 1)

    def _drop_parameters(self, step: int) -> None:
        """Drop sharded parameters that were kept, or asked for again, for a check."""
        if self._replica.drops_params and not self.checks.pending(step):
            self._microbatches.drop_parameters(step - 1)

    def check_again(self, message: m.CheckAgain) -> None:
        """Handle CheckAgain: this worker computes the micro-batch again if it is asked to, and sends the inputs of it
        that it keeps to the workers that are asked (V4)."""
        self.checks.asked(message)
        layers = self._placement.layers_of_stage(message.stage)
        self._boundaries.send_inputs_again(message.step, message.microbatch, layers, message.ranks)

    def receive_pace(self, message: m.Pace) -> None:
        """Handle Pace: use the planned frequencies of this mesh epoch, or keep them if the epoch is still to come."""
        epoch = self._placement.mesh.epoch
        if message.epoch == epoch:
            self.pacing.plan(PlannedPace.of(message))
        elif message.epoch > epoch:
            self._next_pace = message

    def receive_limits(self, message: m.Limits) -> None:
        """Handle Limits: keep them for the next step that begins in their mesh epoch. Older epochs are ignored."""
        if message.epoch >= self._placement.mesh.epoch:
            self._next_limits = message

    def _change_limits(self) -> None:
        """Use the limits that have arrived. Called between two steps, when no micro-batch is in flight or put off."""
        message, epoch = self._next_limits, self._placement.mesh.epoch
        if message is None or message.epoch > epoch:
            return
        self._next_limits = None
        if message.epoch == epoch:  # otherwise they were for an older mesh
            self._microbatches.split(self._keep_to(self._configuration.limited(message)))

    def _keep_to(self, configuration: Configuration) -> frozenset[int]:
        """Set this worker's limits. Returns the layers whose backward may be in two parts."""
        self._configuration = configuration
        self._limits = configuration.limits_of(self._stage)
        self._order = None
        return configuration.split_layers if self._limits.put_off else frozenset()

    # ---- comparison of replicas

    def is_compared(self, version: int) -> bool:
        """True if all replicas were the same at a version in this mesh epoch, or if the version is not compared."""
        return not self._context.job.compares_at(version) or self._agreed >= (self._placement.mesh.epoch, version)

    def replicas_agree(self, message: m.ReplicasAgree) -> None:
        """Handle ReplicasAgree, of this mesh epoch or of one that is not entered yet."""
        self._agreed = max(self._agreed, (message.epoch, message.step))
        if message.epoch == self._placement.mesh.epoch:
            self.checks.compared(message.step)

    def _until_compared(self, version: int) -> Waits:
        """Wait until all replicas are known to be the same at a version, if that version is compared (H1).

        The comparison goes on while this worker computes. Only votes and validations wait for it.
        """
        if not self.is_compared(version):
            yield from self._waiting.until(
                lambda: self.is_compared(version), "the comparison of replicas at step", version
            )

    def _until_sound(self, step: int) -> Waits:
        """If the state in this worker's memory is damaged, report it and wait for the epoch that begins the step anew.

        The step may have been computed from damaged parameters, so this worker must not vote for it (H5).
        """
        if not self._replica.soundness.check():
            yield from self._waiting.until(lambda: False, "the mesh epoch after damage of memory in step", step)

    # ---- waiting

    def _before_step(self, step: int) -> Waits:
        """On a device that can be recovered, wait until no transfer through a group or a pair is under way.

        At the begin of a step such a device is synchronized (DeviceRecovery.begin_step), which blocks this thread. With
        a collective in the device's queue it would wait for other workers, which may be lost.
        """
        if self._context.hooks.device_recovery is not None:
            yield from self._until_copied(step)
            if self._waiting.transfers:
                yield from self._waiting.until(
                    lambda: not self._waiting.transfers, "what a pair copies before step", step
                )

    def _until_parameters_arrived(self, version: int) -> Waits:
        """Wait until all parameters of `version` have come. The vote for version + 1 says that they have (S5).

        Once all votes are in, a primary overwrites the memory that its pages were sent from. Workers that ran a
        micro-batch have waited for their parameters already; a worker without any has not.
        """
        for layer in self._layers:
            if self._values[layer].dropped_at != version:
                arrived = partial(self._replica.parameters.needs_no_more, layer, version)
                yield from self._waiting.until(arrived, "parameters of layer", layer)
        yield from self._until_copied(version + 1)

    def _until_copied(self, step: int) -> Waits:
        if not self._is_copied():
            yield from self._waiting.until(self._is_copied, "what a group copies before step", step)

    def _is_copied(self) -> bool:
        """True if the process group has nothing under way."""
        grouped = self._replica.parameters.grouped
        return grouped.idle and grouped.exchanges.is_over

    def _until_applied(self, step: int) -> Waits:
        is_applied = partial(self._is_applied, step)
        # If the results of two other workers differ, the controller may ask this worker to compute the micro-batch too.
        # That request can arrive after this worker has voted, so checks are computed in this wait as well.
        if self.checks.is_on:
            while not is_applied():
                yield from self._waiting.until(
                    lambda: is_applied() or bool(self.checks.pending(step)), "votes of step", step
                )
                if (yield from self._check_until(step, is_applied, "inputs to check step")):
                    self._drop_parameters(step)
        yield from self._waiting.until(is_applied, "votes of step", step)

    def _is_applied(self, step: int) -> bool:
        return self._commit.version >= step

    # ---- validation

    def validate(self, version: int) -> Waits:
        """Run this worker's share of a validation, a read-only pass at a version, and wait until the controller has all
        losses.

        Micro-batches are assigned in turn to each stage's workers. The workers of the last stage send the losses to the
        controller. If replicas are compared, every other worker sends a report too, without losses, once it has found
        its own state undamaged. Otherwise a validation could be complete before a worker finds that it has sent the
        next stage activations that were computed from damaged parameters (H5).
        """
        yield from self._until_compared(version)
        members, microbatches, scores = self._placement.mesh.stages[self._stage], [], []
        number, first = self._context.job.num_validation_microbatches, members.index(self._context.rank)
        self._microbatches.programs.set_training(False)
        try:
            for microbatch in range(first, number, len(members)):
                x = yield from self._microbatches.validate(version, microbatch)
                if self._is_last:
                    microbatches.append(microbatch)
                    scores.append([float(one) for one in tensors_of(x)])
        finally:
            self._microbatches.programs.set_training(True)
        yield from self._until_sound(version)
        if microbatches or self._context.job.compares_at(0):
            epoch, rank = self._placement.mesh.epoch, self._context.rank
            form = self._microbatches.programs.scored
            self._context.channel.send(CONTROLLER, _validation(version, epoch, rank, microbatches, scores, form))
        # The next step changes the parameters. After that, a validation loss that was lost with its worker could not be
        # computed again (S7).
        yield from self._waiting.until(lambda: self._validated >= version, "the end of validation", version)

    def validated(self, version: int) -> None:
        """The controller has all losses of the validation at this version."""
        self._validated = max(self._validated, version)

    # ---- a change of configuration

    @property
    def step_under_way(self) -> int:
        """The step that this worker has begun last; 0 before the first one, and after what was begun was dropped."""
        return self._under_way.number if self._under_way is not None else 0

    def has_other_shape(self, message: Crossing) -> bool:
        """True if the shape of a tensor from another stage cannot be right; see `Boundaries.has_other_shape`."""
        return self._boundaries.has_other_shape(message)

    def receive(self, message: Crossing, payload: Tensor, *, placed: bool = False) -> None:
        """File a tensor from the stage before or after; see `Boundaries.receive`."""
        if message.step > self._commit.version or (isinstance(message, m.Activation) and message.validation):
            self._boundaries.receive(message, payload, placed=placed)

    def keep_all(self) -> None:
        """Drop nothing until the next `enter_epoch`: a StepReport has named what is here, and is planned with (C2)."""
        self._replica.reducer.keep_all()
        self._boundaries.keep_all()

    def partial_step(self, step: int) -> m.PartialStep:
        """The entry of a StepReport for one step that is not decided: everything that this worker has of that step."""
        reducer = self._replica.reducer
        mine = self._under_way if self._under_way is not None and self._under_way.number == step else None
        current = step == self._commit.version + 1
        # A saved forward is reported only if its backward makes weight gradients. One that is run for its output or for
        # the gradient of its input alone may be used up before the next configuration is entered.
        not_kept = {u for u, left in self._work.items() if left.backward not in (FULL, WEIGHTS_ONLY)}
        if mine is not None:
            # Of a micro-batch in the middle of its backward, the gradients of some layers may have been sent and given
            # up already.
            given_up = {self._microbatches.backward_of} if reducer.gives_up else set()
            mine.reported = frozenset(mine.computed | given_up)
        return m.PartialStep(
            step,
            tuple(sorted(mine.assigned)) if mine else (),
            tuple(sorted(mine.computed)) if mine else (),
            tuple(sorted(self._microbatches.programs.forwarded - not_kept)) if mine else (),
            self._boundaries.kept(ACTIVATION, step),
            self._boundaries.kept(GRADIENT, step),
            reducer.layer_sums() if current else {},
            reducer.page_sums(step, current=current),
            self._replica.reduced_gradients(step),
            self._awaiting_weight_gradients() if mine else (),
        )

    def _awaiting_weight_gradients(self) -> tuple[int, ...]:
        """Micro-batches of which only the weight gradients are left to compute, and none of these has been given up."""
        found = {u for u, left in self._work.items() if not left.forward and left.backward == WEIGHTS_ONLY}
        if self._replica.reducer.gives_up:
            found.discard(self._microbatches.backward_of)
        return tuple(sorted(found))

    def enter_epoch(self, configuration: Configuration) -> None:
        """Take over the layers of the stage that this worker is on in this configuration.

        `resume` must be called once the state is in place.
        """
        placement = self._placement = configuration.placement
        self._stage = placement.mesh.stage_of(self._context.rank)
        self._is_last = self._stage == placement.num_stages - 1
        self._layers = placement.layers_of_stage(self._stage)
        self._boundaries.restore_used()
        self._boundaries.forget_validations()
        moved = self._microbatches.enter_epoch(placement, self._stage, self._keep_to(configuration))
        if moved or configuration.recovery_plan is None:
            # Either this worker had run its micro-batches through other layers, which is of no use on this stage. Or no
            # member had anything of the step, and it is assigned anew.
            self._under_way = None

    def resume(self, configuration: Configuration) -> None:
        """Work out what is left of the step under way, and send again the boundary tensors that its plan needs.

        Called by `Executor.enter_epoch`, after pages and sums have been arranged for the new configuration.
        """
        lines, step = configuration.recovery_plan, configuration.version + 1
        self._recovery = RecoveryPlan(step, lines) if lines is not None else None
        self.pacing.plan(None)
        if (early := self._next_pace) is not None:
            self._next_pace = None
            self.receive_pace(early)
        # A step that is recovered in part is not checked, and its incomplete checks are dropped (V6). If the attempt
        # begins with this epoch, the step runs from its start and is checked.
        self._unchecked = step if lines is not None and configuration.attempt != configuration.epoch else 0
        if self._unchecked:
            self.checks.forget()
            self._replica.forget_checks()
        self._work = self._remaining_of(self._recovery) if self._recovery is not None else {}
        if lines is not None:
            self._boundaries.send_again(step, lines, configuration.placement)
        # If this worker has nothing left to run, parameters that it dropped after its last micro-batch stay dropped.
        needed = self._recovery is None or self._work or configuration.validate is not None
        version = configuration.version
        wanted = [layer for layer in self._layers if needed or self._values[layer].dropped_at != version]
        self._replica.parameters.refresh(wanted, version)

    def _remaining_of(self, plan: RecoveryPlan) -> dict[int, MicrobatchWork]:
        """Micro-batch -> what is left of it: this worker's lines of the plan, less what it did since its StepReport."""
        lines = plan.lines_of(self._context.rank)
        under_way = self._under_way
        if under_way is None or under_way.number != plan.step:
            return remaining_of_new_step(lines)
        programs = self._microbatches.programs
        remaining = remaining_of_begun_step(lines, under_way, programs.forwarded, programs.begun)
        for microbatch in programs.begun - {u for u, left in remaining.items() if left.backward == WEIGHTS_ONLY}:
            programs.discard_begun(microbatch)
        with_weights = (FULL, WEIGHTS_ONLY)
        to_come = {u for u, left in remaining.items() if left.backward in with_weights and not left.alone}
        self._replica.reducer.begin_step(plan.step, under_way.summed | to_come)
        return remaining

    def forget_beyond(self, version: int) -> None:
        """Another attempt of the steps after a version begins: drop what was computed of them, here and elsewhere."""
        if self.step_under_way > version:
            self._under_way = None
            self._work = {}
            self._microbatches.drop_undecided()
        self.checks.forget()
        self._boundaries.forget_beyond(version)
        self._commit.forget_beyond(version)

    def drop_undecided(self) -> None:
        """Drop everything of the step under way: the device has failed, and its memory may be bad (C12)."""
        self.checks.forget()
        self._under_way = None
        self._work = {}
        self._microbatches.drop_undecided()
        self._boundaries.drop_all()
        self._commit.drop_undecided()


def _validation(
    version: int,
    epoch: int,
    rank: int,
    microbatches: Sequence[int],
    scores: Sequence[Sequence[float]],
    form: ScoreForm | None,
) -> m.ValidationLoss:
    """The report of a worker's share of a validation.

    Args:
        microbatches: the micro-batches that this worker has validated.
        scores: for each of these micro-batches the numbers that the last layer's program returned (`evaluate`).
        form: says which number is what; None: there is one number, the loss.
    """
    if form is None or not microbatches:
        return m.ValidationLoss(version, epoch, rank, tuple(microbatches), tuple(loss for loss, *_ in scores))
    columns = []  # for the loss and for each metric: (sums by micro-batch, weights by micro-batch)
    for rows in zip(*map(form.rows, scores), strict=True):
        weights = tuple(weight for _, weight in rows if weight is not None)
        columns.append((tuple(total for total, _ in rows), weights))
    (losses, weights), *others = columns
    metrics = tuple((name, *column) for name, column in zip(form.names, others, strict=True))
    return m.ValidationLoss(version, epoch, rank, tuple(microbatches), losses, weights, metrics)
