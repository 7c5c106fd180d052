"""`Keys`: the integer tensors that name the random numbers of one layer call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.determinism.rng import MASK64, WordSource


@dataclass(frozen=True, eq=False)
class Keys:
    """The seed, the step, the sample ids and the layer of one call `layer(x, keys)`.

    The fields are tensors and not Python numbers, because a compiled program would be traced again for each number. A
    value serves one layer call, because it counts how often each dropout module is used within it. `again()` makes the
    value for a second run of the same call: activation checkpointing recomputes with `keys.again()`, or else the
    recomputed masks would differ.

    Attributes:
        seed, step, layer: int64 scalar tensors.
        sample_ids: int64 [B], the id of the sample in each row of the micro-batch.
        uses: site -> number of uses so far in this layer call.
        source: the generator of random words. All layers of a micro-batch share it, so their keys belong to one thread.
    """

    seed: Tensor
    step: Tensor
    sample_ids: Tensor
    layer: Tensor
    uses: dict[int, int] = field(default_factory=dict, repr=False)
    source: WordSource = field(default_factory=WordSource, repr=False)

    @classmethod
    def make(
        cls,
        seed: int,
        step: int,
        sample_ids: Sequence[int] | np.ndarray | Tensor,
        layer: int,
        device: torch.device | str = "cpu",
    ) -> Keys:
        """Makes keys from plain numbers. `sample_ids` is a sequence, an array or a tensor of integers."""

        def scalar(value: int) -> Tensor:
            return torch.tensor(value, dtype=torch.int64, device=device)

        ids = torch.as_tensor(sample_ids, dtype=torch.int64, device=device)
        return cls(scalar(seed), scalar(step), ids, scalar(layer))

    def again(self) -> Keys:
        """The same keys with no use counted yet, for a second run of the same call."""
        return Keys(self.seed, self.step, self.sample_ids, self.layer, {}, self.source)

    def at(self, layer: int) -> Keys:
        """These keys for the call of layer number `layer`."""
        number = torch.tensor(layer, dtype=torch.int64, device=self.layer.device)
        return Keys(self.seed, self.step, self.sample_ids, number, {}, self.source)

    def generator(self, row: int) -> torch.Generator:
        """A new generator on the CPU for the sample in row `row`, seeded from seed, step, layer and sample id.

        Each call for a row begins the same stream again: a layer that draws twice keeps the generator. It is for layers
        that run eagerly; those that are compiled have `KeyedDropout`.
        """
        parts = int(self.seed), int(self.step), int(self.layer), int(self.sample_ids[row])
        state = np.random.SeedSequence([part & MASK64 for part in parts]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(state[0]))

    def count(self, site: int) -> int:
        """Returns how often `site` was used before in this layer call, and counts this use."""
        use = self.uses.get(site, 0)
        self.uses[site] = use + 1
        return use
