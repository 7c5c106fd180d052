"""Helpers of the tests of all kinds of device."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from elaswave_spmd.runtime.devices import Device, DeviceKind, ThisMachine
from elaswave_spmd.runtime.devices.process_group import DeviceGroups, GroupInBackground
from tests.waiting import eventually


def marks_of(kind: DeviceKind) -> list[Any]:
    """Returns the marks of a module whose tests need a device of this kind."""
    lacks = kind.missing(ThisMachine())
    reason = "; ".join(f"no {lack.what}" for lack in lacks)
    return [pytest.mark.gpu, pytest.mark.skipif(bool(lacks), reason=reason)]


def join(group: GroupInBackground, epoch: int, members: list[int], rank: int) -> None:
    """A member of a new mesh epoch, until its group is made."""
    group.enter_epoch(epoch, members, rank)
    eventually(lambda: group.ready == epoch or group.failure is not None)
    assert group.ready == epoch, group.failure


def exchanges(device: Device, group: GroupInBackground, members: list[int], rank: int) -> None:
    """An all-to-all brings this worker what each other one sends it: as many elements as its sender's rank, and one."""
    sizes = [0 if member == rank else rank + 1 for member in members]
    received = [0 if member == rank else member + 1 for member in members]
    values = device.from_host(torch.zeros(sum(received)))
    work = group.exchange(device.from_host(torch.full((sum(sizes),), float(rank))), values, sizes, received)
    eventually(work.is_completed)
    work.wait()
    wanted = [torch.full((size,), float(member)) for member, size in zip(members, received, strict=True)]
    assert torch.equal(device.to_host(values), torch.cat(wanted))


def exchanges_with_one_that_is_late(
    device: Device, library: DeviceGroups, group: GroupInBackground, members: list[int], rank: int
) -> None:
    """The last member begins its first exchange a second after the calls of all others have returned.

    If the library waited in the call for the one that is late, that one would wait here for ever.
    """
    store = library.open_store("one that is late")
    if rank == members[-1]:
        eventually(lambda: store.add("others", 0) == len(members) - 1)
        time.sleep(1.0)
    sizes = [int(member != rank) for member in members]
    values = device.from_host(torch.zeros(sum(sizes)))
    work = group.exchange(device.from_host(torch.full((sum(sizes),), float(rank))), values, sizes, sizes)
    if rank != members[-1]:
        assert not work.is_completed(), "not all have sent"
        store.add("others", 1)
    eventually(work.is_completed)
    work.wait()
    assert device.to_host(values).tolist() == [float(member) for member in members if member != rank]


def gathers(device: Device, group: GroupInBackground, members: list[int], rank: int) -> None:
    """An all-gather brings this worker the shares of all members."""
    gathered = device.from_host(torch.zeros(4 * len(members)))
    work = group.gather(device.from_host(torch.full((4,), float(rank))), gathered)
    eventually(work.is_completed)
    work.wait()
    assert torch.equal(device.to_host(gathered), torch.tensor(members, dtype=torch.float32).repeat_interleave(4))
