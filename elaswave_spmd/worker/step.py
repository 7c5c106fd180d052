"""The worker's training loop: interprets the actions of its placement, one step after another, one epoch after another.

It is a generator that yields whenever it has nothing to do until a message arrives. The process runtime resumes it from
a mailbox; tests resume many of them in one process, in any order. It decides nothing: what runs where is in the
placement, and when a step may be applied in the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from elaswave_spmd.determinism import Init
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.pipeline import FORWARD, Action, actions_of
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.worker.channel import Channel, Incoming, Stopped
from elaswave_spmd.worker.configuration import Epoch
from elaswave_spmd.worker.fault_points import OnFaultPoint, no_op
from elaswave_spmd.worker.memory_usage import peak_bytes, state_bytes
from elaswave_spmd.worker.microbatches import EpochChangedError, MicrobatchRunner, Modules, Traced, Waits
from elaswave_spmd.worker.parameter_broadcast import StageGroup
from elaswave_spmd.worker.partial_step import (
    FULL,
    INPUT_ONLY,
    RemainingWork,
    StepUnderWay,
    next_ready,
    todo_anew,
    todo_left,
)
from elaswave_spmd.worker.profiling import MemoryRow, Row
from elaswave_spmd.worker.programs.eager import Batches, StagePrograms
from elaswave_spmd.worker.replica import StateReplica
from elaswave_spmd.worker.spec import Job
from elaswave_spmd.worker.stage_boundary import ACTIVATION, GRADIENT, Boundaries
from elaswave_spmd.worker.state import Saved


class Executor:
    """One worker of a run.

    Args:
        rank, job, layout: this worker, the run's arithmetic, how state lies.
        first: the epoch in which it becomes a member.
        modules: makes this worker's layers; their parameters are replaced by views of flat buffers.
        programs: runs layers, one at a time, on tensors of `device`.
        inits: owned parameter name -> initial distribution.
        train, validation, port, visit: the data, the way out, and who is told of the points that a step passes.
        saved: the state that a first mesh beyond version 0 begins with.
        group: of its stage, for new parameters; None: links alone.
    """

    def __init__(
        self,
        rank: int,
        job: Job,
        layout: ModelLayout,
        first: Epoch,
        modules: Modules,
        programs: StagePrograms,
        device: Device,
        inits: Mapping[str, Init],
        train: Batches,
        validation: Batches | None,
        port: Channel,
        *,
        place_of: Callable[[m.Reconfigure], Epoch],
        visit: OnFaultPoint = no_op,
        saved: Saved | None = None,
        group: StageGroup | None = None,
    ) -> None:
        self.rank, self.job, self.layout = rank, job, layout
        self._port, self._inits, self._validation, self._place_of = port, inits, validation, place_of
        self._saved, self.device = saved, device
        self.halts = False  # set from outside: it begins no other step, and `run` raises Stopped instead
        self.measured: Callable[[int, tuple[Row, ...], tuple[MemoryRow, ...]], None] = lambda step, rows, memory: None
        """Told after every step what its layer programs took, and what new ones keep."""
        self.save: Callable[[], None] = lambda: None  # called when the run is about to stop: write the state as it is
        self._boundaries = Boundaries(rank, port.send, device)
        runs = modules, programs, device, train, self._boundaries
        self._microbatches = MicrobatchRunner(job, layout, *runs, self._until, self._take, visit)
        self.values = self._microbatches.values
        ways = device, port.send, visit, group
        self.replica = StateReplica(rank, job, layout, self.values, first.placement, first.version, *ways)
        self._microbatches.reducer = self.replica.reducer
        self._begun: StepUnderWay | None = None
        self._todo: dict[int, RemainingWork] | None = None
        self._planned: tuple[int, tuple[m.Recompute, ...]] | None = None  # (step, its salvage plan)
        self._prepare: m.Prepare | None = None
        self._place: Epoch | None = None
        self._validate_due, self._saves = -1, False
        self._validated = self._final_sent = -1
        self._enter(first)

    def trace(self, traced: Traced) -> None:
        """Tells of every layer program of a step, from now on."""
        self._microbatches.traced = traced

    @property
    def version(self) -> int:
        """The step last applied."""
        return self.replica.protocol.version

    @property
    def _promised(self) -> bool:
        """Whether a PREPARE was answered: nothing is decided in this mesh epoch any more."""
        return self.replica.protocol.promised > self.placement.mesh.epoch

    # ---- mesh epochs

    def _enter(self, epoch: Epoch) -> None:
        """Takes its place in an epoch; what is under way and still wanted goes on."""
        self.replica.chores.finish()  # they know the buffers that there are now
        placement = self.placement = epoch.placement
        self._prepare = p if (p := self._prepare) is not None and p.epoch > placement.mesh.epoch else None
        self._place, self._stage = None, placement.mesh.stage_of(self.rank)
        self._is_last = self._stage == placement.num_stages - 1
        self._layers = placement.layers_of_stage(self._stage)
        self._boundaries.let_go()
        if self._microbatches.take(placement, self._stage) or epoch.work is None:
            self._begun = (
                None  # it was through other layers; or nobody had anything of it, and micro-batches are dealt anew
            )
        runs = placement.replica_map(self.layout, self._stages_of_interest())
        self._epoch_version, self._validate_due = epoch.version, epoch.validate
        self._saves = epoch.save
        self.replica.bind(placement, runs, epoch.version, self._validate_due >= 0)
        self._planned = (epoch.version + 1, epoch.work) if epoch.work is not None else None
        self._actions: tuple[Action, ...] | None = None
        self._plan_salvage(epoch.version + 1)
        if epoch.work is not None:
            self._boundaries.send_again(epoch.version + 1, epoch.work, placement)
        # Sharded parameters that were dropped after this worker's last micro-batch stay dropped if nothing is left for
        # it.
        needed = self._todo is None or self._todo or self._validate_due >= 0
        wanted = [ly for ly in self._layers if needed or self.values[ly].dropped_at != epoch.version]
        self.replica.parameters.refresh(wanted, epoch.version)
        self.replica.resume()

    def _stages_of_interest(self) -> set[int] | None:
        """This worker's stage, and those that own a parameter which a layer of it reads; None: all."""
        if self.placement.replicas is not None:
            return None
        sources = (block.source for ly in self._layers for block in self.layout.layers[ly].reader_blocks)
        return {self._stage, *(self.placement.stage_of_layer(source[0]) for source in sources if source)}

    def _plan_salvage(self, step: int) -> None:
        """What this worker has to do of a step that others, or itself, have begun."""
        self._todo = None
        if self._planned is None:
            return
        lines = [line for line in self._planned[1] if line.worker == self.rank]
        under_way = self._begun if self._begun and self._begun.number == step else None
        if under_way is None:
            self._todo = todo_anew(lines)
            return
        self._todo = todo_left(lines, under_way, self._microbatches.programs.forwarded)
        to_come = {microbatch for microbatch, todo in self._todo.items() if todo.backward == FULL and not todo.alone}
        self.replica.reducer.begin_step(step, under_way.summed | to_come)

    def _answer(self, prepare: m.Prepare) -> None:
        """STATUS: everything that this worker has of steps that are not decided."""
        if not self.replica.protocol.promise(prepare.epoch):
            return
        self._prepare = self._place = None
        self.replica.reducer.keeps_all = True
        self._boundaries.hold()
        found = (self._held(self.version + 1), self._held(self.version + 2))
        held = tuple(h for h in found if h != m.StepHeld(h.step))
        self._port.send(CONTROLLER, m.StepReport(prepare.epoch, self.rank, self.version, held))

    def _held(self, step: int) -> m.StepHeld:
        reducer, mine = self.replica.reducer, self._begun if self._begun and self._begun.number == step else None
        current = step == self.version + 1
        # A saved forward that is to serve for the input's gradient alone may be used up before the PLACE.
        input_only = {microbatch for microbatch, left in (self._todo or {}).items() if left.backward == INPUT_ONLY}
        if mine is not None:
            # Of a micro-batch in the middle of its backward, the sums of some layers may have been given up already.
            given_up = {self._microbatches.backward_of} if reducer.gives_up else set()
            mine.reported = frozenset(mine.computed | given_up)
        return m.StepHeld(
            step,
            tuple(sorted(mine.assigned)) if mine else (),
            tuple(sorted(mine.computed)) if mine else (),
            tuple(sorted(self._microbatches.programs.forwarded - input_only)) if mine else (),
            self._boundaries.kept(ACTIVATION, step),
            self._boundaries.kept(GRADIENT, step),
            reducer.nodes_held() if current else {},
            reducer.trees_held(step, current=current),
            self.replica.entries_held(step),
        )

    # ---- the loop

    def run(self) -> Waits:
        """The whole run; yields what it waits for. It never ends by itself: the controller says when, by Stop.

        When all steps are applied the final pages are sent, and sent again by others if their sender is lost.
        """
        if self.placement.mesh.epoch == 0:
            if self.version == 0:
                self.replica.initialise(self._inits)
            else:
                assert self._saved is not None, "a first mesh beyond version 0 has a checkpoint"
                self.replica.restore(self._saved)
        while True:
            try:
                yield from self._train_on()
            except EpochChangedError:
                assert self._place is not None
                self._enter(self._place)

    def _train_on(self) -> Waits:
        while True:
            if self._validate_due == self.version:
                if self._prepare is not None and self._at_once(self._prepare):
                    self._answer(self._prepare)
                yield from self._validate(self.version)
                self._validate_due = -1
            if self._place is not None:
                raise EpochChangedError
            if self._saves and self.version >= self._epoch_version:
                self.save()
                yield from self._until(lambda: False, "the end of the run, saved at step", self.version)
            if self._begun is None or self._begun.number <= self.version:
                if self.halts:
                    raise Stopped
                if self.version >= self._epoch_version:
                    self.replica.teach()
                now = self.version == self.job.steps or self._promised
                if self._prepare is not None and (now or self._prepare.after <= self.version):
                    self._answer(self._prepare)
                if self._promised:  # STATUS said, or says later, that nothing of the next was begun
                    yield from self._until(lambda: self._prepare is not None, "the mesh epoch after step", self.version)
                    continue
            if self.version == self.job.steps:
                break
            yield from self._run_step(self.version + 1)
            if self.job.validates_at(self.version) and self.version > self._epoch_version:
                self._validate_due = self.version
        if self._final_sent < self.placement.mesh.epoch:
            self._final_sent = self.placement.mesh.epoch
            self._send_final()
        yield from self._until(lambda: self._prepare is not None, "the end of the run, after step", self.version)

    def _send_final(self) -> None:
        for part in self.replica.state:
            if part.run.primary == self.rank:
                self._port.send(CONTROLLER, m.FinalPages(*part.run.key), part.master)
        sizes = self.state_bytes(), peak_bytes(self.device)
        self._port.send(CONTROLLER, m.Finished(self.rank, self.placement.mesh.epoch, *sizes))

    def _run_step(self, step: int) -> Waits:
        if self._planned is None or self._planned[0] < step:
            self._todo = None
        if self._planned is not None and self._planned[0] > step:  # others have applied this one
            yield from self._until(lambda: self.version >= step, "votes of step", step)
            return
        if self._begun is None or self._begun.number != step:
            self._begin(step)
        if self._todo is None:
            yield from self._as_placed(step)
        else:
            yield from self._salvage(step, self._todo)
        for layer in self._layers:
            if self.values[layer].dropped_at != step - 1:
                settled = partial(self.replica.parameters.needs_no_more, layer, step - 1)
                yield from self._until(settled, "parameters of layer", layer)
        if not (grouped := self.replica.parameters.grouped).idle:
            yield from self._until(lambda: grouped.idle, "what a group copies before step", step)
        self.replica.computed(step)
        yield from self._until(lambda: self.version >= step, "votes of step", step)
        self._boundaries.forget(step)
        self.measured(step, self._microbatches.take_times(), self._microbatches.programs.memory.take())

    def _begin(self, step: int) -> None:
        if self._todo is None:
            microbatches = set(self.placement.microbatches_of(self.rank))
        else:
            microbatches = {microbatch for microbatch, todo in self._todo.items() if todo.backward == FULL}
        reducer = self.replica.reducer
        self._begun = StepUnderWay(step, microbatches, frozenset(microbatches), alone=reducer.has_sums)
        if self._begun.alone and self._todo is not None:
            for todo in self._todo.values():
                todo.alone = True
        reducer.begin_step(step, () if self._begun.alone else microbatches)
        self._microbatches.begin_step(step, sorted(microbatches))

    def _as_placed(self, step: int) -> Waits:
        """The step as the placement has it."""
        if self._actions is None:
            self._actions = actions_of(self.placement, self.rank)
        for action in self._actions:
            if action.kind == FORWARD:
                yield from self._forward(step, action.microbatch)
            else:
                yield from self._backward(step, action.microbatch, last=action is self._actions[-1])
            if self._place is not None:
                raise EpochChangedError

    def _salvage(self, step: int, todo: dict[int, RemainingWork]) -> Waits:
        """What is left of a step, in whatever order it can be done: no two workers' lists have to fit together."""
        while todo:
            yield from self._until(lambda: self._ready(step, todo) is not None, "inputs to salvage step", step)
            microbatch = self._ready(step, todo)
            assert microbatch is not None
            left = todo[microbatch]
            if left.forward:
                yield from self._forward(step, microbatch, saves=left.backward > 0)
                left.forward = False
            else:
                last = len(todo) == 1
                yield from self._backward(step, microbatch, left.backward, alone=left.alone, last=last)
                left.backward = 0
            if not left.backward:
                del todo[microbatch]
            if self._place is not None:
                raise EpochChangedError

    def _ready(self, step: int, todo: dict[int, RemainingWork]) -> int | None:
        """A micro-batch whose next action has its input: a backward if there is one."""
        has = self._boundaries.of
        activation = has(ACTIVATION, step, self._layers.start) if self._stage else lambda _: True
        gradient = (lambda _: True) if self._is_last else has(GRADIENT, step, self._layers.stop - 1)
        return next_ready(todo, activation, gradient)

    def _forward(self, step: int, microbatch: int, *, saves: bool = True) -> Waits:
        yield from self._microbatches.forward(
            step, microbatch, lambda: self._peer(step, self._stage + 1, microbatch), saves=saves
        )

    def _backward(
        self, step: int, microbatch: int, what: int = FULL, *, alone: bool = False, last: bool = False
    ) -> Waits:
        peer = lambda: self._peer(step, self._stage - 1, microbatch)  # noqa: E731  (asked when the gradient is there)
        drop = last and self.replica.drops_params
        yield from self._microbatches.backward(step, microbatch, peer, weights=what == FULL, alone=alone, drop=drop)
        if what == FULL:
            assert self._begun is not None
            self._begun.computed.add(microbatch)
            if not alone:
                self._begun.summed.add(microbatch)

    def _peer(self, step: int, stage: int, microbatch: int) -> int | None:
        """Who runs a micro-batch through another stage in this step; None: nobody has to any more."""
        if self._planned is not None and self._planned[0] == step:
            return next((w.worker for w in self._planned[1] if (w.stage, w.microbatch) == (stage, microbatch)), None)
        return self.placement.worker_of_microbatch(stage, microbatch)

    def _validate(self, version: int) -> Waits:
        """A read-only pass at a version: micro-batches dealt in turn to each stage's workers, losses to the
        controller.
        """
        assert self._validation is not None
        members, microbatches, losses = self.placement.mesh.stages[self._stage], [], []
        self._microbatches.programs.set_training(False)
        try:
            for microbatch in range(members.index(self.rank), self.job.validation_microbatches, len(members)):
                x = yield from self._microbatches.validate(version, microbatch, self._validation)
                if self._is_last:
                    microbatches.append(microbatch)
                    losses.append(float(x))
        finally:
            self._microbatches.programs.set_training(True)
        if microbatches:
            self._port.send(CONTROLLER, m.ValidationLoss(version, self.rank, tuple(microbatches), tuple(losses)))
        # Afterwards the parameters move on: a loss that went down with its worker could not be computed again.
        yield from self._until(lambda: self._validated >= version, "the end of validation", version)

    def _until(self, ready: Callable[[], bool], what: str, number: int) -> Waits:
        self._take()
        while not ready():
            if self._place is not None:
                raise EpochChangedError
            if not self.replica.chores.do_one():
                yield f"{what} {number}"
            self._take()

    def _take(self) -> None:
        for incoming in self._port.take():
            self._handle(incoming)
        self.replica.collect()

    def _handle(self, incoming: Incoming) -> None:
        message, payload = incoming.message, incoming.payload
        match message:
            case m.Activation() | m.ActivationGradient():
                assert payload is not None
                if message.step > self.version or (isinstance(message, m.Activation) and message.validation):
                    self._boundaries.receive(message, payload)
            case m.Validated():
                self._validated = max(self._validated, message.step)
            case m.Prepare():
                if self._at_once(message):
                    self._answer(message)
                elif self._prepare is None or message.epoch > self._prepare.epoch:
                    self._prepare = message
            case m.Reconfigure():
                pending = self._place.placement.mesh.epoch if self._place else -1
                if message.epoch > pending and self.replica.protocol.accepts(message.epoch):
                    self._place = self._place_of(message)
            case _:
                self.replica.handle(incoming.sender, message, payload)

    def _at_once(self, prepare: m.Prepare) -> bool:
        """Whether to answer now. To validate first is in vain if others may have answered in the step before it."""
        begun, in_vain = self._begun.number if self._begun else 0, self._validate_due == self.version > prepare.after
        return prepare.after < 0 or begun > max(prepare.after, self.version) or (in_vain and self._place is None)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of training state on this worker between steps; gradients at their peak within a step."""
        return state_bytes(self.replica, self.values, self.job)
