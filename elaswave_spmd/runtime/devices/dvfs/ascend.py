"""Frequencies of Ascend NPUs by DCMI, the library of their driver: it reads them, and has no call that sets them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices.dvfs.base import SETTING, DeviceRange, no_device

_WHERE = f"{SETTING}=ascend"
_NAMES = ("libdcmi.so", "/usr/local/dcmi/libdcmi.so", "/usr/local/Ascend/driver/lib64/driver/libdcmi.so")
_MOST_CARDS = 64
_CURRENT, _RATED = 7, 9  # enum dcmi_freq_type: AICORE_CURRENT, AICORE_MAX


class AscendFrequencies:
    """Reads the clocks of AI cores; a device is called CARD.CHIP.

    Args:
        library: libdcmi; None: where the driver puts it.

    Raises:
        ConfigError: the library is missing, or fails.
    """

    def __init__(self, library: Any = None) -> None:
        self._dcmi = library if library is not None else _load()
        self._call("dcmi_init")
        number, cards = ctypes.c_int(), (ctypes.c_int * _MOST_CARDS)()
        self._call("dcmi_get_card_list", ctypes.byref(number), cards, _MOST_CARDS)
        self._devices: dict[str, tuple[int, int]] = {}
        for card in list(cards)[: number.value]:
            chips = ctypes.c_int()
            self._call("dcmi_get_device_num_in_card", card, ctypes.byref(chips))
            self._devices |= {f"{card}.{chip}": (card, chip) for chip in range(chips.value)}

    def devices(self) -> tuple[str, ...]:
        return tuple(self._devices)

    def range_of(self, device: str) -> DeviceRange:
        """The rated frequency alone: nothing else can be set."""
        rated = self._mhz(device, _RATED)
        return DeviceRange(rated, rated, rated)

    def current(self, device: str) -> float:
        """What it runs at, relative to its rated frequency."""
        return self._mhz(device, _CURRENT) / self._mhz(device, _RATED)

    def set(self, device: str, frequency: float) -> float:
        """Never.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "DCMI reads the frequency of an Ascend device, and has no call that sets it",
            got=f"{frequency:.3g} of the rated frequency, for device {device}",
            where=_WHERE,
            exists="simulated, nvml, cpufreq can set",
            fix=f"{SETTING}=none: micro-batches and layers follow measured speeds without it, and the driver "
            "keeps the clock",
        )

    def reset(self) -> None:
        """Nothing was set."""

    def _mhz(self, device: str, kind: int) -> float:
        if device not in self._devices:
            raise no_device(device, self.devices(), "ascend")
        found = ctypes.c_uint()
        self._call("dcmi_get_device_frequency", *self._devices[device], kind, ctypes.byref(found))
        return float(found.value)

    def _call(self, name: str, *args: object) -> None:
        function: Callable[..., int] | None = getattr(self._dcmi, name, None)
        code = function(*args) if function is not None else "no such function"
        if code:
            raise ConfigError(
                "frequencies of Ascend devices are read by the library of their driver",
                got=f"{name}: {code}",
                where=_WHERE,
                fix=f"check with npu-smi info, or {SETTING}=none",
            )


def _load() -> Any:
    for name in _NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ConfigError(
        "frequencies of Ascend devices are read by the library of their driver",
        got="no libdcmi.so",
        where=_WHERE,
        fix=f"a machine with Ascend devices and their driver, or {SETTING}=none",
    )
