"""A device with memory of its own that is an eager device of torch: one code for all, by torch's device API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from elaswave_spmd.runtime.devices.host import Copied
from elaswave_spmd.runtime.devices.kind import DeviceKind, MemoryFigures, Remedy


@dataclass(frozen=True)
class Copying:
    """A copy to host memory on a stream of its own, done when the event is."""

    values: Tensor
    event: Any

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> Tensor:
        self.event.synchronize()
        return self.values


@dataclass(frozen=True)
class Mark:
    """A point in what was queued: an event that can tell times, and when it was queued, by time.perf_counter()."""

    queued: float
    event: Any


class Faults(Protocol):
    """A vendor's calls for a device that has failed; as `Device` has them."""

    def recover(self, error: BaseException) -> Remedy | None: ...

    def reuse(self, tensors: Iterable[Tensor]) -> int: ...


class AcceleratorDevice:
    """One accelerator.

    Copies from and to the host have a stream each, beside what the current stream computes.

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
        self._streams, self._pins = kind.capabilities.streams, kind.capabilities.pinned_copies
        if self._streams:
            api.set_device(place)
            self._in, self._out = api.Stream(device=place), api.Stream(device=place)

    def from_host(self, values: Tensor) -> Tensor:
        if not self._pins:
            return torch.empty(values.shape, dtype=values.dtype, device=self.place).copy_(values)
        # Through pinned memory: a copy out of a network frame would wait for whatever the current stream has queued.
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
        current = self._api.current_stream(self.place)
        with self._api.stream(self._in):
            found = torch.empty(values.shape, dtype=values.dtype, device=self.place)
            found.copy_(pinned, non_blocking=True)
        current.wait_stream(self._in)
        found.record_stream(current)  # made on the one stream, used on the other
        return found

    def to_place(self, values: Tensor) -> Tensor:
        return values if values.device == self.place else self.from_host(values)

    def to_host(self, values: Tensor) -> Tensor:
        if values.device.type == "cpu":
            return values.detach().contiguous()
        return self.copy_to_host(values).wait()

    def copy_to_host(self, values: Tensor) -> Copying | Copied:
        values = values.detach()
        on_host = values.device.type == "cpu"
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pins and not on_host)
        if on_host or not self._streams:
            return Copied(host.copy_(values))
        self._out.wait_stream(self._api.current_stream(self.place))  # for whatever makes the values
        with self._api.stream(self._out):
            host.copy_(values, non_blocking=self._pins)
            values.record_stream(self._out)  # its memory is not given to others before the copy is done
            return Copying(host, self._out.record_event())

    def mark(self) -> Mark | float:
        if not self._streams:
            return perf_counter()
        event = self._api.Event(enable_timing=True)
        event.record(self._api.current_stream(self.place))
        return Mark(perf_counter(), event)

    def times(self, marks: Sequence[Any]) -> list[float]:
        if not self._streams or not marks:
            return list(marks)
        first = marks[0]
        marks[-1].event.synchronize()
        # Events tell what lies between two of them, in milliseconds.
        return [first.queued + 1e-3 * first.event.elapsed_time(mark.event) for mark in marks]

    def enter_thread(self) -> None:
        if self._streams:
            self._api.set_device(self.place)
            self._api.set_stream(self._api.Stream(device=self.place))

    def synchronize(self) -> None:
        if self._streams:
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
