"""Faults of an Ascend device: what torch_npu's errors say, and its fault calls in the order that they need.

torch_npu raises RuntimeErrors whose text names the fault. Then the device is stopped, its memory is looked at, it is
restarted, and the communicators of its groups are taken up again; what follows for the step is a `Remedy`. Written by
torch_npu's documentation and sources; docs/hardware.md says what was run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from elaswave_spmd.runtime.devices.kind import Remedy


class NpuEvent(Enum):
    """What an error of torch_npu reports; the value is what stands in its text."""

    MEMORY = "UCE ERROR"  # an error in device memory that its error correction could not correct
    MEMORY_ECC = "HBM MULTI BIT ECC ERROR"
    MEMORY_SUSPECTED = "SUSPECT MEM ERROR"
    LINK = "HCCS LINK ERROR"
    RETRIES_USED_UP = "HCCL OP RETRY FAILED"
    REMOTE_SUSPECTED = "SUSPECT REMOTE ERROR"
    STOPPED = "FORCE STOP"  # stop_device was called: other errors may be behind it, so it is looked for last


MEMORY_EVENTS = frozenset({NpuEvent.MEMORY, NpuEvent.MEMORY_ECC, NpuEvent.MEMORY_SUSPECTED})
LINK_EVENTS = frozenset({NpuEvent.LINK, NpuEvent.RETRIES_USED_UP, NpuEvent.REMOTE_SUSPECTED})

_AFTER_MEMORY_CHECK = {
    0: Remedy.REDO,  # no bad address is known
    2: Remedy.REDO,  # it was in memory that nothing lives in: freed, and not used again
    3: Remedy.RELOAD,  # a tensor lies there
}
"""What check_uce_in_memory answers; 1, bad memory outside torch_npu's allocator, has no remedy within the process."""


def event_of(error: BaseException) -> NpuEvent | None:
    """What an error reports, if it is one of torch_npu's about the device."""
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    return next((event for event in NpuEvent if event.value in text), None)


class NpuFaults:
    """The fault calls of one device.

    Args:
        npu: torch_npu.npu.
        index: of the device.
        distributed: torch_npu.distributed.
        safety: torch_npu.npu._recovery, where the calls for single tensors are.
        has_groups: whether this process has a group of HCCL now.
    """

    def __init__(
        self, npu: Any, index: int, distributed: Any, safety: Any, has_groups: Callable[[], bool] = lambda: False
    ) -> None:
        self._npu, self._index, self._distributed, self._safety = npu, index, distributed, safety
        self._has_groups = has_groups

    def stop(self) -> bool:
        """Ends what runs on the device, from any thread: whoever waits for it gets an error that says FORCE STOP.

        Returns: whether it was stopped.
        """
        return self._npu.stop_device(self._index) in (None, 0)  # None in older releases

    def recover(self, error: BaseException) -> Remedy | None:
        """Brings the device back after an error, if it can be; None: the process has to end.

        Nothing that was queued since the device was last synchronised may be trusted afterwards.

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
            return None  # stopped, and left so
        self._npu.restart_device(self._index, rebuild_all_resources=False)
        if self._has_groups():
            # Without new links all groups go on with those that they have; a broken link is made again for each group
            # by the next collective, of all its members.
            self._distributed.reinit_process_group(None, rebuild_link=event in LINK_EVENTS)
        return remedy

    def reuse(self, tensors: Iterable[Any]) -> int:
        """Gives tensors whose memory is bad other memory; what they held is lost. After `Remedy.RELOAD`.

        Returns: how many had to move.
        """
        bad = [tensor for tensor in tensors if not self._safety.check_npu_tensor_is_safe(tensor)]
        for tensor in bad:
            self._safety.update_npu_tensor_to_safe(tensor)
        return len(bad)


def abort(group: Any, reason: str) -> None:
    """Ends a ProcessGroupHCCL's communicators at once, even if a member is lost.

    `ProcessGroupHCCL.abort()` returns and does nothing, so a test for the attribute would say that it can be used.
    """
    group.abort_hccl_comm(reason)
