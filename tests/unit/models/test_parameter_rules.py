"""A model's own `init` and `decays`: what they raise or return otherwise is refused with the function and parameter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elaswave_spmd.determinism import Constant, Init, Normal
from elaswave_spmd.errors import MeshError, ModelError
from elaswave_spmd.models import LayeredModel
from elaswave_spmd.worker.model_layout import describe


class Ruled(LayeredModel):
    """One layer, whose rules are given."""

    def __init__(self, init: Callable[[str], Any] | None = None, decays: Callable[[str], Any] | None = None) -> None:
        super().__init__({"one": nn.Linear(2, 3)})
        self._init, self._decays = init, decays

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        return super().init(name, shape) if self._init is None else self._init(name)

    def decays(self, name: str, shape: tuple[int, ...]) -> bool:
        return super().decays(name, shape) if self._decays is None else self._decays(name)


def ruled(**rules: Callable[[str], Any]) -> LayeredModel:
    with torch.device("meta"):
        return Ruled(**rules)


def raises(name: str) -> Any:
    raise KeyError(name)


@pytest.mark.parametrize("function", ["init", "decays"])
@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (raises, "failed (KeyError: 'one.weight')"),
        (lambda name: sys.exit(3), "failed (SystemExit: 3)"),
        (lambda name: None, "returned None for parameter one.weight"),
        (lambda name: 0.02, "returned 0.02 for parameter one.weight"),
        (lambda name: Normal(float("nan")), "std of Normal is nan"),
        (lambda name: Constant(float("nan")), "value of Constant is nan"),
        (lambda name: Constant("1"), "failed (TypeError: must be real number, not str)"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_is_wrong_with_a_rule_names_the_function_and_the_parameter(
    rule: Callable[[str], Any], told: str, function: str
) -> None:
    given = {"init": lambda name: Normal(0.02)} | {function: rule}
    with pytest.raises(ModelError) as caught:
        describe(ruled(**given))
    error = caught.value
    assert told in error.what, error
    if "of Normal" not in told and "of Constant" not in told:  # a refusal of ours stays as it is
        assert error.what.startswith(f"Ruled.{function}") and "one." in error.what + error.where and error.fix


def test_it_is_said_where_rules_are_imported_from() -> None:
    with pytest.raises(ModelError) as caught:
        describe(ruled(init=lambda name: None))
    assert "from elaswave_spmd.determinism import Normal, Uniform, Constant" in caught.value.fix


def test_a_refusal_of_the_model_itself_stays() -> None:
    def refuses(name: str) -> Init:
        raise MeshError("not on this mesh")

    with pytest.raises(MeshError, match="not on this mesh"):
        describe(ruled(init=refuses))


def test_the_line_of_the_user_is_named() -> None:
    with pytest.raises(ModelError, match=r"test_parameter_rules\.py:\d+, in raises"):
        describe(ruled(decays=raises))


def test_rules_that_are_right_are_taken() -> None:
    found = describe(ruled(init=lambda name: Constant(2.0), decays=lambda name: name.endswith("bias")))
    assert set(found.inits.values()) == {Constant(2.0)}
    decay = {slot.parameter.name: slot.parameter.rule.decay for slot in found.layout.layers[0].slots}
    assert decay == {"one.weight": False, "one.bias": True}
