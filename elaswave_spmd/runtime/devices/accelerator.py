"""Accelerators that are eager devices of torch, with memory of their own; one code for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from elaswave_spmd.runtime.devices.host import Copied
from elaswave_spmd.runtime.devices.kind import DeviceKind, MemoryFigures, Remedy
from elaswave_spmd.runtime.devices.sums import FusedSums, Terms, add_in_turn


@dataclass(frozen=True)
class Copying:
    """A copy to host memory in progress on the stream for such copies; complete when the event is."""

    values: Tensor
    event: Any

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> Tensor:
        self.event.synchronize()
        return self.values


@dataclass(frozen=True)
class Mark:
    """A point in the device's queue: an event with timing, and the time.perf_counter() at which it was queued."""

    queued: float
    event: Any


class Faults(Protocol):
    """A vendor's calls for a device that has failed; see the methods of `Device` with these names."""

    def recover(self, error: BaseException) -> Remedy | None: ...

    def reuse(self, tensors: Iterable[Tensor]) -> int: ...


class AcceleratorDevice:
    """An opened accelerator. Copies from and to the host have a stream each, and overlap with the current stream.

    Args:
        kind: the kind of device; its capabilities tell which calls of `api` exist.
        place: the device of its tensors.
        api: torch's module for it (torch.cuda, torch_npu.npu, ...).
        faults: the fault calls of a kind that can be restarted.
        sums: adds several tensors up in one kernel, where the kind has a way to make such kernels.
    """

    def __init__(
        self,
        kind: DeviceKind,
        place: torch.device,
        api: Any,
        faults: Faults | None = None,
        sums: FusedSums | None = None,
    ) -> None:
        self.kind = kind
        self.place = place
        self._api = api
        self._faults = faults
        self._sums = sums
        self._streams = kind.capabilities.streams
        self._pins = kind.capabilities.pinned_copies
        if self._streams:
            api.set_device(place)
            self._in = api.Stream(device=place)
            self._out = api.Stream(device=place)
            self._training = api.current_stream(place)  # kept: to ask for it costs more than to record an event in it

    def from_host(self, values: Tensor) -> Tensor:
        if not self._pins:
            return torch.empty(values.shape, dtype=values.dtype, device=self.place).copy_(values)
        # Through pinned memory: a copy straight from a network frame would block until the current stream is done.
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
        current = self._api.current_stream(self.place)
        with self._api.stream(self._in):
            found = torch.empty(values.shape, dtype=values.dtype, device=self.place)
            found.copy_(pinned, non_blocking=True)
        current.wait_stream(self._in)
        # The tensor was allocated on one stream and is used on another: its memory must not be reused before both.
        found.record_stream(current)
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
        self._out.wait_stream(self._api.current_stream(self.place))  # the values may not be computed yet
        with self._api.stream(self._out):
            host.copy_(values, non_blocking=self._pins)
            values.record_stream(self._out)  # keeps the allocator from reusing their memory before the copy is done
            return Copying(host, self._out.record_event())

    def add_up(self, terms: Terms) -> Tensor:
        return add_in_turn(terms) if self._sums is None else self._sums.add_up(terms)

    def mark(self) -> Mark | float:
        if not self._streams:
            return perf_counter()
        event = self._api.Event(enable_timing=True)
        event.record(self._training)
        return Mark(perf_counter(), event)

    def times(self, marks: Sequence[Any]) -> list[float]:
        if not self._streams or not marks:
            return list(marks)
        first = marks[0]
        marks[-1].event.synchronize()
        # Events measure only the time between two of them, in milliseconds; so all times are relative to the first.
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
        assert self._faults is not None, "only `recover` of a device with fault calls asks for this"
        self._faults.reuse(tensors)
