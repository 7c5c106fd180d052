"""A training step on one worker: micro-batches through its stage, parameters, the vote, the update.

`StepRunner.train_step` is the step from top to bottom. A worker does of a step what the placement gives it, or, after
the mesh has changed in the middle of it, what is left (`docs/protocol.md`, "A change of the mesh"). Either runs in the
order of readiness (`worker.ready_order`).

Where the rest of a step happens: gradients are reduced in `GradientReducer`, called after each layer's backward; state
is updated and parameters are published in `StepCommit`, called by the handler of the last vote. So the optimizer has no
call in `train_step`: it runs inside one of its waits.
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
        forward: forward, else backward.
        saves: of a forward: its backward will be run here too.
        backward: of a backward: FULL, INPUT_GRADIENT if only the gradient of its input is wanted, or WEIGHTS_ONLY.
        alone: of a backward: its weight gradients are sent by themselves, not added to those of others here.
        last: nothing that needs parameters is left to do in this step after it.
    """

    forward: bool
    microbatch: int
    saves: bool = True
    backward: int = FULL
    alone: bool = False
    last: bool = False


@dataclass(frozen=True)
class _Order:
    """The order of one worker's actions in a mesh epoch.

    Args:
        turns: micro-batch -> turn, of those that the placement gives this worker.
        num_microbatches: of a step.
        limits: of its stage.
    """

    turns: Mapping[int, float]
    num_microbatches: int
    limits: KeptLimits

    @classmethod
    def of(cls, placement: Placement, rank: int, limits: KeptLimits) -> _Order:
        """The order of a worker with these limits."""
        return cls(turns(placement, placement.microbatches_of(rank)), placement.num_microbatches, limits)

    def turn(self, microbatch: int) -> float:
        """The turn of a micro-batch; one taken over from another worker gets that of its position in the step."""
        return self.turns.get(microbatch, (2 * microbatch + 1) / (2 * self.num_microbatches))


