"""What a backend that sets frequencies can do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from elaswave_spmd.errors import ConfigError

SETTING = "schedule.frequency"


@dataclass(frozen=True)
class DeviceRange:
    """The clock of a device, in MHz: what it may be limited to, and what it may run at when it is left alone.

    Args:
        lowest, highest: what can be set.
        nominal: the normal one, to which frequencies are relative.
        cpus: the processors whose clock it is; () for a device that is none.
    """

    lowest: float
    nominal: float
    highest: float
    cpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert 0 < self.lowest <= self.highest and self.nominal > 0, self


class FrequencyController(Protocol):
    """Sets how fast devices run. Frequencies are relative to the device's normal one.

    A frequency is a limit: a device that is idle may run slower. Errors are ConfigErrors: they say what was refused, by
    whom, and what to do about it.
    """

    def devices(self) -> tuple[str, ...]:
        """Their names; () where any name will do."""
        ...

    def range_of(self, device: str) -> DeviceRange: ...

    def set(self, device: str, frequency: float) -> float:
        """Sets the least frequency that the device has at or above this one, or else its highest. Returns it."""
        ...

    def reset(self) -> None:
        """Puts back what was there before: of all devices, whatever becomes of one. May be called again."""
        ...


def at_least(steps: Iterable[float], wanted: float) -> float:
    """The least of the steps that is not below `wanted`, give or take a rounding; else the largest."""
    ordered = sorted(steps)
    return next((step for step in ordered if step >= wanted * (1 - 1e-9)), ordered[-1])


def no_device(device: str, exists: Sequence[str], backend: str) -> ConfigError:
    """A device that the backend does not have."""
    return ConfigError(
        f"{SETTING}={backend} has no device {device}",
        where=f"{SETTING}={backend}",
        exists=", ".join(exists) or "none",
        fix="name one of these",
    )
