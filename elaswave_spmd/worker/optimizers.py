"""Optimizers as replayable page updates: state' = f(state, reduced gradient, step).

Only elementwise rules are allowed. Then any cut of the state into pages gives the same bits, and a mirror that replays
the log of reduced gradients has the same bits as its primary, without any message between them (docs/design.md).
Rules that need a whole matrix or a whole layer, such as Muon or LAMB, do not fit this interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.run_dir.manifest import AVERAGE


@dataclass(frozen=True)
class Update:
    """The scalars of one update.

    Args:
        step: 1, 2, ...; bias corrections are functions of it, never of a counter that would be state of its own.
        lr: learning rate.
        decays: True if weight decay applies to these elements.
        divisor: gradients are divided by it first, which clips them, and takes the weight of the loss into account.
        weight_decay: of these elements, in place of the optimizer's own; None: the optimizer's.
    """

    step: int
    lr: float
    decays: bool = True
    divisor: float = 1.0
    weight_decay: float | None = None

    def decay_of(self, own: float) -> float:
        """The weight decay of these elements, `own` being the optimizer's."""
        if not self.decays:
            return 0.0
        return own if self.weight_decay is None else self.weight_decay


class PageOptimizer(Protocol):
    """The interface of an elementwise optimizer."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the fp32 buffers that `update` reads and writes: each as long as the parameters, zero at first.

        Averages of the parameters (`AVERAGE`) begin as the parameters do.
        """
        ...

    def update(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Mapping[str, Sequence[Tensor]],
        scalars: Update,
    ) -> None:
        """Updates `params` and `states` in place; may overwrite `grads`.

        The sign of a zero gradient is undefined, and no result may depend on it. Where a micro-batch has no gradient
        for a parameter, one mesh adds +0.0 and another adds nothing, and these differ if the sum so far is -0.0.

        Args:
            params: fp32 [elements] each; any number of pieces, however the state is cut.
            grads: reduced gradients, fp32, in the same pieces.
            states: state name -> fp32, in the same pieces.
            scalars: the same for all these elements.
        """
        ...


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019), by torch's fused kernel.

    The kernel treats the last elements of a tensor that do not fill a vector register differently, in the last bit.
    Pages are multiples of 64 elements, so no cut of the state changes which elements these are.
    """

    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("moment1", "moment2")

    def update(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Mapping[str, Sequence[Tensor]],
        scalars: Update,
    ) -> None:
        place = params[0].device
        # The kernel takes numbers as tensors. By `full`: `tensor` would wait for all that an accelerator has queued.
        step = torch.full((), float(scalars.step), device=place)
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            list(params),
            list(grads),
            list(states["moment1"]),
            list(states["moment2"]),
            [],
            [step] * len(params),
            lr=scalars.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=scalars.decay_of(self.weight_decay),
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            # Divides the gradients in the same pass. None where nothing is clipped: faster, and the same bits as 1.0.
            grad_scale=torch.full((), scalars.divisor, device=place) if scalars.divisor != 1.0 else None,
            found_inf=None,
        )


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum: b' = momentum b + g + weight_decay p; p' = p - lr b'. torch.optim.SGD's rule."""

    weight_decay: float = 0.0
    momentum: float = 0.9

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum",)

    def update(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Mapping[str, Sequence[Tensor]],
        scalars: Update,
    ) -> None:
        scale = torch.full((), scalars.divisor, device=params[0].device)
        for param, grad, momentum in zip(params, grads, states["momentum"], strict=True):
            if scalars.divisor != 1.0:
                grad.div_(scale)
            if weight_decay := scalars.decay_of(self.weight_decay):
                grad.add_(param, alpha=weight_decay)
            momentum.mul_(self.momentum).add_(grad)
            param.add_(momentum, alpha=-scalars.lr)


@dataclass(frozen=True)
class Averaged:
    """Another optimizer, and an exponential moving average of the parameters after each of its updates.

    average' = decay average + (1 - decay) parameter'. A step without an update, whose gradient was not finite, leaves
    the average as it is.
    """

    optimizer: PageOptimizer
    decay: float

    @property
    def state_names(self) -> tuple[str, ...]:
        return (*self.optimizer.state_names, AVERAGE)

    def update(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Mapping[str, Sequence[Tensor]],
        scalars: Update,
    ) -> None:
        self.optimizer.update(params, grads, {name: states[name] for name in self.optimizer.state_names}, scalars)
        # As torch computes with it, so that both factors add up to 1: the average would otherwise tend to a multiple of
        # the parameters (0.99983 of them with a decay of 0.9999).
        decay = float(torch.tensor(self.decay))  # fp32
        for param, grad, average in zip(params, grads, states[AVERAGE], strict=True):
            # Three operations that round once each, not lerp or add(alpha=...), which round the elements that fill no
            # vector register in another way. The gradient is used up: its memory holds what is added.
            average.mul_(decay).add_(grad.copy_(param).mul_(1.0 - decay))


def averages(optimizer: PageOptimizer) -> bool:
    """True if an average of the parameters is part of the optimizer's state."""
    return AVERAGE in optimizer.state_names


def make_optimizer(
    name: str,
    *,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    momentum: float,
    ema: float | None = None,
) -> PageOptimizer:
    """Makes the optimizer that `optim.name` names; each one uses the hyperparameters that it has.

    Args:
        ema: the decay of an average of the parameters; None: there is no average.

    Raises:
        ConfigError: no optimizer has this name.
    """
    if name not in ("adamw", "sgd"):
        raise ConfigError(f"optim.name={name} is not a known optimizer", exists="adamw, sgd")
    made = AdamW(weight_decay, betas, eps) if name == "adamw" else SGD(weight_decay, momentum)
    return made if ema is None else Averaged(made, ema)


def clip_divisor(norm: float, clip: float) -> float:
    """The number to divide gradients by so that their norm is at most `clip`.

    Args:
        norm: of all gradients of the step.
        clip: the largest norm allowed; 0 for no clipping.

    Returns:
        1.0 if the norm is small enough or nothing is clipped: dividing by it changes no bit.
    """
    return max(1.0, norm / clip) if clip > 0 else 1.0
