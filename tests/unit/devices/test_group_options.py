"""The options with which groups of NCCL and HCCL are made."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed

from elaswave_spmd.runtime.devices import Device, device_of
from elaswave_spmd.runtime.devices.pair_groups import pairs_of
from elaswave_spmd.runtime.devices.process_group import DeviceGroups, GroupLibrary


class RecordedGroup:
    """A backend of c10d that records its options."""

    class Options(SimpleNamespace):
        """Any options."""

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.options = options


@pytest.fixture(params=["cuda", "npu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """One whose kind makes recorded groups."""
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", RecordedGroup, raising=False)
    torch_npu: Any = ModuleType("torch_npu")
    torch_npu._C = SimpleNamespace(_distributed_c10d=SimpleNamespace(ProcessGroupHCCL=RecordedGroup))
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    found: Any = SimpleNamespace(kind=device_of(request.param))
    return found


def library_of(device: Device, what: str) -> GroupLibrary:
    if what == "stage":
        return DeviceGroups(device, "", "127.0.0.1", 7.0)
    return pairs_of(device, "", "127.0.0.1", 7.0)._library


@pytest.mark.parametrize("what", ["stage", "pair"])
def test_no_group_has_a_stream_that_copies_may_have(device: Device, what: str) -> None:
    """torch hands out the streams of a priority in turn, and copies have two of normal priority.

    What is queued on a stream of a group waits for peers, and a copy behind it would wait for them, too.
    """
    for _ in range(12):  # mesh epochs
        made = library_of(device, what).make(None, 0, 2)
        assert made.options.is_high_priority_stream is True and made.options._timeout == timedelta(seconds=7)
