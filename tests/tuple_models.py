"""Models whose layers hand on several tensors: a residual around many layers, masks, integers, what nobody uses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Init, KeyedDropout, Keys
from elaswave_spmd.models import MLP, Batch, LayeredModel


class Hidden(NamedTuple):
    """What most layers hand on.

    Args:
        x: float [B, T, D].
        skip: float [B, T, D], of the first layer, for the last but one.
        mask: bool [B, T], computed once.
        weights: float [B, T], without gradient.
        tokens: int64 [B, T].
    """

    x: Tensor
    skip: Tensor
    mask: Tensor
    weights: Tensor
    tokens: Tensor


class Begin(nn.Module):
    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(vocab_size, d_model), nn.Linear(d_model, d_model)

    def forward(self, tokens: Tensor) -> Hidden:
        x, mask = self.embed(tokens), tokens % 3 != 0
        return Hidden(x, torch.tanh(self.up(x)).mT.contiguous().mT, mask, 0.5 + mask.float(), tokens)


class Mix(nn.Module):
    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(d_model), nn.Linear(d_model, d_model)
        self.drop = KeyedDropout(dropout)

    def forward(self, given: Hidden, keys: Keys) -> Hidden:
        y = self.drop(torch.tanh(self.linear(self.norm(given.x))) * given.weights[..., None], keys)
        return given._replace(x=given.x + y.masked_fill(~given.mask[..., None], 0.0))


class Join(nn.Module):
    """Returns a plain tuple, of which the next layer uses the first tensor alone."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.down, self.again = nn.Linear(2 * d_model, d_model), nn.Embedding(vocab_size, d_model)

    def forward(self, given: Hidden) -> tuple[Tensor, Tensor]:
        x = self.down(torch.cat([given.x, given.skip], dim=-1)) + self.again(given.tokens)
        return x, x * 2


class First(nn.Linear):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(given[0])


class Skips(LayeredModel):
    """A named tuple through `layers` layers, a plain one, and one tensor."""

    def __init__(self, vocab_size: int, layers: int, d_model: int, dropout: float = 0.0, **others: object) -> None:
        middle = {f"mix{i}": Mix(d_model, dropout) for i in range(layers)}
        begin, join = Begin(vocab_size, d_model), Join(vocab_size, d_model)
        super().__init__(
            {
                "begin": begin,
                **middle,
                "join": join,
                "first": First(d_model, d_model),
                "head": nn.Linear(d_model, vocab_size),
            }
        )

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        return super().init(name, shape)


