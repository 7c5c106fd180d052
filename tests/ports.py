"""Ports of this machine for the programs of tests."""

from __future__ import annotations

import contextlib
import secrets
import socket

_FIRST, _LAST = 10_000, 32_000
"""Below those that the kernel gives to connections and to port 0: another test's connection would take the port
between this function and the program that is to listen there."""


def free_port() -> int:
    """A port at 127.0.0.1 at which nobody listens, drawn at random, so that tests side by side draw different ones."""
    for _ in range(1000):
        port = _FIRST + secrets.randbelow(_LAST - _FIRST)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no free port at 127.0.0.1")
