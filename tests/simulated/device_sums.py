"""Sums on a device and additions in turn, on it and on the CPU: prints as JSON which of them differ.

python -W error -m tests.simulated.device_sums KIND
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from elaswave_spmd.determinism.reduction_tree import split
from elaswave_spmd.runtime.devices import Island, device_of
from elaswave_spmd.runtime.devices.sums import Term, Terms, add_in_turn

_SIZE = 100_003  # so that the parts of one buffer begin at odd addresses
_COUNTS = (2, 3, 5, 8, 13, 64)


def drawn(generator: torch.Generator) -> Tensor:
    """Values of all sizes, too small to be normal ones among them, and a tenth of any bits: infinities, NaN, -0."""
    any_bits = torch.randint(-(2**31), 2**31, (_SIZE,), generator=generator).to(torch.int32).view(torch.float32)
    powers = torch.randint(-44, 38, (_SIZE,), generator=generator)
    values = torch.randn(_SIZE, generator=generator) * 10.0**powers
    return torch.where(torch.rand(_SIZE, generator=generator) < 0.1, any_bits, values)


def in_tree(values: Sequence[Tensor]) -> Terms:
    """Their sum in the order of the reduction tree."""
    if len(values) == 1:
        return Term(values[0], owned=False)
    middle = split((0, len(values)))
    return in_tree(values[:middle]), in_tree(values[middle:])


def same_bits(first: Tensor, second: Tensor) -> bool:
    """True if both have the same bits; where there is no number, which of the many that stand for that is no matter."""
    numbers = ~first.isnan()
    same = torch.equal(first[numbers].view(torch.int32), second[numbers].view(torch.int32))
    return same and torch.equal(first.isnan(), second.isnan())


def main() -> None:
    """Compares sums of several numbers of terms."""
    device = device_of(sys.argv[1]).open(0, Island())
    generator = torch.Generator().manual_seed(0)
    differs = []
    for count in _COUNTS:
        on_host = [drawn(generator) for _ in range(count)]
        on_device = list(device.to_place(torch.cat(on_host)).split(_SIZE))
        found = device.add_up(in_tree(on_device))
        wanted = {"in turn": add_in_turn(in_tree(on_device)), "on the host": add_in_turn(in_tree(on_host))}
        differs += [[count, how] for how, sum_ in wanted.items() if not same_bits(found.cpu(), sum_.cpu())]
    print(json.dumps(differs))


if __name__ == "__main__":
    main()
