"""The store at which the members of a stage's process group meet: a TCPStore of the run, served by the controller.

Neither the store nor the groups of c10d's libraries authenticate their peers: any process that can reach their ports
can connect (docs/security.md).
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from elaswave_spmd.conf.schema import RuntimeSettings
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.transport.tcp_store import connect_store, serve_store

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

_CONNECT_S = 30.0


def group_host(runtime: RuntimeSettings, host: str) -> str:
    """The address of this machine on which the store and the groups listen: loopback for a run on one machine.

    Args:
        host: the address on which links listen.
    """
    return "127.0.0.1" if runtime.rendezvous is None else host


class GroupStore:
    """The controller's end of the store: serves it at a free port of an address of this machine, until `close`.

    Raises:
        ConfigError: no port of that address can be listened on.
    """

    def __init__(self, host: str) -> None:
        try:
            listener = socket.create_server((host, 0))
        except OSError as error:
            raise ConfigError(
                f"the controller cannot listen on {host} ({error.strerror or error})",
                rule="the members of a process group meet at a store on the controller's machine",
                where="runtime.collectives=group",
                fix="runtime.collectives=links",
            ) from error
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._store: TCPStore | None = serve_store(listener, host, _CONNECT_S)

    def close(self) -> None:
        """Stop serving; closing again is allowed."""
        self._store = None


def connect_group_store(address: str, prefix: str) -> Store:
    """A worker's connection to the run's `GroupStore`, for the keys below a prefix. Every caller gets its own.

    Args:
        address: `GroupStore.address`.
    """
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    host, _, port = address.rpartition(":")
    return PrefixStore(prefix, connect_store(host, int(port), _CONNECT_S))
