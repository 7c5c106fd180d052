"""The bytes that a layer keeps for its backward are measured once, and measuring changes no bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, WEIGHTS
from elaswave_spmd.worker.profiling import LayerMemory, LayerTimes

ROWS, WIDTH, HIDDEN = 3, 8, 32


class Block(nn.Module):
    """A layer whose parameters are views of one flat buffer, as they are in a worker."""

    def __init__(self) -> None:
        super().__init__()
        self.values = torch.randn(WIDTH * HIDDEN, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(self.values.view(HIDDEN, WIDTH))

    def forward(self, x_BD: Tensor) -> Tensor:
        return torch.relu(torch.exp(nn.functional.linear(x_BD, self.weight)) @ self.weight)


def microbatch(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_a_layer_keeps_its_input_and_what_autograd_saves_but_neither_parameters_nor_the_output() -> None:
    block, memory, x = Block(), LayerMemory(), microbatch(1)
    y: Any = memory.measure(5, x, block.values, lambda: block(x))
    # exp and the matmul save the same tensor, counted once; relu saves the layer's output, the next layer's input.
    assert memory.pop_rows() == ((5, 4 * ROWS * WIDTH + 4 * ROWS * HIDDEN, y.nbytes),)
    assert memory.known == {5} and memory.pop_rows() == ()


def test_without_a_graph_only_the_input_is_kept() -> None:
    block, memory, x = Block(), LayerMemory(), microbatch(1)
    with torch.no_grad():
        memory.measure(0, x, block.values, lambda: block(x))
    assert memory.pop_rows() == ((0, x.nbytes, 4 * ROWS * WIDTH),)


def test_a_layer_is_reported_once() -> None:
    memory = LayerMemory()
    memory.note(1, 10, 20)
    memory.note(1, 11, 21)
    assert memory.pop_rows() == ((1, 10, 20),)
    memory.note(1, 12, 22)
    assert memory.pop_rows() == ()


def test_another_controller_is_told_of_all_layers_once_more() -> None:
    memory = LayerMemory()
    memory.note(1, 10, 20)
    memory.pop_rows()
    memory.note(2, 11, 21)
    memory.report_again()
    assert memory.pop_rows() == ((1, 10, 20), (2, 11, 21))
    assert memory.pop_rows() == ()


def test_measuring_changes_no_bit() -> None:
    gradients = []
    for measures in (True, False):
        block, x = Block(), microbatch(2)
        y: Any = LayerMemory().measure(0, x, block.values, lambda b=block, x=x: b(x)) if measures else block(x)
        y.square().sum().backward()
        gradients.append((x.grad, block.weight.grad))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_weight_gradients_are_part_of_a_backward_and_measured_beside() -> None:
    times = LayerTimes()
    for layer, seconds, kind in [(1, 1.0, FORWARD), (1, 2.0, BACKWARD), (0, 3.0, BACKWARD), (1, 4.0, WEIGHTS)] * 2:
        times.add(layer, seconds, kind)
    assert times.pop_rows() == (((0, 0.0, 6.0, 0, 2), (1, 2.0, 12.0, 2, 2)), ((1, 8.0, 2),))
    assert times.pop_rows() == ((), ())
