"""Ports of this machine for the programs of tests."""

from __future__ import annotations

from elaswave_spmd.runtime.transport import free_ports


def free_port() -> int:
    """A port at 127.0.0.1 at which nobody listens, drawn at random, so that tests side by side draw different ones.

    It is below those that the kernel gives to connections and to port 0: another test's connection would take such a
    port between this function and the program that is to listen there.
    """
    return free_ports.free_port("127.0.0.1")
