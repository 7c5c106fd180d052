"""c10d's TCPStore, served and reached."""

from __future__ import annotations

from datetime import timedelta
from socket import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


def serve_store(listener: socket, host: str, timeout_s: float) -> TCPStore:
    """Serves a store as long as it is referred to.

    Args:
        listener: listens already; taken over.
        host: at which this process reaches it.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    port, timeout = listener.getsockname()[1], timedelta(seconds=timeout_s)
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def reach_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A connection of its own to a store."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
