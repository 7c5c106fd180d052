"""Images with labels, of which some have none: samples that are no tokens, a loss with a weight, and metrics.

    cd examples
    python ../train.py model.target=images.Classifier data.target=images.Shapes mesh=dp2_pp2 model.layers=3

The dataset returns what a dataset of PyTorch does. The loss is a sum over the images that have a label, with their
number as its weight: a step divides by the number of all labels of its global batch, so it is the same step on every
mesh, however the labels lie in micro-batches. `metrics` are computed in validations. The images are moved at random, by
keys: by another distance in every step, and by the same one on every worker.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd import LayeredModel

SIDE, PATCH, UNKNOWN = 12, 4, -1


class Shapes:
    """Noise with a bright row, column or neither: (float32 [1, SIDE, SIDE], label). Every fifth has no label."""

    num_classes = 3  # the model's constructor names it

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int, keys: Any) -> tuple[np.ndarray, int]:
        draw = np.random.default_rng(index)  # the sample: a function of its number
        image, label = draw.normal(0.0, 0.3, (1, SIDE, SIDE)).astype(np.float32), index % 3
        if label:
            image[(0, index % SIDE) if label == 1 else (0, slice(None), index % SIDE)] += 2.0
        moved = np.roll(image, keys.numpy().integers(SIDE, size=2), axis=(1, 2))  # another one in every step
        return moved, UNKNOWN if index % 5 == 4 else label


class Patches(nn.Conv2d):
    def forward(self, image: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(image).flatten(2).mT


class Block(nn.Module):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.attention = nn.MultiheadAttention(d_model, heads, batch_first=True)
        self.out = nn.Sequential(
            nn.LayerNorm(d_model), nn.Linear(d_model, 2 * d_model), nn.GELU(), nn.Linear(2 * d_model, d_model)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.out(x)


class Head(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x.mean(1))


class Classifier(LayeredModel):
    """A small vision transformer."""

    def __init__(self, num_classes: int, layers: int, d_model: int, heads: int) -> None:
        blocks = {f"block{i}": Block(d_model, heads) for i in range(layers)}
        super().__init__({"patches": Patches(1, d_model, PATCH, PATCH), **blocks, "head": Head(d_model, num_classes)})

    def loss(self, output: Tensor, batch: Any) -> Any:
        labels = batch[1]
        total = nn.functional.cross_entropy(output.float(), labels, ignore_index=UNKNOWN, reduction="sum")
        return total, (labels != UNKNOWN).sum()

    def metrics(self, output: Tensor, batch: Any) -> Any:
        labels = batch[1]
        return {"accuracy": (torch.eq(output.argmax(-1), labels).sum(), (labels != UNKNOWN).sum())}
