"""Reports to the controller that a worker keeps until they are written down, if a controller may come back.

Reports that a controller has not written down when it dies are known only to the workers that sent them. So workers
keep the reports that nobody could make again: those of applied steps, until Written acknowledges them; and those of
damaged state and of results that differ, until the next mesh epoch has dealt with them. All other reports follow from a
worker's state, and are made again in the mesh epoch with which a controller that came back begins (docs/protocol.md,
A5).
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.worker.channel import Channel, ForwardingChannel

_MOST = 1024
"""A worker that keeps this many reports of applied steps begins no other step, so that memory stays bounded. The
controller has stood still for long then, or is gone."""


class KeptReports:
    """The reports that one worker keeps, oldest first."""

    def __init__(self) -> None:
        self.applied: deque[m.Applied] = deque()
        self.damaged: list[m.Damaged] = []
        self._differ = 0  # the newest step in which this worker's results differed from those of another worker

    @property
    def is_full(self) -> bool:
        """True if the worker must begin no other step before some reports are acknowledged."""
        return len(self.applied) >= _MOST

    def keep(self, message: m.Message) -> None:
        """Keep a report that is about to be sent, if it is of a kind that nobody could make again."""
        if isinstance(message, m.Applied):
            self.applied.append(message)
        elif isinstance(message, m.Damaged):
            self.damaged.append(message)
        elif isinstance(message, m.ChecksDiffer | m.SumsDiffer):
            self._differ = max(self._differ, message.step)

    def results_differ(self, version: int) -> bool:
        """True if results differed in the step after this version, so that it waits for the controller's decision."""
        return self._differ > version

    def written(self, step: int) -> None:
        """Drop the reports of steps up to this one, which the controller has written down."""
        while self.applied and self.applied[0].step <= step:
            self.applied.popleft()

    def entered(self) -> None:
        """A mesh epoch was entered, which has dealt with damaged state and differing results: drop those reports."""
        self.damaged.clear()
        self._differ = 0


class KeepingChannel(ForwardingChannel):
    """A channel that keeps reports which go over it to the controller.

    Args:
        channel: sends and receives.
        reports: where they are kept.
    """

    def __init__(self, channel: Channel, reports: KeptReports) -> None:
        super().__init__(channel)
        self._reports = reports

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        """Send a message to a peer; see `Channel.send`."""
        if peer == CONTROLLER:
            self._reports.keep(message)
        super().send(peer, message, payload)
