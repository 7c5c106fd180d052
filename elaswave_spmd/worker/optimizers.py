"""Optimizers as replayable page updates: state' = f(state, reduced gradient, step).

Only elementwise rules: then any cut of the state in pages gives the same bits, and a mirror that replays the log of
reduced gradients has the bits of its primary (principle 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from elaswave_spmd.errors import ConfigError


@dataclass(frozen=True)
class Update:
    """The numbers of one update.

    Args:
        step: 1, 2, ...: bias corrections are functions of it, never of a counter.
        lr: learning rate.
        decays: whether weight decay applies to these elements.
        divisor: gradients are divided by it first (clipping); at least 1.
    """

    step: int
    lr: float
    decays: bool = True
    divisor: float = 1.0


class PageOptimizer(Protocol):
    """An elementwise update. Implement this to bring your own.

    `state_names`: the fp32 buffers, each as long as the parameters, that `update` reads and writes; zero at the start.
    """

    @property
    def state_names(self) -> tuple[str, ...]: ...

    def update(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Mapping[str, Sequence[Tensor]],
        how: Update,
    ) -> None:
        """Updates `params` and `states` in place; may overwrite `grads`.

        The sign of a zero gradient is not defined (a micro-batch without a gradient adds nothing): no result may depend
        on it.

        Args:
            params, grads, states[name]: fp32 1-D tensors of pairwise equal length, any number of any cut.
            how: the numbers of this step, the same for all these elements.
        """
        ...


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, 2019), by torch's fused kernel."""

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
        how: Update,
    ) -> None:
        place = params[0].device
        number = torch.tensor(float(how.step), device=place)
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            list(params),
            list(grads),
            list(states["moment1"]),
            list(states["moment2"]),
            [],
            [number] * len(params),
            lr=how.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay if how.decays else 0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=torch.tensor(how.divisor, device=place) if how.divisor != 1.0 else None,
            found_inf=None,
        )


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum b: b' = momentum b + g + wd p; p' = p - lr b'."""

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
        how: Update,
    ) -> None:
        scale = torch.tensor(how.divisor, device=params[0].device)
        for param, grad, momentum in zip(params, grads, states["momentum"], strict=True):
            if how.divisor != 1.0:
                grad.div_(scale)
            if how.decays and self.weight_decay:
                grad.add_(param, alpha=self.weight_decay)
            momentum.mul_(self.momentum).add_(grad)
            param.add_(momentum, alpha=-how.lr)


def make_optimizer(
    name: str, *, weight_decay: float, betas: tuple[float, float], eps: float, momentum: float
) -> PageOptimizer:
    """The optimizer of `optim.name`.

    Raises:
        ConfigError: no such optimizer.
    """
    if name == "adamw":
        return AdamW(weight_decay, betas, eps)
    if name == "sgd":
        return SGD(weight_decay, momentum)
    raise ConfigError("an optimizer has a known name", got=name, where="optim.name", exists="adamw, sgd")


def clip_divisor(norm: float, clip: float) -> float:
    """What gradients are divided by so that their norm is at most `clip`; 1 when it is already, or clip is 0."""
    return max(1.0, norm / clip) if clip > 0 else 1.0
