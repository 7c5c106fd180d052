"""The worker's part of the trace (`run.trace=true`): opening it, and recording sends, collectives and frequencies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter

from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.run_dir.trace import TracePart
from elaswave_spmd.worker.channel import Channel, ForwardingChannel
from elaswave_spmd.worker.direct_channel import Pairs
from elaswave_spmd.worker.pacing import DeviceClock
from elaswave_spmd.worker.stage_collectives import CollectiveWork, StageGroup


def open_trace(folder: str | None, rank: int) -> TracePart | None:
    """Opens a worker's part of the trace.

    Args:
        folder: the run's directory; None for no trace.

    Returns:
        None without a trace, and where the part cannot be opened: a machine that does not share the run's directory
        trains all the same, and its workers are missing from the trace.
    """
    try:
        return TracePart(folder, rank) if folder is not None else None
    except OSError:
        return None


class TracedChannel(ForwardingChannel):
    """A channel that also records each send with a payload in the trace: receiver, message type, bytes, start and end.

    Args:
        channel: does the work.
        part: the worker's part of the trace.
    """

    def __init__(self, channel: Channel, part: TracePart) -> None:
        super().__init__(channel)
        self._part = part

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        """Sends a message to a peer; see `Channel.send`."""
        began = perf_counter()
        super().send(peer, message, payload)
        if payload is not None:
            self._part.send(peer, type(message).__name__, payload.nbytes, began, perf_counter())


class TracedGroup:
    """A stage's process group that also records in the trace what this worker sends through it.

    Args:
        group: does the work.
        part: the worker's part of the trace.
    """

    def __init__(self, group: StageGroup, part: TracePart) -> None:
        self._group = group
        self._part = part

    def enter_epoch(self, epoch: int, members: Sequence[int], rank: int) -> None:
        """Begins to make the group of a newer epoch; see `StageGroup.enter_epoch`."""
        self._group.enter_epoch(epoch, members, rank)

    @property
    def ready(self) -> int | None:
        """The newest epoch if its group is made; see `StageGroup.ready`."""
        return self._group.ready

    @property
    def failure(self) -> str | None:
        """The reason for which the group could not be made; see `StageGroup.failure`."""
        return self._group.failure

    def gather(self, share: Tensor, gathered: Tensor, what: str) -> CollectiveWork:
        """Begins an all-gather; see `StageGroup.gather`. Its bytes are those of a share, padding included."""
        began = perf_counter()
        work = self._group.gather(share, gathered, what)
        self._part.copy(m.Publish.__name__, share.nbytes, began, perf_counter())
        return work

    def exchange(
        self,
        sent: Tensor,
        received: Tensor,
        sent_sizes: Sequence[int],
        received_sizes: Sequence[int],
        what: str,
    ) -> CollectiveWork:
        """Begins an all-to-all; see `StageGroup.exchange`."""
        began = perf_counter()
        work = self._group.exchange(sent, received, sent_sizes, received_sizes, what)
        self._part.copy(what, sent.nbytes, began, perf_counter())
        return work

    def give_up(self) -> None:
        """Ends a group that has failed; see `StageGroup.give_up`."""
        self._group.give_up()


class TracedPairs:
    """A worker's pairs that also record in the trace what this worker sends through them.

    Args:
        pairs: do the work.
        part: the worker's part of the trace.
    """

    def __init__(self, pairs: Pairs, part: TracePart) -> None:
        self._pairs = pairs
        self._part = part

    def enter_epoch(self, epoch: int, receivers: Collection[int], senders: Collection[int], rank: int) -> None:
        """Begins to make the pairs of a newer epoch; see `Pairs.enter_epoch`."""
        self._pairs.enter_epoch(epoch, receivers, senders, rank)

    def sends_to(self, peer: int) -> bool:
        """True if a peer is connected; see `Pairs.sends_to`."""
        return self._pairs.sends_to(peer)

    def receives_from(self, peer: int) -> bool:
        """True if a peer is connected; see `Pairs.receives_from`."""
        return self._pairs.receives_from(peer)

    def failure(self, peer: int) -> str:
        """The reason for which a pair could not be made; see `Pairs.failure`."""
        return self._pairs.failure(peer)

    def send(self, peer: int, values: Tensor, what: str) -> CollectiveWork:
        """Begins to send bytes; see `Pairs.send`."""
        began = perf_counter()
        work = self._pairs.send(peer, values, what)
        self._part.send(peer, f"{what} by the pair", values.nbytes, began, perf_counter())
        return work

    def receive(self, peer: int, values: Tensor, what: str) -> CollectiveWork:
        """Begins to receive bytes; see `Pairs.receive`. The trace has them where they are sent."""
        return self._pairs.receive(peer, values, what)

    def give_up(self, peer: int) -> None:
        """Ends a pair; see `Pairs.give_up`."""
        self._pairs.give_up(peer)


class TracedClock:
    """A device's clock that also records each change of its frequency in the trace.

    Args:
        clock: does the work.
        part: the worker's part of the trace.
    """

    def __init__(self, clock: DeviceClock, part: TracePart) -> None:
        self._clock = clock
        self._part = part
        part.frequency(1.0)  # a counter has no value before its first event

    def set(self, frequency: float) -> float:
        """Changes to a frequency; see `DeviceClock.set`."""
        in_force = self._clock.set(frequency)
        self._part.frequency(in_force)
        return in_force

    def now(self) -> float:
        """Seconds of the clock; see `DeviceClock.now`."""
        return self._clock.now()
