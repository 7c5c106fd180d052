"""Requirements of a machine and of the environment that several kinds of devices share."""

from __future__ import annotations

from collections.abc import Mapping

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices.kind import Island, Missing
from elaswave_spmd.runtime.devices.machine import Machine

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""The variable by which torch decides if `import torch` also imports the backends of other packages."""


def missing_torch(machine: Machine) -> tuple[Missing, ...]:
    """The things that `import torch` lacks: torch itself, or what a backend needs that torch imports by itself."""
    if machine.version("torch") is None:
        return (Missing("torch", "pip install torch"),)
    loads = machine.environment.get(AUTOLOAD, "1") == "1"
    if loads and machine.version("torch_npu") is not None and not has_cann(machine):
        what = f"{AUTOLOAD}=0 (torch_npu is installed and CANN is not, so that `import torch` itself fails)"
        return (Missing(what, f"export {AUTOLOAD}=0, or pip uninstall torch_npu"),)
    return ()


def has_cann(machine: Machine) -> bool:
    """True if the dynamic loader finds Ascend's libraries."""
    return machine.has_library("hccl")


def check_one_device(kind: str, island: Island) -> None:
    """Check that workers are not given several devices each. For kinds without `capabilities.islands`.

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
    """The wanted variables, after a check that none of them is set to another value already.

    Args:
        given: the environment that workers would inherit.
        wanted: variable -> the value that workers need.
        why: variable -> what its value decides, for the error.

    Raises:
        ConfigError: a variable has another value already.
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
