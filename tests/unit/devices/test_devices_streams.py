"""The calls of an accelerator with streams, and their order: on a recording double, not on hardware."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from elaswave_spmd.runtime.devices import Device, DeviceKind, accelerator, device_of
from elaswave_spmd.runtime.devices.accelerator import AcceleratorDevice


@dataclass
class RecordedEvent:
    """An event whose time is the number of things recorded before it, in milliseconds."""

    log: list[str]
    at: int = -1
    complete: bool = False

    def record(self, stream: RecordedStream) -> None:
        self.at = len(self.log)
        self.log.append(f"event on {stream.name}")

    def query(self) -> bool:
        return self.complete

    def synchronize(self) -> None:
        self.log.append("wait for event")

    def elapsed_time(self, other: RecordedEvent) -> float:
        return float(other.at - self.at)


@dataclass
class RecordedStream:
    log: list[str]
    name: str

    def wait_stream(self, other: RecordedStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> RecordedEvent:
        event = RecordedEvent(self.log)
        event.record(self)
        return event


class RecordingApi:
    """A double of torch's module for a device with streams: records the calls of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._names = iter(("in", "out"))
        self.main = RecordedStream(self.log, "main")

    def set_device(self, place: torch.device) -> None:
        self.log.append("set device")

    def Stream(self, device: torch.device) -> RecordedStream:  # noqa: N802
        return RecordedStream(self.log, next(self._names))

    def Event(self, enable_timing: bool) -> RecordedEvent:  # noqa: N802
        assert enable_timing
        return RecordedEvent(self.log)

    def current_stream(self, place: torch.device) -> RecordedStream:
        return self.main

    @contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        self.log.append(f"on {stream.name}:")
        yield
        self.log.append("on main:")


class RecordedTensor(Tensor):
    """A tensor that lies, as far as the device layer asks, on an accelerator."""

    @property
    def device(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.device("meta")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> tuple[Device, RecordingApi]:
    """A device whose tensors are the CPU's: pinned memory and copies are written down."""
    api, empty, copy = RecordingApi(), torch.empty, Tensor.copy_

    def recorded_empty(*sizes: Any, pin_memory: bool = False, device: Any = None, **how: Any) -> Tensor:
        api.log.append("pinned memory" if pin_memory else "device memory" if device is not None else "memory")
        made = empty(*sizes, **how)
        return made.as_subclass(RecordedTensor) if device is not None else made

    def recorded_copy(into: Tensor, values: Tensor, non_blocking: bool = False) -> Tensor:
        api.log.append("copy begins" if non_blocking else "copy")
        with torch._C.DisableTorchFunctionSubclass():
            copy(into, values)
        return into

    names = {name: getattr(torch, name) for name in ("device", "Tensor")}
    monkeypatch.setattr(accelerator, "torch", SimpleNamespace(empty=recorded_empty, **names))
    monkeypatch.setattr(Tensor, "copy_", recorded_copy)
    monkeypatch.setattr(RecordedTensor, "record_stream", lambda self, s: api.log.append(f"used on {s.name}"))
    capabilities = replace(device_of("npu").capabilities, streams=True, pinned_copies=True)
    kind = cast(DeviceKind, SimpleNamespace(name="double", capabilities=capabilities))
    return AcceleratorDevice(kind, torch.device("meta"), api), api


def test_a_copy_to_the_host_starts_after_its_values_and_is_awaited_later(
    opened: tuple[Device, RecordingApi],
) -> None:
    device, api = opened
    values = torch.arange(4.0).as_subclass(RecordedTensor)
    api.log.clear()
    copying = device.copy_to_host(values)
    assert api.log == [
        "pinned memory",
        "out waits for main",
        "on out:",
        "copy begins",
        "used on out",
        "event on out",
        "on main:",
    ]
    assert not copying.done()
    cast(Any, copying).event.complete = True
    assert copying.done() and "wait for event" not in api.log
    assert copying.wait().tolist() == [0, 1, 2, 3] and api.log[-1] == "wait for event"


def test_a_copy_from_the_host_is_waited_for_by_the_stream_that_computes(opened: tuple[Device, RecordingApi]) -> None:
    device, api = opened
    api.log.clear()
    found = device.from_host(torch.arange(4.0))
    assert api.log == [
        "pinned memory",
        "copy",
        "on in:",
        "device memory",
        "copy begins",
        "on main:",
        "main waits for in",
        "used on main",
    ]
    assert torch.equal(found, torch.arange(4.0)) and device.to_place(found) is found


def test_values_in_host_memory_are_not_queued_on_a_stream(opened: tuple[Device, RecordingApi]) -> None:
    device, api = opened
    values = torch.arange(4.0)
    api.log.clear()
    assert device.to_host(values).data_ptr() == values.data_ptr() and not api.log
    copy = device.copy_to_host(values)
    values.zero_()
    assert copy.done() and copy.wait().tolist() == [0, 1, 2, 3]
    assert api.log == ["memory", "copy"]


def test_times_are_those_of_events_after_the_first_mark(opened: tuple[Device, RecordingApi]) -> None:
    device, api = opened
    marks = [device.mark() for _ in range(3)]
    times = device.times(marks)
    assert api.log[-1] == "wait for event" and device.times([]) == []
    assert times[0] == marks[0].queued
    assert [round(1e3 * (time - times[0])) for time in times] == [0, 1, 2]
