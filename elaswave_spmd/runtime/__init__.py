"""Processes, links and the execution of placements. See README.md in this room."""

from __future__ import annotations

from elaswave_spmd.runtime.links import CONTROLLER, Links, socket_directory
from elaswave_spmd.runtime.mailbox import ControllerGone, Envelope, Interrupted, Item, Mailbox, PeerClosed
from elaswave_spmd.runtime.zygote import Exited, Zygote

__all__ = [
    "CONTROLLER",
    "ControllerGone",
    "Envelope",
    "Exited",
    "Interrupted",
    "Item",
    "Links",
    "Mailbox",
    "PeerClosed",
    "Zygote",
    "socket_directory",
]
