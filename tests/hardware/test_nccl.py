"""Groups of NCCL: they lose a member, and wait for nobody in a call.

The tests take three GPUs, or one: PYTHONPATH=tests/hardware/one_gpu pytest -m gpu tests/hardware/test_nccl.py
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from elaswave_spmd.runtime.devices import Device, Island, device_of
from elaswave_spmd.runtime.devices.group_store import GroupStore
from elaswave_spmd.runtime.devices.process_group import DeviceGroups, GroupInBackground
from tests.hardware.devices import exchanges, exchanges_with_one_that_is_late, gathers, join, marks_of
from tests.waiting import eventually

KIND = device_of("cuda")
pytestmark = marks_of(KIND)


def _opened(rank: int, address: str) -> tuple[Device, DeviceGroups]:
    os.environ.update(KIND.environment(os.environ, Island()) | KIND.group_environment(os.environ))
    device = KIND.open(rank, Island())
    return device, DeviceGroups(device, address, "127.0.0.1", 60.0)


def _member(rank: int, address: str) -> None:
    import torch

    device, library = _opened(rank, address)
    group = GroupInBackground(library, timeout_s=60.0)
    join(group, 0, [0, 1, 2], rank)
    if rank != 1:  # the other one takes no part in the all-gather, and is gone
        group.gather(device.from_host(torch.ones(1 << 20)), device.from_host(torch.zeros(3 << 20)))
        join(group, 1, [0, 2], rank)
        gathers(device, group, [0, 2], rank)
        exchanges(device, group, [0, 2], rank)
        _leave_together(library, 2)
    os._exit(0)


def _member_that_may_be_late(rank: int, address: str) -> None:
    device, library = _opened(rank, address)
    group = GroupInBackground(library, timeout_s=60.0)
    join(group, 0, [0, 1, 2], rank)
    exchanges_with_one_that_is_late(device, library, group, [0, 1, 2], rank)
    _leave_together(library, 3)
    os._exit(0)


def _leave_together(library: DeviceGroups, number: int) -> None:
    """Waits for the others, whose exchange this one's NCCL may still serve.

    Members then end at once, as a worker's process does: a thread that still ends a group must not meet a Python that
    takes itself apart.
    """
    store = library.open_store("the end")
    store.add("done", 1)
    eventually(lambda: store.add("done", 0) == number)


@pytest.mark.parametrize(
    "member",
    [
        pytest.param(_member_that_may_be_late, id="a first exchange waits for nobody in the call"),
        pytest.param(_member, id="a group loses a member in an all-gather and goes on"),
    ],
)
def test_three_members(member: Callable[[int, str], None]) -> None:
    import torch
    import torch.multiprocessing as mp

    if torch.cuda.device_count() < 3 and "NCCL_HOSTID" not in os.environ:
        pytest.skip("less than three GPUs: they need PYTHONPATH=tests/hardware/one_gpu")
    store = GroupStore("127.0.0.1")
    mp.spawn(member, (store.address,), nprocs=3)  # pyright: ignore[reportPrivateImportUsage]
