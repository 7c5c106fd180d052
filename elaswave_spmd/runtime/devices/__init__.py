"""Devices: the kinds that exist, the requirements of each, and opened devices. See README.md in this room.

Importing this does not import torch: a machine is checked before `import torch`, which may itself fail (torch_npu
without CANN breaks it).
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
