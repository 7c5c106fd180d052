"""Models with one mistake each, as users make them, and models that look like mistakes and are right.

`Mistaken` is a small language model whose block (or embedding, head, loss) has the mistake that `mistake` names.
`write` puts this file where a run finds it. Each mistake is a function or class here, with what the check says of it.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional

from elaswave_spmd import Batch, KeyedDropout, LayeredModel, P, Shardings

_calls: list[int] = []
_first: list[Tensor] = []


class Block(nn.Module):
    """x + linear(x), and what a subclass does besides."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d_model, d_model)
        self.drop = KeyedDropout(0.1)

    def forward(self, x: Tensor, keys: Any) -> Tensor:
        return x + self.drop(self.linear(self.change(x, keys)), keys)

    def change(self, x: Tensor, keys: Any) -> Tensor:
        return x


# ---- mistakes


class TorchNoise(Block):
    def change(self, x: Tensor, keys: Any) -> Tensor:
        return x + 0.1 * torch.rand_like(x)


class TorchDropout(Block):
    def change(self, x: Tensor, keys: Any) -> Tensor:
        return functional.dropout(x, 0.1, self.training)


class PythonNoise(Block):
    def change(self, x: Tensor, keys: Any) -> Tensor:
        return x * (1 + 0.1 * random.random())


class NumpyNoise(Block):
    def change(self, x: Tensor, keys: Any) -> Tensor:
        return x + torch.from_numpy(np.random.rand(x.shape[-1]).astype(np.float32))


class OwnGenerator(Block):
    """Seeded, but one number after the other, whichever sample comes."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.draw = np.random.default_rng(0)

    def change(self, x: Tensor, keys: Any) -> Tensor:
        return x + torch.from_numpy(self.draw.random(x.shape[-1], dtype=np.float32))


class Clock(Block):
    def change(self, x: Tensor, keys: Any) -> Tensor:
        return x * (1 + time.perf_counter() % 1)


class RunningMean(Block):
    """A buffer that forward updates, as BatchNorm does."""

    mean: Tensor

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.register_buffer("mean", torch.zeros(d_model))

    def change(self, x: Tensor, keys: Any) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.float().mean((0, 1)))
        return x - self.mean


class Remembers(Block):
    """The state of a recurrent layer, carried from one micro-batch to the next."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.state: Tensor | None = None

    def change(self, x: Tensor, keys: Any) -> Tensor:
        before, self.state = self.state, x.detach()
        return x if before is None else x + 0.1 * before


class FirstInput(Block):
    """Scaled by the first micro-batch that it happens to get."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.scale: Tensor | None = None

    def change(self, x: Tensor, keys: Any) -> Tensor:
        if self.scale is None:
            self.scale = x.detach().float().abs().mean()
        return x / self.scale


class Counter(Block):
    """Counts its calls, for a warm-up."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.calls = 0

    def change(self, x: Tensor, keys: Any) -> Tensor:
        self.calls += 1
        return x * min(1.0, self.calls / 1000)


class GlobalCounter(Block):
    def change(self, x: Tensor, keys: Any) -> Tensor:
        _calls.append(0)
        return x * (1 + 0.01 * len(_calls))


class InPlace(Block):
    def change(self, x: Tensor, keys: Any) -> Tensor:
        x += 1
        return x


class InPlaceHidden(Block):
    """The same without autograd noticing."""

    def change(self, x: Tensor, keys: Any) -> Tensor:
        x.data.mul_(0.5)
        return x


class InPlaceOutput(Block):
    """The output of exp, which its backward needs, is changed."""

    def change(self, x: Tensor, keys: Any) -> Tensor:
        return x.exp().add_(1)


