"""The life of a worker as a member of the mesh: one step after another, one configuration after another.

`Executor.train` is the loop, `Executor.enter_epoch` is a recovery. A worker decides nothing by itself: the placement
says what runs where, the step protocol says when a step may be applied, and only the controller changes the
configuration.

A recovery, in the order in which it happens: a Prepare arrives (`_handle`) and is answered with a StepReport
(`_answer`); the worker goes on with the micro-batches that it has. A Reconfigure arrives and is noted (`_reconfigure`);
the next wait raises ConfigurationChanged, wherever in the step that is; `train` catches it and calls `enter_epoch`;
then `train_step` runs what is left of the step.

The loop is a generator that yields whenever it has nothing to do until a message arrives. The process resumes it from
its mailbox (process.py); the simulated cluster resumes many of them in one process, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from msgspec.structs import replace as replace_fields

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.admission import SIZE, WorkerPosition, refused_by_worker
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.worker.attempts import AttemptChannel, Attempts
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.channel import Channel, Incoming, WorkerStopped
from elaswave_spmd.worker.configuration import Configuration
from elaswave_spmd.worker.context import WorkerContext
from elaswave_spmd.worker.direct_channel import Direct, DirectChannel, HeldBack, PairLimits
from elaswave_spmd.worker.kept_reports import KeepingChannel, KeptReports
from elaswave_spmd.worker.memory_usage import peak_bytes, state_bytes
from elaswave_spmd.worker.optimizers import averages
from elaswave_spmd.worker.spec import message_bounds
from elaswave_spmd.worker.state import Saved
from elaswave_spmd.worker.step import StepRunner
from elaswave_spmd.worker.step_commit import StepCommit
from elaswave_spmd.worker.waiting import ConfigurationChanged, Waits

_CheckRequest: TypeAlias = m.CheckAgain | m.CheckAccepted | m.AddAgain | m.SumAccepted


class Executor:
    """One worker of a run.

    Args:
        context: what does not change: rank, job, model, data, device, channel, hooks.
        first: the configuration in which the worker becomes a member.
        saved: reads the checkpoint that the run resumes from; None if the run begins at version 0 or if this worker
            joins later and is sent its state.
    """

    def __init__(self, context: WorkerContext, first: Configuration, saved: Saved | None = None) -> None:
        self.rank = context.rank
        self._attempts = Attempts()
        self._reports = KeptReports() if context.hooks.adopted is not None else None
        channel = context.channel if self._reports is None else KeepingChannel(context.channel, self._reports)
        self.direct = self._direct_over(channel, context)
        """The channel whose payloads go from device to device (`runtime.pairs`); None with the option off."""
        channel = AttemptChannel(self.direct or channel, self._attempts)
        context = replace(context, channel=channel)
        self._context = context
        self._saved = saved
        self._began = first.version if first.epoch == 0 else None  # None: this worker joined later
        self._bounds = message_bounds(context.job, context.model.layout, pairs=self.direct is not None)
        self._values: dict[int, ValueBuffer] = {}
        self.commit = StepCommit(context, self._values, first)
        self.replica = self.commit.replica
        self._steps = StepRunner(context, self.commit, self._values, self)
        self.configuration: Configuration
        """The configuration that was entered last."""
        self._next: Configuration | None = None  # the configuration that has arrived and is not entered yet
        self._resend_to: set[int] = set()  # members that may have lost what was sent to them; they get it again
        self._has_missed = False  # other members may have entered a configuration that this worker did not enter
        self._prepare: m.Prepare | None = None  # a planned change that is still to be answered, between two steps
        self._validation_due: int | None = None  # the version to validate next
        self._last_step = context.job.steps  # an earlier step if a validation ends the run (`train.stop_patience`)
        self._check_requests: list[_CheckRequest] = []  # requests for a mesh epoch that is not entered yet
        self._weights_sent = -1  # the epoch in which the final weights were sent
        self._was_just_adopted = False  # True from an Adopt until the Prepare with which the new controller begins
        self.is_orphaned = False
        """The controller is gone. Orphans begin no other step, and complete a step only if all members have begun it,
        since a step needs the vote of every member. So all of them stop at the same version. There they end or, if
        another controller may adopt them (`timeouts.adopt`), wait for it."""
        self._failed_step = 0  # the step in which the device failed and was reset; 0 from the next epoch on
        self._failed: m.Failed | None = None  # the report of an exception after which this worker computes nothing more
        self.enter_epoch(first)  # the first configuration is entered like every later one

    def _direct_over(self, channel: Channel, context: WorkerContext) -> DirectChannel | None:
        if (pairs := context.hooks.pairs) is None:
            return None
        return DirectChannel(
            channel,
            context.rank,
            context.device,
            context.job.torch_dtype,
            pairs,
            self._refusal,
            self._expects,
            PairLimits(sends_state=context.hooks.device_recovery is None, held_back=HeldBack.of(context.model.layout)),
        )

    @property
    def version(self) -> int:
        """The step last applied."""
        return self.commit.version

    @property
    def placement(self) -> Placement:
        """The mesh and what runs where, in the configuration that was entered last."""
        return self.configuration.placement

    @property
    def wakes_at(self) -> float | None:
        """The time at which `train` must be resumed even if no message has come (on the clock of
        `pacing.DeviceClock.now`); None if only a message can let it go on."""
        return self._steps.pacing.wakes_at

    # ---- the loop

    def train(self) -> Waits:
        """Train to the last step, then send the weights. Yields a description of what it waits for.

        The loop never ends by itself: every worker stays until the controller sends Stop, because other members must
        send the final weights again if a sender is lost.

        Raises:
            WorkerStopped: the controller has sent Stop; or it is gone and no step is under way.
        """
        self._initialize_or_restore()
        while True:
            try:
                # The order matters. After an exception or a device fault the worker waits for a new mesh before
                # anything else. A validation that is due comes before the check for a new configuration. Only the
                # cases of the last if-elif chain exclude each other.
                if self._failed is not None:
                    yield from self._until_saved_or_lost(self._failed)
                if self._failed_step:
                    yield from self._until_reconfigured("the mesh epoch after a fault of the device in step")
                if self._validation_due == self.version:
                    yield from self._validate()
                self.check_configuration()
                if self.configuration.save and self.version >= self.configuration.version:
                    self._save()
                    yield from self._until_reconfigured("the end of the run, saved at step")
                if self._is_between_steps:
                    if self.is_orphaned:
                        yield from self._until_votes_are_passed_on()
                    if self._reports is not None:
                        yield from self._until_there_is_a_controller(self._reports)
                    self._between_steps()
                if self._is_between_steps and self._may_not_begin:
                    # This worker has answered a Prepare between two steps. By its answer (C2) it begins no step in
                    # this epoch: the next step begins as the next configuration places it.
                    yield from self._until_prepare("the mesh epoch after step")
                elif self.version == self._last_step:
                    self._send_weights()
                    yield from self._until_prepare("the end of the run, after step")
                else:
                    yield from self._train_step(self.version + 1)
            except ConfigurationChanged as change:
                self.enter_epoch(change.configuration)  # the next turn of the loop runs what is left of the step
            except WorkerStopped:
                raise
            except Exception as error:
                if not (self._recovers_from(error) or self._holds_after(error)):
                    raise

    def _save(self) -> None:
        """Write this worker's part of the checkpoint with which the run stops.

        If replicas are compared, hashes of the state are sent first.
        """
        self.replica.soundness.compare(saves=True)
        # If the state is damaged it is not written: another mesh epoch follows, in which other replicas write it.
        if self.replica.soundness.check(leaves=True):
            self._context.hooks.save(self.replica)

    def _initialize_or_restore(self) -> None:
        """Fill the state of a member of the run's first mesh. A worker that joins later is sent its state by others."""
        if self.configuration.epoch:
            return
        if self.version == 0:
            self.replica.initialize()
        else:
            assert self._saved is not None, "a first mesh beyond version 0 has a checkpoint"
            self.replica.restore(self._saved)

    def _train_step(self, step: int) -> Waits:
        yield from self._steps.train_step(step)
        # A step up to the version with which this epoch began was validated before the epoch, or the Reconfigure asks
        # for its validation (`validate`). Neither makes another validation due here.
        if self._context.job.validates_at(step) and step > self.configuration.version:
            self._validation_due = step

    def _validate(self) -> Waits:
        if self._prepare is not None and self._answers_at_once(self._prepare):
            self._answer(self._prepare)
        yield from self._steps.validate(self.version)
        self._validation_due = None

    @property
    def _is_between_steps(self) -> bool:
        """True if no step is under way on this worker."""
        return self._steps.step_under_way <= self.version

    @property
    def _may_not_begin(self) -> bool:
        """True if a newer Prepare was answered: no step begins until its Reconfigure."""
        return self.commit.protocol.promised > self.configuration.epoch

    def _between_steps(self) -> None:
        """Send state to learners, and answer a Prepare for a planned change. Called while no step is under way.

        Raises:
            WorkerStopped: the controller is gone.
        """
        if self.is_orphaned:
            self.hand_over()
            raise WorkerStopped
        if self.version >= self.configuration.version:  # otherwise this worker is behind, and its state is outdated
            self.replica.send_state()
        if self._prepare is not None:
            nothing_comes = self.version == self._last_step or self._may_not_begin
            # If this worker runs no other step in this epoch, it must not wait for step `after`: it answers now.
            if nothing_comes or self._prepare.after <= self.version:
                self._answer(self._prepare)

    def _until_votes_are_passed_on(self) -> Waits:
        """Wait until this orphan has passed on all sums of votes: a member that is one step behind needs them (S9)."""
        protocol = self.commit.protocol
        yield from self.until(
            lambda: not (self.is_orphaned and protocol.owes_votes), "votes to pass on of step", self.version
        )

    def hand_over(self) -> None:
        """This orphan is about to end: send over links what its pairs may not have brought to their receivers.

        Otherwise other members would wait for ever: a receiver also holds back whatever came after such a message,
        a vote for example (P4).
        """
        if self.direct is not None:
            self.direct.hand_over()

    def _until_there_is_a_controller(self, reports: KeptReports) -> Waits:
        """Wait, if this worker is an orphan that may be adopted, or if it keeps too many reports that nobody has
        written down (`KeptReports`)."""
        yield from self.until(
            lambda: not (self.is_orphaned or self._was_just_adopted or reports.is_full),
            "a controller, after step",
            self.version,
        )

    def _send_weights(self) -> None:
        """Send the final values of all primary pages to the controller, once in every configuration.

        The hashes of the last version were sent before, so the controller compares them before the run is done (H1).
        """
        epoch = self.configuration.epoch
        if self._weights_sent >= epoch:
            return
        self._weights_sent = epoch
        if not self.replica.soundness.check(leaves=True):
            return  # the state is damaged: another mesh epoch follows, in which other replicas send it
        channel = self._context.channel
        for part in self.replica.state:
            if part.pages.primary == self.rank:
                channel.send(CONTROLLER, m.FinalPages(*part.pages.key), part.master)
                if averages(self._context.job.optimizer):
                    channel.send(CONTROLLER, m.FinalPages(*part.pages.key, True), self.replica.state.average_of(part))
        sizes = self.state_bytes(), peak_bytes(self._context.device)
        checks, rejected = self._steps.checks, tuple(channel.rejected.items())
        made = (checks.num_made, checks.num_idle, self.replica.sums.num_made) if checks.is_on else ()
        channel.send(CONTROLLER, m.Finished(self.rank, epoch, *sizes, rejected, made))

    # ---- a change of configuration: Prepare -> StepReport -> Reconfigure -> enter_epoch

    def _answers_at_once(self, prepare: m.Prepare) -> bool:
        """True if a Prepare is answered now; otherwise it is answered between two steps.

        The Prepare for a loss (AT_ONCE) is always answered now. So is that for a planned change, if this worker has
        begun a later step: the boundary between steps at which the change was planned has passed. During a validation
        it is answered now if other members may have answered one step earlier: they stay at that step and take no part
        in the validation, so it would never end.
        """
        in_vain = self._validation_due == self.version > prepare.after  # this validation may never end
        begun = self._steps.step_under_way
        return (
            prepare.after == m.AT_ONCE or begun > max(prepare.after, self.version) or (in_vain and self._next is None)
        )

    def _answer(self, prepare: m.Prepare) -> None:
        """Send a StepReport: everything that this worker has of steps that are not decided.

        From now on this worker neither votes nor applies in the present epoch (docs/protocol.md, C2), so the report
        stays true. It goes on with its micro-batches.
        """
        if not self.commit.protocol.promise(prepare.epoch):
            return
        self._prepare = None
        self._skip_next()  # its epoch is older than this Prepare's, and some members may never get its Reconfigure
        self._steps.keep_all()
        self.replica.soundness.report_damage()
        # Two steps are reported: a primary without micro-batches of its own may already have partial sums of the step
        # after the next one, from members that are one step ahead.
        found = (self._steps.partial_step(self.version + 1), self._steps.partial_step(self.version + 2))
        partial_steps = tuple(part for part in found if part != m.PartialStep(part.step))
        ahead = self.replica.state.ahead_of(self.version)
        # The layers that this worker is on, which the controller may not know: a Reconfigure that was skipped may have
        # given the stage other layers (C3).
        on = self.placement.layers_of_stage(self.placement.mesh.stage_of(self.rank))
        layers, attempt = (on.start, on.stop), self._attempts.number
        report = m.StepReport(prepare.epoch, self.rank, self.version, partial_steps, attempt, ahead, layers)
        self._context.channel.send(CONTROLLER, report)

    def enter_epoch(self, configuration: Configuration) -> None:
        """Become a member of a configuration: after a loss, by a planned change, or for the first time.

        Partial sums are sent to the primaries of the new replica map, boundary tensors to the workers of the recovery
        plan, missing parameters are asked for, and votes are sent again. Then the loop goes on with what is left of the
        step.
        """
        self.replica.background.finish()  # background copies refer to the buffers of the present configuration
        for rank in self._resend_to - {self.rank}:
            # This member may have lost what it was sent. As after a lost link (C11), it is sent again.
            self.commit.handle(rank, m.LinkClosed(self.rank, rank), None)
        self._resend_to.clear()
        another = configuration.attempt > self._attempts.number
        if another:
            self._steps.forget_beyond(configuration.version)
        repairs = configuration.repair > self._attempts.repair
        if another:
            self._attempts.begin(configuration.attempt, configuration.version, configuration.repair)
        came = self._attempts.enter_epoch(configuration.epoch)
        self.configuration = configuration
        if self._prepare is not None and self._prepare.epoch <= configuration.epoch:
            self._prepare = None  # this configuration is its outcome, or a later one that has overtaken it
        self._next = None
        self._failed_step = 0
        if self._reports is not None:
            self._reports.entered()
        self._validation_due = configuration.validate
        if configuration.is_last:
            self._last_step = configuration.version
        # The order matters: the stage and its buffers come first; then pages and partial sums, which refer to the
        # buffers; then what is left of the step, which refers to both. Votes come last, since a vote may let this
        # worker apply the step at once.
        #   StepRunner.enter_epoch  the stage, its buffers and programs
        #   StepCommit.enter_epoch  WorkerProtocol; StateReplica (reduced gradients again), GradientReducer (sums again)
        #   StepRunner.resume       the remaining work; Boundaries (tensors again), Parameters (Need)
        #   StepCommit.resume       messages that came early, and the votes again
        self._steps.enter_epoch(configuration)
        replica_map = self.placement.replica_map(self._context.model.layout, self._stages_of_interest())
        if self.direct is not None:  # before anything is sent in this epoch: payloads that pairs have not brought (P6)
            self.direct.enter_epoch(self.placement, replica_map)
        version, begun = configuration.version, self._steps.step_under_way
        self.commit.enter_epoch(self.placement, replica_map, version, begun, has_missed=self._has_missed)
        self._has_missed = False
        if repairs:
            self.replica.repair()
        self._steps.resume(configuration)
        self.commit.resume()
        # Messages of this attempt from members that entered the epoch before this worker; those of a later attempt are
        # put aside again.
        for incoming in came:
            self._handle(incoming)
        requests, self._check_requests = self._check_requests, []
        for request in requests:
            self._check(request)
        if self.version >= configuration.version:  # otherwise this worker is behind: this version is not compared
            self.replica.soundness.compare(saves=configuration.save)

    def _stages_of_interest(self) -> set[int] | None:
        """This worker's stage, and the stages that own a parameter which one of its layers reads (ties). None: all
        stages, where the configuration lists its replicas in place of having them follow from the mesh."""
        placement, layout = self.placement, self._context.model.layout
        if placement.replicas is not None:
            return None
        stage = placement.mesh.stage_of(self.rank)
        readers = (block for layer in placement.layers_of_stage(stage) for block in layout.layers[layer].reader_blocks)
        return {stage, *(placement.stage_of_layer(block.source[0]) for block in readers if block.source)}

    # ---- messages

    def handle_messages(self) -> None:
        """Handle everything that has arrived. Deciding and applying a step may happen in here (StepCommit)."""
        found = self._context.channel.receive_all()
        prepares = [incoming.message.epoch for incoming in found if isinstance(incoming.message, m.Prepare)]
        for incoming in found:
            # Of several Prepares the last one alone is answered: for the others the controller does not wait any more.
            if not isinstance(incoming.message, m.Prepare) or incoming.message.epoch == max(prepares):
                self._handle(incoming)
        self.replica.collect()

    def _refusal(self, sender: int, message: m.AnyMessage, num_elements: int | None) -> str:
        """The reason for which a message cannot be right, and is dropped; empty if it can be right."""
        # A message from this worker to itself is a LinkClosed that its links made. The controller is trusted.
        if sender in (self.rank, CONTROLLER):
            return ""
        epoch, protocol = self.configuration.epoch, self.commit.protocol
        at = WorkerPosition(self.version, epoch, max(epoch, protocol.promised), protocol.voters, self._began)
        if why := refused_by_worker(self._bounds, message, sender, num_elements, at):
            return why
        is_crossing = isinstance(message, m.Activation | m.ActivationGradient)
        return SIZE if is_crossing and self._steps.has_other_shape(message) else ""

    def _expects(self, sender: int, message: Direct) -> bool:
        """True if, in the present configuration, this worker is to receive such a message from this sender (P2)."""
        mesh = self.placement.mesh
        if sender not in mesh:
            return False
        if isinstance(message, m.PageState):
            return self.replica.learns_from(sender, (message.layer, message.first, message.stop))
        stage = mesh.stage_of(self.rank)
        layers, other = self.placement.layers_of_stage(stage), mesh.stage_of(sender)
        if isinstance(message, m.Activation):
            return other == stage - 1 and message.layer == layers.start
        return other == stage + 1 and message.layer == layers.stop - 1

    def _handle(self, incoming: Incoming) -> None:
        num_elements = None if incoming.payload is None else incoming.payload.numel()
        if why := self._refusal(incoming.sender, incoming.message, num_elements):
            self._context.channel.reject(why)
            return
        if not self._attempts.admits(incoming):
            return
        message, payload = incoming.message, incoming.payload
        match message:
            case m.Activation() | m.ActivationGradient():
                assert payload is not None
                self._steps.receive(message, payload, placed=incoming.placed)
            case m.CheckDigests():
                self._steps.checks.received(incoming.sender, message)
            case m.CheckAgain() | m.CheckAccepted() | m.AddAgain() | m.SumAccepted():
                self._check(message)
            case m.Pace():
                self._steps.receive_pace(message)
            case m.Limits():
                self._steps.receive_limits(message)
            case m.Validated():
                if message.is_last:
                    self._last_step = message.step
                self._steps.validated(message.step)
            case m.ReplicasAgree():
                self._steps.replicas_agree(message)
            case m.Prepare():
                self._was_just_adopted = False
                # Handled after every layer, so that a loss is answered within the time of one.
                if self._answers_at_once(message):
                    self._answer(message)
                elif self._prepare is None or message.epoch > self._prepare.epoch:
                    self._prepare = message
            case m.Reconfigure():
                self._reconfigure(message)
            case m.LinkClosed(peer=peer) if peer == CONTROLLER:
                self.is_orphaned = True
            case m.Adopt():
                # The controller that is gone may have sent other members a Reconfigure that this worker never got.
                self._has_missed = True
                self._adopted()
            case m.Written(step=step):
                if self._reports is not None:
                    self._reports.written(step)
            case _:
                self.commit.handle(incoming.sender, message, payload)

    def _adopted(self) -> None:
        """A new controller adopts this worker: send it the reports that the lost controller may not have written down.

        Whatever is under way goes on. The new controller begins with a Prepare, whose answer has everything else.
        """
        adopted, reports = self._context.hooks.adopted, self._reports
        if adopted is None or reports is None:
            return
        # It begins with a change of the mesh after a given step. Until its Prepare has come this worker begins no step,
        # so that it is not past that step by then.
        self.is_orphaned, self._was_just_adopted = False, True
        self._context.model.programs.memory.report_again()
        facts = adopted(self.placement.mesh.members)
        answer = replace_fields(
            facts,
            version=self.version,
            applied=tuple(reports.applied),
            damaged=tuple(reports.damaged),
            results_differ=reports.results_differ(self.version),
            caught_up=self.replica.has_caught_up_in(facts.epoch),
        )
        self._context.channel.send(CONTROLLER, answer)

    def _check(self, message: _CheckRequest) -> None:
        """Handle a request of the controller about results that differ, in the mesh epoch that the request names."""
        if message.epoch > self.configuration.epoch:
            self._check_requests.append(message)  # the Reconfigure of that epoch has arrived, and is not entered yet
        if message.epoch != self.configuration.epoch:
            return
        match message:
            case m.CheckAgain():
                self._steps.check_again(message)
            case m.CheckAccepted():
                self._steps.checks.accepted(message)
            case m.AddAgain():
                self.replica.add_again(message)
            case m.SumAccepted():
                self.replica.sums.accepted(message)

    def _reconfigure(self, message: m.Reconfigure) -> None:
        """Note a new configuration. It is entered at the next wait, or after the action that is running."""
        # Even if this Reconfigure is skipped: a later one does not name these members again.
        self._resend_to.update(message.resend_to)
        device_recovery = self._context.hooks.device_recovery
        if device_recovery is not None and not device_recovery.accepts(message):
            self._has_missed = True
            return
        pending = self._next.epoch if self._next is not None else -1
        # It is not entered here: messages are also handled in the middle of an action, and `enter_epoch` would replace
        # the buffers that the action uses.
        if message.epoch > pending and self.commit.protocol.accepts(message.epoch):
            self._context.hooks.members_changed(message)
            self._skip_next()
            self._next = Configuration.from_message(self._context.placement, message)
        else:
            self._has_missed = True

    def _skip_next(self) -> None:
        """Drop the configuration that has arrived and is not entered, if there is one. Other members may enter it."""
        self._has_missed = self._has_missed or self._next is not None
        self._next = None

    # ---- waiting

    def until(self, ready: Callable[[], bool], what: str, number: int) -> Waits:
        """Handle messages, and do background copies, until `ready()`. See `Waiting`."""
        self.handle_messages()
        while not ready():
            self.check_configuration()  # the sender of what is waited for may be lost: it would never come
            if not self.replica.background.do_one():
                yield f"{what} {number}"
            self.handle_messages()

    @property
    def transfers(self) -> bool:
        """True while something is under way through pairs (`runtime.pairs`)."""
        return self.direct is not None and not self.direct.idle

    def check_configuration(self) -> None:
        """Raise ConfigurationChanged if a new configuration has arrived."""
        if self._next is not None:
            raise ConfigurationChanged(self._next)

    def _until_prepare(self, what: str) -> Waits:
        yield from self.until(lambda: self._prepare is not None, what, self.version)

    def _until_reconfigured(self, what: str) -> Waits:
        number = self._failed_step or self.version
        yield from self.until(lambda: False, what, number)

    # ---- an exception

    def _holds_after(self, error: Exception) -> bool:
        """True if the worker stays after an exception, so that its state can still be written (C17).

        If False, the exception ends the process: the hook `failed` is not there or returns None, the worker has failed
        before, or a decided step is being applied, so that the state is of no version. The exception itself is not
        kept, and neither are the activations that its frames refer to.
        """
        report = self._context.hooks.failed
        if report is None or self._failed is not None or self.commit.is_applying:
            return False
        self._failed = report(error)
        return self._failed is not None

    def _until_saved_or_lost(self, failed: m.Failed) -> Waits:
        """Report the exception, and keep the state until it has been written, or others have taken this worker's place.

        Called in every mesh epoch that the worker enters. It reports the exception again each time, as another
        controller may have come that does not know of it.
        """
        if self.configuration.save:
            # If this worker is behind, it applies the step that the others have applied, once it has their votes.
            yield from self.until(lambda: self.version >= self.configuration.version, "votes of step", failed.step)
            self._save()
        else:
            self._context.channel.send(CONTROLLER, failed)
        yield from self._until_reconfigured("the end of the run, after an exception in step")

    # ---- the option of devices that recover

    def _recovers_from(self, error: Exception) -> bool:
        """True if the device caused the error and was reset. Whatever this worker had of undecided steps is dropped."""
        device_recovery = self._context.hooks.device_recovery
        if device_recovery is None or not isinstance(error, RuntimeError) or self._failed_step:
            return False
        if (damage := device_recovery.recover(error, self)) is None:
            return False
        self._failed_step = damage.step
        self._skip_next()  # it was planned with data that is lost now
        self._context.channel.send(CONTROLLER, damage)
        return True

    def drop_undecided(self) -> None:
        """Drop everything of steps that are not decided. Called by `DeviceRecovery.recover`."""
        if self.direct is not None:
            self.direct.give_up_all("a device has failed")
        self._steps.drop_undecided()

    @property
    def values(self) -> dict[int, ValueBuffer]:
        """Compute buffers of the layers that this worker computes."""
        return self._values

    # ---- reports

    def state_bytes(self) -> dict[str, int]:
        """Bytes of training state on this worker between steps; gradients at their peak within a step."""
        return state_bytes(self.replica, self._values, self._context.job)
