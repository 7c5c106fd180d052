"""Models are made under seeded generators, and layers given as factories only where they are needed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import LayeredModel, constructing
from elaswave_spmd.models.construction import seeded
from tests.own_values_model import Block, Own


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def seed_all() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def values(model: LayeredModel) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items() if not tensor.is_meta}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_generators_are_seeded_inside_and_as_before_afterwards() -> None:
    seed_all()
    wanted = draws(), draws()
    seed_all()
    first = draws()
    with seeded(7, "block0"):
        inside = draws()
    with pytest.raises(ZeroDivisionError), constructing(7):
        _ = draws(), 1 // 0
    assert (first, draws()) == wanted, "whatever is drawn in between, also by a constructor that fails"
    with seeded(7, "block0"):
        assert draws() == inside
    for seed, name in ((8, "block0"), (7, "block1"), (7, "")):
        with seeded(seed, name):
            assert not set(draws()) & set(inside)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("factories", [False, True])
def test_a_model_is_the_same_whatever_was_drawn_before(factories: bool) -> None:
    def make(seed: int) -> LayeredModel:
        _ = draws()
        with constructing(seed):
            return Own(11, 8, factories=factories)

    assert_equal(values(make(3)), values(make(3)))
    one, other = values(make(3)), values(make(4))
    assert not torch.equal(one["block0.up.weight"], other["block0.up.weight"])
    assert not torch.equal(one["block0.up.weight"], one["block1.up.weight"]), "a seed of its own for each layer"


def test_factories_build_what_is_wanted_with_the_values_that_all_have() -> None:
    with constructing(3):
        whole = values(Own(11, 8, layers=4, factories=True))
    for layers in (["block2"], ["block0", "block3"], []):
        with constructing(3, layers):
            model = Own(11, 8, layers=4, factories=True)
        assert model.factories == {f"block{number}" for number in range(4)}
        made = values(model)
        assert {name.partition(".")[0] for name in made} == {"embed", "head", *layers}
        assert_equal(made, {name: whole[name] for name in made})
    with torch.device("meta"), constructing(3):
        assert not values(Own(11, 8, factories=True))


def test_outside_of_a_run_a_factory_is_built_at_once() -> None:
    assert len(values(Own(11, 8, factories=True))) == 2 * 8 + 3
    torch.manual_seed(5)
    layer = Block(4)
    torch.manual_seed(5)
    model = LayeredModel({"only": lambda: Block(4)})
    assert torch.equal(model.get_parameter("only.up.weight"), layer.up.weight), "its own generators, as they are"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (
            lambda x: x.relu(),
            "<lambda>, which is no module, and makes none when it is called without arguments (missing ",
        ),
        (nn.functional.gelu, "gelu, which is no module"),  # in C, without a signature
        (nn.Linear, "Linear, which is no module"),
    ],
)
def test_a_function_of_the_layers_input_is_no_factory(given: Any, shown: str) -> None:
    with pytest.raises(ModelError) as refused:
        LayeredModel({"only": given})
    assert refused.value.what.startswith(f"layer only is {shown}")
    assert "a callable without arguments" in refused.value.rule


def test_a_class_without_arguments_is_a_factory() -> None:
    assert isinstance(LayeredModel({"only": nn.ReLU}).get_submodule("only"), nn.ReLU)


@pytest.mark.parametrize("made", [lambda: 3, lambda: None, lambda: nn.Linear])
def test_what_is_no_layer_is_refused(made: Callable[[], nn.Module]) -> None:
    with pytest.raises(ModelError, match="layer only is of type"):
        LayeredModel({"only": made})
