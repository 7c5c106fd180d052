"""The Protocols of the device layer, and their data. No torch at import: see `__init__`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from elaswave_spmd.runtime.devices.machine import Machine

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Capabilities:
    """What a kind of device can do, as data: code asks for a capability, never for a name.

    Args:
        streams: work is queued, and streams and events order it; else every call returns when it is done.
        pinned_copies: copies from and to pinned host memory go on beside computation.
        masks: how keyed dropout makes its masks: "host" (a generator on the CPU) or "operators" (int64 operators on the
            device). The same masks, bit for bit.
        dtypes: values of `runtime.dtype` that layer programs can compute in.
        collectives: c10d backend for collectives on device memory; None: links alone.
        shrinks_groups: a group of that backend can lose a member without being made anew.
        state: where a worker's state pages, sums and boundary tensors lie: on the "device" or in "host" memory.
        compiles: layer programs are compiled, all of them before a worker's first step.
        islands: a worker may have several local devices, one program over all of them (mesh axes tp and fsdp).
        forks: workers may be forked from a process that has imported what they need.
        preload: modules for such a process to import: importing them opens no device and leaves no thread.
        inductor: torch.compile can make its layer programs (`runtime.compile`), and gives the same bits every time.
        recovers: a device that has failed can be brought back, and its process goes on.
    """

    streams: bool
    pinned_copies: bool
    masks: Literal["host", "operators"]
    dtypes: tuple[str, ...]
    collectives: str | None
    shrinks_groups: bool
    state: Literal["device", "host"]
    compiles: bool
    islands: bool
    forks: bool
    preload: tuple[str, ...] = ()
    inductor: bool = False
    recovers: bool = False

    def __post_init__(self) -> None:
        assert self.dtypes and (self.collectives or not self.shrinks_groups), self
        assert self.streams or not self.pinned_copies, self


@dataclass(frozen=True)
class Missing:
    """Something that a kind of device needs and a machine lacks: what it is, and what to do about it."""

    what: str
    fix: str


@dataclass(frozen=True)
class Island:
    """What the workers of a run have of their machine.

    Args:
        devices: local devices of each worker: the product of the mesh axes tp and fsdp.
        threads: intra-op threads of each worker. Part of a run's identity: other numbers, other bits.
    """

    devices: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        assert self.devices >= 1 and self.threads >= 1, self


class DeviceKind(Protocol):
    """A kind of device, before any vendor module is imported."""

    @property
    def name(self) -> str:
        """As in `runtime.device`."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def missing(self, machine: Machine) -> tuple[Missing, ...]:
        """What a machine lacks for this kind; () when it can be used."""
        ...

    def model(self, machine: Machine) -> str:
        """Which one it is, where other models have other bits; "" where that is not known or makes no difference."""
        ...

    def environment(self, given: Mapping[str, str], island: Island) -> dict[str, str]:
        """The variables that are set for workers, before they start.

        Args:
            given: the environment that they would inherit.

        Raises:
            ConfigError: a variable that is set otherwise already, or an island that this kind cannot have.
        """
        ...

    def open(self, index: int, island: Island) -> Device:
        """Opens the device in a worker's process; imports vendor modules. Once in a process.

        Args:
            index: of the worker among those of its machine.
        """
        ...

    def group_environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """The variables that workers need besides for groups of `capabilities.collectives`.

        Raises:
            ConfigError: a variable that is set otherwise already.
        """
        ...

    def make_group(self, store: Any, rank: int, size: int, timeout: timedelta, host: str) -> Any:
        """This process's end of a group: a backend object of c10d. All its members call this together.

        Args:
            store: c10d's, in which nothing is but this group.
            host: address of this machine at which the others reach it, for a backend that asks.
        """
        ...

    def abort_group(self, group: Any, reason: str) -> None:
        """Ends what such an object has under way at once, whatever its members do; nothing, where it cannot be."""
        ...


class WithoutGroups:
    """What a kind without `capabilities.collectives` has in place of groups."""

    def group_environment(self, given: Mapping[str, str]) -> dict[str, str]:
        return {}

    def make_group(self, store: Any, rank: int, size: int, timeout: timedelta, host: str) -> Any:
        raise AssertionError("it has no groups")

    def abort_group(self, group: Any, reason: str) -> None:
        raise AssertionError("it has no groups")


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes of device memory: in tensors now, at most so far, and of the device (None: not told)."""

    allocated: int
    peak: int
    total: int | None = None


class Remedy(Enum):
    """What has to follow when a device has been brought back after a fault, without an end of its process."""

    REDO = "redo"
    """State is intact: what this worker had of the step under way is given up, and done again."""
    RELOAD = "reload"
    """State is lost too: it is learned again from those who mirror it."""


class HostCopy(Protocol):
    """A copy to host memory that is under way."""

    def done(self) -> bool:
        """Whether it is complete; does not wait."""
        ...

    def wait(self) -> Tensor:
        """The copy, complete, contiguous, in host memory. The source may change from now on."""
        ...


class Device(Protocol):
    """An opened device. `place` is where a worker's state, sums and boundary tensors lie."""

    @property
    def kind(self) -> DeviceKind: ...

    @property
    def place(self) -> torch.device: ...

    def from_host(self, values: Tensor) -> Tensor:
        """A fresh contiguous tensor at `place`, aligned as the device's own allocator aligns.

        Args:
            values: in host memory, any alignment (a network frame); may be overwritten once this returns.
        """
        ...

    def to_place(self, values: Tensor) -> Tensor:
        """The values at `place`, of any alignment: the tensor itself where it lies there already."""
        ...

    def to_host(self, values: Tensor) -> Tensor:
        """The values in host memory, contiguous: the tensor itself where it lies there already."""
        ...

    def copy_to_host(self, values: Tensor) -> HostCopy:
        """Begins a copy to host memory, never `values` itself, which may not change before it is done."""
        ...

    def mark(self) -> Any:
        """Marks the point between what has been asked of the device and what will be, to tell when it was reached."""
        ...

    def times(self, marks: Sequence[Any]) -> list[float]:
        """When marks were reached, by time.perf_counter(); waits for the last one.

        Args:
            marks: in the order in which they were made.
        """
        ...

    def enter_thread(self) -> None:
        """Makes this the device of a thread that is not the training thread, which gets a stream of its own."""
        ...

    def synchronize(self) -> None:
        """Waits until everything that was queued is done."""
        ...

    def memory(self) -> MemoryFigures | None:
        """None: this device has no memory of its own."""
        ...

    def recover(self, error: BaseException) -> Remedy | None:
        """Brings the device back after an error that an operation on it raised.

        Returns: None: it cannot be, or the error is none of the device's; the worker fails with it.
        """
        ...

    def reuse(self, tensors: Iterable[Tensor]) -> None:
        """After `Remedy.RELOAD`: tensors whose memory is bad get other memory; what they held is lost."""
        ...
