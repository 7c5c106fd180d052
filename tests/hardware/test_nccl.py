"""On several NVIDIA GPUs: groups of NCCL that lose a member. Never run so far: docs/hardware.md."""

from __future__ import annotations

import time

import pytest

from elaswave_spmd.runtime.devices import Island, ThisMachine, device_of
from elaswave_spmd.runtime.devices.groups import GroupInBackground
from elaswave_spmd.runtime.group_store import GroupStore, group_of

KIND = device_of("cuda")
LACKS = KIND.missing(ThisMachine())
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(LACKS), reason="; ".join(f"no {lack.what}" for lack in LACKS)),
]


def _member(rank: int, address: str, shrinks: bool) -> None:
    import torch

    device = KIND.open(rank, Island())
    group = group_of(device, address, "127.0.0.1", 60.0)
    if not shrinks:
        group._shrink = None
    group.change(0, [0, 1, 2], rank)
    _ready(group, 0)
    if rank == 1:  # it takes no part in the broadcast, and is gone
        return
    group.broadcast(device.from_host(torch.ones(1 << 20)), 1)
    group.change(1, [0, 2], rank)
    _ready(group, 1)
    values = device.from_host(torch.full((4,), float(rank)))
    work = group.broadcast(values, 2)
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()
    assert torch.equal(device.to_host(values), torch.full((4,), 2.0))


def _ready(group: GroupInBackground, epoch: int) -> None:
    while group.ready != epoch:
        assert group.failure is None, group.failure
        time.sleep(0.01)


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_group_loses_a_member_in_a_broadcast_and_goes_on(shrinks: bool) -> None:
    import torch
    import torch.multiprocessing as mp

    if torch.cuda.device_count() < 3:
        pytest.skip(f"three GPUs are needed, there are {torch.cuda.device_count()}")
    store = GroupStore("127.0.0.1")
    mp.spawn(_member, (store.address, shrinks), nprocs=3)  # pyright: ignore[reportPrivateImportUsage]
