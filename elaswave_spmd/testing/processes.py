"""Parts of the simulated cluster: a worker, its end, and what a run leaves."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np

from elaswave_spmd.recovery.effects import EpochBegun, Unrecoverable
from elaswave_spmd.runtime.executor import Executor
from elaswave_spmd.testing.wires import ListPort


class Killed(Exception):  # noqa: N818  (the end of a simulated process)
    pass


class LostStateError(AssertionError):
    """All holders of some pages are gone.

    Args:
        losses: workers lost since every page had all its mirrors, with those that left if any was lost without notice.
        members: how many members there were then.
        left: workers that are neither lost nor asked to leave.
    """

    def __init__(self, effect: Unrecoverable, losses: int, members: int, left: int) -> None:
        super().__init__(effect)
        self.losses, self.members, self.left = losses, members, left


@dataclass
class Trained:
    """What a run left: per committed step the loss and gradient norm as hex, validation losses, final parameters."""

    losses: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    state_bytes: dict[int, dict[str, int]] = field(default_factory=dict)
    epochs: list[EpochBegun] = field(default_factory=list)
    turns: int = 0


class Worker:
    """A simulated process: waits for its place, then trains."""

    def __init__(self, rank: int, port: ListPort) -> None:
        self.rank, self.port = rank, port
        self.executor: Executor | None = None
        self.running: Generator[str, None, None] | None = None
        self.waiting = "its place"
        self.asleep = 0  # turns that it stands still
        self.pace = 1.0  # how often it gets a turn
        self.version = 0