class StepRunner:
    """Runs one step after another on whatever stage the worker belongs to.

    Args:
        context: of the worker.
        commit: votes, and applies.
        values: compute buffers by layer.
        waiting: the worker's loop.
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
        # Of the stage that the worker is on, by `enter_epoch`, which is called before anything else.
        self._configuration: Configuration
        self._placement: Placement
        self._stage: int
        self._is_last: bool
        self._layers: range
        self._under_way: StepUnderWay | None = None
        self._recovery: RecoveryPlan | None = None
        self._work: dict[int, MicrobatchWork] = {}  # micro-batch -> what is left of it in the step under way
        self._order: _Order | None = None  # of this mesh epoch, worked out once
        self._limits = KeptLimits(1)  # of this worker in this mesh epoch
        self.pacing = self._microbatches.pacing
        self._next_pace: m.Pace | None = None  # of a mesh epoch that is not entered yet
        self._next_limits: m.Limits | None = None  # from the next step of their mesh epoch on
        self._validated = -1
        self._agreed = -1, -1  # the newest (mesh epoch, version) at which all replicas were the same
        self._unchecked = 0  # a step of which a part was computed in an older mesh epoch: it is not checked

    # ---- a step, from top to bottom

    def train_step(self, step: int) -> Waits:
        """Run this worker's part of a step until the step is applied here.

        The version is `step` afterwards; it advances in the middle of one of these waits, when the last vote is handled
        (StepCommit).

        Raises:
            ConfigurationChanged: called again after `enter_epoch`, it goes on with what is left.
        """
        if self._recovery is not None and self._recovery.step > step:
            # Others have applied this step, so this worker has voted for it, and has all that it needs to apply it. It
            # only lacks votes, which all members send again in the new epoch.
            yield from self._until_applied(step)
            return
        if self._recovery is None or self._recovery.step < step:  # no recovery plan is for this step: it runs as placed
            placed = self._placement.microbatches_of(self._context.rank)
            self._work = {microbatch: MicrobatchWork(True, FULL, alone=False) for microbatch in placed}
        yield from self._before_step(step)
        self._begin(step)
        while (action := (yield from self._next_action(step))) is not None:
            # Messages, Prepare among them, are handled after each layer (MicrobatchRunner) and in every wait.
            yield from self._run_action(step, action)
            self._waiting.check_configuration()
        yield from self._until_parameters_arrived(step - 1)
        yield from self._until_checked(step)
        self._replica.refuse_mixed_weights(step)
        yield from self._until_compared(step - 1)
        self._microbatches.report_data_wait(step)
        yield from self._until_sound(step)
        # From here on others may decide the step: with the votes of all members, each applies it for itself.
        self._commit.vote(step)
        yield from self._until_applied(step)
        self._boundaries.drop_decided(step)
        # After the step, not in it: on a device with streams, to read the times waits until their programs have run.
        times, memory = self._microbatches.pop_times(), self._microbatches.programs.memory.pop_rows()
        self._context.hooks.step_measured(step, *times, memory)

    def _begin(self, step: int) -> None:
        """Begin a step, unless it has begun: assign this worker its micro-batches.

        A step that goes on after a change of the mesh has begun, unless this worker has changed its stage.
        """
        if self.step_under_way == step:
            return
        self._change_limits()
        if (recovery := self._context.hooks.device_recovery) is not None:
            recovery.begin_step(step, self._replica)
        microbatches = {microbatch for microbatch, left in self._work.items() if left.backward == FULL}
        reducer = self._replica.reducer
        # Sums that the reducer still has are of this step, through the layers of the stage that this worker came from.
        # The tree over its micro-batches is open there, so what it computes here is sent micro-batch by micro-batch.
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
            self.pacing.begin_step()  # of a step that does not begin at its start the pace knows nothing

    def _next_action(self, step: int) -> Generator[Reason, None, MicrobatchAction | None]:
        """The next action of the step; None when nothing is left. Checks are run while it has no input.

        Raises:
            ConfigurationChanged: the mesh has changed meanwhile.
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
        """A micro-batch whose next action has its input, by the order of this mesh epoch."""
        if self._order is None:
            self._order = _Order.of(self._placement, self._context.rank, self._limits)
        has = self._boundaries.arrived
        activation = has(ACTIVATION, step, self._layers.start) if self._stage else lambda _: True
        gradient = (lambda _: True) if self._is_last else has(GRADIENT, step, self._layers.stop - 1)
        limits, work = self._order.limits, self._work
        found = next_ready(work, self._order.turn, activation, gradient, limits)
        return self.pacing.choose(found, lambda action: is_ready(*action, work, activation, gradient, limits))

    def _run_action(self, step: int, action: MicrobatchAction) -> Waits:
        """Run an action and note that it is done."""
        microbatch = action.microbatch
        neighbour = self._stage + 1 if action.forward else self._stage - 1
        receivers = partial(self._receivers, step, neighbour, microbatch)
        digests, run = self.checks.digests_of(microbatch), self._microbatches
        left, full, alone = self._work[microbatch], action.backward == FULL, action.alone
        # ZeRO-3: after the last action of a step its parameters are not needed before the next version comes.
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
        """True if backwards are in two parts: another stage waits for the first, and the second has time."""
        return self._limits.put_off > 0 and self._microbatches.programs.has_split_layers

    def _receivers(self, step: int, stage: int, microbatch: int) -> tuple[int | None, ...]:
        """The workers that take the input of a micro-batch on another stage: its own, and one that checks it."""
        own = self._worker_of(step, stage, microbatch)
        return own, *(checker for checker in self.checks.receivers(stage, microbatch) if checker != own)

    def _worker_of(self, step: int, stage: int, microbatch: int) -> int | None:
        """The worker that runs a micro-batch on another stage in this step; None if no worker has to any more."""
        if self._recovery is not None and self._recovery.step == step:
            return self._recovery.worker_of(stage, microbatch)
        return self._placement.worker_of_microbatch(stage, microbatch)

    # ---- checks

    def _check_until(self, step: int, ready: Callable[[], bool], what: str) -> Generator[Reason, None, bool]:
        """Compute checks while `ready()` is false and as long as there are any. Without checks this is nothing.

        Returns:
            True if any was computed.
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

        The controller may ask for one more meanwhile, to see which of two workers is wrong.
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
        """True if all that this worker checks has agreed: micro-batches and sums."""
        return self.checks.is_settled and self._replica.sums.is_settled

    def _ask_for_dropped(self, step: int) -> None:
        """Ask for sharded parameters that were dropped after this worker's last action: a check needs them again."""
        if dropped := [layer for layer in self._layers if self._values[layer].dropped_at == step - 1]:
            self._replica.parameters.refresh(dropped, step - 1)

    def _drop_parameters(self, step: int) -> None:
        """Drop sharded parameters again that were kept, or asked for, for a check."""
        if self._replica.drops_params and not self.checks.pending(step):
            self._microbatches.drop_parameters(step - 1)

    def check_again(self, message: m.CheckAgain) -> None:
        """The controller asks for a micro-batch once more: this worker sends its inputs, or computes it."""
        self.checks.asked(message)
        layers = self._placement.layers_of_stage(message.stage)
        self._boundaries.send_inputs_again(message.step, message.microbatch, layers, message.ranks)

    def receive_pace(self, message: m.Pace) -> None:
        """The controller sends the frequencies of a mesh epoch: of this one, or of one that is not entered yet."""
        epoch = self._placement.mesh.epoch
        if message.epoch == epoch:
            self.pacing.plan(PlannedPace.of(message))
        elif message.epoch > epoch:
            self._next_pace = message

    def receive_limits(self, message: m.Limits) -> None:
        """The controller sends other limits, of this mesh epoch or of one that is not entered yet."""
        if message.epoch >= self._placement.mesh.epoch:
            self._next_limits = message

    def _change_limits(self) -> None:
        """Take the limits that have come. Between two steps: nothing is in flight, and nothing is put off."""
        message, epoch = self._next_limits, self._placement.mesh.epoch
        if message is None or message.epoch > epoch:
            return
        self._next_limits = None
        if message.epoch == epoch:  # else they were for another mesh
            self._microbatches.split(self._keep_to(self._configuration.limited(message)))

    def _keep_to(self, configuration: Configuration) -> frozenset[int]:
        """Set this worker's limits. Returns the layers whose backward may be in two parts."""
        self._configuration = configuration
        self._limits = configuration.limits_of(self._stage)
        self._order = None
        return configuration.split_layers if self._limits.put_off else frozenset()

    # ---- comparison of replicas

    def is_compared(self, version: int) -> bool:
        """True if all replicas were found to be the same at a version, in this mesh epoch, or need not be."""
        return not self._context.job.compares_at(version) or self._agreed >= (self._placement.mesh.epoch, version)

    def replicas_agree(self, message: m.ReplicasAgree) -> None:
        """All replicas are the same at a version: in this mesh epoch, or in one that is not entered yet."""
        self._agreed = max(self._agreed, (message.epoch, message.step))
        if message.epoch == self._placement.mesh.epoch:
            self.checks.compared(message.step)

    def _until_compared(self, version: int) -> Waits:
        """Wait until all replicas are known to be the same at a version, where that is compared.

        The comparison goes on while this worker computes; only what makes its results count waits for it.
        """
        if not self.is_compared(version):
            yield from self._waiting.until(
                lambda: self.is_compared(version), "the comparison of replicas at step", version
            )

    def _until_sound(self, step: int) -> Waits:
        """Wait for another attempt of the step if it was computed from parameters that have changed in this memory."""
        if not self._replica.soundness.check():
            yield from self._waiting.until(lambda: False, "the mesh epoch after damage of memory in step", step)

    # ---- waiting

    def _before_step(self, step: int) -> Waits:
        """Wait for what a group copies, where the device can be recovered.

        At the begin of a step such a device is synchronized (DeviceRecovery.begin_step), which blocks this thread. With
        a collective in its queue it would wait for other workers, and they may be lost.
        """
        if self._context.hooks.device_recovery is not None:
            yield from self._until_copied(step)
            if self._waiting.transfers:
                yield from self._waiting.until(
                    lambda: not self._waiting.transfers, "what a pair copies before step", step
                )

    def _until_parameters_arrived(self, version: int) -> Waits:
        """Wait until this worker needs no page of `version` any more: its vote for version + 1 means that as well.

        With all votes a primary overwrites the memory that its pages were sent from. Workers that ran a micro-batch
        have waited for their parameters already; others have not.
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
        if self.checks.is_on:  # a third worker is asked when it has voted, perhaps: it did not know that others differ
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
        """Run this worker's share of a validation, a read-only pass at a version, and wait until all losses are known.

        Micro-batches are assigned in turn to each stage's workers. The last stage sends the losses to the controller.
        Where replicas are compared, everybody reports that it has done its share with parameters as they were written,
        be it without losses: else a validation could be complete before a worker has found that what it had sent to the
        next stage came of damaged ones (H5).
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
        # The next step changes the parameters: a loss that went down with its worker could not be computed again.
        yield from self._waiting.until(lambda: self._validated >= version, "the end of validation", version)

    def validated(self, version: int) -> None:
        """The controller has all losses of the validation at this version."""
        self._validated = max(self._validated, version)

    # ---- a change of configuration

    @property
    def step_under_way(self) -> int:
        """The step that this worker has begun last, 0 before the first and when it gave up what it had begun."""
        return self._under_way.number if self._under_way is not None else 0

    def has_other_shape(self, message: Crossing) -> bool:
        """True if a tensor of another stage has another shape than those of this boundary."""
        return self._boundaries.has_other_shape(message)

    def receive(self, message: Crossing, payload: Tensor, *, placed: bool = False) -> None:
        """File a tensor from the stage before or after; see `Boundaries.receive`."""
        if message.step > self._commit.version or (isinstance(message, m.Activation) and message.validation):
            self._boundaries.receive(message, payload, placed=placed)

    def keep_all(self) -> None:
        """Give up nothing from a StepReport to the Reconfigure after it: what was reported must still be here."""
        self._replica.reducer.keep_all()
        self._boundaries.keep_all()

    def partial_step(self, step: int) -> m.PartialStep:
        """This worker's part of a StepReport: everything that it has of a step that is not decided."""
        reducer = self._replica.reducer
        mine = self._under_way if self._under_way is not None and self._under_way.number == step else None
        current = step == self._commit.version + 1
        # A forward that is to serve for its output alone, or for the gradient of its input, may be used up before the
        # next configuration.
        not_kept = {u for u, left in self._work.items() if left.backward not in (FULL, WEIGHTS_ONLY)}
        if mine is not None:
            # The sums of some layers of a micro-batch in the middle of its backward may have been given up already.
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
        """Micro-batches of which nothing but the weight gradients is left, and no part of these has been given up."""
        found = {u for u, left in self._work.items() if not left.forward and left.backward == WEIGHTS_ONLY}
        if self._replica.reducer.gives_up:
            found.discard(self._microbatches.backward_of)
        return tuple(sorted(found))

    def enter_epoch(self, configuration: Configuration) -> None:
        """Compute the layers of the stage that this worker belongs to now. `resume` follows when state is in place."""
        placement = self._placement = configuration.placement
        self._stage = placement.mesh.stage_of(self._context.rank)
        self._is_last = self._stage == placement.num_stages - 1
        self._layers = placement.layers_of_stage(self._stage)
        self._boundaries.restore_used()
        self._boundaries.forget_validations()
        moved = self._microbatches.enter_epoch(placement, self._stage, self._keep_to(configuration))
        if moved or configuration.recovery_plan is None:
            # What it did of the step went through other layers, and is of no use here. Or no member had anything of the
            # step, which is assigned anew.
            self._under_way = None

    def resume(self, configuration: Configuration) -> None:
        """Work out what is left of the step under way, and send boundary tensors again that its plan needs.

        Called by `Executor.enter_epoch` when state and sums are where the new configuration has them.
        """
        lines, step = configuration.recovery_plan, configuration.version + 1
        self._recovery = RecoveryPlan(step, lines) if lines is not None else None
        self.pacing.plan(None)
        if (early := self._next_pace) is not None:
            self._next_pace = None
            self.receive_pace(early)
        # What was computed of the step in an older epoch was checked there, or is not checked any more.
        self._unchecked = step if lines is not None and configuration.attempt != configuration.epoch else 0
        if self._unchecked:
            self.checks.forget()
            self._replica.forget_checks()
        self._work = self._remaining_of(self._recovery) if self._recovery is not None else {}
        if lines is not None:
            self._boundaries.send_again(step, lines, configuration.placement)
        # Sharded parameters that were dropped after this worker's last micro-batch stay dropped if nothing is left.
        needed = self._recovery is None or self._work or configuration.validate is not None
        version = configuration.version
        wanted = [layer for layer in self._layers if needed or self._values[layer].dropped_at != version]
        self._replica.parameters.refresh(wanted, version)

    def _remaining_of(self, plan: RecoveryPlan) -> dict[int, MicrobatchWork]:
        """This worker's part of a recovery plan, less what it has done since it reported."""
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
        """Another attempt of the steps after a version begins: give up what was computed of them, here or elsewhere."""
        if self.step_under_way > version:
            self._under_way = None
            self._work = {}
            self._microbatches.drop_undecided()
        self.checks.forget()
        self._boundaries.forget_beyond(version)
        self._commit.forget_beyond(version)

    def drop_undecided(self) -> None:
        """Give up everything of the step under way."""
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
        scores: of each micro-batch what a validation makes of it.
        form: of these; None: each is a loss alone.
    """
    if form is None or not microbatches:
        return m.ValidationLoss(version, epoch, rank, tuple(microbatches), tuple(loss for loss, *_ in scores))
    columns = []  # of the loss and of each metric: sums and weights by micro-batch
    for rows in zip(*map(form.rows, scores), strict=True):
        weights = tuple(weight for _, weight in rows if weight is not None)
        columns.append((tuple(total for total, _ in rows), weights))
    (losses, weights), *others = columns
    metrics = tuple((name, *column) for name, column in zip(form.names, others, strict=True))
    return m.ValidationLoss(version, epoch, rank, tuple(microbatches), losses, weights, metrics)
