"""A layer's run of autograd's engine, against the public way to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from elaswave_spmd.worker.programs.engine_run import run_backward


def made(kind: str) -> tuple[list[Tensor], tuple[Tensor, ...], tuple[Tensor, ...] | None]:
    """Leaves, outputs that depend on them, and gradients of the outputs."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(6, 4, generator=draw).requires_grad_()
    linear = nn.Linear(4, 5)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    unused = nn.Parameter(torch.ones(2))
    y = linear(x).relu()
    leaves = [x, *linear.parameters(), unused]
    if kind == "loss":
        return leaves, (y.square().sum(),), None
    if kind == "tuple":
        outputs = y, x * 2
        return leaves, outputs, tuple(torch.randn(one.shape, generator=draw) for one in outputs)
    return leaves, (y,), (torch.randn(5, 6, generator=draw).t(),)  # not contiguous


@pytest.mark.parametrize("kind", ["tensor", "tuple", "loss"])
@pytest.mark.parametrize("times", [1, 2])
def test_it_has_the_bits_of_the_public_way(kind: str, times: int):
    found = []
    for run in (run_backward, torch.autograd.backward):
        gradients: list[Tensor | None] = []
        for _ in range(times):  # each from new leaves: gradients are added up by the tree, not by autograd
            leaves, outputs, given = made(kind)
            run(outputs, given)
            gradients += [leaf.grad for leaf in leaves]
        found.append(gradients)
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours, theirs)


def test_hooks_of_parameters_and_of_the_graph_are_called():
    leaves, outputs, given = made("tensor")
    called: list[str] = []
    leaves[1].register_post_accumulate_grad_hook(lambda _: called.append("parameter"))
    leaves[0].register_hook(lambda _: called.append("input"))
    run_backward(outputs, given)
    assert sorted(called) == ["input", "parameter"]


def test_the_graph_is_freed():
    _, outputs, given = made("tensor")
    run_backward(outputs, given)
    with pytest.raises(RuntimeError, match="second time"):
        run_backward(outputs, given)


def test_a_gradient_of_another_shape_is_refused():
    _, (y,), _ = made("tensor")
    with pytest.raises(AssertionError):
        run_backward((y,), (torch.ones(6, 1),))


class Own(Tensor):
    """A class of its own, whose way to a backward is seen."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Own.asked += func is torch.autograd.backward
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_class_of_its_own_keeps_its_way():
    leaf = torch.ones(3, requires_grad=True)
    y = (leaf * 2).as_subclass(Own)
    run_backward((y,), (torch.ones(3),))
    assert Own.asked == 1 and leaf.grad is not None and torch.equal(leaf.grad, torch.full((3,), 2.0))
