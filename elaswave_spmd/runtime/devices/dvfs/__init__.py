"""Frequencies of devices: read, set within a range, and put back whatever becomes of the job.

A `FrequencyController` does it in its own process; `GuardedFrequencies` has it done in another one, which puts
everything back when the job ends or is killed. A run only uses the latter.
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
