"""Frequencies of NVIDIA GPUs, through NVML from the package nvidia-ml-py (the extra `dvfs`).

nvmlDeviceSetGpuLockedClocks, which only root may call, sets the range from the lowest clock to the wanted one, so the
frequency is an upper limit. NVML does not tell which limits were set before, so `reset` removes all limits from the
devices whose frequency was set.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices.dvfs.base import SETTING, DeviceRange, at_least, no_device

_WHERE = f"{SETTING}=nvml"


class NvmlFrequencies:
    """The NVML backend: sets the clocks of the GPUs of this run. They are named 0, 1, ... in CUDA's order.

    Args:
        visible: numbers or UUIDs of GPUs in the form of CUDA_VISIBLE_DEVICES; None: all GPUs of the machine.
        nvml: the module to use; None: pynvml.

    Raises:
        ConfigError: the module or the driver is missing, or there is no such GPU.
    """

    def __init__(self, visible: str | None = None, nvml: Any = None) -> None:
        self._nvml = nvml if nvml is not None else _pynvml()
        try:
            self._nvml.nvmlInit()
            self._handles = dict(enumerate(self._open(visible)))
            self._clocks = {number: self._read(handle) for number, handle in self._handles.items()}
        except self._nvml.NVMLError as error:
            raise ConfigError(
                f"the NVIDIA driver does not answer NVML ({error})",
                rule="frequencies of NVIDIA GPUs are set by NVML, through their driver",
                where=_WHERE + ("" if visible is None else f" CUDA_VISIBLE_DEVICES={visible}"),
                fix=f"a machine with NVIDIA GPUs, or {SETTING}=none",
            ) from None
        self._set: set[int] = set()  # GPUs whose frequency was set and not restored

    def devices(self) -> tuple[str, ...]:
        """The names of the GPUs: 0, 1, ..."""
        return tuple(map(str, self._handles))

    def range_of(self, device: str) -> DeviceRange:
        """The range of a GPU's clock. Its normal frequency is the highest, at which it runs when it has no limit."""
        clocks = self._clocks[self._number(device)]
        return DeviceRange(clocks[0], clocks[-1], clocks[-1])

    def set(self, device: str, frequency: float) -> float:
        number = self._number(device)
        clocks = self._clocks[number]
        mhz = at_least(clocks, frequency * clocks[-1])
        try:
            self._nvml.nvmlDeviceSetGpuLockedClocks(self._handles[number], round(clocks[0]), round(mhz))
        except self._nvml.NVMLError as error:
            raise self._refused(number, error) from None
        self._set.add(number)
        return mhz / clocks[-1]

    def reset(self) -> None:
        errors = []
        for number in sorted(self._set):
            try:
                self._nvml.nvmlDeviceResetGpuLockedClocks(self._handles[number])
                self._set.discard(number)
            except self._nvml.NVMLError as error:
                errors.append(self._refused(number, error))
        if errors:
            raise errors[0]

    def _open(self, visible: str | None) -> list[Any]:
        nvml = self._nvml
        if visible is None:
            return [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        names = [name.strip() for name in visible.split(",") if name.strip()]
        return [
            nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
            for name in names
        ]

    def _read(self, handle: Any) -> list[float]:
        """The clocks of a GPU in MHz, lowest first."""
        nvml = self._nvml
        found: set[float] = set()
        with contextlib.suppress(nvml.NVMLError):  # not every GPU reports its steps
            for memory in nvml.nvmlDeviceGetSupportedMemoryClocks(handle):
                found |= set(map(float, nvml.nvmlDeviceGetSupportedGraphicsClocks(handle, memory)))
        return sorted(found) or [float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))]

    def _number(self, device: str) -> int:
        if device not in self.devices():
            raise no_device(device, self.devices(), "nvml")
        return int(device)

    def _refused(self, number: int, error: Exception) -> ConfigError:
        return ConfigError(
            f"NVML cannot set the clocks of GPU {number} ({error})",
            rule="only root may set the clocks of NVIDIA GPUs, and not every GPU lets them be set",
            where=_WHERE,
            fix=f"run as root (in a container with the capability SYS_ADMIN), or {SETTING}=none",
        )


def _pynvml() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise ConfigError(
            f"the package nvidia-ml-py cannot be imported ({error})",
            rule="frequencies of NVIDIA GPUs are set by this package",
            where=_WHERE,
            fix=f"pip install 'elaswave-spmd[dvfs]', or {SETTING}=none",
        ) from None
