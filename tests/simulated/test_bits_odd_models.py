"""Layers that a user may well write: the contract allows them, so their bits are the same on every mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Init, KeyedDropout, Keys
from elaswave_spmd.models import LayeredModel
from elaswave_spmd.sharding import tie
from tests.simulated import bits_cases
from tests.simulated.bits_cases import TOKENS, VOCAB, Run, assert_as_reference, placement_of
from tests.tuple_models import Emptied, FeaturesFirst, Mixture, Packed, Skips

WIDTH = 8


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCAB, WIDTH))

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return nn.functional.embedding(x, self.weight)


class Bigram(nn.Module):
    """A whole model: the logits of the next token are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(VOCAB, VOCAB))

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return nn.functional.embedding(x, self.table)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCAB, WIDTH))

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Mix(nn.Module):
    """A linear layer over the width, with a bias that most cuts of pages go through."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Transposed(Mix):
    """Gives a tensor that is not contiguous."""

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return super().forward(x, keys).transpose(1, 2).contiguous().transpose(1, 2)


class Nothing(nn.Module):
    """Has no parameters."""

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return torch.nn.functional.gelu(x)


class Same(nn.Module):
    """Gives its input back."""

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return x


class Scaled(nn.Module):
    """A parameter without dims, one that is never used, one dropout used twice, one array under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))
        self.idle = nn.Parameter(torch.empty(3, 5))
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.drop = KeyedDropout(0.2)

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return x + self.drop(self.second(self.drop(torch.relu(self.first(x)), keys)), keys) * self.scale


class Pooled(nn.Module):
    """Gives [B, C, 1, 1] in the strides of channels_last, which is contiguous in both ways."""

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return x.mean(1)[:, None, None].permute(0, 3, 1, 2)


class Convolved(nn.Module):
    """Runs other kernels for other strides, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.convolution = nn.GroupNorm(2, WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return x + torch.tanh(self.convolution(self.norm(x)))


class Spread(nn.Module):
    """Gives each token what was pooled of all."""

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return x[:, None, :, 0, 0].expand(-1, TOKENS, -1)


class Queries(nn.Module):
    """Gives a parameter of its own beside its input, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(3, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.query


class Answered(nn.Module):
    """Uses what `Queries` gave, also for the gradient of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        memory, query = x
        return memory + torch.tanh(self.project(query)).mean(0)


class Buffered(Mix):
    """Has a constant that is registered as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ramp", torch.arange(TOKENS, dtype=torch.float32).view(-1, 1) / 7)

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return super().forward(x, keys) + self.get_buffer("ramp").to(x.dtype)


class Evaluated(nn.Module):
    """A frozen part in evaluation mode, with the statistics of what it was trained on, which are in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(TOKENS, affine=False)
        self.first.requires_grad_(False)
        self.norm.eval()
        for buffer, start in ((self.norm.running_mean, -0.2), (self.norm.running_var, 0.7)):
            assert buffer is not None
            buffer.copy_(torch.linspace(start, 1.0, TOKENS))
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.norm(self.first(x).float()).relu().to(x.dtype))


def of_torch() -> LayeredModel:
    """Modules of torch as they are, which have no place for keys."""
    middle = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    encoder = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
    return Drawn(
        {"embed": nn.Embedding(VOCAB, WIDTH), "mlp": middle, "encoder": encoder, "head": nn.Linear(WIDTH, VOCAB)}
    )


class Drawn(LayeredModel):
    """Its parameters are drawn by rule; what constructors made of them does not count."""

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        return super().init(name, shape)


def model(*middle: Callable[[], nn.Module], tied: bool = False) -> Callable[[], LayeredModel]:
    def make() -> LayeredModel:
        layers = {f"middle{i}": each() for i, each in enumerate(middle)}
        ties = [tie("head.weight", "embed.weight")] if tied else []
        return Drawn({"embed": Embed(), **layers, "head": Head()}, ties)

    return make


CASES: dict[str, Callable[[], LayeredModel]] = {
    "no middle": model(),
    "no middle, tied": model(tied=True),
    "one layer": lambda: Drawn({"all": Bigram()}),
    "not contiguous": model(Mix, Transposed, Mix),
    "channels last": model(Pooled, Convolved, Convolved, Spread),
    "no parameters": model(Nothing, Mix, Nothing),
    "its input": model(Same, Same, tied=True),
    "its own parameter": model(Queries, Answered),
    "odd parameters": model(Scaled, Scaled),
    "a buffer": model(Buffered),
    "batch norm, evaluated": model(Evaluated, Evaluated),
    "of torch": of_torch,
    "tuples": lambda: Skips(VOCAB, 2, WIDTH, dropout=0.2),
    "terms of the loss": lambda: Mixture(VOCAB, 2, WIDTH),
    "features": lambda: FeaturesFirst(VOCAB, WIDTH),
    "packed": lambda: Packed(VOCAB, 2, WIDTH),
    "no elements": lambda: Emptied(VOCAB, 2, WIDTH, TOKENS),
    "tuple of no elements": lambda: Emptied(VOCAB, 2, WIDTH, TOKENS, is_tuple=True),
}

MESHES = {"single": 1, "dp2": 1, "pp2": 2, "stages1-2": 2, "pp3": 3}  # and their stages


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "case, mesh", [(c, mesh) for c in CASES for mesh in MESHES if MESHES[mesh] <= len(CASES[c]().layers)]
)
def test_odd_layers_have_the_same_bits(case: str, mesh: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bits_cases.MODELS, case, CASES[case])
    run = Run(model=case, dtype=dtype, microbatches=3, steps=4, page_size=64)
    for zero in (0, 3):
        assert_as_reference(run, placement_of(run, mesh, zero), order=zero)
