"""The check of a model's loss and metrics: is what they return for a micro-batch a sum over its samples?

A step adds up the losses of its micro-batches, and a validation adds up their metrics, whatever the size of a
micro-batch. So each of these numbers has to be the sum of the numbers of both halves of the batch. Called by the check
of the model (model_check.py).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import Loss, Metrics
from elaswave_spmd.worker.activations import Activation, in_words, map_tensors
from elaswave_spmd.worker.inputs import leaves_of, with_leaves
from elaswave_spmd.worker.programs.scores import checked_loss, scores_of

_LOSS_TOLERANCE = 1e-3  # relative: fp32 sums of other lengths are rounded differently, but a mean is wrong by a factor
_LONGEST_REASON = 200  # characters


def refuse_detached(loss: Loss, output: Activation, batch: Any) -> None:
    """Refuse a loss without a graph that leads to the output, with which nothing would be trained.

    Only a loss of zero may have no graph, as that of a micro-batch in which no sample counts.

    Args:
        output: the output of the last layer.

    Raises:
        ModelError: the loss has no graph, and is not zero.
    """
    with torch.enable_grad():
        found = checked_loss(
            loss(map_tensors(lambda y: y.detach().requires_grad_(y.is_floating_point()), output), batch)
        )
    total = found[0] if isinstance(found, tuple) else found
    if not total.requires_grad and total.item() != 0.0:
        raise ModelError(
            f"loss(output, batch) is {total.item():g}, and has no gradient",
            rule="the model is trained by the gradient of its loss with respect to the output of its last layer",
            where="loss(output, batch)",
            fix="compute it from output by differentiable operations of torch: without detach(), data, item(), numpy, "
            "argmax and torch.no_grad()",
        )


def check_loss(loss: Loss, output: Activation, batch: Any, cut: int) -> str:
    """Check that the loss of a batch, and its weight, are the sums of those of samples [0, cut) and of the others.

    Args:
        output: the output of the last layer. Its tensors are [samples, ...], floating-point ones in fp32.

    Returns:
        "" if it was checked. Otherwise the reason why it could not be, such as what the loss raised for a part.

    Raises:
        ModelError: they differ by more than rounding explains.
    """
    return _check_sums(lambda y, given: _named_sums(checked_loss(loss(y, given)), {}), _LOSS, output, batch, cut)


def check_metrics(metrics: Metrics, output: Activation, batch: Any, cut: int) -> None:
    """Check that each metric of a batch, and its weight, are the sums of those of two parts; see `check_loss`.

    A validation adds up the metrics of its micro-batches. If a metric were a mean or a maximum, the result would depend
    on the size of micro-batches.
    """

    def sums(y: Activation, given: Any) -> dict[str, float]:
        return _named_sums(torch.zeros(()), metrics(y, given))

    _check_sums(sums, _METRICS, output, batch, cut)


@dataclass(frozen=True)
class _SumRule:
    """The parts of the error for a loss or metric that is not a sum over samples, as in `UserError`."""

    rule: str
    where: str
    fix: str


_LOSS = _SumRule(
    "the loss of a micro-batch is the sum over its samples and tokens: the loss of a step is added up from "
    "micro-batches, and divided by its tokens there",
    "loss(output, batch)",
    'end it with .sum(), or reduction="sum", in place of a mean; let each sample count by itself, with an output and '
    "a target of one shape: of [4] and [4, 1] torch makes [4, 4]",
)
_METRICS = _SumRule(
    "a metric of a micro-batch is the sum over its samples, or (sum, weight): a validation adds both up from "
    "micro-batches, and divides by the weight, or by the number of samples",
    "metrics(output, batch)",
    "return the sum in place of a mean, or (sum, weight) where not every sample counts alike",
)


def _named_sums(loss: Tensor | tuple[Tensor, Tensor], metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a loss and of metrics that must be sums over samples, by their names for errors."""
    form, values = scores_of(loss, metrics)
    names = ("loss()", *(f"metric {name}" for name in form.names))
    found: dict[str, float] = {}
    for name, (total, weight) in zip(names, form.rows([float(value) for value in values]), strict=True):
        found[name] = total
        if weight is not None:
            found[f"the weight of {name}"] = weight
    return found


def _check_sums(
    sums: Callable[[Activation, Any], dict[str, float]], rule: _SumRule, output: Activation, batch: Any, cut: int
) -> str:
    """Check that each number of a batch is the sum of those of samples [0, cut) and of the others; see `check_loss`."""
    number = leaves_of(batch)[0][1].shape[0] if leaves_of(batch)[0][1].ndim else 0
    if any(not leaf.ndim or leaf.shape[0] != number for _, leaf in leaves_of(batch)):
        return "a tensor of the batch has no dim of samples in front, so half of it cannot be told"
    try:
        whole = sums(output, batch)
        first, rest = (
            sums(_part(output, part), with_leaves(batch, (leaf[part] for _, leaf in leaves_of(batch))))
            for part in (slice(None, cut), slice(cut, None))
        )
    except Exception as error:
        # The function may accept only whole micro-batches, or only the outputs of its own model. That is no mistake: it
        # was called with such ones before, in the forward.
        return shortened(error)
    for name, of_all in whole.items():
        parts = first.get(name, math.nan), rest.get(name, math.nan)
        size = max(abs(of_all), sum(map(abs, parts)))
        # A loss that is not finite is refused elsewhere, with the model's own outputs.
        if not math.isfinite(size) or abs(of_all - sum(parts)) <= _LOSS_TOLERANCE * size:
            continue
        seen = f"{name} of {number} samples is {of_all:.6g}, and of their two halves {parts[0]:.6g} + {parts[1]:.6g}"
        given = ", ".join(f"{leaf} {in_words(values)}" for leaf, values in leaves_of(batch))
        exists = f"output {in_words(output)}, {given}"
        raise ModelError(seen, rule=rule.rule, where=rule.where, exists=exists, fix=rule.fix)
    return ""


def shortened(error: Exception) -> str:
    """The type and message of an exception, on one line of bounded length."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", _LONGEST_REASON, placeholder=" ...")


def _part(value: Activation, samples: slice) -> Activation:
    """A slice of the samples of an activation. Tensors without dims stay whole."""
    return map_tensors(lambda tensor: tensor[samples].contiguous() if tensor.ndim else tensor, value)