class InPlaceTokens(nn.Embedding):
    """Masks the tokens themselves, which are the targets of others too."""

    def forward(self, x: Tensor, keys: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x[:, 0] = 0
        return super().forward(x)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Tensor:
        return dy[0].mul_(2)


class InPlaceGradient(Block):
    """A backward of its own, which changes the gradient that it is given."""

    def forward(self, x: Tensor, keys: Any) -> Tensor:
        return _Doubled.apply(super().forward(x, keys))  # pyright: ignore[reportReturnType]


class NanBackward(Block):
    """The square root of zero: 0 forward, and an infinite slope."""

    def change(self, x: Tensor, keys: Any) -> Tensor:
        return x + (x - x).sqrt()


class InfForward(Block):
    def forward(self, x: Tensor, keys: Any) -> Tensor:
        return (super().forward(x, keys).abs() + 1) / 0


class CutGradient(Block):
    """All that comes out is without a graph: this layer and those before it would stay as they are."""

    def forward(self, x: Tensor, keys: Any) -> Tensor:
        with torch.no_grad():
            return super().forward(x, keys)


class NanForward(Block):
    def change(self, x: Tensor, keys: Any) -> Tensor:
        return x + (x - x) / (x - x)


class NoisyValidation(Block):
    def change(self, x: Tensor, keys: Any) -> Tensor:
        return x if self.training else x + torch.rand_like(x)


class ParameterHook(Block):
    """A hook of a parameter, which the framework replaces by a view of its buffer: it would never be called."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.linear.weight.register_hook(lambda gradient: 2 * gradient)


class HiddenModules(Block):
    """Modules in a list, which torch does not see."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.more = [nn.Linear(d_model, d_model)]

    def change(self, x: Tensor, keys: Any) -> Tensor:
        return self.more[0](x)


class Alias(Block):
    """A second way to a parameter, which stays behind when that is replaced."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.kept = {"weight": self.linear.weight}

    def change(self, x: Tensor, keys: Any) -> Tensor:
        return x @ self.kept["weight"]


class AssignedData(Block):
    """A mask that is written into a parameter: from then on that is no view of the worker's buffer."""

    def change(self, x: Tensor, keys: Any) -> Tensor:
        weight = self.linear.weight.data
        self.linear.weight.data = torch.where(weight.abs() < 1e-3, 0.0, weight)
        return x


class NewParameter(Block):
    def change(self, x: Tensor, keys: Any) -> Tensor:
        self.linear.weight = nn.Parameter(self.linear.weight.detach().clamp(-1, 1))
        return x


class Freezes(Block):
    """Frozen when it computes: the worker goes on updating it, by weight decay."""

    def change(self, x: Tensor, keys: Any) -> Tensor:
        self.linear.requires_grad_(False)
        return x


class Thaws(Block):
    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.more = nn.Linear(d_model, d_model).requires_grad_(False)

    def change(self, x: Tensor, keys: Any) -> Tensor:
        self.more.requires_grad_(True)
        return x + self.more(x)


class Renormalised(nn.Embedding):
    """Its rows are scaled down where they are read."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__(vocab_size, d_model, max_norm=0.1)

    def forward(self, x: Tensor, keys: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)


class EveryOtherCall(Block):
    """The same again after an even number of calls: a forward and a validation, say."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.flip = False

    def change(self, x: Tensor, keys: Any) -> Tensor:
        self.flip = not self.flip
        return x if self.flip else -x


class OncePerStep(Block):
    """Decays when it sees a step for the first time, a value that only the first worker to see it has."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.last, self.scale = 0, 1.0

    def change(self, x: Tensor, keys: Any) -> Tensor:
        if int(keys.step) > self.last:
            self.last, self.scale = int(keys.step), self.scale * 0.9
        return x * self.scale


class InPlaceKeys(Block):
    """Changes the ids of samples, by which the dropout of the layers after it is drawn."""

    def change(self, x: Tensor, keys: Any) -> Tensor:
        keys.sample_ids.add_(1_000)
        return x


class LateWrite(Block):
    """Reuses the memory of the output that it returned before."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, keys: Any) -> Tensor:
        y = super().forward(x, keys)
        if self.kept:
            self.kept.pop().data.zero_()
        self.kept.append(y)
        return y


class Reentrant(Block):
    """A parameter inside and outside of a backward of its own: autograd adds its gradient in two parts."""

    def change(self, x: Tensor, keys: Any) -> Tensor:
        if not x.requires_grad:  # torch warns of a checkpoint that serves nothing
            return self.linear(x)
        return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=True)


class OtherMasks(Block):
    """A dropout within a function that torch runs again in the backward, where its mask is another one."""

    def change(self, x: Tensor, keys: Any) -> Tensor:
        y = torch.utils.checkpoint.checkpoint(self.drop, x, keys, use_reentrant=False)
        assert isinstance(y, Tensor)
        return y


