"""Ports of this machine at which nobody listens, for a program that is about to."""

from __future__ import annotations

import contextlib
import secrets
import socket

_FIRST, _LAST = 20_000, 30_000
"""Below those that the kernel gives to connections, and to port 0: one of these could be taken before it is used."""


def free_port(host: str, wanted: int = 0) -> int:
    """A port at an address of this machine: the wanted one if nobody listens there, else one drawn at random.

    Raises:
        OSError: there is none.
    """
    for _ in range(1000):
        port = wanted or _FIRST + secrets.randbelow(_LAST - _FIRST)
        wanted = 0
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    raise OSError(f"no free port at {host}")
