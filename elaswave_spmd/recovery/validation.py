"""The sums of losses, weights and metrics over the micro-batches of a validation.

They are exactly rounded (math.fsum), so they depend neither on which worker ran which micro-batch nor on the order in
which workers report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from elaswave_spmd.errors import ModelError
from elaswave_spmd.recovery.actions import ValidationDone
from elaswave_spmd.recovery.messages import ValidationLoss

Scores: TypeAlias = dict[str, tuple[float, float | None]]
"""The results of one micro-batch: name of a metric -> (sum, weight or None). The loss has the name ""."""

_LOSS = ""


def scores_of(message: ValidationLoss) -> dict[int, Scores]:
    """The losses and metrics that a worker reports, by micro-batch."""
    rows = ((_LOSS, message.losses, message.weights), *message.metrics)
    found: dict[int, Scores] = {microbatch: {} for microbatch in message.microbatches}
    for name, sums, weights in rows:
        for number, microbatch in enumerate(message.microbatches):
            found[microbatch][name] = sums[number], weights[number] if weights else None
    return found


def validation_done(step: int, found: Mapping[int, Scores]) -> ValidationDone:
    """A validation whose micro-batches have all been reported.

    Raises:
        ModelError: micro-batches have different metrics, or only some have weights. No worker can find this, as each
            sees only the micro-batches that it runs.
    """
    first = min(found)
    for microbatch, scores in found.items():
        if _form(scores) != _form(found[first]):
            raise other_metrics(
                f"loss and metrics(output, batch) have returned {_form(scores)} for micro-batch {microbatch} of the "
                f"validation at step {step}, and {_form(found[first])} for micro-batch {first}"
            )
    rows = []
    for name in found[first]:
        weights = [weight for _, weight in (scores[name] for scores in found.values()) if weight is not None]
        rows.append((name, _sum(scores[name][0] for scores in found.values()), _sum(weights) if weights else None))
    (_, total, weight), *metrics = rows
    return ValidationDone(step, total, weight=weight, metrics=tuple(metrics))


def other_metrics(what: str) -> ModelError:
    """The error for a model whose micro-batches have different metrics, or weights only for some of them."""
    return ModelError(
        what,
        rule="the metrics of all micro-batches have the same names, and weights or none",
        where="metrics(output, batch)",
        fix="return (0.0, 0) for a metric that a micro-batch has nothing for",
    )


def _form(scores: Scores) -> str:
    """The names of metrics, and which of them have a weight, such as "loss, accuracy (sum, weight)"."""
    return ", ".join(
        (name or "loss") + ("" if weight is None else " (sum, weight)") for name, (_, weight) in scores.items()
    )


def _sum(values: Iterable[float]) -> float:
    """The exactly rounded sum; not finite where a value is not, or it overflows."""
    found = list(values)
    try:
        return math.fsum(found)
    except (OverflowError, ValueError):  # beyond the largest double, or infinities of both signs
        return math.nan
