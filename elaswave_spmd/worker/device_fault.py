"""Recovery of a worker whose device fails in the middle of a step and can be brought back (`WorkerHooks`).

Nothing that was on its way through the device can be trusted then. So the worker gives up everything that it has of
steps that are not decided (micro-batches, sums, reduced gradients, tensors that came), and with bad memory its state as
well, and reports it. In the configuration that follows it has nothing of the step: other workers send again what they
had sent it, the step is recovered from what they have, and lost state is sent by mirrors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.devices import Device, Remedy
from elaswave_spmd.sharding.replicas import PageRange
from elaswave_spmd.worker.model_layout import has_constants
from elaswave_spmd.worker.state import LEARNING
from elaswave_spmd.worker.state_replica import StateReplica

if TYPE_CHECKING:
    from elaswave_spmd.worker.loop import Executor


class DeviceRecovery:
    """Recovery of the worker's own device, where its kind can be recovered; a hook of the worker's loop.

    Args:
        device: of the worker.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._complete_version = -1  # the version whose state is known to be complete in the device's memory
        self._void_epoch = -1  # configurations up to this epoch are planned with what is lost

    def begin_step(self, step: int, replica: StateReplica) -> None:
        """Wait for the device, so that an error of the update before shows here, and not as one of this step."""
        replica.background.finish()  # no state is sent in a step that may turn out to have a fault
        self._device.synchronize()
        self._complete_version = step - 1

    def accepts(self, message: m.Reconfigure) -> bool:
        """True unless the configuration was planned with what this worker has lost since."""
        return message.epoch > self._void_epoch

    def recover(self, error: RuntimeError, executor: Executor) -> m.Damaged | None:
        """Bring the device back and give up what cannot be trusted.

        Returns:
            The report to the controller; None if the device cannot be recovered or did not cause the error: the caller
            raises the error again.
        """
        remedy = self._device.recover(error) if self._can_forget(executor) else None
        if remedy is None or (remedy is Remedy.RELOAD and _has_constants(executor)):
            return None
        reason = str(error).partition("\n")[0] or type(error).__name__
        # A StepReport that was given for this epoch has reported what is lost now.
        self._void_epoch = executor.commit.protocol.promised
        executor.drop_undecided()
        lost = self._give_up_state(executor) if remedy is Remedy.RELOAD else []
        held = [part.pages for part in executor.replica.state if part.version != LEARNING]
        for layer, values in executor.values.items():
            # Pages that other workers have published came through the device as well.
            values.keep_only((pages.first, pages.stop) for pages in held if pages.layer == layer)
            for parameter in values.parameters:
                parameter.grad = None
        step = executor.version + 1
        return m.Damaged(executor.rank, executor.configuration.epoch, step, tuple(lost), reason)

    def _can_forget(self, executor: Executor) -> bool:
        """True if the fault is in a step that nobody can have decided, and all state before it is complete."""
        replica, version = executor.replica, executor.version
        complete = all(part.version == version for part in replica.state)
        entered = version >= executor.configuration.version
        updated = self._complete_version == version and entered and replica.reducer.applied_step == version
        return complete and updated and executor.commit.protocol.may_drop_undecided

    def _give_up_state(self, executor: Executor) -> list[PageRange]:
        """Replace memory that may be bad, and give up the state in it. Returns the page ranges that had state."""
        tensors = [values.flat for values in executor.values.values()]
        tensors += [t for part in executor.replica.state for t in (part.master, *part.optimizer_state.values())]
        self._device.reuse(t for t in tensors if t.untyped_storage().nbytes())  # dropped parameters have no memory
        return executor.replica.state.disown(executor.replica.state)


def _has_constants(executor: Executor) -> bool:
    """True if layers have tensors besides parameters: no mirror has a copy of those."""
    return any(has_constants(values.module) for values in executor.values.values())