class Threads(Block):
    def change(self, x: Tensor, keys: Any) -> Tensor:
        torch.set_num_threads(torch.get_num_threads() + 1)
        return x


class Lock(Block):
    """An object that cannot be copied."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.lock = threading.Lock()


class OfTheProcess(Block):
    """The same at all times on one worker."""

    def change(self, x: Tensor, keys: Any) -> Tensor:
        return x * (1 + os.getpid() % 1000 / 1000)


class FirstOfAll(Block):
    """A global variable that the first micro-batch of a process fills."""

    def change(self, x: Tensor, keys: Any) -> Tensor:
        if not _first:
            _first.append(x.detach().float().abs().mean())
        return x / _first[0]


class OrderOfASet(Block):
    """Another function for each order of a set of texts, which follows from PYTHONHASHSEED."""

    def change(self, x: Tensor, keys: Any) -> Tensor:
        for name in {f"part{number}" for number in range(12)}:
            x = x.tanh() + 0.01 * int(name[4:])
        return x


def mean_loss(output: Tensor, batch: Batch) -> Tensor:
    return functional.cross_entropy(output.float().flatten(0, 1), batch.targets.flatten())


def loss_over_samples(output: Tensor, batch: Batch) -> Tensor:
    """Each sample is compared with the mean of all samples of its micro-batch."""
    summed = functional.cross_entropy(output.float().flatten(0, 1), batch.targets.flatten(), reduction="sum")
    return summed + (output - output.mean(0, keepdim=True)).float().pow(2).sum()


def weighted_loss(output: Tensor, batch: Batch) -> Tensor:
    """Divided by the number of tokens that count, which is another one in each micro-batch."""
    each = functional.cross_entropy(output.float().flatten(0, 1), batch.targets.flatten(), reduction="none")
    counts = (batch.targets.flatten() % 3 != 0).float()
    return (each * counts).sum() / counts.sum() * counts.numel() / 2


def noisy_loss(output: Tensor, batch: Batch) -> Tensor:
    return summed(output, batch) + 1e-4 * torch.randn(())


def counting_loss(output: Tensor, batch: Batch) -> Tensor:
    _calls.append(0)
    return summed(output, batch) * (1 + 0.01 * len(_calls))


def loss_in_place(output: Tensor, batch: Batch) -> Tensor:
    """A change that is not seen to happen again."""
    batch.targets.clamp_(0, 2)
    return summed(output, batch)


def summed(output: Tensor, batch: Batch) -> Tensor:
    return functional.cross_entropy(output.float().flatten(0, 1), batch.targets.flatten(), reduction="sum")


def noisy_metric(output: Tensor, batch: Batch) -> dict[str, Any]:
    return {"noise": torch.rand(len(output)).sum()}


def metric_in_place(output: Tensor, batch: Batch) -> dict[str, Any]:
    return {"right": (output.argmax(-1) == batch.targets.add_(1)).sum()}


def mean_metric(output: Tensor, batch: Batch) -> dict[str, Any]:
    return {"accuracy": (output.argmax(-1) == batch.targets).float().mean() + 1e-3}


def largest_metric(output: Tensor, batch: Batch) -> dict[str, Any]:
    return {"right": (output.argmax(-1) == batch.targets).sum(), "largest": output.abs().amax()}


def metric_of_two_means(output: Tensor, batch: Batch) -> dict[str, Any]:
    """The sum is right, its weight is not."""
    return {"loss_again": (functional.cross_entropy(output.flatten(0, 1), batch.targets.flatten()), 1)}


def raising_metric(output: Tensor, batch: Batch) -> dict[str, Any]:
    return {"first": batch[0]}  # pyright: ignore[reportIndexIssue]


# ---- what is right


def sums(output: Tensor, batch: Batch) -> dict[str, Any]:
    counts = batch.targets % 3 != 0
    each = functional.cross_entropy(output.flatten(0, 1), batch.targets.flatten(), reduction="none")
    return {
        "right": (output.argmax(-1) == batch.targets).sum(),
        "of_some": (each[counts.flatten()].sum(), counts.sum()),
        "samples": (len(output), len(output)),
    }


def loss_of_whole_microbatches(output: Tensor, batch: Batch) -> Tensor:
    """Micro-batches have one size in a run, and it relies on that."""
    rows = output.float().view(2, -1, output.shape[-1]).unbind()
    return sum(
        (functional.cross_entropy(row, own, reduction="sum") for row, own in zip(rows, batch.targets, strict=True)),
        torch.zeros(()),
    )


class MixedTypes(Block):
    """A constant of another dtype: the output is converted where the layer ends."""

    scale: Tensor

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, d_model, dtype=torch.float64))

    def change(self, x: Tensor, keys: Any) -> Tensor:
        return (x * self.scale).to(x.dtype)


class SameMasks(Block):
    """Dropouts within functions that are run again in the backward, with the keys that they have in the forward."""

    def change(self, x: Tensor, keys: Any) -> Tensor:
        return keys.checkpoint(self.inner, keys.checkpoint(self.inner, x))

    def inner(self, x: Tensor, keys: Any) -> Tensor:
        return x + self.drop(self.linear(x).tanh(), keys)


class LazyTable(Block):
    """A table that is made when it is needed, of the input's form alone."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.table: Tensor | None = None
        self.tables: dict[int, Tensor] = {}

    def change(self, x: Tensor, keys: Any) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / x.shape[1]
        self.tables.setdefault(x.shape[1], self.table)
        return x + self.tables[x.shape[1]]


