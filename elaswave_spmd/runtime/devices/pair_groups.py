"""Pairs of workers: a process group of two workers for each direction in which one of them sends to the other.

A pair copies bytes from the device of one worker to that of another by NCCL, HCCL or gloo: boundary tensors, and state
that is moved or copied to new replicas. It has a group for each direction, since a library runs the calls on a group
one after another: with one group for both directions, two workers that send at the same time would wait for each other.
A transfer is an uneven all-to-all in which one side sends nothing, which NCCL turns into a send and a receive. `send`
and `recv` of c10d are not used, as those of gloo cannot be polled.

Pairs are made anew in every mesh epoch, in the background, and ended, as groups of stages are (process_group.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.runtime.devices.process_group import Collective, DeviceGroups, GroupInBackground, GroupLibrary

if TYPE_CHECKING:
    from torch import Tensor

_Direction = tuple[int, int]  # (sender, receiver)


class PairsInBackground:
    """The pairs of one worker. The training thread calls it; the slow parts run in other threads.

    Args:
        library: makes groups, and copies.
        timeout_s: time limit of making a group once both workers have met, and of a transfer.
    """

    def __init__(self, library: GroupLibrary, timeout_s: float) -> None:
        self._library = library
        self._timeout_s = timeout_s
        self._groups: dict[_Direction, GroupInBackground] = {}
        self._closing: list[GroupInBackground] = []  # those that a thread has still to be started for, which ends them
        self._rank = -1

    def enter_epoch(self, epoch: int, receivers: Collection[int], senders: Collection[int], rank: int) -> None:
        """Abandon the present groups, and start to make those of a newer mesh epoch.

        The caller must have dropped all transfers before, as for `GroupInBackground.give_up`.

        Args:
            epoch: the number of the mesh epoch.
            receivers: the workers that this one sends to.
            senders: the workers that send to this one.
            rank: this worker.
        """
        self._close(*self._groups.values())
        self._rank = rank
        self._groups = {}
        wanted = {(rank, peer) for peer in receivers} | {(peer, rank) for peer in senders}
        for sender, receiver in sorted(wanted):
            name = f"from {sender} to {receiver}"
            group = GroupInBackground(self._library, self._timeout_s, name, gathers=False)
            self._groups[sender, receiver] = group
            group.enter_epoch(epoch, (sender, receiver), rank)

    def sends_to(self, peer: int) -> bool:
        """True if the group in which this worker sends to `peer` is connected."""
        return self._is_ready(self._rank, peer)

    def receives_from(self, peer: int) -> bool:
        """True if the group in which `peer` sends to this worker is connected."""
        return self._is_ready(peer, self._rank)

    def failure(self, peer: int) -> str:
        """The reason why a group with another worker could not be made; "" if none has failed."""
        groups = [self._groups.get(way) for way in ((self._rank, peer), (peer, self._rank))]
        return next((group.failure for group in groups if group is not None and group.failure is not None), "")

    def send(self, peer: int, values: Tensor, what: str = "") -> Collective:
        """Start to send bytes to another worker.

        Args:
            peer: the receiver.
            values: the bytes, contiguous uint8 [n] on the device.
            what: the kind of message that they belong to, which the error names if the transfer takes too long.

        Raises:
            RuntimeError: the library refuses, since it has lost the connection to the peer.
        """
        size = values.numel()
        return self._groups[self._rank, peer].exchange(values, values[:0], (0, size), (0, 0), what)

    def receive(self, peer: int, values: Tensor, what: str = "") -> Collective:
        """Start to receive as many bytes from another worker as `values` has. Arguments and errors are as in `send`."""
        size = values.numel()
        return self._groups[peer, self._rank].exchange(values[:0], values, (0, 0), (size, 0), what)

    def give_up(self, peer: int) -> None:
        """Abandon the groups of this and another worker. The next ones are made in the next mesh epoch.

        The caller must have dropped the transfers in them before.
        """
        found = [self._groups.pop(way, None) for way in ((self._rank, peer), (peer, self._rank))]
        self._close(*(group for group in found if group is not None))

    def _close(self, *groups: GroupInBackground) -> None:
        self._closing = [group for group in (*self._closing, *groups) if not group.close()]

    def _is_ready(self, sender: int, receiver: int) -> bool:
        group = self._groups.get((sender, receiver))
        return group is not None and group.ready is not None


def pairs_of(device: Device, address: str, host: str, timeout_s: float) -> PairsInBackground:
    """The pairs of a worker, with the backend of its device. Nothing is connected yet.

    Args:
        address: address of the run's `GroupStore`.
        host: address at which the other machines reach this one.
        timeout_s: time limit of making a group once both workers have met, and of a transfer.
    """
    return PairsInBackground(DeviceGroups(device, address, host, timeout_s), timeout_s)
