"""Devices whose tensors are in host memory: the CPU, and XLA islands, whose programs take and return host tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from elaswave_spmd.runtime.devices.kind import DeviceKind, MemoryFigures, Remedy
from elaswave_spmd.runtime.devices.sums import Terms, add_in_turn


@dataclass(frozen=True)
class Copied:
    """A copy to host memory that is complete already."""

    values: Tensor

    def done(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self.values


class HostDevice:
    """An opened device with its state in host memory.

    Args:
        kind: the kind of device that it was opened for.
        settle: waits until everything that was queued on the device behind it is done.
        figures: memory of the device behind it, if it has its own.
    """

    def __init__(
        self,
        kind: DeviceKind,
        settle: Callable[[], None] = lambda: None,
        figures: Callable[[], MemoryFigures | None] = lambda: None,
    ) -> None:
        self.kind = kind
        self.place = torch.device("cpu")
        self._settle = settle
        self._figures = figures

    def from_host(self, values: Tensor) -> Tensor:
        # Always copy: torch's allocator aligns to 64 bytes, but a network frame need not be aligned, and some kernels
        # give other bits for memory with another alignment.
        return torch.empty(values.shape, dtype=values.dtype).copy_(values)

    def to_place(self, values: Tensor) -> Tensor:
        return values

    def to_host(self, values: Tensor) -> Tensor:
        return values.detach().contiguous()

    def copy_to_host(self, values: Tensor) -> Copied:
        return Copied(values.detach().clone(memory_format=torch.contiguous_format))

    def add_up(self, terms: Terms) -> Tensor:
        return add_in_turn(terms)

    # The function itself, without a method around it, to save time: it is called before and after each layer program.
    mark = staticmethod(perf_counter)

    def times(self, marks: Sequence[float]) -> list[float]:
        return list(marks)

    def enter_thread(self) -> None:
        pass

    def synchronize(self) -> None:
        self._settle()

    def memory(self) -> MemoryFigures | None:
        return self._figures()

    def recover(self, error: BaseException) -> Remedy | None:
        return None

    def reuse(self, tensors: Iterable[Tensor]) -> None:
        raise AssertionError("host memory is never recovered after a fault")
