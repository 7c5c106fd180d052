"""The kinds of devices by name, and the refusal of one that cannot be used."""

from __future__ import annotations

import importlib
import pkgutil

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices import kinds
from elaswave_spmd.runtime.devices.kind import DeviceKind, Missing
from elaswave_spmd.runtime.devices.machine import Machine, ThisMachine


def device_names() -> tuple[str, ...]:
    """The kinds that there are: the modules in kinds/."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(kinds.__path__)))


def device_of(name: str) -> DeviceKind:
    """The kind of device of this name, whether or not it can be used here.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in device_names():
        raise ConfigError(
            f"runtime.device={name} is not a kind of device",
            where=f"runtime.device={name}",
            exists=", ".join(device_names()),
            fix="use one of these",
        )
    kind: DeviceKind = importlib.import_module(f"{kinds.__name__}.{name}").KIND
    assert kind.name == name, (kind, name)
    return kind


def check_usable(name: str, machine: Machine | None = None, also: tuple[str, ...] = ()) -> DeviceKind:
    """The kind of device of this name, if this machine has what it needs. Imports no vendor module and no torch.

    Args:
        machine: None: this one.
        also: devices that are none of these kinds and work on any machine, to be named beside those that work here.

    Raises:
        ConfigError: with everything that is missing, how to get it, and what works here instead.
    """
    machine = machine or ThisMachine()
    kind = device_of(name)
    lacks = kind.missing(machine)
    if not lacks:
        return kind
    works = [other for other in device_names() if not device_of(other).missing(machine)]
    raise ConfigError(
        f"runtime.device={name} needs {_listed(lacks)}, not found on this machine",
        where=f"runtime.device={name}",
        exists=f"what works here: {', '.join([*works, *also]) or 'no device'}",
        fix="; ".join([*(lack.fix for lack in lacks), *(f"or runtime.device={other}" for other in works[:1])]),
    )


def _listed(lacks: tuple[Missing, ...]) -> str:
    *first, last = (lack.what for lack in lacks)
    return f"{', '.join(first)} and {last}" if first else last
