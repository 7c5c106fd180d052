"""Waiting inside the training thread: a worker is a generator that yields whenever it can only go on after a message.

The process resumes the generator from its mailbox. The simulated cluster resumes those of many workers in one process,
in an order drawn from a seed. So nothing in this room blocks or sleeps while it trains, with two exceptions that the
simulated cluster does not have: a batch of a user's dataset that is still being read (loading.py), and a device that
can be recovered and is synchronized at the begin of a step (device_fault.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol

from elaswave_spmd.worker.configuration import Configuration

Reason = str
"""What a suspended worker waits for, in words: shown in heartbeats, the trace and timeouts."""

Waits = Generator[Reason, None, None]
"""A computation of the training thread that may have to wait for messages on the way."""


class ConfigurationChanged(Exception):  # noqa: N818  (control flow, not an error)
    """A new configuration arrived: the current step must be re-planned. Control flow, not an error.

    Raised by a wait, however deep in a step, and caught only by `Executor.train`. An action that is interrupted puts
    back the inputs that it has taken (MicrobatchRunner.forward), so that it can be run again.
    """

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.configuration = configuration


class Waiting(Protocol):
    """The methods of a worker's loop (`Executor`) that its other parts call in order to wait."""

    def until(self, ready: Callable[[], bool], what: str, number: int) -> Waits:
        """Handle messages, and do background copies, until `ready()`.

        Args:
            ready: a condition that handling a message can make true.
            what, number: what is waited for, in words, and its step, layer or micro-batch.

        Raises:
            ConfigurationChanged: a new configuration arrived before the condition held.
        """
        ...

    def handle_messages(self) -> None:
        """Handle everything that has arrived. Deciding and applying a step may happen in here."""
        ...

    @property
    def transfers(self) -> bool:
        """True while something is under way through pairs (`runtime.pairs`)."""
        ...

    def check_configuration(self) -> None:
        """Raise ConfigurationChanged if a new configuration has arrived."""
        ...
