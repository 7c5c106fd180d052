"""The choice of the device that a run's workers compute on: the checks of this machine, and how workers start.

Does not import torch: torch_npu without CANN breaks `import torch`, and that must be reported before it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from elaswave_spmd.conf.schema import EMULATED, GROUP, Settings
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices import (
    Capabilities,
    DeviceKind,
    Island,
    Machine,
    ThisMachine,
    check_usable,
    device_names,
    device_of,
)
from elaswave_spmd.runtime.processes.fork_server_client import Method

_INDUCTOR = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""One thread means no pool of compiler processes, which would start in the process that workers are forked from."""

_COMPILER = "torch._inductor.compile_fx"


@dataclass(frozen=True)
class WorkerStart:
    """The way in which worker processes are made on one machine.

    Args:
        environment: variables that are set for them.
        preload: modules that the fork server imports once for all workers, besides those that it always imports.
        method: "fork" (from the fork server) or "spawn" (a fresh interpreter for each worker).
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    method: Method = "fork"

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in sorted(self.environment.items()))


def kind_of(settings: Settings) -> DeviceKind:
    """The kind of device that layer programs run on; the CPU for `runtime.device=emulated`."""
    name = settings.runtime.device
    return device_of("cpu" if name == EMULATED else name)


def worker_start(settings: Settings, machine: Machine | None = None) -> WorkerStart:
    """Check that the settings' device can be used on this machine, and choose how workers are started for it.

    Args:
        machine: None: this machine.

    Raises:
        ConfigError: the machine lacks something that the device needs; a variable is set to a value that contradicts
            the settings; the settings ask for several devices per worker, for `runtime.compile` or for
            `runtime.collectives=group`, and the device does not support it.
    """
    machine, kind = machine or ThisMachine(), kind_of(settings)
    check_usable(kind.name, machine, also=(EMULATED,))
    island = Island(settings.mesh.shape.island_size, settings.runtime.threads_per_worker)
    if settings.runtime.collectives == GROUP:
        check_collectives(settings)
    environment, preload = kind.environment(machine.environment, island), kind.capabilities.preload
    if settings.runtime.collectives == GROUP:
        environment |= kind.group_environment(machine.environment)
    if settings.runtime.compile:
        check_compile(settings, machine)
        environment |= _INDUCTOR
        if kind.capabilities.forks_compiler:
            preload = (*preload, _COMPILER)
    return WorkerStart(environment, preload, "fork" if kind.capabilities.forks else "spawn")


def _names(wanted: Callable[[Capabilities], object]) -> str:
    """The kinds of device that have a capability."""
    return ", ".join(name for name in device_names() if wanted(device_of(name).capabilities))


def check_collectives(settings: Settings) -> None:
    """Check that the device has a library for process groups, as `runtime.collectives=group` needs.

    Raises:
        ConfigError: it has none.
    """
    if kind_of(settings).capabilities.collectives is not None:
        return
    raise ConfigError(
        f"runtime.collectives=group is not possible with runtime.device={settings.runtime.device}",
        rule="a process group needs a library (gloo, NCCL, HCCL) that copies from and to the device's memory",
        where="runtime.collectives=group",
        exists=_names(lambda can: can.collectives),
        fix="runtime.collectives=links",
    )


def check_compile(settings: Settings, machine: Machine) -> None:
    """Check that `runtime.compile` is possible: the device runs eager torch, and the machine has a C++ compiler.

    Raises:
        ConfigError: one of the two is missing.
    """
    device = settings.runtime.device
    if device == EMULATED or not device_of(device).capabilities.inductor:
        raise ConfigError(
            f"runtime.compile=true is not possible with runtime.device={device}",
            rule="torch.compile makes layer programs only for devices that run eager torch",
            where="runtime.compile=true",
            exists=_names(lambda can: can.inductor),
            fix="runtime.compile=false",
        )
    compiler = cxx(machine)
    if not machine.has_program(compiler):
        raise ConfigError(
            f"runtime.compile=true finds no C++ compiler {compiler}",
            rule="torch.compile needs a C++ compiler on every machine",
            where="runtime.compile=true",
            fix="install g++, or name a compiler in the variable CXX, or runtime.compile=false",
        )


def cxx(machine: Machine) -> str:
    """The C++ compiler that torch.compile uses."""
    return machine.environment.get("CXX", "g++")
