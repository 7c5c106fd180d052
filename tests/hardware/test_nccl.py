"""On several NVIDIA GPUs: groups of NCCL that lose a member. Never run so far: docs/hardware.md."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from elaswave_spmd.runtime.devices import Island, ThisMachine, device_of
from elaswave_spmd.runtime.devices.groups import GroupInBackground

KIND = device_of("cuda")
LACKS = KIND.missing(ThisMachine())
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(LACKS), reason="; ".join(f"no {lack.what}" for lack in LACKS)),
]


def _member(rank: int, store: str, shrinks: bool) -> None:
    import torch
    import torch.distributed as dist

    device = KIND.open(rank, Island())
    group = GroupInBackground(
        dist,
        "nccl",
        lambda: dist.FileStore(store, 3),  # pyright: ignore[reportPrivateImportUsage]
        timeout=timedelta(seconds=60),
        enter=device.enter_thread,
        abort=lambda old, why: KIND.abort_group(old, device.place, why),
        shrinks=shrinks,
    )
    group.change(0, [0, 1, 2], rank)
    group.wait()
    assert group.ready == 0, group.failure
    if rank == 1:  # it takes no part in the broadcast, and is gone
        group.close()
        return
    group.broadcast(device.from_host(torch.ones(1 << 20)), 1)
    group.change(1, [0, 2], rank)
    group.wait()
    assert group.ready == 1, group.failure
    values = device.from_host(torch.full((4,), float(rank)))
    work = group.broadcast(values, 2)
    work.wait()
    assert torch.equal(device.to_host(values), torch.full((4,), 2.0))
    group.close()


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_group_loses_a_member_in_a_broadcast_and_goes_on(tmp_path: Path, shrinks: bool) -> None:
    import torch
    import torch.multiprocessing as mp

    if torch.cuda.device_count() < 3:
        pytest.skip(f"three GPUs are needed, there are {torch.cuda.device_count()}")
    mp.spawn(_member, (str(tmp_path / "store"), shrinks), nprocs=3)  # pyright: ignore[reportPrivateImportUsage]
