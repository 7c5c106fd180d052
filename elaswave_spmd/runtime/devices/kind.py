"""The Protocols of the device layer, and their data. Does not import torch; `__init__` has the reason."""

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

    from elaswave_spmd.runtime.devices.sums import Terms


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a kind of device. Code tests for a capability, never for the name of a kind.

    Args:
        streams: operations are queued, and ordered by streams and events; otherwise a call returns when it is done.
        pinned_copies: copies from and to pinned host memory overlap with computation.
        dtypes: values of `runtime.dtype` that layer programs can compute in.
        collectives: c10d backend for collectives on device memory; None: there is none, and only links are used.
        state: the memory that holds a worker's state pages, sums and boundary tensors: "device" or "host".
        compiles: layer programs are compiled, all of them before a worker's first step.
        islands: a worker may have several local devices, with one program over all of them (mesh axes tp and fsdp).
        forks: workers may be forked from a process that has imported the modules that they need.
        preload: further modules for that process to import. Importing them opens no device and starts no thread.
        inductor: torch.compile can make its layer programs (`runtime.compile`), with the same bits every time.
        forks_compiler: the process that workers are forked from may import torch's compiler, once for all of them.
        recovers: a device that has failed can be restarted while its process goes on.
        resource: the name under which a cluster manager counts such devices; "" if it counts none.
    """

    streams: bool
    pinned_copies: bool
    dtypes: tuple[str, ...]
    collectives: str | None
    state: Literal["device", "host"]
    compiles: bool
    islands: bool
    forks: bool
    preload: tuple[str, ...] = ()
    inductor: bool = False
    forks_compiler: bool = False
    recovers: bool = False
    resource: str = ""

    def __post_init__(self) -> None:
        assert self.dtypes, self
        assert self.streams or not self.pinned_copies, self


@dataclass(frozen=True)
class Missing:
    """A requirement of a kind of device that a machine does not meet: what is missing, and what to do about it."""

    what: str
    fix: str


@dataclass(frozen=True)
class Island:
    """The share of a machine that each worker of a run has.

    Args:
        devices: local devices of each worker: the product of the mesh axes tp and fsdp.
        threads: intra-op threads of each worker. Another number gives other bits, so it is part of a run's identity.
    """

    devices: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        assert self.devices >= 1 and self.threads >= 1, self


class DeviceKind(Protocol):
    """A kind of device, before any vendor module is imported."""

    @property
    def name(self) -> str:
        """The name, as in `runtime.device`."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def missing(self, machine: Machine) -> tuple[Missing, ...]:
        """The requirements of this kind that a machine does not meet; () if the kind can be used."""
        ...

    def model(self, machine: Machine) -> str:
        """The model of the device, if other models compute other bits; "" if unknown, or if it makes no difference."""
        ...

    def environment(self, given: Mapping[str, str], island: Island) -> dict[str, str]:
        """The environment variables that workers need, set before they start.

        Args:
            given: the environment that they would inherit.

        Raises:
            ConfigError: a variable has another value already, or this kind cannot have such an island.
        """
        ...

    def open(self, index: int, island: Island) -> Device:
        """Open the device in a worker's process, and import vendor modules. Called once in a process.

        Args:
            index: the worker's index among the workers of its machine.
        """
        ...

    def group_environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """The further variables that workers need for groups of `capabilities.collectives`.

        Raises:
            ConfigError: a variable has another value already.
        """
        ...

    def make_group(self, store: Any, rank: int, size: int, timeout: timedelta, host: str) -> Any:
        """Make this process's end of a group, a backend object of c10d. All members call this together.

        Where the library can, its collectives have a stream of another pool than copies and computation: a stream that
        both had would make these wait for a peer.

        Args:
            store: c10d's store, used for this group alone.
            host: address at which the other members reach this machine, for backends that need it.
        """
        ...

    def abort_group(self, group: Any, reason: str) -> None:
        """End everything in progress in a group at once, without its other members. Does nothing if it cannot."""
        ...


class WithoutGroups:
    """Base of the kinds without `capabilities.collectives`. Their methods for groups are never called."""

    def group_environment(self, given: Mapping[str, str]) -> dict[str, str]:
        return {}

    def make_group(self, store: Any, rank: int, size: int, timeout: timedelta, host: str) -> Any:
        raise AssertionError("it has no groups")

    def abort_group(self, group: Any, reason: str) -> None:
        raise AssertionError("it has no groups")


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes of device memory: allocated now, the most so far, and the size of the device (None if it is unknown)."""

    allocated: int
    peak: int
    total: int | None = None


class Remedy(Enum):
    """The consequence of a fault for a worker whose device was restarted while its process went on."""

    REDO = "redo"
    """State is intact. The worker discards its part of the present step and computes it again."""
    RELOAD = "reload"
    """State is lost, too. The worker receives it again from its mirrors."""


class HostCopy(Protocol):
    """A copy to host memory, in progress or complete."""

    def done(self) -> bool:
        """True if it is complete. Does not wait."""
        ...

    def wait(self) -> Tensor:
        """Wait for the copy, and return it: contiguous, in host memory. The source may change from now on."""
        ...


class Device(Protocol):
    """An opened device. The worker's state, sums and boundary tensors are at `place`."""

    @property
    def kind(self) -> DeviceKind: ...

    @property
    def place(self) -> torch.device: ...

    def from_host(self, values: Tensor) -> Tensor:
        """Copy values into a new contiguous tensor at `place`, with the alignment of the device's allocator.

        Args:
            values: in host memory, with any alignment (a network frame); may be overwritten once this returns.
        """
        ...

    def to_place(self, values: Tensor) -> Tensor:
        """The values at `place`, with any alignment: the tensor itself if it is there already."""
        ...

    def to_host(self, values: Tensor) -> Tensor:
        """The values in host memory, contiguous: the tensor itself if it is there already."""
        ...

    def copy_to_host(self, values: Tensor) -> HostCopy:
        """Start a copy to host memory, never `values` itself. The values must not change before the copy is done."""
        ...

    def add_up(self, terms: Terms) -> Tensor:
        """A sum with the very additions that are asked for, by as few passes over memory as the device can.

        Args:
            terms: of one shape and dtype, contiguous, at `place`. Those that are `owned` may be overwritten.
        """
        ...

    def mark(self) -> Any:
        """Mark the present point in the training thread's queue; `times` tells when the device reached it."""
        ...

    def times(self, marks: Sequence[Any]) -> list[float]:
        """The times, of time.perf_counter(), at which the device reached the marks. Waits for the last mark.

        Args:
            marks: results of `mark`, in the order in which they were made.
        """
        ...

    def enter_thread(self) -> None:
        """Make this the device of the calling thread, with a stream of its own. Not for the training thread."""
        ...

    def synchronize(self) -> None:
        """Wait until everything that was queued is done."""
        ...

    def memory(self) -> MemoryFigures | None:
        """The device's memory, or None if it has no memory of its own."""
        ...

    def recover(self, error: BaseException) -> Remedy | None:
        """Restart the device after an error that an operation on it raised.

        Returns:
            The remedy; None if the device cannot be restarted or did not cause the error: the caller re-raises it.
        """
        ...

    def reuse(self, tensors: Iterable[Tensor]) -> None:
        """Give other memory to those tensors whose memory is bad. Their values are lost. After `Remedy.RELOAD`."""
        ...