class Features(nn.Module):
    """Nothing to train: integers and floating-point features, none of which has a gradient."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return tokens, torch.stack([(tokens % n).float() for n in (2, 3, 5)], dim=-1)


class OfFeatures(nn.Module):
    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(vocab_size, d_model), nn.Linear(3, d_model)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return self.embed(given[0]) + self.linear(given[1])


class FeaturesFirst(LayeredModel):
    """The first layer has neither parameters nor an output with a gradient."""

    def __init__(self, vocab_size: int, d_model: int, layers: int = 0) -> None:
        of_features = OfFeatures(vocab_size, d_model)
        super().__init__({"features": Features(), "of": of_features, "head": nn.Linear(d_model, vocab_size)})

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        return super().init(name, shape)


class Routed(NamedTuple):
    """What layers of a mixture of experts hand on.

    Args:
        x: float [B, T, D].
        balance: float, without dims: the terms of the loss so far.
    """

    x: Tensor
    balance: Tensor


class Start(nn.Embedding):
    def forward(self, tokens: Tensor) -> Routed:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Routed(super().forward(tokens), torch.zeros((), device=tokens.device))


class Experts(nn.Module):
    """Each token goes through the expert that its router prefers; the balance is that of Switch Transformer."""

    def __init__(self, d_model: int, number: int) -> None:
        super().__init__()
        self.router = nn.Linear(d_model, number)
        self.experts = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(number))

    def forward(self, given: Routed) -> Routed:
        odds = self.router(given.x).softmax(-1)
        taken = nn.functional.one_hot(odds.argmax(-1), len(self.experts)).to(odds.dtype)
        outputs = torch.stack([torch.tanh(expert(given.x)) for expert in self.experts], dim=-1)
        balance = len(self.experts) * (taken.mean((0, 1)) * odds.mean((0, 1))).sum()
        return Routed(given.x + (outputs * (taken * odds)[..., None, :]).sum(-1), given.balance + balance)


class Answer(nn.Linear):
    def forward(self, given: Routed) -> Routed:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Routed(super().forward(given.x), given.balance)


class Mixture(LayeredModel):
    """A mixture of experts: each layer adds a term to the loss, which is a function of the whole micro-batch."""

    def __init__(self, vocab_size: int, layers: int, d_model: int, experts: int = 3, **others: object) -> None:
        middle = {f"experts{i}": Experts(d_model, experts) for i in range(layers)}
        super().__init__({"start": Start(vocab_size, d_model), **middle, "answer": Answer(d_model, vocab_size)})

    def loss(self, output: Routed, batch: Batch) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().loss(output.x, batch) + 0.1 * batch.targets.numel() * output.balance

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        return super().init(name, shape)


class Pack(nn.Module):
    """Hands on the tokens that are no padding: how many these are differs from micro-batch to micro-batch."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        kept = tokens % 3 != 0
        return tokens[kept], kept


class PackedEmbedding(nn.Embedding):
    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        tokens, kept = given
        return super().forward(tokens), kept


class OfEach(nn.Module):
    """A layer of tokens by themselves, [N, D]."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, kept = given
        return x + torch.tanh(self.linear(x)), kept


class Unpack(nn.Linear):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, kept = given
        y = super().forward(x)
        return y.new_zeros(*kept.shape, y.shape[-1]).masked_scatter(kept[..., None], y)


class Packed(LayeredModel):
    """Computes nothing for padding: between its layers micro-batches of tokens have other shapes."""

    def __init__(self, vocab_size: int, layers: int, d_model: int, **others: object) -> None:
        middle = {f"each{i}": OfEach(d_model) for i in range(layers)}
        embed, head = PackedEmbedding(vocab_size, d_model), Unpack(d_model, vocab_size)
        super().__init__({"pack": Pack(), "embed": embed, **middle, "head": head})

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        return super().init(name, shape)


class Hollow(nn.Module):
    """Hands on no elements: a tensor, or a tuple of two."""

    def __init__(self, *, is_tuple: bool) -> None:
        super().__init__()
        self.is_tuple = is_tuple

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        nothing = x[:, :0].contiguous()
        return (nothing, nothing.sum(-1)) if self.is_tuple else nothing


class Refill(nn.Module):
    """Gives [B, T, D] for [B, 0, D], or a tuple that begins with it."""

    def __init__(self, seq_len: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(seq_len, d_model))

    def forward(self, given: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        x = given if isinstance(given, Tensor) else given[0]
        return x.sum(1, keepdim=True) + torch.tanh(self.weight)


class Emptied(LayeredModel):
    """Between two of its layers a micro-batch has no elements, as where all of its tokens were left out."""

    def __init__(
        self, vocab_size: int, layers: int, d_model: int, seq_len: int, is_tuple: bool = False, **others: object
    ) -> None:
        embed, head = nn.Embedding(vocab_size, d_model), nn.Linear(d_model, vocab_size)
        middle = {"hollow": Hollow(is_tuple=is_tuple), "refill": Refill(seq_len, d_model)}
        super().__init__({"embed": embed, **middle, "head": head})

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        return super().init(name, shape)


class AnySizes(MLP):
    """An MLP for words that name other sizes as well."""

    def __init__(self, vocab_size: int, layers: int, d_model: int, dropout: float, **others: object) -> None:
        super().__init__(vocab_size, layers, d_model, dropout=dropout)
