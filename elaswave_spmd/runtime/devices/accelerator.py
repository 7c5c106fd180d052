"""A device with memory of its own that is an eager device of torch: one code for all, by torch's device API."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from elaswave_spmd.runtime.devices.kind import DeviceKind, MemoryFigures, Remedy


@dataclass(frozen=True)
class Copying:
    """A copy to host memory on a stream of its own. `event` is None where calls are done when they return."""

    values: Tensor
    event: Any = None

    def done(self) -> bool:
        return self.event is None or bool(self.event.query())

    def wait(self) -> Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.values


class Faults(Protocol):
    """A vendor's calls for a device that has failed; as `Device` has them."""

    def recover(self, error: BaseException) -> Remedy | None: ...

    def reuse(self, tensors: Iterable[Tensor]) -> int: ...


class AcceleratorDevice:
    """One accelerator.

    Args:
        kind: whose capabilities say what `api` can do.
        place: the device of its tensors.
        api: torch's module for it (torch.cuda, torch_npu.npu, ...).
        faults: of a kind that can be brought back after a fault.
    """

    def __init__(
        self,
        kind: DeviceKind,
        place: torch.device,
        api: Any,
        faults: Faults | None = None,
    ) -> None:
        self.kind, self.place, self._api, self._faults = kind, place, api, faults
        self._out: Any = None
        if kind.capabilities.streams:
            api.set_device(place)
            self._out = api.Stream(device=place)  # copies out go on beside what the main stream computes

    def from_host(self, values: Tensor) -> Tensor:
        return torch.empty(values.shape, dtype=values.dtype, device=self.place).copy_(values)

    def to_host(self, values: Tensor) -> Tensor:
        return self.copy_to_host(values).wait()

    def copy_to_host(self, values: Tensor) -> Copying:
        values = values.detach()
        pinned = self.kind.capabilities.pinned_copies
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=pinned)
        if self._out is None:
            return Copying(host.copy_(values))
        self._out.wait_stream(self._api.current_stream(self.place))  # for whatever makes the values
        with self._api.stream(self._out):
            host.copy_(values, non_blocking=pinned)
            values.record_stream(self._out)  # its memory is not given to others before the copy is done
            return Copying(host, self._out.record_event())

    def synchronize(self) -> None:
        if self.kind.capabilities.streams:
            self._api.synchronize(self.place)

    def memory(self) -> MemoryFigures | None:
        if not hasattr(self._api, "memory_allocated"):
            return None
        total = getattr(self._api.get_device_properties(self.place), "total_memory", None)
        allocated, peak = self._api.memory_allocated(self.place), self._api.max_memory_allocated(self.place)
        return MemoryFigures(allocated, peak, total)

    def recover(self, error: BaseException) -> Remedy | None:
        return self._faults.recover(error) if self._faults is not None else None

    def reuse(self, tensors: Iterable[Tensor]) -> None:
        assert self._faults is not None, "no memory of it was found bad"
        self._faults.reuse(tensors)
