"""PyTorch/XLA: a worker is an island, and its layer programs are compiled over its local devices.

Programs take and return host tensors, so state, links and recovery are the same as on the CPU. The XLA client is the
CPU's or that of a PJRT plugin, as the variable PJRT_DEVICE says.
"""

from __future__ import annotations

from collections.abc import Mapping

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices.kind import Capabilities, Device, Island, MemoryFigures, Missing, WithoutGroups
from elaswave_spmd.runtime.devices.machine import Machine, same_release
from elaswave_spmd.runtime.devices.requirements import missing_torch, set_variables

PLUGINS = "torch_xla.plugins"
"""The group of entry points by which packages register PJRT plugins."""

_REGISTERS = "XLA_REGISTER_INSTALLED_PLUGINS"
_CLIENT, _DEVICES, _FLAGS = "PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS"
_WHY = {
    _DEVICES: "the number of local devices of an island (mesh.tp x mesh.fsdp)",
    "XLA_NO_SPECIAL_SCALARS": "if a program with an input of 0 or 1 is compiled anew",
    _REGISTERS: "if torch_xla finds the plugin that PJRT_DEVICE names",
    "NPROC": "the number of threads that XLA computes with (runtime.threads_per_worker)",
}
_CHANGE_NUMBERS = (
    *("XLA_USE_BF16", "XLA_USE_FP16", "XLA_DOWNCAST_BF16", "XLA_DOWNCAST_FP16", "XLA_USE_32BIT_LONG"),
    *("XLA_USE_EAGER_DEBUG_MODE", "XLA_DISABLE_FUNCTIONALIZATION"),
)
_WORLDS = ("WORLD_SIZE", "PJRT_LOCAL_PROCESS_COUNT")
_QUIET = "TF_CPP_MIN_LOG_LEVEL"
_FLAGS_OF_THREADS = ("--xla_cpu_multi_thread_eigen", "--xla_force_host_platform_device_count")


class Xla(WithoutGroups):
    """`runtime.device=xla`: on the CPU's client, or on that of a plugin (PJRT_DEVICE)."""

    name = "xla"
    capabilities = Capabilities(
        streams=False,
        pinned_copies=False,
        dtypes=("fp32", "bf16"),
        collectives=None,  # inside an island XLA makes its own; between islands there are links
        state="host",
        compiles=True,
        islands=True,
        forks=True,  # importing torch_xla opens no client, which a fork would break
        preload=("torch_xla", "torch_xla.runtime", "torch_xla.distributed.spmd", "torch_xla.debug.metrics"),
    )

    def missing(self, machine: Machine) -> tuple[Missing, ...]:
        found = list(missing_torch(machine))
        torch, torch_xla = machine.version("torch"), machine.version("torch_xla")
        own = "in an environment of its own: pip install -e '.[xla]'"
        if torch_xla is None:
            found.append(Missing("torch_xla", own))
        elif torch is not None and not same_release(torch, torch_xla):
            found.append(Missing(f"torch_xla for torch {torch} (this is {torch_xla})", own))
        client = machine.environment.get(_CLIENT, "CPU")
        if torch_xla is not None and client != "CPU" and client not in map(str.upper, machine.entry_points(PLUGINS)):
            what = f"a PJRT plugin for {_CLIENT}={client}: a package with an entry point {client} in {PLUGINS}"
            found.append(Missing(what, f"install one (examples/ has a skeleton), or unset {_CLIENT}"))
        return tuple(found)

    def model(self, machine: Machine) -> str:
        return ""

    def environment(self, given: Mapping[str, str], island: Island) -> dict[str, str]:
        client = given.get(_CLIENT, "CPU")
        for name in _CHANGE_NUMBERS:
            if given.get(name, "0") not in ("", "0"):
                raise _refused(name, given, "layer programs compute in runtime.dtype, with random keys of 64 bits")
        for name in _WORLDS:
            if given.get(name, "1") != "1":
                rule = "each worker is a torch_xla world of size 1; torch_xla would ignore any other size silently"
                raise _refused(name, given, rule)
        flags = given.get(_FLAGS, "")
        if any(flag in flags for flag in _FLAGS_OF_THREADS):
            rule = f"{', '.join(_FLAGS_OF_THREADS)} are set from mesh.tp, mesh.fsdp and runtime.threads_per_worker"
            raise _refused(_FLAGS, given, rule)
        wanted = {"XLA_NO_SPECIAL_SCALARS": "1"}
        if client == "CPU":
            single = "" if island.threads > 1 else " --xla_cpu_multi_thread_eigen=false"
            wanted |= {_DEVICES: str(island.devices), "NPROC": str(max(island.threads, island.devices))}
            flags = (flags + single).strip()
        else:
            wanted[_REGISTERS] = "1"
        return (
            set_variables(given, wanted, _WHY)
            | {_CLIENT: client, _QUIET: given.get(_QUIET, "2")}
            | ({_FLAGS: flags} if flags else {})
        )

    def open(self, index: int, island: Island) -> Device:
        import torch
        import torch_xla  # pyright: ignore[reportMissingImports]
        import torch_xla.core.xla_model as xm  # pyright: ignore[reportMissingImports]

        from elaswave_spmd.runtime.devices.host import HostDevice

        torch.set_num_threads(island.threads)

        def figures() -> MemoryFigures | None:
            try:
                info = xm.get_memory_info(torch_xla.device())
            except RuntimeError:  # the CPU's client does not report its memory
                return None
            return MemoryFigures(info["bytes_used"], info.get("peak_bytes_used", 0), info.get("bytes_limit"))

        return HostDevice(self, xm.wait_device_ops, figures)


def _refused(name: str, given: Mapping[str, str], rule: str) -> ConfigError:
    """The error for a variable that must not be set."""
    where = f"{name}={given[name]}"
    return ConfigError(f"{where} is set in the environment", rule=rule, where=where, fix=f"unset {name}")


KIND = Xla()
