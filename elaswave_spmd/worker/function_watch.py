"""The watch over the functions that a model has around its layers: inputs(batch), loss(output, batch) and metrics.

The rules for layers (`layer_watch`) hold for them, too. They return the same result for the same micro-batch, whatever
was computed before. They do not draw from generators without keys, and do not change what they are given. They get no
keys, so random numbers must come from the dataset or from a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import Loss, Metrics
from elaswave_spmd.worker.activations import Activation, tensors_of
from elaswave_spmd.worker.inputs import Inputs, first_input, leaves_of
from elaswave_spmd.worker.layer_watch import SAME_RESULT, difference_of, equal_bits, process_state, refuse_process
from elaswave_spmd.worker.programs.scores import checked_loss, scores_of

_BY_DATASET = "def __getitem__(self, index, keys) with keys.generator() or keys.numpy() (docs/your_data.md)"


@dataclass(frozen=True)
class _Function:
    """A function of a model.

    Args:
        name: its name with its arguments, as a user writes them.
        draw: where random numbers should be drawn instead; for the fix in errors.
        given: what it is computed from, in words.
    """

    name: str
    draw: str
    given: str


_INPUTS = _Function(
    "inputs(batch)",
    f"draw random numbers in the dataset by keys: {_BY_DATASET}; or in the first layer, by its keys",
    "the batch",
)
_LOSS, _METRICS = (
    _Function(
        f"{name}(output, batch)",
        f"draw random numbers in a layer by its keys, and hand them on in its output; or in the dataset by keys: "
        f"{_BY_DATASET}, and hand them on in the batch",
        "the output and the batch",
    )
    for name in ("loss", "metrics")
)


def checked_inputs(
    inputs: Inputs, batches: Sequence[Any], dtype: torch.dtype, place: torch.device
) -> tuple[Activation, Activation]:
    """Check `inputs(batch)`, and return the inputs of the first layer for two micro-batches.

    The input of the first micro-batch is computed again after that of the other one, and compared.

    Raises:
        ModelError: `inputs(batch)` returns something else than it should, has two results for one micro-batch, draws
            from a generator without keys, or changes the batch or what it has returned before.
        Exception: whatever `inputs(batch)` raises, with a note that names it and the batch.
    """
    runs = [_Run(dict(leaves_of(batch)), lambda batch=batch: first_input(inputs, batch, dtype)) for batch in batches]
    return _run_both(_INPUTS, runs, place)


def refuse_functions(
    loss: Loss,
    metrics: Metrics | None,
    outputs: Sequence[Activation],
    batches: Sequence[Any],
    place: torch.device,
) -> None:
    """Refuse a loss or metrics that break the rules by themselves, and not because of the last layer.

    Args:
        loss, metrics: the functions of the model's own code; `metrics` is None if the model has none.
        outputs: the output of the last layer for each of the two micro-batches.
        batches: the two micro-batches.

    Raises:
        ModelError: for the same reasons as `checked_inputs`.
        Exception: whatever the functions raise.
    """

    def scores(output: Activation, batch: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            found = checked_loss(loss(output, batch))
        return (found,) if isinstance(found, Tensor) else found

    def measured(output: Activation, batch: Any) -> tuple[Tensor, ...]:
        assert metrics is not None
        with torch.no_grad():
            return scores_of(torch.zeros((), device=place), metrics(output, batch))[1]

    for function, run in ((_LOSS, scores), *(() if metrics is None else ((_METRICS, measured),))):
        runs = []
        for output, batch in zip(outputs, batches, strict=True):
            given = {**dict(_named_output(output)), **dict(leaves_of(batch))}
            runs.append(_Run(given, lambda y=output, b=batch, run=run: run(y, b)))
        _run_both(function, runs, place)


@dataclass(frozen=True)
class _Run:
    """A call of a function for one micro-batch, with the tensors that it is given, by their names for errors."""

    given: Mapping[str, Tensor]
    call: Callable[[], Activation]


def _run_both(function: _Function, runs: Sequence[_Run], place: torch.device) -> tuple[Activation, Activation]:
    """Run a function for two micro-batches, and for the first one again. Returns the results for both.

    Raises:
        ModelError: the two results for the first micro-batch differ, or the function changes something.
    """
    first, other = runs
    once = _run(function, first, place)
    kept = [tensor.detach().clone() for tensor in tensors_of(once)]
    between = _run(function, other, place)
    if not all(map(equal_bits, kept, tensors_of(once))):
        raise ModelError(
            f"{function.name} changes in place what it has returned for another micro-batch",
            rule="several micro-batches are computed at a time: each has tensors of its own",
            where=function.name,
            fix="return a new tensor from each call, without a buffer that is used again",
        )
    twice = _run(function, first, place)
    for number, (one, again) in enumerate(zip(kept, tensors_of(twice), strict=True)):
        if one.shape != again.shape or not equal_bits(one, again):
            what = "what it returns" + (f" [{number}]" if len(kept) > 1 else "")
            raise ModelError(
                f"{function.name} gave other results for the same micro-batch: {difference_of(what, one, again)}",
                rule=SAME_RESULT,
                where=function.name,
                fix=f"compute it from {function.given} alone: no counter, no clock, no state that is kept between "
                f"calls; {function.draw}",
            )
    return once, between


def _run(function: _Function, run: _Run, place: torch.device) -> Activation:
    """Run a function for one micro-batch, and check that it changes nothing."""
    before, process = {name: value.clone() for name, value in run.given.items()}, process_state(place)
    found = run.call()
    refuse_process(function.name, function.draw, process, process_state(place), where=function.name)
    for name, value in run.given.items():
        if not equal_bits(before[name], value):
            raise ModelError(
                f"{function.name} changes {name} in place",
                rule="a batch, and the output of a layer, stay as they are: others read them too, and a loss of a "
                "worker makes them read it again",
                where=function.name,
                fix="x = x * 2 in place of x *= 2 and x.mul_(2); or change a copy of it: x.clone()",
            )
    return found


def _named_output(output: Activation) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output with their names for errors."""
    for number, tensor in enumerate(tensors_of(output)):
        yield "output" if isinstance(output, Tensor) else f"output [{number}]", tensor
