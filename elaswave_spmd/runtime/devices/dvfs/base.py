"""The interface of a backend that sets frequencies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from elaswave_spmd.errors import ConfigError

SETTING = "schedule.frequency"
SIMULATED = "simulated"
"""The value of the setting for emulated devices, which have no backend: their workers have clocks of their own."""


@dataclass(frozen=True)
class DeviceRange:
    """The range of a device's clock, in MHz.

    Args:
        lowest, highest: the limits between which it can be set.
        nominal: the normal clock, to which relative frequencies refer.
        cpus: the processors that have this clock; () if the device is not a processor.
    """

    lowest: float
    nominal: float
    highest: float
    cpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert 0 < self.lowest <= self.highest and self.nominal > 0, self


class FrequencyController(Protocol):
    """A backend that sets the clocks of devices. Frequencies are relative to a device's normal clock.

    A frequency is an upper limit: an idle device may run slower. Methods raise ConfigError when the system refuses.
    """

    def devices(self) -> tuple[str, ...]:
        """The names of the devices."""
        ...

    def range_of(self, device: str) -> DeviceRange:
        """The range of a device's clock."""
        ...

    def set(self, device: str, frequency: float) -> float:
        """Set the lowest frequency of the device that is not below this one, or else its highest. Returns it."""
        ...

    def reset(self) -> None:
        """Restore all devices, even if one of them raises an error. May be called again."""
        ...


def at_least(steps: Iterable[float], wanted: float) -> float:
    """The lowest of the steps that is not below `wanted`, up to rounding; else the highest step."""
    ordered = sorted(steps)
    return next((step for step in ordered if step >= wanted * (1 - 1e-9)), ordered[-1])


def no_device(device: str, exists: Sequence[str], backend: str) -> ConfigError:
    """The error for a device that the backend does not have."""
    return ConfigError(
        f"{SETTING}={backend} has no device {device}",
        where=f"{SETTING}={backend}",
        exists=", ".join(exists) or "none",
        fix="name one of these",
    )
