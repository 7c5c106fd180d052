"""Frequencies of devices: they are read, set within a range, and restored however the job ends.

A `FrequencyController` does this in its own process. `GuardedFrequencies` has it done by another process, the guard,
which restores everything when the job ends or is killed. A run uses only the latter.
"""

from __future__ import annotations

from elaswave_spmd.runtime.devices.dvfs.backends import BACKENDS, open_backend
from elaswave_spmd.runtime.devices.dvfs.base import DeviceRange, FrequencyController
from elaswave_spmd.runtime.devices.dvfs.guarded import Answer, GuardedFrequencies
from elaswave_spmd.runtime.devices.dvfs.simulated import FrequencyCell

__all__ = [
    "BACKENDS",
    "Answer",
    "DeviceRange",
    "FrequencyCell",
    "FrequencyController",
    "GuardedFrequencies",
    "open_backend",
]
