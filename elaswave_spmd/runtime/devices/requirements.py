"""What several kinds of devices ask of a machine or of the environment."""

from __future__ import annotations

from collections.abc import Mapping

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices.kind import Island, Missing
from elaswave_spmd.runtime.devices.machine import Machine

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Whether `import torch` imports the backends of other packages; read by torch."""


def missing_torch(machine: Machine) -> tuple[Missing, ...]:
    """What keeps `import torch` from working: a backend that torch loads by itself and that cannot be loaded."""
    if machine.version("torch") is None:
        return (Missing("torch", "pip install torch"),)
    loads = machine.environment.get(AUTOLOAD, "1") == "1"
    if loads and machine.version("torch_npu") is not None and not has_cann(machine):
        what = f"{AUTOLOAD}=0: torch_npu is installed and CANN is not, so that `import torch` itself fails"
        return (Missing(what, f"export {AUTOLOAD}=0, or pip uninstall torch_npu"),)
    return ()


def has_cann(machine: Machine) -> bool:
    """Whether the loader finds Ascend's libraries."""
    return machine.has_library("hccl")


def one_device(kind: str, island: Island) -> None:
    """Refuses an island of several devices.

    Raises:
        ConfigError: `mesh.tp` or `mesh.fsdp` above 1.
    """
    if island.devices > 1:
        raise ConfigError(
            f"mesh.tp and mesh.fsdp ask for {island.devices} devices for each worker, and a worker on "
            f"runtime.device={kind} has one device",
            rule="mesh.tp and mesh.fsdp lie inside one XLA program",
            where="mesh.tp, mesh.fsdp",
            fix="runtime.device=xla, or leave mesh.tp and mesh.fsdp out and use mesh.dp",
        )


def set_variables(given: Mapping[str, str], wanted: Mapping[str, str], why: Mapping[str, str]) -> dict[str, str]:
    """The wanted variables, all of them.

    Args:
        why: variable -> what its value decides.

    Raises:
        ConfigError: one is set otherwise already.
    """
    for name, value in wanted.items():
        if given.get(name, value) != value:
            raise ConfigError(
                f"{name}={given[name]} is set in the environment",
                rule=f"{name} is set for workers by this package, since it decides {why[name]}",
                where=f"{name}={given[name]}",
                exists=f"{name}={value}",
                fix=f"unset {name}",
            )
    return dict(wanted)
