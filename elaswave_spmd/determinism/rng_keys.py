"""`Keys`: what names the random numbers of one layer call, as integer tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.determinism.rng import WordSource


@dataclass(frozen=True, eq=False)
class Keys:
    """(seed, step, sample ids, layer) of one call `layer(x, keys)`.

    Tensors, never Python numbers: a compiled program would be traced anew for each number. One value serves one layer
    call, because it counts how often each dropout module is used within it; `again()` gives the value for a second run
    of the same call (activation checkpointing recomputes with `keys.again()`, else its masks would differ).

    Attributes:
        seed, step, layer: int64 scalars.
        sample_ids: int64 [B], the sample in each row of the micro-batch.
        uses: site -> how often it was used in this layer call.
        source: makes words of random bits; shared by the keys of a micro-batch's layers, so these belong to one thread.
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
        """Keys from plain numbers; `sample_ids` may be any integers: a sequence, an array, a tensor."""

        def scalar(value: int) -> Tensor:
            return torch.tensor(value, dtype=torch.int64, device=device)

        ids = torch.as_tensor(sample_ids, dtype=torch.int64, device=device)
        return cls(scalar(seed), scalar(step), ids, scalar(layer))

    def again(self) -> Keys:
        """The same keys with no use counted yet: for another layer, or for the same call run once more."""
        return Keys(self.seed, self.step, self.sample_ids, self.layer, {}, self.source)

    def at(self, layer: int) -> Keys:
        """These keys for the call of layer number `layer`."""
        number = torch.tensor(layer, dtype=torch.int64, device=self.layer.device)
        return Keys(self.seed, self.step, self.sample_ids, number, {}, self.source)

    def count(self, site: int) -> int:
        """How often `site` was used before in this layer call; counts this use."""
        use = self.uses.get(site, 0)
        self.uses[site] = use + 1
        return use
