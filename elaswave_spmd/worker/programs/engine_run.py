"""One run of autograd's engine, from the outputs of one layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Variable


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None) -> None:
    """Runs `torch.autograd.backward(outputs, gradients)`, without its checks in Python of each given gradient.

    Each layer's backward is a run of its own. So torch's check of shapes, which may be symbolic, took 1 to 2 % of a
    training step (with d_model 128; docs/design.md has the measurement). The errors that are possible here are still
    found: the engine checks dtype and device, and an assertion checks the shape. This is the entry to the engine that
    torch itself uses, but it is not public. tests/unit/worker/test_engine_run.py compares it with the public one.

    On the CPU, nodes run in the calling thread. So the engine is entered without torch's copy of the context, which is
    for the threads of other devices, and without its logging of graphs.

    Args:
        outputs: outputs of a layer, each with a graph.
        gradients: the gradients of these outputs, in their shapes and dtypes. None if the only output is the loss, a
            scalar.
    """
    on_cpu = True
    for one in outputs:
        if type(one) is not Tensor:  # a subclass may handle its backward itself
            torch.autograd.backward(outputs, gradients)
            return
        on_cpu = on_cpu and one.is_cpu
    given = (torch.ones_like(outputs[0]),) if gradients is None else tuple(gradients)
    for one, gradient in zip(outputs, given, strict=True):
        assert one.shape == gradient.shape, (one.shape, gradient.shape)
    run = Variable._execution_engine.run_backward if on_cpu else torch.autograd.graph._engine_run_backward  # pyright: ignore[reportPrivateUsage]
    run(tuple(outputs), given, False, False, (), allow_unreachable=True, accumulate_grad=True)
