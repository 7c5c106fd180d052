"""The numbers that a model's `loss` and `metrics` return for a micro-batch: checked, and in one form.

Each number is a sum over samples, with or without a weight. The losses of a step are reduced together with the
gradients. The losses and metrics of a validation are sent to the controller (`recovery/validation.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elaswave_spmd.errors import ModelError
from elaswave_spmd.recovery.admission import LONGEST_METRIC, MOST_METRICS
from elaswave_spmd.worker.activations import described


def checked_loss(loss: object) -> Tensor | tuple[Tensor, Tensor]:
    """Checks the loss of one micro-batch.

    Returns:
        The loss, an fp32 scalar; or (loss, weight), both fp32 scalars.

    Raises:
        ModelError: the loss is neither one number nor a pair of numbers, or its weight has a dtype that rounds counts.
    """
    if isinstance(loss, tuple) and len(loss) == 2 and _is_number(loss[0], tensor=True) and _is_number(loss[1]):
        _refuse_short_weight(loss[1], "loss")
        return loss[0].float(), as_number(loss[1], loss[0])
    if not _is_number(loss, tensor=True):
        raise ModelError(
            f"loss(output, batch) returned {described(loss)}, not one number",
            rule="a loss is a tensor without dims, the sum over the tokens of a micro-batch; or a tuple of that and "
            "its weight",
            fix=_fix_of_loss(loss),
        )
    assert isinstance(loss, Tensor)
    return loss.float()


def _refuse_short_weight(weight: object, function: str) -> None:
    """Refuses a weight in a dtype of less than 4 bytes, such as bf16, which rounds counts of samples or tokens.

    The model's code has rounded the sum already, so a conversion to fp32 would come too late.
    """
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dtype.itemsize >= 4:
        return
    dtype = str(weight.dtype).removeprefix("torch.")
    raise ModelError(
        f"the weight that {function}(output, batch) returned is {dtype}",
        rule=f"a weight is counted exactly, and {dtype} has all whole numbers only up to "
        f"{2 / torch.finfo(weight.dtype).eps:.0f}",
        where=f"{function}(output, batch)",
        fix="count in fp32 or in whole numbers: mask.sum() of a bool mask, mask.float().sum(), or a number of Python",
    )


def _fix_of_loss(loss: object) -> str:
    if isinstance(loss, int | float):
        return "return the tensor, without float() and item()"
    if isinstance(loss, Mapping | list | tuple):
        return "add the losses up and return their sum; single ones go into metrics(output, batch), for validations"
    return "end it with .sum()" if isinstance(loss, Tensor) else "return the loss"


def mixed_weights(what: str) -> ModelError:
    """The error of a model whose loss has a weight for some micro-batches only."""
    return ModelError(
        what,
        rule="a model's loss returns a sum for every micro-batch, or (sum, weight) for every one",
        where="loss(output, batch)",
        fix="return (sum, weight) always; the weight of a micro-batch may be 0",
    )


def _is_number(value: object, *, tensor: bool = False) -> bool:
    if isinstance(value, Tensor):
        return not value.ndim
    return not tensor and isinstance(value, int | float)


def as_number(value: Any, like: Tensor) -> Tensor:
    """A number as an fp32 scalar without a graph, on the device of `like`, which may be a device that only traces.

    Raises:
        ModelError: a whole number that no float can hold.
    """
    if isinstance(value, Tensor):
        return value.detach().float()
    try:
        return torch.zeros_like(like, dtype=torch.float32, requires_grad=False) + float(value)
    except OverflowError as error:
        raise ModelError(
            "a number that loss() or metrics() returned is larger than any float",
            rule="a weight and a metric are numbers that fp32 can hold",
            fix="count samples or tokens",
        ) from error


def loss_and_weight(loss: Tensor, weight: Tensor) -> Tensor:
    """The scaled loss of a micro-batch, its weight, and 1, which counts micro-batches with a weight: fp32 [3]."""
    return torch.stack([loss.detach(), weight, torch.ones_like(weight)])


@dataclass(frozen=True)
class ScoreForm:
    """The form of the numbers that a validation computes for a micro-batch: sums and weights, one after the other.

    Args:
        names: the names of the metrics, which come after the loss.
        weighted: True for the loss, and for each metric, if its sum is followed by a weight.
    """

    names: tuple[str, ...]
    weighted: tuple[bool, ...]

    def rows(self, values: Sequence[float]) -> list[tuple[float, float | None]]:
        """(sum, weight) of the loss, then of each metric; the weight is None if it has none."""
        found, rest = [], iter(values)
        for has_weight in self.weighted:
            total = next(rest)
            found.append((total, next(rest) if has_weight else None))
        return found

    @property
    def in_words(self) -> str:
        """The names of the metrics, such as "accuracy (sum, weight)"."""
        named = zip(self.names, self.weighted[1:], strict=True)
        return ", ".join(f"{name} (sum, weight)" if has else name for name, has in named) or "none"


def scores_of(loss: Tensor | tuple[Tensor, Tensor], metrics: Mapping[str, Any]) -> tuple[ScoreForm, tuple[Tensor, ...]]:
    """A checked loss and the metrics of one micro-batch, as fp32 scalars one after the other, with their form.

    Raises:
        ModelError: a metric is neither one number nor a pair of numbers, or its weight has a dtype that rounds counts.
    """
    values = [loss] if isinstance(loss, Tensor) else [*loss]
    weighted = [not isinstance(loss, Tensor)]
    if not isinstance(metrics, Mapping):
        raise _no_metrics(f"metrics(output, batch) returned an object of type {type(metrics).__name__}")
    for name, value in metrics.items():
        pair = value if isinstance(value, tuple) else (value,)
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_METRIC or not name.isprintable():
            raise _no_metrics(f"metrics(output, batch) returned a metric with the name {name!r}")
        if name == "loss" or len(metrics) > MOST_METRICS:
            raise _no_metrics(f"metrics(output, batch) returned {len(metrics)} metrics, one of them {name}")
        if len(pair) not in (1, 2) or not all(map(_is_number, pair)):
            raise _no_metrics(f"metrics(output, batch) returned {described(value)} as {name}")
        if len(pair) == 2:
            _refuse_short_weight(pair[1], "metrics")
        values += [as_number(one, values[0]) for one in pair]
        weighted.append(len(pair) == 2)
    return ScoreForm(tuple(metrics), tuple(weighted)), tuple(values)


def _no_metrics(what: str) -> ModelError:
    return ModelError(
        what,
        rule="metrics(output, batch) returns a dict of name -> sum over the samples of the micro-batch, or "
        f"(sum, weight), as numbers or tensors without dims; at most {MOST_METRICS}, none of them called loss",
        where="metrics(output, batch)",
        fix='return {"accuracy": ((output.argmax(-1) == batch[1]).sum(), len(batch[1]))}',
    )
