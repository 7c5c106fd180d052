"""The CPU: tensors are in host memory, and every call is done when it returns."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from elaswave_spmd.runtime.devices.kind import Capabilities, Device, Island, Missing
from elaswave_spmd.runtime.devices.machine import Machine
from elaswave_spmd.runtime.devices.requirements import check_one_device, missing_torch


class Cpu:
    """`runtime.device=cpu`."""

    name = "cpu"
    capabilities = Capabilities(
        streams=False,
        pinned_copies=False,
        dtypes=("fp32", "bf16"),
        collectives="gloo",
        state="host",
        compiles=False,
        islands=False,
        forks=True,
        inductor=True,
        forks_compiler=True,
    )

    def missing(self, machine: Machine) -> tuple[Missing, ...]:
        return missing_torch(machine)

    def model(self, machine: Machine) -> str:
        return ""

    def environment(self, given: Mapping[str, str], island: Island) -> dict[str, str]:
        check_one_device(self.name, island)
        return {}

    def open(self, index: int, island: Island) -> Device:
        import torch
        from torch.utils import deterministic

        from elaswave_spmd.runtime.devices.host import HostDevice

        torch.set_num_threads(island.threads)
        if island.threads > 1:
            # Else the gradient of an indexing with tensors, `weight[tokens]`, is added up by several threads in the
            # order of their times. (Not use_deterministic_algorithms, which imports the compiler.)
            torch.set_deterministic_debug_mode("error")
            # It would also fill new tensors; every buffer here is written before it is read.
            deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        return HostDevice(self)

    def group_environment(self, given: Mapping[str, str]) -> dict[str, str]:
        return {}

    def make_group(self, store: Any, rank: int, size: int, timeout: timedelta, host: str) -> Any:
        from torch.distributed import ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        return ProcessGroupGloo(store, rank, size, options)

    def abort_group(self, group: Any, reason: str) -> None:
        pass  # gloo's abort ends nothing; a collective that hangs ends by its timeout, or with the last reference


KIND = Cpu()
