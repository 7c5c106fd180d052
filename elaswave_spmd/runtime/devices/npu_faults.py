"""Faults of an Ascend device: the meaning of torch_npu's errors, and its fault calls in the order that they need.

torch_npu raises RuntimeErrors whose text names the fault. After one the device is stopped, its memory is checked, it is
restarted, and the communicators of its groups are made usable again; a `Remedy` tells what this means for the step.
Written after torch_npu's documentation and sources, and never run on a device; see docs/hardware.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from elaswave_spmd.runtime.devices.kind import Remedy


class NpuEvent(Enum):
    """The fault that an error of torch_npu reports. The value is the phrase in the error's text."""

    MEMORY = "UCE ERROR"  # an error in device memory that its error correction could not correct
    MEMORY_ECC = "HBM MULTI BIT ECC ERROR"
    MEMORY_SUSPECTED = "SUSPECT MEM ERROR"
    LINK = "HCCS LINK ERROR"
    RETRIES_USED_UP = "HCCL OP RETRY FAILED"
    REMOTE_SUSPECTED = "SUSPECT REMOTE ERROR"
    STOPPED = "FORCE STOP"  # stop_device was called; last, since the text may name another fault as its cause


MEMORY_EVENTS = frozenset({NpuEvent.MEMORY, NpuEvent.MEMORY_ECC, NpuEvent.MEMORY_SUSPECTED})
LINK_EVENTS = frozenset({NpuEvent.LINK, NpuEvent.RETRIES_USED_UP, NpuEvent.REMOTE_SUSPECTED})

_AFTER_MEMORY_CHECK = {
    0: Remedy.REDO,  # no bad address is known
    2: Remedy.REDO,  # the bad memory is in no tensor; the allocator has freed it and does not use it again
    3: Remedy.RELOAD,  # the bad memory is in a tensor
}
"""The remedy for each answer of check_uce_in_memory. For 1, bad memory outside torch_npu's allocator, there is none."""


def event_of(error: BaseException) -> NpuEvent | None:
    """The fault that an error reports, or None if it is not an error of torch_npu about the device."""
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    return next((event for event in NpuEvent if event.value in text), None)


class NpuFaults:
    """The fault calls of one device.

    Args:
        npu: the module torch_npu.npu.
        index: the device's index.
        distributed: the module torch_npu.distributed.
        safety: the module torch_npu.npu._recovery, which has the calls for single tensors.
        has_groups: returns True if this process has a group of HCCL now.
    """

    def __init__(
        self, npu: Any, index: int, distributed: Any, safety: Any, has_groups: Callable[[], bool] = lambda: False
    ) -> None:
        self._npu = npu
        self._index = index
        self._distributed = distributed
        self._safety = safety
        self._has_groups = has_groups

    def stop(self) -> bool:
        """Stop the device, from any thread. A thread that waits for the device gets an error with FORCE STOP.

        Returns:
            True if it was stopped.
        """
        return self._npu.stop_device(self._index) in (None, 0)  # None in older releases

    def recover(self, error: BaseException) -> Remedy | None:
        """Restart the device after an error.

        Results of anything that was queued since the device was last synchronised are unreliable afterwards.

        Returns:
            The remedy; None if the device cannot be restarted or did not cause the error: the process has to end.

        Raises:
            RuntimeError: a fault call failed in turn.
        """
        event = event_of(error)
        if event is None or (event is not NpuEvent.STOPPED and not self.stop()):
            return None
        remedy: Remedy | None = Remedy.REDO
        if event in MEMORY_EVENTS:
            remedy = _AFTER_MEMORY_CHECK.get(self._npu.check_uce_in_memory(self._index))
        if remedy is None:
            return None  # the device stays stopped
        self._npu.restart_device(self._index, rebuild_all_resources=False)
        if self._has_groups():
            # With rebuild_link each group makes its connections anew at its next collective, which needs all members.
            # Without it the groups continue with the connections that they have.
            self._distributed.reinit_process_group(None, rebuild_link=event in LINK_EVENTS)
        return remedy

    def reuse(self, tensors: Iterable[Any]) -> int:
        """Give other memory to those of the tensors whose memory is bad. Their values are lost. After `Remedy.RELOAD`.

        Returns:
            The number of tensors that were moved.
        """
        bad = [tensor for tensor in tensors if not self._safety.check_npu_tensor_is_safe(tensor)]
        for tensor in bad:
            self._safety.update_npu_tensor_to_safe(tensor)
        return len(bad)


def abort(group: Any, reason: str) -> None:
    """End a ProcessGroupHCCL's communicators at once, even if a member is lost.

    Not by `ProcessGroupHCCL.abort()`: that method exists, and does nothing.
    """
    group.abort_hccl_comm(reason)
