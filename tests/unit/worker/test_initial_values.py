"""Initial values: of `init` where a subclass overrides it, else those that constructors made."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Constant, Init
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import GPT, MLP, LayeredModel, Llama, constructing
from elaswave_spmd.sharding import tie
from elaswave_spmd.worker.initial_values import MadeValues, digests
from elaswave_spmd.worker.model_layout import describe
from tests.own_values_model import Embed, Own


class Made:
    """Makes the model, and notes which layers were asked for."""

    def __init__(self, wrong: str = "", *, factories: bool = False) -> None:
        self.asked: list[list[str]] = []
        self._arguments = {"wrong": wrong, "factories": factories}

    def __call__(self, layers: Collection[str]) -> LayeredModel:
        self.asked.append(list(layers))
        with constructing(3, layers):
            return Own(11, 8, layers=3, **self._arguments)


def test_a_layer_scale_stays_what_it_is_and_the_identity_the_identity() -> None:
    made = MadeValues(Made())
    assert made.part("block1.scale", 2, 5).tolist() == [pytest.approx(1e-4)] * 3
    assert torch.equal(made.part("block0.mix.weight", 0, 64).view(8, 8), torch.eye(8))
    assert made.part("embed.weight", 0, 88).std() > 0.5, "as nn.Embedding has it"


@pytest.mark.parametrize("factories", [False, True])
def test_layers_are_made_once_and_forgotten_when_they_are_used(factories: bool) -> None:
    make = Made(factories=factories)
    made = MadeValues(make)
    made.prepare(["embed", "block1"])
    _ = made.values_of("block1"), made.values_of("embed"), made.values_of("head")
    assert make.asked == [["embed", "block1"]]
    _ = made.values_of("block2")
    assert make.asked[1:] == ([["block2"]] if factories else [])
    made.clear()
    _ = made.values_of("embed")
    assert make.asked[-1] == ["embed"]


def test_of_the_layers_that_are_only_read_the_last_is_kept() -> None:
    make = Made(factories=True)
    made = MadeValues(make)
    made.prepare(["block0"])
    first = made.part("block1.up.weight", 0, 64)
    _ = made.values_of("block2"), made.values_of("block2"), made.values_of("block0"), made.values_of("head")
    assert torch.equal(made.part("block1.up.weight", 0, 64), first)
    made.prepare(["block1", "block2"])
    _ = made.values_of("block1"), made.values_of("block2")
    assert make.asked == [["block0"], ["block1"], ["block2"], ["block1"], ["block2"]]


@pytest.mark.parametrize("factories", [False, True])
def test_a_tied_reader_may_be_left_as_it_is(factories: bool) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(11, 8))

        def forward(self, x: Tensor, keys: object) -> Tensor:
            return x @ self.weight.mT

    def make(layers: Collection[str]) -> LayeredModel:
        head = Head if factories else Head()
        with constructing(3, layers):
            return LayeredModel({"embed": Embed(11, 8), "head": head}, ties=[tie("head.weight", "embed.weight")])

    made = MadeValues(make)
    assert made.values_of("head") == {} and made.values_of("embed").keys() == {"embed.weight"}
    assert describe(make([])).has_own_values and digests((), made, ["embed", "head"])


def test_memory_that_the_constructor_left_is_refused() -> None:
    with pytest.raises(ModelError, match=r"parameter block0\.up\.weight has no initial values: 64 (.|\n)*torch\.empty"):
        MadeValues(Made("empty")).prepare(["block0"])


def test_digests_tell_what_differs() -> None:
    def rows(wrong: str) -> dict[str, tuple[bool, bytes]]:
        make = Made(wrong)
        model = make(())
        layers = [(name, model.get_submodule(name)) for name in ("block0", "head")]
        return {name: (constant, digest) for name, constant, digest in digests(layers, MadeValues(make), ["block1"])}

    one = rows("")
    assert one == rows("") and one.keys() - {f"block1.{name}" for name in ("scale", "mix.weight")} == {
        "block0.features", "block0.shift", "block1.up.weight", "block1.up.bias", "block1.by_numpy", "block1.by_python",
    }  # fmt: skip
    assert [name for name, (constant, _) in one.items() if constant] == ["block0.features", "block0.shift"]
    clock = rows("clock")
    assert {name for name in one if one[name] != clock[name]} == {"block1.up.bias"}


class Own1(Own):
    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        return Constant(2.0)


def test_rules_count_where_a_subclass_has_them() -> None:
    def has_own_values(make: Callable[[], LayeredModel]) -> bool:
        with torch.device("meta"):
            found = describe(make())
        assert bool(found.inits) != found.has_own_values
        return found.has_own_values

    assert has_own_values(lambda: Own(7, 8)) and not has_own_values(lambda: Own1(7, 8))
    assert not has_own_values(lambda: GPT(vocab_size=7, layers=1, d_model=8, heads=2, seq_len=4))
    assert not has_own_values(lambda: Llama(vocab_size=7, layers=1, d_model=8, heads=2))
    assert not has_own_values(lambda: MLP(vocab_size=7, layers=1, d_model=8))