class BackwardHook(Block):
    """A hook of a module, which scales the gradient of its input."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.linear.register_full_backward_hook(_half)


def _half(module: nn.Module, given: Any, gradients: Any) -> Any:
    return tuple(None if gradient is None else gradient / 2 for gradient in given)


class Unused(Block):
    """A parameter that no forward uses; its gradient is zero."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.spare = nn.Parameter(torch.zeros(d_model))


class SecondName(Block):
    """A module under two names, one of them in a list."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.order = [self.linear, (self.linear,)]

    def change(self, x: Tensor, keys: Any) -> Tensor:
        return x + 0.1 * self.order[0](x).tanh()  # pyright: ignore[reportCallIssue]


class OrderOfADict(Block):
    """The order of a dict is that in which it was filled, on every worker."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.parts = {f"part{number}": 1 / (1 + number) for number in range(9)}

    def change(self, x: Tensor, keys: Any) -> Tensor:
        for weight in self.parts.values():
            x = x * (1 + 0.37 * weight) - 0.11
        return x.tanh()


class CachedLength(Block):
    """A table that is made anew when an input is longer than all before, and the length that it is for."""

    table: Tensor
    filled: Tensor

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.length, self.is_ready = 0, False
        self.register_buffer("table", torch.empty(0), persistent=False)
        self.register_buffer("filled", torch.zeros(d_model))

    def change(self, x: Tensor, keys: Any) -> Tensor:
        if x.shape[1] > self.length:
            self.length, self.is_ready = x.shape[1], True
            self.table = torch.cos(torch.arange(x.shape[1], dtype=x.dtype))[:, None]
            self.filled.copy_(torch.linspace(0, 1, len(self.filled)))
        return x * self.table + self.filled.to(x.dtype)


class OddAttributes(Block):
    """NaN, which is not equal to itself, and containers that contain themselves."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.fill, self.loop = float("nan"), {"d_model": d_model}
        self.loop["loop"] = [self.loop]  # pyright: ignore[reportArgumentType]


class Recurrent(Block):
    """A module of torch that keeps its parameters in a list as well."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.rnn = nn.GRU(d_model, d_model, batch_first=True)

    def change(self, x: Tensor, keys: Any) -> Tensor:
        return self.rnn(x)[0]


class PlainParameters(Block):
    """Takes parameters of torch's own type alone."""

    def change(self, x: Tensor, keys: Any) -> Tensor:
        if type(self.linear.weight) is not nn.Parameter:
            raise TypeError(f"a parameter is a {type(self.linear.weight)}")
        return x


class SharedInside(Block):
    """One parameter in two modules, in a layer that has constants."""

    shift: Tensor

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.second = nn.Linear(d_model, d_model)
        self.second.weight = self.linear.weight
        self.register_buffer("shift", torch.linspace(0, 1, d_model))

    def change(self, x: Tensor, keys: Any) -> Tensor:
        return torch.tanh(self.second(x)) + self.shift.to(x.dtype)


