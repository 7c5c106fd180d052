"""The learning rate as a pure function of the step.

There is no scheduler state to save or to transfer: a worker that joins at step t computes the same rate as the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elaswave_spmd.conf.schema import SCHEDULES, WSD, OptimSettings
from elaswave_spmd.errors import ConfigError

_DECAY_SHARE = 0.2
"""Of all steps, those in which `wsd` decays where nothing else is said (Hägele et al., 2024)."""


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to `peak`, then a schedule.

    "constant" stays at `peak`. "linear" and "cosine" (Loshchilov and Hutter, 2017, without restarts) end at peak x
    final_ratio. "wsd" (warm-up, stable, decay; Hu et al., 2024) stays at `peak`, and falls linearly to peak x
    final_ratio in the last `decay_steps`. "inverse_sqrt" (Vaswani et al., 2017) is peak x sqrt(warmup_steps / step); it
    has no end.

    Args:
        peak: the rate at the end of the warm-up.
        schedule: one of the names above.
        warmup_steps: step s of these has the rate peak x s / warmup_steps; 0 for no warm-up.
        num_steps: the step at which the schedule reaches its end; the rate stays there afterwards.
        final_ratio: the rate at the end, as a share of `peak`.
        decay_steps: of wsd; None: a fifth of `num_steps`, or what the warm-up leaves.

    Raises:
        ConfigError: the schedule has an unknown name.
    """

    peak: float
    schedule: str = "constant"
    warmup_steps: int = 0
    num_steps: int = 1
    final_ratio: float = 0.1
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                f"optim.schedule={self.schedule} is not a known learning-rate schedule", exists=", ".join(SCHEDULES)
            )

    @classmethod
    def of(cls, optim: OptimSettings, steps: int) -> LearningRate:
        """The learning rate that a run of so many steps has with these settings."""
        o = optim
        num_steps = steps if o.schedule_steps is None else o.schedule_steps
        return cls(o.lr, o.schedule, o.warmup_steps, num_steps, o.final_lr_ratio, o.decay_steps)

    @classmethod
    def of_identity(cls, identity: Mapping[str, Any]) -> LearningRate:
        """The learning rate of a run, from its identity as a checkpoint has it (`run_fingerprint.identity_of`)."""
        o = identity["optim"]
        num_steps = o.get("schedule_steps") or identity["train"]["steps"]
        return cls(o["lr"], o["schedule"], o["warmup_steps"], num_steps, o["final_lr_ratio"], o.get("decay_steps"))

    def at(self, step: int) -> float:
        """The rate of a step; steps count from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        if self.schedule == "inverse_sqrt":
            return self.peak * math.sqrt(max(1, self.warmup_steps) / step)
        start = self.decay_begin if self.schedule == WSD else self.warmup_steps
        if step <= start:
            return self.peak
        done = min(1.0, (step - start) / max(1, self.num_steps - start))
        left = 0.5 * (1.0 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1.0 - done
        return self.peak * (self.final_ratio + (1.0 - self.final_ratio) * left)

    @property
    def decay_begin(self) -> int:
        """The last step of wsd at the peak: it decays in the steps after this one."""
        decays = self.decay_steps if self.decay_steps is not None else round(_DECAY_SHARE * self.num_steps)
        return max(self.warmup_steps, self.num_steps - decays)
