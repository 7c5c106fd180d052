"""The CPU: tensors in host memory, every call done when it returns."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from elaswave_spmd.runtime.devices.kind import Capabilities, Device, Island, Missing
from elaswave_spmd.runtime.devices.machine import Machine
from elaswave_spmd.runtime.devices.requirements import missing_torch, one_device


class Cpu:
    """`runtime.device=cpu`."""

    name = "cpu"
    capabilities = Capabilities(
        streams=False,
        pinned_copies=False,
        masks="host",
        dtypes=("fp32", "bf16"),
        collectives="gloo",
        shrinks_groups=False,
        state="host",
        compiles=False,
        islands=False,
        forks=True,
        inductor=True,
    )

    def missing(self, machine: Machine) -> tuple[Missing, ...]:
        return missing_torch(machine)

    def model(self, machine: Machine) -> str:
        return ""

    def environment(self, given: Mapping[str, str], island: Island) -> dict[str, str]:
        one_device(self.name, island)
        return {}

    def open(self, index: int, island: Island) -> Device:
        import torch

        from elaswave_spmd.runtime.devices.host import HostDevice

        torch.set_num_threads(island.threads)
        return HostDevice(self)

    def group_environment(self, given: Mapping[str, str]) -> dict[str, str]:
        return {}

    def make_group(self, store: Any, rank: int, size: int, timeout: timedelta, host: str) -> Any:
        from torch.distributed import ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices, options._timeout = [ProcessGroupGloo.create_device(hostname=host)], timeout
        return ProcessGroupGloo(store, rank, size, options)

    def abort_group(self, group: Any, reason: str) -> None:
        pass  # gloo's abort releases nobody; what hangs ends with the group's timeout, or its last reference


KIND = Cpu()
