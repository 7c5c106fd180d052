"""Flat buffers: parameters are views, pages have versions, memory is freed and allocated again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elaswave_spmd.sharding.layout import LayerLayout, LayerUse, ParameterInfo, lay_out
from elaswave_spmd.worker.buffers import GradientBuffer, GradientPool, ValueBuffer, bind_parameters
from tests.unit.runtime.runtime_cases import HOST, small_layout


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(9, 33)
        self.again = nn.Linear(9, 33, bias=False)
        self.again.weight = self.inner.weight


def layout(page_size: int = 64) -> LayerLayout:
    parameters = (ParameterInfo("layer.inner.weight", (33, 9)), ParameterInfo("layer.inner.bias", (33,), decay=False))
    return lay_out([LayerUse("layer", parameters)], page_size=page_size).layers[0]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_become_aligned_views_under_all_their_names(device: str) -> None:
    with torch.device(device):
        module = Layer()
    flat = torch.arange(layout().num_value_elements, dtype=torch.float32)
    weight, bias = bind_parameters(module, layout(), flat)
    assert module.inner.weight is weight and module.again.weight is weight and module.inner.bias is bias
    assert torch.equal(weight.detach().flatten(), flat[: 33 * 9]) and weight.is_contiguous()
    assert bias.storage_offset() % 64 == 0 and bias[0] == bias.storage_offset()
    flat.zero_()
    assert not bias.any(), "a view, not a copy"


def test_a_buffer_is_at_a_version_only_with_all_its_pages() -> None:
    values = ValueBuffer(layout(), Layer(), torch.float32, HOST.place)
    pages = layout().num_value_pages
    assert pages > 3 and not values.is_at(0)
    values.mark(0, pages - 1, 0)
    assert not values.is_at(0)
    values.mark(pages - 1, pages, 1)
    assert not values.is_at(0) and not values.is_at(1)
    values.mark(0, pages - 1, 1)
    assert values.is_at(1) and not values.is_at(0)


def test_versions_never_go_back() -> None:
    values = ValueBuffer(layout(), Layer(), torch.float32, HOST.place)
    values.mark(0, 2, 5)
    with pytest.raises(AssertionError):
        values.mark(1, 3, 4)


def test_installing_converts_and_marks() -> None:
    values = ValueBuffer(layout(), Layer(), torch.bfloat16, HOST.place)
    start, stop = layout().span(1, 3)
    master = torch.randn(stop - start)
    values.install(1, 3, master, 2)
    assert torch.equal(values.pages(1, 3), master.bfloat16())
    assert not values.is_at(2)


def test_dropped_memory_is_freed_and_allocated_for_the_next_version() -> None:
    values = ValueBuffer(layout(), Layer(), torch.float32, HOST.place)
    pages = layout().num_value_pages
    values.mark(0, pages, 0)
    values.drop()
    assert values.flat.untyped_storage().nbytes() == 0 and not values.is_at(0) and not values.is_at(-2)
    fresh = torch.randn(layout().num_value_elements)
    values.install(0, pages, fresh, 1)
    assert values.is_at(1) and torch.equal(values.parameters[0].detach().flatten(), fresh[: 33 * 9])


def test_what_comes_late_does_not_bring_dropped_memory_back() -> None:
    """A worker that had all pages may have used them and dropped them before a slow member's all-gather is through."""
    values = ValueBuffer(layout(), Layer(), torch.float32, HOST.place)
    pages = layout().num_value_pages
    values.mark(0, pages, 3)
    values.drop()
    late = torch.randn(layout().num_value_elements)
    values.install(0, pages, late, 3)
    assert values.flat.untyped_storage().nbytes() == 0
    values.expect()  # asked for again
    values.install(0, pages, late, 3)
    assert values.is_at(3)


def test_a_layer_without_parameters_is_always_ready() -> None:
    empty = lay_out([LayerUse("a", ()), LayerUse("b", ())]).layers[0]
    values = ValueBuffer(empty, nn.Identity(), torch.float32, HOST.place)
    assert values.is_at(0) and values.is_at(7)
    values.drop()
    values.allocate()
    assert values.is_at(8)


def test_gradients_are_set_by_parameter_and_missing_ones_are_zero() -> None:
    buffer = GradientBuffer(layout(), HOST.place)
    weight, bias = torch.randn(33, 9, dtype=torch.bfloat16), torch.randn(33)
    buffer.set([weight, bias])
    assert torch.equal(buffer.views[0], weight.float()) and torch.equal(buffer.views[1], bias)
    buffer.set([None, bias])
    assert not buffer.views[0].any() and torch.equal(buffer.views[1], bias)
    used = torch.zeros_like(buffer.flat, dtype=torch.bool)
    for slot in layout().slots:
        used[slot.start : slot.stop] = True
    assert not buffer.flat[~used].any(), "elements between parameters stay zero"


def test_the_last_layer_has_a_page_for_the_loss() -> None:
    last = small_layout().layers[-1]
    buffer = GradientBuffer(last, HOST.place)
    buffer.loss.copy_(torch.tensor(2.5))
    block = last.loss_block
    assert block is not None
    page = buffer.pages(block.first_page, block.first_page + 1)
    assert page[0] == 2.5 and page.count_nonzero() == 1


def test_a_pool_gives_each_buffer_to_one_user_at_a_time() -> None:
    pool = GradientPool(layout(), HOST.place)
    first, second = pool.acquire(), pool.acquire()
    assert first is not second and pool.peak == 2
    pool.release(first)
    assert pool.acquire() is first and pool.peak == 2
    pool.remove(second)
    pool.release_all()
    assert pool.acquire() is first and pool.acquire() is not second
    assert pool.num_bytes == 2 * layout().num_gradient_elements * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_received_boundary_is_copied_to_aligned_memory(dtype: torch.dtype) -> None:
    odd = torch.randn(65).to(dtype)[1:]
    copy = HOST.from_host(odd.view(8, 8))
    assert copy.data_ptr() % 64 == 0 and copy.shape == (8, 8) and torch.equal(copy.flatten(), odd)