class KeyedNoise(Block):
    """Noise of a generator that is seeded by the keys, row by row."""

    def change(self, x: Tensor, keys: Any) -> Tensor:
        rows = []
        for sample in keys.sample_ids.tolist():
            seed = hash((int(keys.seed), int(keys.step), int(keys.layer), sample)) % 2**63
            rows.append(torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(seed)))
        return x + 0.1 * torch.stack(rows)


BLOCKS: dict[str, tuple[type[Block], str]] = {
    "torch_noise": (TorchNoise, "layer block0 draws from torch's generator"),
    "torch_dropout": (TorchDropout, "layer block0 draws from torch's generator"),
    "python_noise": (PythonNoise, "layer block0 draws from Python's random"),
    "numpy_noise": (NumpyNoise, "layer block0 draws from numpy.random"),
    "own_generator": (OwnGenerator, "layer block0 gave other results for the same micro-batch: "),
    "clock": (Clock, "layer block0 gave other results for the same micro-batch: "),
    "running_mean": (RunningMean, "layer block0 changes block0.mean while it computes"),
    "remembers": (Remembers, "layer block0 changes block0.state while it computes"),
    "first_input": (FirstInput, "layer block0 changes block0.scale while it computes"),
    "counter": (Counter, "layer block0 changes block0.calls while it computes, from 0 to "),
    "global_counter": (GlobalCounter, "layer block0 gave other results for the same micro-batch: "),
    "in_place": (InPlace, "layer block0 changes a tensor in place that its backward needs"),
    "in_place_hidden": (InPlaceHidden, "layer block0 changes its input in place"),
    "in_place_output": (InPlaceOutput, "layer block0 changes a tensor in place that its backward needs"),
    "in_place_gradient": (InPlaceGradient, "layer block0 changes the gradient of its output in place"),
    "nan_backward": (NanBackward, "layer block0 gives gradients that are not finite, though its output is: of "),
    "inf_forward": (InfForward, "layer block0 gives gradients that are not finite, and its output has infinities: of "),
    "cut_gradient": (CutGradient, "no gradient comes back through layer block0: it and the layers before it would not"),
    "nan_forward": (NanForward, "the output of layer block0 is not finite"),
    "noisy_validation": (NoisyValidation, "layer block0 draws from torch's generator"),
    "assigned_data": (AssignedData, "layer block0 puts another tensor in the place of block0.linear.weight"),
    "new_parameter": (NewParameter, "layer block0 puts another tensor in the place of block0.linear.weight"),
    "freezes": (Freezes, "layer block0 sets requires_grad=False of block0.linear.weight while it computes"),
    "thaws": (Thaws, "layer block0 sets requires_grad=True of block0.more.weight while it computes"),
    "every_other_call": (EveryOtherCall, "layer block0 changes block0.flip while it computes"),
    "once_per_step": (OncePerStep, "layer block0 changes block0.last while it computes, from 0 to "),
    "in_place_keys": (InPlaceKeys, "layer block0 changes keys.sample_ids in place"),
    "late_write": (LateWrite, "layer block0 changes its own output, once returned, in place"),
    "reentrant": (Reentrant, "layer block0 adds to the gradient of block0.linear."),
    "other_masks": (OtherMasks, "layer block0 draws 1 more mask of KeyedDropout in its backward, other ones than"),
    "threads": (Threads, "layer block0 changes torch.get_num_threads() while it computes, from "),
    "parameter_hook": (ParameterHook, "parameter block0.linear.weight has a hook"),
    "hidden_modules": (HiddenModules, "block0.more keeps the parameters of Linear("),
    "alias": (Alias, "block0.kept keeps a parameter in a dict"),
}
"""Name of a mistake -> the block, and how the refusal begins."""

BUILT = ("parameter_hook", "hidden_modules", "alias")
"""Those that are refused when the model is made."""

