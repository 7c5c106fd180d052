"""Where the members of a stage's process group meet: a TCPStore of the run, served by the controller.

The store asks nobody who they are, and c10d's groups have no secrets either: what goes through them (parameters) is
readable and writable for anybody who reaches these addresses. Links, which carry everything else, are authenticated.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.runtime.devices.process_group import GroupInBackground
from elaswave_spmd.runtime.transport.tcp_store import reach_store, serve_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

_CONNECT_S = 30.0


class GroupStore:
    """Serves the store on an address of this machine, at a port that is free.

    Raises:
        ConfigError: no port of that address can be had.
    """

    def __init__(self, host: str) -> None:
        try:
            listener = socket.create_server((host, 0))
        except OSError as error:
            raise ConfigError(
                "the groups of stages meet at a port of the controller's machine",
                got=f"{host}: {error.strerror or error}",
                where="runtime.collectives=group",
                fix="runtime.collectives=links",
            ) from error
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._store: TCPStore | None = serve_store(listener, host, _CONNECT_S)

    def close(self) -> None:
        """Stop serving; idempotent."""
        self._store = None


def group_of(device: Device, address: str, host: str, timeout_s: float) -> GroupInBackground:
    """The group of a worker's stage, of the backend that its device has; nothing is opened yet.

    Args:
        address: of the run's `GroupStore`.
        host: address of this machine at which the others reach it.
        timeout_s: of making a group once all its members are there, and of a broadcast.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    kind, shrinks = device.kind, device.kind.capabilities.shrinks_groups
    store_host, _, port = address.rpartition(":")

    def open_store(prefix: str) -> Any:
        store = reach_store(store_host, int(port), _CONNECT_S)
        return dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]

    def broadcast(backend: Any, values: torch.Tensor, root: int) -> Any:
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
        return backend.broadcast([values], options)

    return GroupInBackground(
        lambda store, rank, size: kind.make_group(store, rank, size, timedelta(seconds=timeout_s), host),
        broadcast,
        open_store,
        lambda: torch.zeros(1, device=device.place),
        timeout_s=timeout_s,
        enter=device.enter_thread,
        abort=kind.abort_group,
        shrink=(lambda backend, gone: backend.shrink(gone, c10d.SHRINK_ABORT, None)) if shrinks else None,
    )
