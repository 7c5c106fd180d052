"""What a worker does when its device has failed in the middle of a step and has been brought back.

Nothing that was on its way through the device can be trusted then. So the worker gives up all that it has of steps that
are not decided (micro-batches, sums, entries, tensors that came), and with bad memory its state as well, and says so.
The mesh epoch that follows is one in which it has begun nothing: others send it again what it had got from them, the
step is salvaged from what they have, and state is learned again from mirrors.
"""

from __future__ import annotations

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.devices import Remedy
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.worker.channel import Incoming
from elaswave_spmd.worker.configuration import Epoch
from elaswave_spmd.worker.microbatches import Waits
from elaswave_spmd.worker.state import LEARNING
from elaswave_spmd.worker.step import Executor


class RecoveringExecutor(Executor):
    """An executor that outlives faults of its device, where those can be survived."""

    _sound = -1  # the version whose state is known to be complete in the device's memory
    _void = -1  # the mesh epochs up to this one are planned with what is lost
    _forgetful: frozenset[int] = frozenset()  # of members, as mesh epochs to enter or to skip have said

    def _enter(self, epoch: Epoch) -> None:
        for rank in self._forgetful - {self.rank}:  # as after a lost link: what was sent there may not be there
            self.replica.handle(rank, m.LinkClosed(self.rank, rank), None)
        self._forgetful = frozenset()
        super()._enter(epoch)

    def _begin(self, step: int) -> None:
        if self.device.kind.capabilities.recovers:
            self.replica.chores.finish()  # others are taught nothing in a step that may turn out to be a fault's
            self.device.synchronize()  # an error of the update before it shows here, and not as one of this step
        self._sound = step - 1
        super()._begin(step)

    def _run_step(self, step: int) -> Waits:
        # To wait for the device would be to wait for what others do in a group, who may be gone.
        grouped = self.replica.parameters.grouped
        if self.device.kind.capabilities.recovers and not grouped.idle:
            yield from self._until(lambda: grouped.idle, "what a group copies before step", step)
        yield from super()._run_step(step)

    def _handle(self, incoming: Incoming) -> None:
        message = incoming.message
        if isinstance(message, m.Reconfigure):
            self._forgetful |= {*message.forgot}  # a later epoch does not say it again
            if message.epoch <= self._void:
                return
        super()._handle(incoming)

    def _train_on(self) -> Waits:
        try:
            yield from super()._train_on()
        except RuntimeError as error:
            remedy = self.device.recover(error) if self._can_forget() else None
            if remedy is None or (remedy is Remedy.RELOAD and self._has_constants()):
                raise
            reason = str(error).partition("\n")[0] or type(error).__name__
        else:
            return
        step = self.version + 1
        runs = self._forget(remedy)
        self._port.send(CONTROLLER, m.Damaged(self.rank, self.placement.mesh.epoch, step, tuple(runs), reason))
        yield from self._until(lambda: False, "the mesh epoch after a fault of the device in step", step)

    def _can_forget(self) -> bool:
        """Whether the fault is in a step that nobody can have decided, and all state before it is complete."""
        replica = self.replica
        complete = all(part.version == self.version for part in replica.state)
        updated = self._sound == self.version >= self._epoch_version and replica.reducer.decided == self.version
        return complete and updated and replica.protocol.may_forget

    def _forget(self, remedy: Remedy) -> list[tuple[int, int, int]]:
        """Gives up what cannot be trusted any more. Returns the runs of state among it."""
        self._begun = self._todo = self._place = None
        self._void = self.replica.protocol.promised  # a STATUS that was given has told of what is lost now
        self._microbatches.backward_of = -1
        self._microbatches.programs.discard_all()
        self._boundaries.forget_all()
        self.replica.forget()
        runs = self._give_up_state() if remedy is Remedy.RELOAD else []
        held = [part.run for part in self.replica.state if part.version != LEARNING]
        for layer, values in self.values.items():
            # Pages that others have published came through the device as well.
            values.keep_only((run.first, run.stop) for run in held if run.layer == layer)
            for parameter in values.parameters:
                parameter.grad = None
        return runs

    def _has_constants(self) -> bool:
        """Whether layers have tensors that no mirror has."""
        return any(True for values in self.values.values() for _ in values.module.buffers())

    def _give_up_state(self) -> list[tuple[int, int, int]]:
        """State is to be learned again, in memory that is good. Returns the runs that it had."""
        tensors = [values.flat for values in self.values.values()]
        tensors += [t for part in self.replica.state for t in (part.master, *part.optimizer_state.values())]
        self.device.reuse(t for t in tensors if t.untyped_storage().nbytes())  # dropped parameters have no memory
        return self.replica.state.disown_all()
