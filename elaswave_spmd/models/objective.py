"""What a model computes of a batch outside its layers: the first layer's input, the loss, and validation metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from elaswave_spmd.errors import ModelError

if TYPE_CHECKING:
    from elaswave_spmd.models.base import LayeredModel


@dataclass(frozen=True)
class Batch:
    """One micro-batch of tokens: the inputs `tokens`, int64 [B, T], and the labels `targets`, int64 [B, T]."""

    tokens: Tensor
    targets: Tensor


Loss = Callable[[Any, Any], Any]
"""(the last layer's output, the micro-batch) -> the loss of the micro-batch: one number, the sum over its samples or
tokens; or (sum, weight). The weights of a step are added up, and its gradient and its reported loss are divided by
their sum."""

Metrics = Callable[[Any, Any], Mapping[str, Any]]
"""(the last layer's output, the micro-batch) -> for the name of each metric its sum over the samples, or (sum, weight).
"""


@dataclass(frozen=True)
class Objective:
    """The functions of a model that are called after its last layer.

    Args:
        loss: the loss function, see `Loss`.
        metrics: the function of the metrics that a validation computes beside the loss; None if the model has none.
        model: the model whose methods these are: its `training` is False while they are called for a validation. None
            if they belong to no model.
    """

    loss: Loss
    metrics: Metrics | None = None
    model: nn.Module | None = None

    @classmethod
    def of(cls, model: LayeredModel) -> Objective:
        """The objective of a model."""
        has_metrics = callable(getattr(type(model), "metrics", None))  # of the class: a layer may have this name
        found: Any = model.metrics if has_metrics else None
        return cls(model.loss, found, model)


def first_inputs(batch: Any) -> Any:
    """The input of the first layer, for models that have no `inputs(batch)` of their own.

    For token data it is `batch.tokens`. For other data it is `batch["x"]` of a dict, `batch[0]` of a tuple, a named
    tuple or a list (as in the (x, y) of PyTorch's loaders), or the batch itself if it is one tensor.

    Raises:
        ModelError: the batch is a dict without "x".
    """
    if isinstance(batch, Batch):
        return batch.tokens
    if isinstance(batch, Mapping):
        if "x" in batch:
            return batch["x"]
        keys = [str(key) for key in batch]
        raise ModelError(
            'the first layer is given batch["x"], and the batch has no "x"',
            rule='the first layer gets what inputs(batch) returns: batch["x"] of a dict, batch[0] of a tuple, or the '
            "batch itself if it is one tensor",
            where="inputs(batch)",
            exists=", ".join(keys),
            fix=f"def inputs(self, batch): return batch[{keys[0]!r}], a method of the model",
        )
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def other_loss(model: str) -> ModelError:
    """The error about a model without a `loss` of its own, whose data is not tokens. `model`: the name of its class."""
    return ModelError(
        f"{model} has no loss for samples that are no tokens",
        rule="the loss of LayeredModel is the cross entropy of tokens; with other data a model has its own",
        where="loss(output, batch)",
        fix="def loss(self, output, batch): return nn.functional.cross_entropy(output, batch[1], reduction='sum'); or "
        "give the dataset vocab_size, if its samples are tokens",
    )
