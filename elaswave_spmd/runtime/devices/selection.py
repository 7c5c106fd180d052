"""The device that a run's workers compute on: whether it can be used on this machine, and how workers start for it.

Imports no torch: torch_npu without CANN breaks `import torch` itself, and that has to be said before it happens.
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
"""No pool of compiling processes: it would begin in the process that workers are forked from."""

_COMPILER = "torch._inductor.compile_fx"


@dataclass(frozen=True)
class WorkerStart:
    """How workers' processes are made on one machine.

    Args:
        environment: variables that they get.
        preload: modules, besides those that all workers need, that are imported once for all of them.
        method: forked from a process that has imported what they need, or each in a fresh interpreter.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    method: Method = "fork"

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in sorted(self.environment.items()))


def kind_of(settings: Settings) -> DeviceKind:
    """The kind of device that programs run on: the CPU for those that are emulated."""
    name = settings.runtime.device
    return device_of("cpu" if name == EMULATED else name)


def worker_start(settings: Settings, machine: Machine | None = None) -> WorkerStart:
    """How workers are to be started on this machine.

    Args:
        machine: None: this one.

    Raises:
        ConfigError: the machine lacks something that the device needs; a variable is set to a value that contradicts
            the settings; several devices for each worker, where a worker has one; `runtime.compile` or
            `runtime.collectives=group` where it cannot be.
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
        environment, preload = environment | _INDUCTOR, (*preload, _COMPILER)
    return WorkerStart(environment, preload, "fork" if kind.capabilities.forks else "spawn")


def _names(wanted: Callable[[Capabilities], object]) -> str:
    """The kinds of device that have a capability."""
    return ", ".join(name for name in device_names() if wanted(device_of(name).capabilities))


def check_collectives(settings: Settings) -> None:
    """Refuses `runtime.collectives=group` where a device's memory has no library for it.

    Raises:
        ConfigError: such a device.
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
    """Refuses `runtime.compile` where there is nothing to compile, or nothing to compile with.

    Raises:
        ConfigError: a device whose programs torch.compile does not make; no C++ compiler.
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
