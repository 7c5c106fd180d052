"""The learning rate as a pure function of the step: nothing to save, nothing that depends on history."""

from __future__ import annotations

import math
from dataclasses import dataclass

from elaswave_spmd.errors import ConfigError

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class LearningRate:
    """`peak` after `warmup_steps` of linear warm-up, then the schedule down to peak x final_ratio at `num_steps`."""

    peak: float
    schedule: str = "constant"
    warmup_steps: int = 0
    num_steps: int = 1
    final_ratio: float = 0.1

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                "a learning-rate schedule has a known name",
                got=self.schedule,
                where="optim.schedule",
                exists=", ".join(SCHEDULES),
            )

    def at(self, step: int) -> float:
        """The rate of step 1, 2, ..."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        done = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        done = min(1.0, done)
        left = 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak * (self.final_ratio + (1.0 - self.final_ratio) * left)
