"""Ascend NPUs, through torch_npu and CANN. Written after the documentation of both, never run; see docs/hardware.md."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from elaswave_spmd.runtime.devices.kind import Capabilities, Device, Island, Missing
from elaswave_spmd.runtime.devices.machine import Machine, same_release
from elaswave_spmd.runtime.devices.requirements import (
    AUTOLOAD,
    check_one_device,
    has_cann,
    missing_torch,
    set_variables,
)

_DETERMINISTIC, _HCCL_ERRORS = "HCCL_DETERMINISTIC", "HCCL_ASYNC_ERROR_HANDLING"


class Npu:
    """`runtime.device=npu`: worker i of a machine has the NPU i modulo the number of NPUs."""

    name = "npu"
    capabilities = Capabilities(
        streams=True,
        pinned_copies=True,
        dtypes=("fp32", "bf16"),
        collectives="hccl",
        state="device",
        compiles=False,
        islands=False,
        forks=False,
        recovers=True,
        resource="NPU",
    )

    def missing(self, machine: Machine) -> tuple[Missing, ...]:
        found = list(missing_torch(machine))
        torch, torch_npu = machine.version("torch"), machine.version("torch_npu")
        if torch_npu is None:
            found.append(Missing("torch_npu", f"export {AUTOLOAD}=0 and pip install -e '.[npu]'"))
        elif torch is not None and not same_release(torch, torch_npu):
            what = f"torch_npu for torch {torch} (this is {torch_npu})"
            found.append(Missing(what, f"pip install torch=={'.'.join(torch_npu.split('.')[:2])}.*"))
        if not has_cann(machine):
            fix = "install Ascend's CANN toolkit and source its set_env.sh"
            found.append(Missing("CANN (libhccl.so)", fix))
        if not machine.has_path("/dev/davinci[0-9]*"):
            fix = "install Ascend's driver and firmware; npu-smi info lists devices"
            found.append(Missing("the Ascend driver and a device (/dev/davinci0)", fix))
        return tuple(found)

    def model(self, machine: Machine) -> str:
        return ""

    def environment(self, given: Mapping[str, str], island: Island) -> dict[str, str]:
        check_one_device(self.name, island)
        wanted = {_DETERMINISTIC: "true"}
        # Workers import torch_npu themselves when they open their device, so that an error in it is reported as such.
        return set_variables(given, wanted, {_DETERMINISTIC: "if HCCL sums in a fixed order"}) | {AUTOLOAD: "0"}

    def open(self, index: int, island: Island) -> Device:
        import torch
        import torch_npu  # pyright: ignore[reportMissingImports]
        import torch_npu.distributed  # pyright: ignore[reportMissingImports]
        from torch_npu.npu import _recovery  # pyright: ignore[reportMissingImports]

        from elaswave_spmd.runtime.devices.accelerator import AcceleratorDevice
        from elaswave_spmd.runtime.devices.npu_faults import NpuFaults

        torch.set_num_threads(island.threads)
        torch.use_deterministic_algorithms(True)
        npu = torch_npu.npu
        place = torch.device("npu", index % npu.device_count())
        has_groups = torch.distributed.is_initialized
        faults = NpuFaults(npu, place.index, torch_npu.distributed, _recovery, has_groups)
        return AcceleratorDevice(self, place, npu, faults)

    def group_environment(self, given: Mapping[str, str]) -> dict[str, str]:
        return set_variables(given, {_HCCL_ERRORS: "0"}, {_HCCL_ERRORS: "if an error of HCCL ends the process"})

    def make_group(self, store: Any, rank: int, size: int, timeout: timedelta, host: str) -> Any:
        import torch_npu  # pyright: ignore[reportMissingImports]

        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options.is_high_priority_stream = True  # as for CUDA: copies have streams of normal priority
        options._timeout = timeout
        return torch_npu._C._distributed_c10d.ProcessGroupHCCL(store, rank, size, options)

    def abort_group(self, group: Any, reason: str) -> None:
        from elaswave_spmd.runtime.devices.npu_faults import abort

        abort(group, reason)


KIND = Npu()
