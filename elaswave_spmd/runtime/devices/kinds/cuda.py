"""NVIDIA GPUs, through torch's CUDA build."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elaswave_spmd.runtime.devices.kind import Capabilities, Device, Island, Missing
from elaswave_spmd.runtime.devices.machine import Machine
from elaswave_spmd.runtime.devices.requirements import check_one_device, missing_torch, set_variables

if TYPE_CHECKING:
    import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = ":4096:8"
_NCCL_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_NCCL_CONNECT = "NCCL_RUNTIME_CONNECT"
_GPUS = "/proc/driver/nvidia/gpus/*/information"  # written by the driver; asking a library would open the devices


class Cuda:
    """`runtime.device=cuda`: worker i of a machine has the GPU i modulo the number of GPUs."""

    name = "cuda"
    capabilities = Capabilities(
        streams=True,
        pinned_copies=True,
        dtypes=("fp32", "bf16"),
        collectives="nccl",
        state="device",
        compiles=False,
        islands=False,
        forks=True,  # CUDA breaks in children only if the parent has used a device, and the fork server never does
        inductor=True,
        forks_compiler=False,  # it asks the driver for devices when it is imported, which starts a thread of the driver
        resource="GPU",
    )

    def missing(self, machine: Machine) -> tuple[Missing, ...]:
        found = list(missing_torch(machine))
        version = machine.version("torch")
        if version is not None and not machine.has_package_file("torch", "lib/libtorch_cuda.so"):
            what = f"a CUDA build of torch (this is {version})"
            found.append(Missing(what, "install torch from its CUDA index: https://pytorch.org/get-started/locally"))
        if not machine.has_library("cuda"):
            found.append(Missing("the NVIDIA driver (libcuda.so)", "install the driver; nvidia-smi shows it"))
        elif not machine.has_path("/dev/nvidia[0-9]*") and not machine.has_path("/dev/dxg"):
            found.append(Missing("a GPU (/dev/nvidia0)", "give this machine or container one; nvidia-smi -L lists"))
        return tuple(found)

    def model(self, machine: Machine) -> str:
        lines = [line.partition(":") for text in machine.texts(_GPUS) for line in text.splitlines()]
        return ", ".join(sorted({value.strip() for name, _, value in lines if name == "Model"}))

    def environment(self, given: Mapping[str, str], island: Island) -> dict[str, str]:
        check_one_device(self.name, island)
        if given.get(_WORKSPACE) == ":16:8":  # the other value with which cuBLAS gives the same bits every time
            return {}
        return set_variables(given, {_WORKSPACE: _WORKSPACES}, {_WORKSPACE: "if cuBLAS gives the same bits every time"})

    def open(self, index: int, island: Island) -> Device:
        import torch
        from torch.cuda import jiterator
        from torch.utils import deterministic

        from elaswave_spmd.runtime.devices.accelerator import AcceleratorDevice
        from elaswave_spmd.runtime.devices.sums import FusedSums

        torch.set_num_threads(island.threads)
        # The bits of a micro-batch must not depend on the worker that computes it, nor on the time.
        torch.use_deterministic_algorithms(True)
        # Deterministic mode would also fill new tensors; every buffer here is written before it is read.
        deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        torch.backends.cudnn.benchmark = False  # it would choose kernels by time, and differently on each worker
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        # Products in bf16 have their partial sums in fp32, whatever the shape.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        # A backward runs in the training thread. By itself torch would hand every layer's to another thread and wait.
        torch.autograd.set_multithreading_enabled(False)
        place = torch.device("cuda", index % torch.cuda.device_count())
        device = AcceleratorDevice(self, place, torch.cuda, sums=FusedSums(jiterator._create_jit_fn))
        _show_workspaces(place)
        return device

    def group_environment(self, given: Mapping[str, str]) -> dict[str, str]:
        # Blocking wait turns NCCL's watchdog off. The watchdog ends collectives in a way that makes them look complete,
        # and may end the process, while here a lost peer is an event that the worker survives.
        # NCCL chooses an algorithm by the size of what is sent, and connects what it needs at the first use of each: a
        # first large all-gather would wait for a lost peer, in the call. So all is connected when the group is made.
        why = {_NCCL_WAIT: "if NCCL's watchdog ends processes", _NCCL_CONNECT: "if NCCL waits for peers in a call"}
        return set_variables(given, {_NCCL_WAIT: "1", _NCCL_CONNECT: "0"}, why)

    def make_group(self, store: Any, rank: int, size: int, timeout: timedelta, host: str) -> Any:
        from torch.distributed import ProcessGroupNCCL  # pyright: ignore[reportPrivateImportUsage]

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        # torch hands out the 32 streams of a priority in turn. Those of normal priority also go to copies and threads:
        # after some mesh epochs a group would have that of the copies, which would then wait for its peers.
        options.is_high_priority_stream = True
        return ProcessGroupNCCL(store, rank, size, options)

    def abort_group(self, group: Any, reason: str) -> None:
        group.abort()


def _show_workspaces(place: torch.device) -> None:
    """Lets torch see the variable for cuBLAS's workspaces, and removes it from this process, which has no use for it.

    A deterministic product asks for it once in a process. After that it is only a size, which torch (2.11, for one)
    parses anew in each product: that took twice the time of the product's other work on the CPU. What makes results the
    same every time is that torch gives each pair of a handle and a stream a workspace of its own, whatever the size.
    That is then torch's own on all machines, also on one whose user had set another.
    """
    import torch

    one = torch.ones(1, 1, device=place)
    torch.matmul(one, one)
    # Nothing else runs in this process yet: a worker opens its device first of all.
    os.environ.pop(_WORKSPACE, None)


KIND = Cuda()
