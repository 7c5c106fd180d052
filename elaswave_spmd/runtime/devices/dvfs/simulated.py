"""Simulated frequencies: a float64 in a small file for each worker, which the worker's emulated accelerator reads.

Both sides map the file's eight aligned bytes, so a program that starts sees the number that was written last, without a
system call.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from elaswave_spmd.runtime.devices.dvfs.base import DeviceRange

_BYTES = 8
_RANGE = DeviceRange(lowest=1.0, nominal=1000.0, highest=1e6)


class FrequencyCell:
    """The frequency of one worker's device; 1 until it is set.

    Args:
        directory: created by the controller. A worker's file in it is created by the side that opens it first.
        rank: the worker.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, directory: str | Path, rank: int) -> None:
        file = os.open(Path(directory) / f"worker-{rank}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, _BYTES)  # new bytes are zero, which `__call__` reads as frequency 1
            self._number = np.frombuffer(mmap.mmap(file, _BYTES), np.float64)
        finally:
            os.close(file)

    def __call__(self) -> float:
        return float(self._number[0]) or 1.0

    def set(self, frequency: float) -> None:
        self._number[0] = frequency


class SimulatedFrequencies:
    """The simulated backend: sets the cells of workers, named by their ranks. Any frequency is set as it is.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._cells: dict[str, FrequencyCell] = {}

    def devices(self) -> tuple[str, ...]:
        """No names: workers may join at any time, so every rank is accepted."""
        return ()

    def range_of(self, device: str) -> DeviceRange:
        return _RANGE

    def set(self, device: str, frequency: float) -> float:
        if device not in self._cells:
            self._cells[device] = FrequencyCell(self._directory, int(device))
        self._cells[device].set(frequency)
        return frequency

    def reset(self) -> None:
        for cell in self._cells.values():
            cell.set(1.0)
