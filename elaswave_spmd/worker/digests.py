"""Digests of tensors: by them two workers compare what they have computed of a micro-batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.recovery.checks import DIGEST_COLUMNS
from elaswave_spmd.recovery.messages import DigestRow
from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.worker.activations import Activation, map_tensors, packed

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class Digester:
    """Makes digests on a device; 512 bytes of a tensor leave it. One that lies elsewhere is copied to the host first.

    Element i is in column i mod 64. A column is the sum of its elements' bits, each times an odd 64-bit weight of its
    row, modulo 2**64. So a column in which one element differs always differs: an odd number times a difference below
    2**64 is not 0. Several differences cancel as rarely as random 64-bit numbers do. Integers have no rounding and no
    order of additions, so a digest is the same on every device that gives the same bits.

    Args:
        device: where the tensors lie.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._weights = torch.empty(0, dtype=torch.int64)

    def digest(self, value: Activation | None) -> bytes:
        """The digest of a tensor, or of all bytes of a tuple of tensors; empty for None."""
        if value is None:
            return b""
        tensor = packed(map_tensors(self._here, value))
        flat = tensor.detach().reshape(-1)
        bits = flat.view(_INTEGERS[flat.element_size()]).to(torch.int64)
        rows, rest = divmod(bits.numel(), DIGEST_COLUMNS)
        weights = self._weights_of(rows + 1)
        columns = (bits[: rows * DIGEST_COLUMNS].view(rows, DIGEST_COLUMNS) * weights[:rows, None]).sum(0)
        if rest:
            columns[:rest] += bits[rows * DIGEST_COLUMNS :] * weights[rows]
        return self.device.to_host(columns).numpy().tobytes()

    def digest_of_sum(self, value: Tensor) -> bytes:
        """The digest of a sum, in which all elements that are not a number count as the same (`with_one_nan`).

        Args:
            value: floating-point numbers, of any shape.
        """
        return self.digest(with_one_nan(self._here(value)))

    def _here(self, tensor: Tensor) -> Tensor:
        """The tensor; on the host, if it is an output of a compiled island, whose state is in host memory."""
        return tensor if tensor.device.type == self.device.place.type else tensor.detach().cpu()

    def _weights_of(self, rows: int) -> Tensor:
        """The weights of the first rows, int64 [rows]: odd, from the generator splitmix64."""
        if len(self._weights) < rows:
            state = np.arange(1, 2 * rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            odd = (state ^ (state >> np.uint64(31))) | np.uint64(1)
            self._weights = torch.from_numpy(odd.view(np.int64)).to(self.device.place)
        return self._weights[:rows]


def with_one_nan(value: Tensor) -> Tensor:
    """The same numbers, where all that are not a number (NaN) have the same bits; the tensor itself if it has none.

    A NaN has a sign and a payload. Those of NaN + NaN are those of one of the two, and which one is not the same on all
    devices and for all orders of the operands. So two workers that have added up rightly may differ in them.

    Args:
        value: floating-point numbers, of any shape.
    """
    nans = value.isnan()
    return value.masked_fill(nans, torch.nan) if nans.any() else value


class MicrobatchDigests:
    """The digests of one micro-batch through a worker's stage, as they become known.

    Args:
        digester: of the worker.
        computed_twice: the worker checks its own micro-batch, and needs its inputs a second time.
    """

    def __init__(self, digester: Digester, *, computed_twice: bool = False) -> None:
        self._digester = digester
        self.computed_twice = computed_twice
        self._outputs: dict[int, bytes] = {}
        self._inputs: dict[int, bytes] = {}
        self._weights: dict[int, bytes] = {}

    def forward(self, layer: int, y: Activation) -> None:
        """A layer's output."""
        self._outputs[layer] = self._digester.digest(y)

    def input_gradient(self, layer: int, dx: Activation | None) -> None:
        """The gradient of a layer's input, if it has one."""
        self._inputs[layer] = self._digester.digest(dx)

    def weight_gradient(self, layer: int, weights: Tensor) -> None:
        """The gradient of a layer's parameters."""
        self._weights[layer] = self._digester.digest(weights)

    @property
    def rows(self) -> tuple[DigestRow, ...]:
        """The digests of all layers, once the backward is done."""
        return tuple(
            (layer, output, self._inputs[layer], self._weights[layer])
            for layer, output in sorted(self._outputs.items())
        )
