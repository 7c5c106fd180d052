"""Recovery of a worker whose device fails in the middle of a step and can be reset (C12; a hook, `WorkerHooks`).

Nothing that was on its way through the device can be trusted then. So the worker drops everything that it has of steps
that are not decided (micro-batches, sums, reduced gradients, received tensors), and also its state if the device's
memory is bad, and reports this. In the next configuration it has nothing of the step: other workers send again what
they had sent it, the step is recovered from what they have, and mirrors send the lost state.
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
    """Recovers the worker's own device, if its kind can be recovered.

    Args:
        device: the worker's device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._complete_version = -1  # the version whose state is known to be complete in the device's memory
        self._void_epoch = -1  # configurations up to this epoch were planned with data that this worker has lost

    def begin_step(self, step: int, replica: StateReplica) -> None:
        """Wait for the device, so that an error of the last update shows here and is not taken for one of this step."""
        replica.background.finish()  # all state has been copied before the step in which the device may fail
        self._device.synchronize()
        self._complete_version = step - 1

    def accepts(self, message: m.Reconfigure) -> bool:
        """True unless the configuration was planned with data that this worker has lost since."""
        return message.epoch > self._void_epoch

    def recover(self, error: RuntimeError, executor: Executor) -> m.Damaged | None:
        """Reset the device and drop everything that cannot be trusted.

        Returns:
            The report to the controller; None if the device cannot be recovered or did not cause the error: the caller
            raises the error again.
        """
        remedy = self._device.recover(error) if self._can_forget(executor) else None
        if remedy is None or (remedy is Remedy.RELOAD and _has_constants(executor)):
            return None
        reason = str(error).partition("\n")[0] or type(error).__name__
        # The StepReport for this epoch, if one was sent, has named data that is lost now.
        self._void_epoch = executor.commit.protocol.promised
        executor.drop_undecided()
        lost = self._give_up_state(executor) if remedy is Remedy.RELOAD else []
        held = [part.pages for part in executor.replica.state if part.version != LEARNING]
        for layer, values in executor.values.items():
            # Pages that other workers have published have passed through the device as well: only held ones are kept.
            values.keep_only((pages.first, pages.stop) for pages in held if pages.layer == layer)
            for parameter in values.parameters:
                parameter.grad = None
        step = executor.version + 1
        return m.Damaged(executor.rank, executor.configuration.epoch, step, tuple(lost), reason)

    def _can_forget(self, executor: Executor) -> bool:
        """True if no member can have decided the step of the fault, and all state before that step is complete."""
        replica, version = executor.replica, executor.version
        complete = all(part.version == version for part in replica.state)
        entered = version >= executor.configuration.version
        updated = self._complete_version == version and entered and replica.reducer.applied_step == version
        return complete and updated and executor.commit.protocol.may_drop_undecided

    def _give_up_state(self, executor: Executor) -> list[PageRange]:
        """Have memory that may be bad replaced, and give up the state in it. Returns the ranges that had state."""
        tensors = [values.flat for values in executor.values.values()]
        tensors += [t for part in executor.replica.state for t in (part.master, *part.optimizer_state.values())]
        self._device.reuse(t for t in tensors if t.untyped_storage().nbytes())  # dropped parameters have no memory
        return executor.replica.state.disown(executor.replica.state)


def _has_constants(executor: Executor) -> bool:
    """True if layers have constants: tensors besides parameters, of which no mirror has a copy."""
    return any(has_constants(values.module) for values in executor.values.values())
