"""`Keys`: the integer tensors that name the random numbers of one layer call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from elaswave_spmd.determinism.rng import MASK64, WordSource


@dataclass(frozen=True, eq=False)
class Keys:
    """The seed, the step, the sample ids and the layer of one call `layer(x, keys)`.

    The fields are tensors and not Python numbers, because a compiled program would be traced again for each number. A
    value serves one layer call, because it counts how often each dropout module is used within it. `again()` makes the
    value for a second run of the whole call: `runtime.activation_checkpointing` recomputes with it, or else the
    recomputed masks would differ. A part of a layer that is recomputed is called by `checkpoint`.

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
        return self._counting_from({})

    def checkpoint(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `function(*arguments, keys)` within a layer, and keeps little of it: the backward computes it again.

        It takes the place of `torch.utils.checkpoint.checkpoint`, whose second run would draw other masks than the
        first one, as the uses of the first one are counted. The masks are those of a plain call, also where one
        function, or one dropout module, is called several times. torch.compile refuses both (`runtime.compile`).

        Args:
            function: such as a module of the layer; the keys are its last argument.
            arguments: tensors, and whatever else it takes. Gradients go back through tensors among them.

        Returns:
            What `function` returns.
        """
        before = dict(self.uses)

        def run(*given: Any) -> Any:
            keys = self._counting_from(dict(before))
            result = function(*given, keys)
            # A second run, in the backward, finds these uses counted already, and later ones of the layer with them.
            for site, use in keys.uses.items():
                self.uses[site] = max(use, self.uses.get(site, 0))
            return result

        # Nothing of a layer draws from torch's own generators, so their states need not be kept.
        return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)

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

    def _counting_from(self, uses: dict[int, int]) -> Keys:
        return Keys(self.seed, self.step, self.sample_ids, self.layer, uses, self.source)

    def count(self, site: int) -> int:
        """Returns how often `site` was used before in this layer call, and counts this use."""
        use = self.uses.get(site, 0)
        self.uses[site] = use + 1
        return use
