"""On Ascend NPUs with CANN and torch_npu: what nothing else shows. Never run so far: docs/hardware.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elaswave_spmd.runtime.devices import Island, Remedy, device_of
from elaswave_spmd.runtime.devices.group_store import GroupStore
from elaswave_spmd.runtime.devices.npu_faults import NpuEvent, event_of
from elaswave_spmd.runtime.devices.process_group import DeviceGroups, GroupInBackground, group_of
from tests.hardware.devices import exchanges, exchanges_with_one_that_is_late, gathers, join, marks_of

KIND = device_of("npu")
pytestmark = marks_of(KIND)


@pytest.fixture(scope="module")
def device() -> Iterator[Any]:
    yield KIND.open(0, Island())


def test_copies_cross_and_come_back(device: Any) -> None:
    import torch

    values = torch.arange(1000, dtype=torch.float32).view(10, 100)
    there = device.from_host(values)
    assert there.device.type == "npu" and torch.equal(device.to_host(there + 1), values + 1)
    copy = device.copy_to_host(there)
    assert torch.equal(copy.wait(), values) and copy.done()
    figures = device.memory()
    assert figures is not None and 0 < figures.allocated <= figures.peak


def test_masks_are_those_of_the_host(device: Any) -> None:
    import numpy as np

    from elaswave_spmd.determinism import Keys
    from elaswave_spmd.determinism.dropout import keep_mask_numpy, keep_mask_torch

    keys, shape = Keys.make(7, 2**33 + 5, [3, 2**40], 4), (2, 37, 11)
    there = device.to_host(keep_mask_torch(shape, 0.3, keys, 1, device.place))
    assert np.array_equal(there.numpy(), keep_mask_numpy(shape, 0.3, keys, 1))


def test_a_stopped_device_says_so_and_comes_back(device: Any) -> None:
    import torch
    import torch_npu  # pyright: ignore[reportMissingImports]

    kept = device.from_host(torch.ones(8))
    assert torch_npu.npu.stop_device(device.place.index) in (None, 0)
    with pytest.raises(RuntimeError) as caught:
        device.to_host(kept * 2)
    assert event_of(caught.value) is NpuEvent.STOPPED
    assert device.recover(caught.value) is Remedy.REDO
    assert torch.equal(device.to_host(kept * 2), torch.full((8,), 2.0)), "what was in memory is there"


def test_sound_memory_needs_no_reload(device: Any) -> None:
    """An error made up here: the check that follows it looks at real memory."""
    import torch

    kept = device.from_host(torch.ones(8))
    assert device.recover(RuntimeError("UCE ERROR")) is Remedy.REDO
    assert torch.equal(device.to_host(kept), torch.ones(8))


def _member(rank: int, address: str) -> None:
    device = KIND.open(rank, Island())
    group = group_of(device, address, "127.0.0.1", 60.0)
    for epoch, members in enumerate(([0, 1, 2], [0, 2])):
        if rank not in members:
            return
        join(group, epoch, members, rank)
        gathers(device, group, members, rank)
        exchanges(device, group, members, rank)


def _member_that_may_be_late(rank: int, address: str) -> None:
    device = KIND.open(rank, Island())
    library = DeviceGroups(device, address, "127.0.0.1", 60.0)
    group = GroupInBackground(library, timeout_s=60.0)
    join(group, 0, [0, 1, 2], rank)
    exchanges_with_one_that_is_late(device, library, group, [0, 1, 2], rank)


def test_a_first_exchange_waits_for_nobody_in_the_call() -> None:
    import torch.multiprocessing as mp
    import torch_npu  # pyright: ignore[reportMissingImports]

    if torch_npu.npu.device_count() < 3:
        pytest.skip(f"three NPUs are needed, there are {torch_npu.npu.device_count()}")
    store = GroupStore("127.0.0.1")
    mp.spawn(_member_that_may_be_late, (store.address,), nprocs=3)  # pyright: ignore[reportPrivateImportUsage]


def test_a_group_loses_a_member_and_goes_on() -> None:
    import torch.multiprocessing as mp
    import torch_npu  # pyright: ignore[reportMissingImports]

    if torch_npu.npu.device_count() < 3:
        pytest.skip(f"three NPUs are needed, there are {torch_npu.npu.device_count()}")
    store = GroupStore("127.0.0.1")
    mp.spawn(_member, (store.address,), nprocs=3)  # pyright: ignore[reportPrivateImportUsage]
