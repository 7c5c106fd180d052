"""Pages become parameters again; what is missing is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elaswave_spmd.controller import summary
from elaswave_spmd.controller.summary import collect_pages, is_complete
from elaswave_spmd.recovery.messages import FinalPages
from tests.unit.runtime.runtime_cases import small_layout
from tests.unit.sharding.sharding_strategies import owned_slots


def test_pages_in_any_order_and_one_array_per_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = small_layout(64)
    made: list[tuple[int, ...]] = []
    zeros = np.zeros

    def counted(shape: tuple[int, ...], dtype: type) -> np.ndarray:
        made.append(shape)
        return zeros(shape, dtype)

    monkeypatch.setattr(summary.np, "zeros", counted)
    weights: dict[str, np.ndarray] = {}
    received: set[tuple[int, int, int]] = set()
    for layer in reversed(layout.layers):
        values = torch.arange(layer.num_gradient_elements, dtype=torch.float32)
        for page in reversed(range(layer.num_state_pages)):
            assert not is_complete(layout, received)
            start, stop = layer.span(page, page + 1)
            collect_pages(layout, FinalPages(layer.index, page, page + 1), values[start:stop], weights)
            received.add((layer.index, page, page + 1))
    assert is_complete(layout, received)
    assert sorted(weights) == sorted(slot.parameter.name for slot in owned_slots(layout))
    assert len(made) == len(weights), "each parameter is allocated once, not once per page"
    for slot in owned_slots(layout):
        name = slot.parameter.name
        expected = np.arange(slot.start, slot.stop, dtype=np.float32).reshape(slot.parameter.shape)
        np.testing.assert_array_equal(weights[name], expected)
