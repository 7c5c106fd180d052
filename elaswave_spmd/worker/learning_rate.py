"""The learning rate as a pure function of the step.

There is no scheduler state to save or to transfer: a worker that joins at step t computes the same rate as the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elaswave_spmd.errors import ConfigError

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to `peak`, then a schedule that ends at peak x final_ratio.

    Args:
        peak: the rate at the end of the warm-up.
        schedule: "constant" (stays at `peak`), "linear", or "cosine" (Loshchilov and Hutter, 2017, without restarts).
        warmup_steps: step s of these has the rate peak x s / warmup_steps; 0 for no warm-up.
        num_steps: the step at which the schedule reaches its end; the rate stays there afterwards.
        final_ratio: the rate at the end, as a share of `peak`.

    Raises:
        ConfigError: the schedule has an unknown name.
    """

    peak: float
    schedule: str = "constant"
    warmup_steps: int = 0
    num_steps: int = 1
    final_ratio: float = 0.1

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                f"optim.schedule={self.schedule} is not a known learning-rate schedule", exists=", ".join(SCHEDULES)
            )

    def at(self, step: int) -> float:
        """The rate of a step; steps count from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        done = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        done = min(1.0, done)
        left = 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak * (self.final_ratio + (1.0 - self.final_ratio) * left)
