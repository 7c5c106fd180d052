"""`Keys`: the integer tensors that name the random numbers of one layer call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from elaswave_spmd.determinism.rng import NOISE, WordSource, generator_seeds


@dataclass(frozen=True, eq=False)
class Keys:
    """The seed, the step, the sample ids and the layer of one call `layer(x, keys)`.

    The fields are tensors and not Python numbers, because a compiled program would be traced again for each number.

    A value serves one layer call, because it counts how often each dropout module is used within this call. For a
    second run of the whole call, as with `runtime.activation_checkpointing`, `again()` makes keys that begin to count
    anew, so that the recomputed masks are equal. A layer that recomputes a part of itself calls it by `checkpoint`.

    Attributes:
        seed, step, layer: int64 scalar tensors.
        sample_ids: int64 [B], the id of the sample in each row of the micro-batch.
        uses: site of a dropout -> number of its uses so far in this layer call.
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
        """The same keys without any counted use, for a second run of the same layer call."""
        return self._counting_from({})

    def checkpoint(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `function(*arguments, keys)` within a layer, and keeps only its inputs: the backward runs it again.

        Use it in place of `torch.utils.checkpoint.checkpoint`. There the second run would draw other masks than the
        first one, because the uses of the first run are counted already. Here the masks are those of a plain call, even
        if one function, or one dropout module, is called several times. torch.compile accepts neither of the two
        (`runtime.compile`).

        Args:
            function: the part of the layer, such as a module; it gets the keys as its last argument.
            arguments: its other arguments. Gradients flow back through tensors among them.

        Returns:
            What `function` returns.
        """
        before = dict(self.uses)

        def run(*given: Any) -> Any:
            keys = self._counting_from(dict(before))
            result = function(*given, keys)
            # The second run, in the backward, comes after further uses in the layer. The larger count stays.
            for site, use in keys.uses.items():
                self.uses[site] = max(use, self.uses.get(site, 0))
            return result

        # No layer draws from torch's own generators, so their states need not be kept for the second run.
        return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)

    def at(self, layer: int) -> Keys:
        """These keys for the call of layer number `layer`."""
        number = torch.tensor(layer, dtype=torch.int64, device=self.layer.device)
        return Keys(self.seed, self.step, self.sample_ids, number, {}, self.source)

    def generator(self, row: int) -> torch.Generator:
        """A new generator on the CPU for the sample in row `row`, seeded from seed, step, layer and sample id.

        Each call for a row begins the same stream, so a layer that draws twice has to keep the generator. It is for
        layers that run eagerly; compiled layers use `KeyedDropout`. torch takes 32 bits of a seed, so that among many
        samples and layers two streams may be equal by chance (one pair in 93,000 streams, on average).
        """
        parts = int(self.seed), int(self.step), int(self.layer), int(self.sample_ids[row])
        state = generator_seeds(NOISE, *parts).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(state[0]))

    def _counting_from(self, uses: dict[int, int]) -> Keys:
        return Keys(self.seed, self.step, self.sample_ids, self.layer, uses, self.source)

    def count(self, site: int) -> int:
        """Returns how often `site` was used before in this layer call, and counts this use."""
        use = self.uses.get(site, 0)
        self.uses[site] = use + 1
        return use
