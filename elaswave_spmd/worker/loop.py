"""The life of a worker as a member of the mesh: one step after another, one configuration after another.

`Executor.train` is the loop, `Executor.enter_epoch` a recovery. A worker decides nothing by itself: what runs where is
in the placement, when a step may be applied is up to the protocol, and the controller alone changes the configuration.

A recovery, in the order in which it happens: a Prepare arrives (`_handle`) and is answered with a StepReport
(`_answer`); the worker goes on with what it has. A Reconfigure arrives and is noted (`_reconfigure`); the next wait
raises ConfigurationChanged, from wherever the step is; `train` catches it and calls `enter_epoch`; then `train_step`
runs what is left of the step.

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
        first: the configuration in which it becomes a member.
        saved: the state to begin with, if the run resumes from a checkpoint.
    """

    def __init__(self, context: WorkerContext, first: Configuration, saved: Saved | None = None) -> None:
        self.rank = context.rank
        self._attempts = Attempts()
        self._reports = KeptReports() if context.hooks.link_facts is not None else None
        channel = context.channel if self._reports is None else KeepingChannel(context.channel, self._reports)
        self.direct = self._direct_over(channel, context)
        """What goes from device to device (`runtime.pairs`); None with the option off."""
        channel = AttemptChannel(self.direct or channel, self._attempts)
        context = replace(context, channel=channel)
        self._context = context
        self._saved = saved
        self._began = first.version if first.epoch == 0 else None
        self._bounds = message_bounds(context.job, context.model.layout, pairs=self.direct is not None)
        self._values: dict[int, ValueBuffer] = {}
        self.commit = StepCommit(context, self._values, first)
        self.replica = self.commit.replica
        self._steps = StepRunner(context, self.commit, self._values, self)
        self.configuration: Configuration
        """The configuration that was entered last."""
        self._next: Configuration | None = None  # has arrived and is not entered yet
        self._recovered: set[int] = set()  # members that may not have what was sent to them any more
        self._has_missed = False  # others may have entered a configuration that this worker did not
        self._prepare: m.Prepare | None = None  # a planned change that is answered between two steps
        self._validation_due: int | None = None  # the version to validate next
        self._last_step = context.job.steps  # or an earlier one, by a validation
        self._check_requests: list[_CheckRequest] = []  # of a mesh epoch that is not entered yet
        self._weights_sent = -1  # the epoch in which the final weights were sent
        self._was_just_adopted = False  # until the Prepare with which the new controller begins
        self.is_orphaned = False
        """The controller is gone. No worker begins another step, and a step that all have begun is still completed: so
        all end at the same version, as a step needs the vote of every member; or, where another controller may come
        (`timeouts.adopt`), wait for it there."""
        self._failed_step = 0  # in which the device failed and was brought back; 0: none, or over
        self._failed: m.Failed | None = None  # the exception that this worker cannot go on after
        self.enter_epoch(first)  # like every later configuration

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
        """The time at which it has to be resumed though nothing has come (`pacing.DeviceClock.now`); None: never."""
        return self._steps.pacing.wakes_at

    # ---- the loop

    def train(self) -> Waits:
        """Train to the last step, then send the weights; yields what it waits for.

        It never ends by itself: the controller says when, by Stop. If the sender of final weights is lost, others send
        them, so every worker stays until then.

        Raises:
            WorkerStopped: the controller says so; or it is gone and no step is under way.
        """
        self._initialize_or_restore()
        while True:
            try:
                # The order matters: a step that an exception or a device fault ended waits for a new mesh, a
                # validation that is due comes before a new configuration is entered, and only the last cases exclude
                # each other.
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
                    # It answered a Prepare here: the next step begins in the next configuration, as that has it.
                    yield from self._until_prepare("the mesh epoch after step")
                elif self.version == self._last_step:
                    self._send_weights()
                    yield from self._until_prepare("the end of the run, after step")
                else:
                    yield from self._train_step(self.version + 1)
            except ConfigurationChanged as change:
                self.enter_epoch(change.configuration)  # what is left of the step is run at the next turn of the loop
            except WorkerStopped:
                raise
            except Exception as error:
                if not (self._recovers_from(error) or self._holds_after(error)):
                    raise

    def _save(self) -> None:
        """Send hashes of the state, if replicas are compared, and have it written: the run is about to stop."""
        self.replica.soundness.compare(saves=True)
        if self.replica.soundness.check(leaves=True):  # else another mesh epoch follows, in which others write it
            self._context.hooks.save(self.replica)

    def _initialize_or_restore(self) -> None:
        """Fill the state of the first mesh. A worker that joins later is sent its state by the others."""
        if self.configuration.epoch:
            return
        if self.version == 0:
            self.replica.initialize()
        else:
            assert self._saved is not None, "a first mesh beyond version 0 has a checkpoint"
            self.replica.restore(self._saved)

    def _train_step(self, step: int) -> Waits:
        yield from self._steps.train_step(step)
        # A step up to the version that this epoch began with was validated before it, or the Reconfigure names it
        # (`validate`): it is not validated again.
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
        """Send state to learners, and answer a Prepare for a planned change. Nothing is under way.

        Raises:
            WorkerStopped: the controller is gone.
        """
        if self.is_orphaned:
            self.hand_over()
            raise WorkerStopped
        if self.version >= self.configuration.version:  # else this worker is behind: its state is not the newest
            self.replica.send_state()
        if self._prepare is not None:
            nothing_comes = self.version == self._last_step or self._may_not_begin
            # With nothing to come, this worker would otherwise wait for a step that it does not run.
            if nothing_comes or self._prepare.after <= self.version:
                self._answer(self._prepare)

    def _until_votes_are_passed_on(self) -> Waits:
        """An orphan ends, and whoever is behind it needs the votes that it gets and adds up (S9)."""
        protocol = self.commit.protocol
        yield from self.until(
            lambda: not (self.is_orphaned and protocol.owes_votes), "votes to pass on of step", self.version
        )

    def hand_over(self) -> None:
        """An orphan is about to end: what it has sent goes over links as far as pairs may not have brought it.

        Else the others would wait for it: for a vote that is held back behind it, for one.
        """
        if self.direct is not None:
            self.direct.hand_over()

    def _until_there_is_a_controller(self, reports: KeptReports) -> Waits:
        """An orphan that may be adopted holds between two steps, as does a worker whose reports nobody writes down."""
        yield from self.until(
            lambda: not (self.is_orphaned or self._was_just_adopted or reports.is_full),
            "a controller, after step",
            self.version,
        )

    def _send_weights(self) -> None:
        """Send the final values of all primary pages to the controller, once in every configuration.

        The hashes of the last version went before them, so that they are compared before the run is done (H1).
        """
        epoch = self.configuration.epoch
        if self._weights_sent >= epoch:
            return
        self._weights_sent = epoch
        if not self.replica.soundness.check(leaves=True):
            return  # another mesh epoch follows, in which others send it
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
        """True if a Prepare is answered where this worker is; else it is answered between two steps.

        A loss is answered at once, wherever this worker is. So is a planned change if this worker has begun a later
        step: the boundary between steps that was meant has passed. During a validation it is answered at once too, if
        other members may have answered one step earlier: they stay there, and the validation would never end.
        """
        in_vain = self._validation_due == self.version > prepare.after
        begun = self._steps.step_under_way
        return (
            prepare.after == m.AT_ONCE or begun > max(prepare.after, self.version) or (in_vain and self._next is None)
        )

    def _answer(self, prepare: m.Prepare) -> None:
        """Report everything that this worker has of steps that are not decided.

        From now on nothing is decided in this epoch (docs/protocol.md, C2): the report
        stays true. Work goes on.
        """
        if not self.commit.protocol.promise(prepare.epoch):
            return
        self._prepare = None
        self._skip_next()  # an older epoch: it was overtaken, and some member may never have got its Reconfigure
        self._steps.keep_all()
        self.replica.soundness.report_damage()
        # Two steps: a primary that has no micro-batches of its own can have sums of the step after the next already.
        found = (self._steps.partial_step(self.version + 1), self._steps.partial_step(self.version + 2))
        partial_steps = tuple(part for part in found if part != m.PartialStep(part.step))
        ahead = self.replica.state.ahead_of(self.version)
        # A Reconfigure that was overtaken may have given its stage other layers: then this is not of these.
        on = self.placement.layers_of_stage(self.placement.mesh.stage_of(self.rank))
        layers, attempt = (on.start, on.stop), self._attempts.number
        report = m.StepReport(prepare.epoch, self.rank, self.version, partial_steps, attempt, ahead, layers)
        self._context.channel.send(CONTROLLER, report)

    def enter_epoch(self, configuration: Configuration) -> None:
        """Become a member of a configuration: a recovery, a planned change, or the first one.

        Sums go to where the new replica map wants them, boundary tensors to where the recovery plan wants them,
        parameters that are missing are asked for, and votes are sent again. Then the loop goes on with what is left of
        the step.
        """
        self.replica.background.finish()  # copies read and write the buffers that there are now
        for rank in self._recovered - {self.rank}:
            # What was sent to them may not be there any more: as after a lost link, it is sent again.
            self.commit.handle(rank, m.LinkClosed(self.rank, rank), None)
        self._recovered.clear()
        another = configuration.attempt > self._attempts.number
        if another:
            self._steps.forget_beyond(configuration.version)
        repairs = configuration.repair > self._attempts.repair
        if another:
            self._attempts.begin(configuration.attempt, configuration.version, configuration.repair)
        came = self._attempts.enter_epoch(configuration.epoch)
        self.configuration = configuration
        if self._prepare is not None and self._prepare.epoch <= configuration.epoch:
            self._prepare = None  # this configuration is its outcome, or a later one
        self._next = None
        self._failed_step = 0
        if self._reports is not None:
            self._reports.entered()
        self._validation_due = configuration.validate
        if configuration.is_last:
            self._last_step = configuration.version
        # The order matters: stage and buffers; then pages and sums, which refer to them; then what is left of the step,
        # which refers to both; votes last, since a vote may apply the step at once.
        #   StepRunner.enter_epoch  the stage, its buffers and programs
        #   StepCommit.enter_epoch  WorkerProtocol; StateReplica (reduced gradients again), GradientReducer (sums again)
        #   StepRunner.resume       the remaining work; Boundaries (tensors again), Parameters (Need)
        #   StepCommit.resume       messages that came early, and the votes again
        self._steps.enter_epoch(configuration)
        replica_map = self.placement.replica_map(self._context.model.layout, self._stages_of_interest())
        if self.direct is not None:  # first: what pairs have not brought goes before whatever is sent in this epoch
            self.direct.enter_epoch(self.placement, replica_map)
        version, begun = configuration.version, self._steps.step_under_way
        self.commit.enter_epoch(self.placement, replica_map, version, begun, has_missed=self._has_missed)
        self._has_missed = False
        if repairs:
            self.replica.repair()
        self._steps.resume(configuration)
        self.commit.resume()
        for incoming in came:  # of this attempt, from members that have entered it first; or of one still to come
            self._handle(incoming)
        requests, self._check_requests = self._check_requests, []
        for request in requests:
            self._check(request)
        if self.version >= configuration.version:  # else the state of this version is not used any more
            self.replica.soundness.compare(saves=configuration.save)

    def _stages_of_interest(self) -> set[int] | None:
        """This worker's stage, and the stages that own a parameter which a layer of it reads; None: all."""
        placement, layout = self.placement, self._context.model.layout
        if placement.replicas is not None:
            return None
        stage = placement.mesh.stage_of(self.rank)
        readers = (block for layer in placement.layers_of_stage(stage) for block in layout.layers[layer].reader_blocks)
        return {stage, *(placement.stage_of_layer(block.source[0]) for block in readers if block.source)}

    # ---- messages

    def handle_messages(self) -> None:
        """Handle everything that has arrived. Deciding and applying a step may happen in here (StepCommit)."""
        for incoming in self._context.channel.receive_all():
            self._handle(incoming)
        self.replica.collect()

    def _refusal(self, sender: int, message: m.AnyMessage, num_elements: int | None) -> str:
        """Why a message cannot be right, so that nothing acts on it; empty if it can."""
        if sender in (self.rank, CONTROLLER):  # the end of a link, noticed here; or trusted
            return ""
        at = WorkerPosition(self.version, self.configuration.epoch, self.commit.protocol.voters, self._began)
        if why := refused_by_worker(self._bounds, message, sender, num_elements, at):
            return why
        is_crossing = isinstance(message, m.Activation | m.ActivationGradient)
        return SIZE if is_crossing and self._steps.has_other_shape(message) else ""

    def _expects(self, sender: int, message: Direct) -> bool:
        """True if the configuration has this worker get such a message from this sender."""
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
                self._has_missed = True  # perhaps: others may have been told more by the controller before
                self._adopted()
            case m.Written(step=step):
                if self._reports is not None:
                    self._reports.written(step)
            case _:
                self.commit.handle(incoming.sender, message, payload)

    def _adopted(self) -> None:
        """Another controller has taken the place of the one that is gone: tell it what that one may not have written.

        Whatever is under way goes on. The mesh epoch with which the controller begins asks for all the rest.
        """
        link_facts, reports = self._context.hooks.link_facts, self._reports
        if link_facts is None or reports is None:
            return
        # It begins with a change of the mesh, after a step that nobody should be past by then.
        self.is_orphaned, self._was_just_adopted = False, True
        answer = replace_fields(
            link_facts(self.placement.mesh.members),
            version=self.version,
            applied=tuple(reports.applied),
            damaged=tuple(reports.damaged),
            is_suspect=reports.is_suspect(self.version),
        )
        self._context.channel.send(CONTROLLER, answer)

    def _check(self, message: _CheckRequest) -> None:
        """Do what the controller wants about results that differ, in the mesh epoch that it means."""
        if message.epoch > self.configuration.epoch:
            self._check_requests.append(message)  # its Reconfigure came before it, and is not entered yet
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
        """Note a new configuration; it is entered at the next wait, or after the action that runs."""
        self._recovered.update(message.recovered)  # even if it is skipped: a later one does not name them again
        device_recovery = self._context.hooks.device_recovery
        if device_recovery is not None and not device_recovery.accepts(message):
            self._has_missed = True
            return
        pending = self._next.epoch if self._next is not None else -1
        # Not entered here: this is called in the middle of an action, whose buffers `enter_epoch` would change.
        if message.epoch > pending and self.commit.protocol.accepts(message.epoch):
            self._context.hooks.members_changed(message)
            self._skip_next()
            self._next = Configuration.from_message(self._context.placement, message)
        else:
            self._has_missed = True

    def _skip_next(self) -> None:
        """Give up the configuration that has arrived and is not entered, if there is one; others may enter it."""
        self._has_missed = self._has_missed or self._next is not None
        self._next = None

    # ---- waiting

    def until(self, ready: Callable[[], bool], what: str, number: int) -> Waits:
        """Handle messages, and do background copies, until `ready()`. See `Waiting`."""
        self.handle_messages()
        while not ready():
            self.check_configuration()  # what is waited for may never come in this configuration: its sender is lost
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
        """True if this worker, which cannot go on after an exception, keeps its state for as long as it is needed.

        The exception itself is let go, and with it the activations that its frames refer to.
        """
        report = self._context.hooks.failed
        if report is None or self._failed is not None or self.commit.is_applying:
            return False
        self._failed = report(error)
        return self._failed is not None

    def _until_saved_or_lost(self, failed: m.Failed) -> Waits:
        """Report the exception, and keep the state until it has been written, or others have taken this worker's place.

        In every mesh epoch that it enters it says again that it computes nothing: another controller may not know it.
        """
        if self.configuration.save:
            # If it is behind, the votes of the others have it apply the step that they have applied.
            yield from self.until(lambda: self.version >= self.configuration.version, "votes of step", failed.step)
            self._save()
        else:
            self._context.channel.send(CONTROLLER, failed)
        yield from self._until_reconfigured("the end of the run, after an exception in step")

    # ---- the option of devices that recover

    def _recovers_from(self, error: Exception) -> bool:
        """True if the device caused the error and was brought back: what was on its way through it is given up."""
        device_recovery = self._context.hooks.device_recovery
        if device_recovery is None or not isinstance(error, RuntimeError) or self._failed_step:
            return False
        if (damage := device_recovery.recover(error, self)) is None:
            return False
        self._failed_step = damage.step
        self._skip_next()  # planned with what is lost
        self._context.channel.send(CONTROLLER, damage)
        return True

    def drop_undecided(self) -> None:
        """Give up everything of steps that are not decided."""
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
