"""Activations: tuples of tensors between layers and between stages keep their bits, forms and names."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elaswave_spmd.errors import ModelError
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.worker import activations as a

DTYPES = [getattr(torch, name) for name in m.ITEM_BYTES]


class Pair(NamedTuple):
    hidden: Tensor
    mask: Tensor


def pair() -> Pair:
    return Pair(torch.arange(6.0).view(2, 3).requires_grad_(), torch.tensor([[True], [False]]))


@st.composite
def tuples(draw: st.DrawFn) -> tuple[Tensor, ...]:
    tensors = []
    for dtype in draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=5)):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        size = torch.empty(shape).numel() * dtype.itemsize
        raw = torch.tensor(draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)), dtype=torch.uint8)
        tensor = raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        tensors.append(tensor.requires_grad_(dtype.is_floating_point and draw(st.booleans())))
    return tuple(tensors)


@given(tuples(), st.booleans())
def test_what_is_packed_is_unpacked_bit_for_bit(given_: tuple[Tensor, ...], named: bool) -> None:
    value = given_
    if named:
        two = (*given_, torch.zeros(1))[:2]
        value = a.like(a.checked_output(Pair(*two), torch.float32, "l"), two)
    forms, names = a.forms_sent(value)
    payload = a.packed(value)
    assert payload.dtype is torch.uint8 and payload.numel() == m.packed_bytes(forms)
    found = a.unpacked(payload, forms, names)
    assert type(found) is type(value) and len(found) == len(value)
    for one, other in zip(found, value, strict=True):
        assert one.dtype == other.dtype and one.requires_grad == other.requires_grad
        assert one.shape == other.shape and one.data_ptr() % 64 == 0
        raw = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        assert torch.equal(*raw)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (1, 4, 1), (3, 0, 1), (8, 64, 1, 1), (2, 3, 4)])
def test_what_the_next_layer_is_given_has_the_strides_of_its_shape(shape: tuple[int, ...]) -> None:
    """As it would arrive in another stage. A dim of size 1 has any stride, and kernels are chosen by it."""
    x, wanted = torch.randn(shape), torch.empty(shape).stride()
    odd = x.as_strided(shape, [7 if size == 1 else stride for size, stride in zip(shape, wanted, strict=True)])
    assert odd.is_contiguous() and (1 not in shape or odd.stride() != wanted)
    for found in (a.checked_output(odd, torch.float32, "l"), *a.checked_output((odd,), torch.float32, "l")):
        assert isinstance(found, Tensor) and found.stride() == wanted and torch.equal(found, x)
    leaf = x.clone().requires_grad_()
    leaf.grad = odd
    found = a.gradient_of(leaf)
    assert isinstance(found, Tensor) and found.stride() == wanted and torch.equal(found, x)


def test_what_the_next_layer_is_given_is_aligned_and_no_parameter() -> None:
    """A view that begins in the middle would be an aligned copy in another stage; parameters change, or are freed."""
    flat = torch.randn(64)
    whole, part, own = torch.randn(1, 5, 10), torch.randn(1, 5, 10)[:, 1:], flat[:32].view(4, 8).requires_grad_()
    assert part.is_contiguous() and part.data_ptr() % a.ALIGNMENT
    assert a.in_own_memory(whole, flat) is whole
    found = a.in_own_memory((whole, part, own), flat)
    assert found[0] is whole
    for one, other in zip(found[1:], (part, own), strict=True):
        assert torch.equal(one, other) and one.requires_grad == other.requires_grad
        assert not one.data_ptr() % a.ALIGNMENT and one.untyped_storage().data_ptr() != flat.data_ptr()
    found[2].sum().backward()
    assert own.grad is not None and torch.equal(own.grad, torch.ones(4, 8)), "its gradient reaches the parameter"
    x = torch.randn(1, 4, 10, requires_grad=True)
    torch.cat([torch.randn(1, 1, 10), x], 1).square().sum().backward()
    gradient = a.gradient_of(x)
    assert isinstance(gradient, Tensor) and not gradient.data_ptr() % a.ALIGNMENT
    assert x.grad is not None and torch.equal(gradient, x.grad)


def test_a_tensor_is_sent_as_it_is() -> None:
    tensor = torch.randn(2, 3)
    assert a.packed(tensor) is tensor and a.forms_sent(tensor) == ((), ())


def test_an_output_is_contiguous_and_floats_are_in_the_compute_dtype() -> None:
    y = a.checked_output((torch.zeros(2, 3).mT, torch.arange(4)[::2], torch.zeros(1).double()), torch.bfloat16, "l")
    assert [one.dtype for one in y] == [torch.bfloat16, torch.int64, torch.bfloat16]
    assert all(one.is_contiguous() for one in y)


@pytest.mark.parametrize(
    ("y", "told"),
    [
        (torch.arange(3), r"a tensor int64\[3\]"),
        ((), "a tuple of nothing"),
        ((torch.zeros(1), None), "a tuple of Tensor, NoneType"),
        ((torch.zeros(1), 3), "a tuple of Tensor, int"),
        ((torch.zeros(1), (torch.zeros(1),)), "a tuple of Tensor, tuple"),
        ((torch.zeros(2, dtype=torch.complex64),), r"a tuple \(complex64\[2\]\)"),
        ([torch.zeros(1)], "an object of type list"),
        ({"x": torch.zeros(1)}, "an object of type dict"),
        ((torch.zeros(1),) * (m.MOST_TENSORS + 1), "a tuple"),
    ],
)
def test_other_outputs_are_refused(y: Any, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        a.checked_output(y, torch.float32, "block0")


@pytest.mark.parametrize("several", [False, True])
def test_complex_numbers_are_refused_with_the_real_ones_to_return(several: bool) -> None:
    y = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(ModelError) as caught:
        a.checked_output((torch.zeros(1), y) if several else y, torch.float32, "block0")
    assert caught.value.fix and "torch.view_as_real" in caught.value.fix


def test_what_is_handed_on_has_no_graph_and_keeps_its_marks_and_names() -> None:
    y = a.checked_output(Pair(pair().hidden * 2, pair().mask), torch.float32, "l")
    x = a.handed_on(y)
    assert isinstance(x, tuple) and x._fields == ("hidden", "mask")  # pyright: ignore[reportAttributeAccessIssue]
    assert x[0].is_leaf and a.marks_of(x) == (True, False)
    begun = a.leaf(x, passes_gradient=True)
    assert begun[0] is not x[0] and begun[0].data_ptr() == x[0].data_ptr() and a.marks_of(begun) == (True, False)
    assert a.marks_of(a.leaf(x, passes_gradient=False)) == (False, False)


def test_the_gradient_of_what_is_ignored_is_zero() -> None:
    x = a.leaf((pair().hidden, torch.ones(2).requires_grad_(), torch.ones(2)), passes_gradient=True)
    (x[0] * 3).sum().backward()
    dx = a.gradient_of(x)
    assert isinstance(dx, tuple) and [one.tolist() for one in dx] == [[[3.0] * 3] * 2, [0.0, 0.0]]
    assert a.gradient_of((torch.ones(2),)) is None and a.gradient_of(torch.arange(2)) is None
    assert len(a.zero_gradient(x)) == 2


def test_kinds_of_layers_are_told_apart_by_the_forms_of_their_inputs() -> None:
    one = pair()
    others = [
        (one.hidden, one.mask),
        one.hidden,
        Pair(one.hidden.detach(), one.mask),
        Pair(one.hidden, one.mask.int()),
        Pair(one.hidden, one.mask.mT),
    ]
    assert a.forms_of(one) == a.forms_of(pair()) and all(a.forms_of(other) != a.forms_of(one) for other in others)
