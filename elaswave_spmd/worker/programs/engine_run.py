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

    Args:
        outputs: of a layer, each with a graph.
        gradients: of these, in their shapes and dtypes; None: of one scalar, the loss.
    """
    if gradients is None:
        (loss,) = outputs
        gradients = (torch.ones_like(loss),)
    for one, given in zip(outputs, gradients, strict=True):
        if type(one) is not Tensor:  # a class of its own may have its own way
            torch.autograd.backward(outputs, gradients)
            return
        assert one.shape == given.shape, (one.shape, given.shape)
    # On the CPU the engine runs in this thread, so it needs none of the context that torch's own way to it copies.
    on_cpu = outputs[0].is_cpu
    run = Variable._execution_engine.run_backward if on_cpu else torch.autograd.graph._engine_run_backward  # pyright: ignore[reportPrivateUsage]
    run(tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)
