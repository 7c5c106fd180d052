"""Processes, links and the execution of placements. See README.md in this room."""

from __future__ import annotations

from elaswave_spmd.runtime.processes.fork_server_client import Exited, ForkServerClient
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links, socket_directory
from elaswave_spmd.runtime.transport.mailbox import ControllerGone, Envelope, Interrupted, Item, Mailbox, PeerClosed

__all__ = [
    "CONTROLLER",
    "ControllerGone",
    "Envelope",
    "Exited",
    "ForkServerClient",
    "Interrupted",
    "Item",
    "Links",
    "Mailbox",
    "PeerClosed",
    "socket_directory",
]
