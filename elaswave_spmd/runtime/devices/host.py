"""A device whose tensors lie in host memory: the CPU, and XLA islands, whose programs take and give host tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from elaswave_spmd.runtime.devices.kind import DeviceKind, MemoryFigures, Remedy


@dataclass(frozen=True)
class Copied:
    """A copy that is complete."""

    values: Tensor

    def done(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self.values


class HostDevice:
    """Host memory.

    Args:
        kind: what it is opened for.
        settle: waits for what that has queued.
        figures: memory of the device behind it.
    """

    def __init__(
        self,
        kind: DeviceKind,
        settle: Callable[[], None] = lambda: None,
        figures: Callable[[], MemoryFigures | None] = lambda: None,
    ) -> None:
        self.kind, self.place = kind, torch.device("cpu")
        self._settle, self._figures = settle, figures

    def from_host(self, values: Tensor) -> Tensor:
        # torch's allocator aligns to 64 bytes, a network frame need not be.
        return torch.empty(values.shape, dtype=values.dtype).copy_(values)

    def to_place(self, values: Tensor) -> Tensor:
        return values

    def to_host(self, values: Tensor) -> Tensor:
        return values.detach().contiguous()

    def copy_to_host(self, values: Tensor) -> Copied:
        return Copied(values.detach().clone(memory_format=torch.contiguous_format))

    def mark(self) -> float:
        return perf_counter()

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
        raise AssertionError("host memory that is bad is not brought back")
