"""Devices: what kinds there are, what each needs of a machine, and an opened one. See README.md in this room.

Importing this loads no torch: a check comes before `import torch`, which may itself fail (torch_npu without CANN).
"""

from __future__ import annotations

from elaswave_spmd.runtime.devices.kind import (
    Capabilities,
    Device,
    DeviceKind,
    HostCopy,
    Island,
    MemoryFigures,
    Missing,
    Remedy,
)
from elaswave_spmd.runtime.devices.machine import Machine, ThisMachine
from elaswave_spmd.runtime.devices.registry import check_usable, device_names, device_of

__all__ = [
    "Capabilities",
    "Device",
    "DeviceKind",
    "HostCopy",
    "Island",
    "Machine",
    "MemoryFigures",
    "Missing",
    "Remedy",
    "ThisMachine",
    "check_usable",
    "device_names",
    "device_of",
]