OTHERS: dict[str, str] = {
    "in_place_tokens": "layer embed changes its input in place",
    "renormalised": "layer embed changes its parameters while it computes",
    "noisy_loss": "loss(output, batch) draws from torch's generator",
    "counting_loss": "loss(output, batch) gave other results for the same micro-batch: ",
    "loss_in_place": "loss(output, batch) changes batch.targets in place",
    "noisy_metric": "metrics(output, batch) draws from torch's generator",
    "metric_in_place": "metrics(output, batch) changes batch.targets in place",
    "mean_loss": "loss() of ",
    "loss_over_samples": "loss() of ",
    "weighted_loss": "loss() of ",
    "mean_metric": "metric accuracy of ",
    "largest_metric": "metric largest of ",
    "metric_of_two_means": "metric loss_again of ",
}
UNCOPIED: dict[str, tuple[type[Block], str]] = {"lock": (Lock, "layer block0 cannot be copied (TypeError: ")}
"""Refused where a worker makes its copies of layers."""

BETWEEN_WORKERS: dict[str, type[Block]] = {"of_the_process": OfTheProcess, "first_of_all": FirstOfAll}
"""Mistakes that one worker alone cannot see."""

RIGHT: dict[str, type[Block]] = {
    "mixed_types": MixedTypes,
    "same_masks": SameMasks,
    "lazy_table": LazyTable,
    "backward_hook": BackwardHook,
    "unused": Unused,
    "second_name": SecondName,
    "order_of_a_dict": OrderOfADict,
    "cached_length": CachedLength,
    "odd_attributes": OddAttributes,
    "recurrent": Recurrent,
    "shared_inside": SharedInside,
    "plain_parameters": PlainParameters,
    "keyed_noise": KeyedNoise,
    "none": Block,
}
LOSSES: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "noisy_loss": noisy_loss,
    "counting_loss": counting_loss,
    "loss_in_place": loss_in_place,
    "mean_loss": mean_loss,
    "loss_over_samples": loss_over_samples,
    "weighted_loss": weighted_loss,
    "loss_of_whole_microbatches": loss_of_whole_microbatches,
}
METRICS: dict[str, Callable[[Tensor, Batch], dict[str, Any]]] = {
    "noisy_metric": noisy_metric,
    "metric_in_place": metric_in_place,
    "mean_metric": mean_metric,
    "largest_metric": largest_metric,
    "metric_of_two_means": metric_of_two_means,
    "raising_metric": raising_metric,
    "sums": sums,
}
REFUSED = {name: words for name, (_, words) in BLOCKS.items()} | OTHERS
"""Name of a mistake that a worker finds alone -> how its refusal begins."""


class Embed(nn.Embedding):
    def forward(self, x: Tensor, keys: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)


class Head(nn.Linear):
    def forward(self, x: Tensor, keys: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)


class Mistaken(LayeredModel):
    """Embedding, two blocks and a head; `mistake` names what is wrong with one of them, or with the loss.

    `none_of_many` has a block of each kind that is right, and a loss that is.
    """

    shardings = Shardings(batch=P("dp"), layers=P("pp"), grads=P("dp"), optim=P("dp"))

    def __init__(self, vocab_size: int, d_model: int, mistake: str, **others: object) -> None:
        blocks = {name: kind for name, (kind, _) in BLOCKS.items()} | BETWEEN_WORKERS | RIGHT
        blocks |= {name: kind for name, (kind, _) in UNCOPIED.items()}
        block = OrderOfASet if mistake == "order_of_a_set" else blocks.get(mistake, Block)
        embed = {"in_place_tokens": InPlaceTokens, "renormalised": Renormalised}.get(mistake, Embed)
        layers = {f"block{number}": block(d_model) for number in range(2)}
        if mistake == "none_of_many":
            layers = {name: kind(d_model) for name, kind in RIGHT.items()}
        super().__init__({"embed": embed(vocab_size, d_model), **layers, "head": Head(d_model, vocab_size)})
        self._metrics = METRICS.get(mistake)
        self._loss = LOSSES.get("loss_of_whole_microbatches" if mistake == "none_of_many" else mistake)

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return super().loss(output, batch) if self._loss is None else self._loss(output, batch)

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Any]:
        return {} if self._metrics is None else self._metrics(output, batch)


def write(folder: Path, mistake: str) -> list[str]:
    """Puts the model into a run's folder; returns the overrides that choose it."""
    shutil.copy(__file__, folder / "mistaken_model.py")
    return ["model.target=mistaken_model.Mistaken", f"+model.args.mistake={mistake}"]
