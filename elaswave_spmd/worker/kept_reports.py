"""Reports to the controller that a worker keeps until they are written down, where a controller may come back.

What a controller that has died had not written is gone with it, and only the workers know it. So they keep what nobody
could compute again: their reports of applied steps, until Written acknowledges them, and what they have given up of
their state, or found to differ, until the next mesh epoch has dealt with it. All other reports follow from a worker's
state, and are made again in the mesh epoch with which a controller that came back begins (docs/protocol.md, A5).
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.worker.channel import Channel, ForwardingChannel

_MOST = 1024
"""A worker with so many reports begins no other step: the controller has stood still for long, or is gone."""


class KeptReports:
    """The reports, oldest first."""

    def __init__(self) -> None:
        self.applied: deque[m.Applied] = deque()
        self.damaged: list[m.Damaged] = []
        self._differ = 0  # the newest step in which this worker had other results than another one

    @property
    def is_full(self) -> bool:
        """True if nothing more is to be done before some of them are acknowledged."""
        return len(self.applied) >= _MOST

    def keep(self, message: m.Message) -> None:
        """A report is about to be sent."""
        if isinstance(message, m.Applied):
            self.applied.append(message)
        elif isinstance(message, m.Damaged):
            self.damaged.append(message)
        elif isinstance(message, m.ChecksDiffer | m.SumsDiffer):
            self._differ = max(self._differ, message.step)

    def is_suspect(self, version: int) -> bool:
        """True if the step after this version waits for what the controller makes of two results that differ."""
        return self._differ > version

    def written(self, step: int) -> None:
        """The controller has written down all steps up to this one."""
        while self.applied and self.applied[0].step <= step:
            self.applied.popleft()

    def entered(self) -> None:
        """A mesh epoch has begun: what was given up before is being learned."""
        self.damaged.clear()
        self._differ = 0


class KeepingChannel(ForwardingChannel):
    """A channel that keeps the reports which go over it.

    Args:
        channel: does the work.
    """

    def __init__(self, channel: Channel, reports: KeptReports) -> None:
        super().__init__(channel)
        self._reports = reports

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        """Send a message to a peer; see `Channel.send`."""
        if peer == CONTROLLER:
            self._reports.keep(message)
        super().send(peer, message, payload)
