"""Ports of this machine for the programs of tests."""

from __future__ import annotations

import os
import secrets

from elaswave_spmd.runtime.transport import free_ports

_FIRST, _EACH, _PROCESSES = 30_000, 270, 10
"""Each process of pytest-xdist has ports of its own: another one could draw a port before the program listens there for
which it is. They are above those that the product draws itself."""


def free_port() -> int:
    """A port at 127.0.0.1 at which nobody listens, drawn at random, and by no process of tests beside this one.

    It is below those that the kernel gives to connections and to port 0: another test's connection would take such a
    port between this function and the program that is to listen there.
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PROCESSES
    return free_ports.free_port("127.0.0.1", _FIRST + _EACH * process + secrets.randbelow(_EACH))
