"""Server and client ends of c10d's TCPStore. Only calls import torch, not this module."""

from __future__ import annotations

from datetime import timedelta
from socket import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


def serve_store(listener: socket, host: str, timeout_s: float) -> TCPStore:
    """Serve a store for as long as the returned object is referenced.

    Args:
        listener: a listening socket; the store takes it over.
        host: address at which this process itself reaches it.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    port, timeout = listener.getsockname()[1], timedelta(seconds=timeout_s)
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A new connection to a served store."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
