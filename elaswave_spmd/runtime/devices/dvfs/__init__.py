"""Frequencies of devices: they are read, set within a range, and restored however the job ends.

A `FrequencyController` does this in its own process. `GuardedFrequencies` has it done by another process, the guard,
which restores everything when the job ends or is killed. A run uses only the latter: its workers request
their frequencies from the guard (`GuardedClock`). An emulated device has a clock of its own (`SimulatedClock`).
"""

from __future__ import annotations

from elaswave_spmd.runtime.devices.dvfs.backends import BACKENDS, open_backend
from elaswave_spmd.runtime.devices.dvfs.base import SIMULATED, DeviceRange, FrequencyController
from elaswave_spmd.runtime.devices.dvfs.clocks import GuardedClock, SimulatedClock
from elaswave_spmd.runtime.devices.dvfs.guarded import GuardedFrequencies

__all__ = [
    "BACKENDS",
    "SIMULATED",
    "DeviceRange",
    "FrequencyController",
    "GuardedClock",
    "GuardedFrequencies",
    "SimulatedClock",
    "open_backend",
]
