"""Early stopping: the step after which a run ends, as its validation loss does not get any better.

It is a pure function of the validation losses so far. These have the same bits on every mesh and through every fault,
and no worker begins a step before the validation of the step before is complete (docs/protocol.md, S7). So a run ends
after the same step wherever it runs, and also if it is resumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The validations so far.

    Args:
        best_step: the step after which the loss was best; 0 if no loss was finite.
        best_loss: the loss after this step; infinite if no loss was finite.
        since: the number of validations after this step without an improvement.
    """

    best_step: int = 0
    best_loss: float = math.inf
    since: int = 0


@dataclass(frozen=True)
class EarlyStop:
    """The rule by which a run ends early.

    Args:
        patience: the run ends after this number of validations in a row without an improvement.
        min_delta: a loss is an improvement if it is lower than the best one by more than this.
    """

    patience: int
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        assert self.patience >= 1 and self.min_delta >= 0, self

    def progress(self, losses: Mapping[int, float]) -> Progress:
        """The best validation so far, and the number of validations after it. A loss of NaN is no improvement.

        Args:
            losses: step -> mean validation loss.
        """
        best = Progress()
        for step in sorted(losses):
            if losses[step] < best.best_loss - self.min_delta:
                best = Progress(step, losses[step])
            else:
                best = Progress(best.best_step, best.best_loss, best.since + 1)
        return best

    def is_over(self, losses: Mapping[int, float]) -> bool:
        """True if the run ends after the newest of these validations."""
        return self.progress(losses).since >= self.patience
