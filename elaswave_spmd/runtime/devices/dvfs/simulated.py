"""Simulated frequencies: one float64 in a small file for each worker, which its emulated accelerator reads.

Eight aligned bytes, mapped by both sides: a program that starts sees the number that was written last, without a call
to the system.
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
    """The frequency of one worker's device. Until somebody sets it, it is 1.

    Args:
        directory: made by the controller; a worker's file in it by whoever opens it first.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, directory: str | Path, rank: int) -> None:
        file = os.open(Path(directory) / f"worker-{rank}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, _BYTES)  # what is new is zero
            self._number = np.frombuffer(mmap.mmap(file, _BYTES), np.float64)
        finally:
            os.close(file)

    def __call__(self) -> float:
        return float(self._number[0]) or 1.0

    def set(self, frequency: float) -> None:
        self._number[0] = frequency


class SimulatedFrequencies:
    """Sets the cells of workers, by rank. Takes any frequency, as it is.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._cells: dict[str, FrequencyCell] = {}

    def devices(self) -> tuple[str, ...]:
        """(): workers come and go."""
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
