"""The kinds of devices by name, and the check that a machine has what a kind needs."""

from __future__ import annotations

import importlib
import pkgutil

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices import kinds
from elaswave_spmd.runtime.devices.kind import DeviceKind, Missing
from elaswave_spmd.runtime.devices.machine import Machine, ThisMachine


def device_names() -> tuple[str, ...]:
    """The names of all kinds of devices. Each kind is one module in kinds/."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(kinds.__path__)))


def device_of(name: str) -> DeviceKind:
    """The kind of device with this name, which need not be usable on this machine.

    Raises:
        ConfigError: there is no such kind.
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
    """Check that a machine has what a kind of device needs. Imports neither torch nor vendor modules.

    Args:
        name: the name of the kind.
        machine: the machine; None for this one.
        also: values of `runtime.device` that are not kinds and work on any machine; the error offers them as well.

    Raises:
        ConfigError: names everything that is missing, how to get it, and the kinds that work on this machine.
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
