"""One run of autograd's engine, from the outputs of one layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Variable


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None) -> None:
    """Runs `torch.autograd.backward(outputs, gradients)`, without what it does in Python for each gradient given to it.

    A layer's backward is a run of its own, and the check of shapes that may be symbolic took 1 to 2 % of a training
    step (d128, where caches are cold by then; docs/design.md has the measurement). The engine itself checks again what
    can be wrong here: dtype, device and, by the assertion, shape. It is torch's own entry to the engine, though no
    public one; tests/unit/worker/test_engine_run.py compares it with the public one.

    On the CPU the engine is entered without torch's copy of the context, which is for the threads of other devices, and
    without its logging of graphs: there nodes run in the thread that calls.

    Args:
        outputs: of a layer, each with a graph.
        gradients: of these, in their shapes and dtypes; None: of one scalar, the loss.
    """
    on_cpu = True
    for one in outputs:
        if type(one) is not Tensor:  # a class of its own may have its own way
            torch.autograd.backward(outputs, gradients)
            return
        on_cpu = on_cpu and one.is_cpu
    given = (torch.ones_like(outputs[0]),) if gradients is None else tuple(gradients)
    for one, gradient in zip(outputs, given, strict=True):
        assert one.shape == gradient.shape, (one.shape, gradient.shape)
    run = Variable._execution_engine.run_backward if on_cpu else torch.autograd.graph._engine_run_backward  # pyright: ignore[reportPrivateUsage]
    run(tuple(outputs), given, False, False, (), allow_unreachable=True, accumulate_grad=True)
