"""Datasets whose samples are no tokens, and models of them: images with labels, and sequences of other lengths."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd.data import ShardedDataset
from elaswave_spmd.determinism import Init, KeyedDropout, Keys
from elaswave_spmd.models import LayeredModel

SIDE, CLASSES, FEATURES = 6, 3, 3


class Images:
    """Bright rows, columns or nothing in noise: (float32 [1, SIDE, SIDE], label). `split` moves the noise."""

    num_classes = CLASSES

    def __init__(self, count: int = 48, split: str = "train") -> None:
        self.image_size = SIDE
        self.opened_by = os.getpid()  # no model takes it, so a resumed run may have another one
        self._count = count if split == "train" else 12
        self._shift = 0 if split == "train" else 1000

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        draw = np.random.Generator(np.random.Philox(self._shift + index))
        image, label = draw.normal(size=(1, SIDE, SIDE)).astype(np.float32) * 0.3, index % CLASSES
        if label:
            image[(0, index % SIDE) if label == 1 else (0, slice(None), index % SIDE)] += 2.0
        return image, label


class Augmented(Images):
    """Images that are shifted by keyed random numbers: another one in every step, the same on every worker."""

    def __getitem__(self, index: int, keys: Any) -> tuple[np.ndarray, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        image, label = super().__getitem__(index)
        return np.roll(image, int(keys.numpy().integers(SIDE)), axis=2), label


class Restless(Images):
    """Augmented by numpy's own generator: other samples whenever they are read."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image, label = super().__getitem__(index)
        return image + np.random.random(), label


