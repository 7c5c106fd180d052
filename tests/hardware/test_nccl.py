"""On several NVIDIA GPUs: groups of NCCL that lose a member. Never run so far: docs/hardware.md."""

from __future__ import annotations

import pytest

from elaswave_spmd.runtime.devices import Island, device_of
from elaswave_spmd.runtime.devices.group_store import GroupStore
from elaswave_spmd.runtime.devices.process_group import DeviceGroups, GroupInBackground
from tests.hardware.devices import exchanges, exchanges_with_one_that_is_late, join, marks_of, passes_on

KIND = device_of("cuda")
pytestmark = marks_of(KIND)


def _member(rank: int, address: str, shrinks: bool) -> None:
    import torch

    device = KIND.open(rank, Island())
    library = DeviceGroups(device, address, "127.0.0.1", 60.0)
    library.shrinks = shrinks
    group = GroupInBackground(library, timeout_s=60.0)
    join(group, 0, [0, 1, 2], rank)
    if rank == 1:  # it takes no part in the broadcast, and is gone
        return
    group.broadcast(device.from_host(torch.ones(1 << 20)), 1)
    join(group, 1, [0, 2], rank)
    passes_on(device, group, rank, 2)
    exchanges(device, group, [0, 2], rank)


def _member_that_may_be_late(rank: int, address: str, shrinks: bool) -> None:
    device = KIND.open(rank, Island())
    library = DeviceGroups(device, address, "127.0.0.1", 60.0)
    library.shrinks = shrinks
    group = GroupInBackground(library, timeout_s=60.0)
    members = [0, 1, 2]
    join(group, 0, members, rank)
    if shrinks:
        members = [0, 2]
        if rank not in members:
            return
        join(group, 1, members, rank)
    exchanges_with_one_that_is_late(device, library, group, members, rank)


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_first_exchange_waits_for_nobody_in_the_call(shrinks: bool) -> None:
    import torch
    import torch.multiprocessing as mp

    if torch.cuda.device_count() < 3:
        pytest.skip(f"three GPUs are needed, there are {torch.cuda.device_count()}")
    store = GroupStore("127.0.0.1")
    mp.spawn(  # pyright: ignore[reportPrivateImportUsage]
        _member_that_may_be_late, (store.address, shrinks), nprocs=3
    )


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_group_loses_a_member_in_a_broadcast_and_goes_on(shrinks: bool) -> None:
    import torch
    import torch.multiprocessing as mp

    if torch.cuda.device_count() < 3:
        pytest.skip(f"three GPUs are needed, there are {torch.cuda.device_count()}")
    store = GroupStore("127.0.0.1")
    mp.spawn(_member, (store.address, shrinks), nprocs=3)  # pyright: ignore[reportPrivateImportUsage]
