"""A device that fails in the middle of a step and can be brought back, as an NPU can be after some of its errors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from elaswave_spmd.runtime.devices import Remedy

DEVICE_FAULT = "UCE ERROR, error code is 507053"
"""The text of the exception that a failing device raises."""


class FailingDevice:
    """A device that comes back with these remedies, the last one first; bad memory (Remedy.RELOAD) comes back as other
    memory, with other content.

    Args:
        remedies: of the next failures; None in it: the device cannot be brought back.
    """

    def __init__(self, remedies: list[Remedy | None] | None = None) -> None:
        self._remedies = [Remedy.REDO] if remedies is None else remedies

    def synchronize(self) -> None: ...

    def recover(self, error: BaseException) -> Remedy | None:
        return self._remedies.pop() if DEVICE_FAULT in str(error) else None

    def reuse(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.fill_(torch.nan)
