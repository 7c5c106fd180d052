"""The backends that set frequencies, by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices.dvfs.base import SETTING, FrequencyController
from elaswave_spmd.runtime.devices.dvfs.cpufreq import CpuFrequencies
from elaswave_spmd.runtime.devices.dvfs.nvml import NvmlFrequencies

BACKENDS: Mapping[str, Callable[[str], FrequencyController]] = MappingProxyType(
    {
        "nvml": lambda where: NvmlFrequencies(where or os.environ.get("CUDA_VISIBLE_DEVICES")),
        "cpufreq": lambda where: CpuFrequencies(where) if where else CpuFrequencies(),
    }
)


def open_backend(name: str, where: str = "") -> FrequencyController:
    """Open the backend with this name.

    Args:
        where: for cpufreq, the folder of its policies, by default the kernel's; for nvml, the GPUs of this run in the
            form of CUDA_VISIBLE_DEVICES, which is the default.

    Raises:
        ConfigError: there is no such backend, or it cannot work on this machine.
    """
    if name not in BACKENDS:
        raise ConfigError(
            f"{SETTING}={name} names no backend",
            where=f"{SETTING}={name}",
            exists=", ".join(BACKENDS),
            fix="use one of these",
        )
    return BACKENDS[name](where)