class Decoded(Images):
    """Each sample takes a process that is ended by SIGTERM and waited for, as a pool is at the end of its `with`."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        decoder = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        decoder.start()
        decoder.terminate()
        decoder.join()
        return super().__getitem__(index)


class Patches(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, d_model, 3, stride=3)

    def forward(self, image: Tensor) -> Tensor:
        return self.conv(image).flatten(2).mT


class Mix(nn.Module):
    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(d_model), nn.Linear(d_model, d_model), KeyedDropout(dropout)

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x))), keys)


class Pooled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x.mean(1))


class Classifier(LayeredModel):
    """Of images. `num_classes` is the dataset's."""

    def __init__(self, num_classes: int, layers: int = 2, d_model: int = 8, dropout: float = 0.1) -> None:
        middle = {f"mix{i}": Mix(d_model, dropout) for i in range(layers)}
        super().__init__({"patches": Patches(d_model), **middle, "head": Pooled(d_model, num_classes)})

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(output.float(), batch[1], reduction="sum")

    def metrics(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        right = output.argmax(-1) == batch[1]
        return {"accuracy": right.sum(), "recall of 2": ((right & (batch[1] == 2)).sum(), (batch[1] == 2).sum())}

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        return super().init(name, shape)


class Weighed(Classifier):
    """Each image has the weight 1, so that the bits are those of no weight."""

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().loss(output, batch), len(batch[1])


class Weightless(Classifier):
    """No image counts."""

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().loss(output, batch), 0.0


class Sentence(NamedTuple):
    """Sequences that were padded to the longest of a micro-batch.

    Args:
        x: float64 [B, T, FEATURES].
        labels: what is to be found, and whether it counts: {"of": int64 [B, T], "counts": bool [B, T]}.
    """

    x: Tensor
    labels: dict[str, Tensor]


class Sentences:
    """Sequences of 1 to 7 features with a label each, of which every third does not count."""

    def __init__(self, count: int = 40, shift: int = 0) -> None:
        self._count, self._shift = count, shift

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index += self._shift
        draw = np.random.Generator(np.random.Philox(index))
        length = 1 + index * index % 7
        x = draw.normal(size=(length, FEATURES))
        return {"x": x, "of": (x.sum(-1) > 0).astype(np.int64), "counts": (np.arange(length) + index) % 3 > 0}

    def collate(self, samples: list[dict[str, np.ndarray]]) -> Sentence:
        longest = max(len(sample["of"]) for sample in samples)
        padded = {
            name: torch.stack([nn.functional.pad(torch.from_numpy(s[name]), pad(s[name], longest)) for s in samples])
            for name in samples[0]
        }
        return Sentence(padded["x"], {"of": padded["of"], "counts": padded["counts"]})


class Padded(Sentences):
    """All micro-batches have one form, as compiled layers need."""

    def collate(self, samples: list[dict[str, np.ndarray]]) -> Sentence:
        longest = {name: np.zeros((7, *value.shape[1:]), value.dtype) for name, value in samples[0].items()}
        found = super().collate([*samples, longest])
        return Sentence(found.x[:-1], {name: label[:-1] for name, label in found.labels.items()})


class Sharded(ShardedDataset[int]):
    """The same sequences, read by iterating over shards of them."""

    shards = (0, 10, 20, 30)
    collate = Sentences.collate

    def shard_length(self, shard: int) -> int:
        return 10

    def open_shard(self, shard: int, offset: int) -> Iterator[dict[str, np.ndarray]]:
        return (Sentences()[number] for number in range(shard + offset, shard + 10))


class Broken(Sentences):
    """Three of its samples cannot be in a batch, which shows when one of them comes."""

    def collate(self, samples: list[dict[str, np.ndarray]]) -> Sentence:
        if threading.current_thread().name == "loader" and any(len(sample["of"]) == 5 for sample in samples):
            raise RuntimeError("five is too long")
        return super().collate(samples)


def pad(values: np.ndarray, longest: int) -> tuple[int, ...]:
    return (0, 0) * (values.ndim - 1) + (0, longest - len(values))


class Hidden(NamedTuple):
    """What layers of the tagger hand on: float [B, T, D], and the lengths that came with it, int64 [B]."""

    x: Tensor
    lengths: Tensor


class Read(nn.Linear):
    def forward(self, given: tuple[Tensor, Tensor]) -> Hidden:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, counts = given
        return Hidden(super().forward(x), counts.sum(-1))


class Recur(nn.Module):
    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(d_model, d_model), KeyedDropout(dropout)

    def forward(self, given: Hidden, keys: Keys) -> Hidden:
        y = torch.tanh(self.linear(given.x)) / (1 + given.lengths[:, None, None])
        return given._replace(x=given.x + self.drop(y, keys))


class Tag(nn.Linear):
    def forward(self, given: Hidden) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(given.x)


class Tagger(LayeredModel):
    """Of sequences: a loss with a weight, and layers that hand on tuples."""

    def __init__(self, layers: int = 2, d_model: int = 8, dropout: float = 0.1) -> None:
        middle = {f"recur{i}": Recur(d_model, dropout) for i in range(layers)}
        super().__init__({"read": Read(FEATURES, d_model), **middle, "tag": Tag(d_model, 2)})

    def inputs(self, batch: Sentence) -> tuple[Tensor, Tensor]:
        return batch.x, batch.labels["counts"]

    def loss(self, output: Tensor, batch: Sentence) -> tuple[Tensor, Tensor]:
        of, counts = batch.labels["of"], batch.labels["counts"]
        each = nn.functional.cross_entropy(output.float().flatten(0, 1), of.flatten(), reduction="none")
        return (each * counts.flatten()).sum(), counts.sum()

    def metrics(self, output: Tensor, batch: Sentence) -> dict[str, Any]:
        of, counts = batch.labels["of"], batch.labels["counts"]
        right = (output.argmax(-1) == of) & counts
        return {"accuracy": (right.sum(), counts.sum()), "length": counts.sum()}

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        return super().init(name, shape)


class Balance(NamedTuple):
    """What the mixture hands on: `Hidden`, and how far its experts are from equal loads: a number."""

    x: Tensor
    lengths: Tensor
    term: Tensor


class Mixture(nn.Module):
    """Two experts, weighed by a gate, with a term that keeps their loads alike."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.gate, self.one, self.other = (nn.Linear(d_model, n) for n in (2, d_model, d_model))

    def forward(self, given: Hidden) -> Balance:
        share = torch.softmax(self.gate(given.x), -1)
        y = share[..., :1] * torch.tanh(self.one(given.x)) + share[..., 1:] * torch.tanh(self.other(given.x))
        return Balance(given.x + y, given.lengths, (share.mean((0, 1)) - 0.5).square().sum())


class Judge(nn.Linear):
    def forward(self, given: Balance) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(given.x), given.term


class Balanced(Tagger):
    """A mixture of experts: a loss with a weight, and a term of each micro-batch. Its first layer is frozen."""

    def __init__(self, d_model: int = 8) -> None:
        layers = {"read": Read(FEATURES, d_model), "recur": Recur(d_model, 0.1), "mixture": Mixture(d_model)}
        LayeredModel.__init__(self, {**layers, "judge": Judge(d_model, 2)})
        self.layers[0].requires_grad_(False)

    def loss(self, output: tuple[Tensor, Tensor], batch: Sentence) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total, weight = super().loss(output[0], batch)
        return total + 0.1 * output[1] * weight, weight

    def metrics(self, output: tuple[Tensor, Tensor], batch: Sentence) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().metrics(output[0], batch)


class Lossless(LayeredModel):
    """It has the loss of tokens."""

    def __init__(self, num_classes: int) -> None:
        super().__init__({"patches": Patches(4), "head": Pooled(4, num_classes)})


class Mapped(Sentences):
    """Batches are dicts without "x"."""

    def collate(self, samples: list[dict[str, np.ndarray]]) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().collate(samples).labels
