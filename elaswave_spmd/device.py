"""The device that a run's workers compute on: whether it can be used on this machine, and how workers start for it.

Imports no torch: torch_npu without CANN breaks `import torch` itself, and that has to be said before it happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices import DeviceKind, Island, Machine, ThisMachine, check_usable, device_of
from elaswave_spmd.runtime.zygote import Method
from elaswave_spmd.runtime_settings import EMULATED
from elaswave_spmd.settings import Settings


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
            the settings; several devices for each worker, where a worker has one.
    """
    machine, kind = machine or ThisMachine(), kind_of(settings)
    check_usable(kind.name, machine, also=(EMULATED,))
    if kind.capabilities.state == "device":
        raise ConfigError(
            "workers of this version keep their state in host memory",
            got=settings.runtime.device,
            where=f"runtime.device={settings.runtime.device}",
            exists="cpu, xla, emulated",
        )
    island = Island(settings.mesh.shape.island_size, settings.runtime.threads_per_worker)
    environment = kind.environment(machine.environment, island)
    return WorkerStart(environment, kind.capabilities.preload, "fork" if kind.capabilities.forks else "spawn")
