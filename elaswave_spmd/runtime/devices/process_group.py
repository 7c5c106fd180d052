"""A process group whose members change: given up and made anew in the background, while links go on serving.

What it is for: copying bytes between the workers of a stage (parameters to those that compute with them) by NCCL, HCCL
or gloo. Sums never go through it: their order would be the library's, and with it the bits. A new group takes seconds,
and HCCL has no way to take a member out of one. A mesh epoch does not wait for that: the old group is given up at once,
links carry everything meanwhile, and the new one is used from a step on for which all its members have voted so.

A group here is a backend object of c10d by itself, none that torch.distributed knows: there may be several at a time,
so one that hangs while it is made, or ends, keeps nobody waiting.

Whoever drops the last reference to a backend, or to a broadcast in it, runs its destructor, and gloo's waits for its
peers: for seconds, if one of them stands still. That must never be the training thread, which would not answer a
Prepare meanwhile, nor the thread that makes the next group. So a group is handed over, in a list of one, to a thread
that only ends it, and the others keep nothing of it: no local variable, no broadcast, and no exception, since a
traceback refers to the frames it went through.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.runtime.transport.tcp_store import connect_store, serve_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1  # between two looks at who is there, or whether a newer epoch is
_ALL, _LEFT = "all", "left"

Make = Callable[[Any, int, int], Any]
"""(store, rank, size) -> a backend of c10d; connects, or does so at the first collective."""


class Broadcast:
    """A broadcast under way that has failed, too, when it takes too long or cannot be asked for.

    Nobody but this ends it: c10d's own watchdogs would make one that they have ended look like one that is complete.
    """

    def __init__(self, work: Any, values: Any, patience_s: float) -> None:
        self._work, self.values, self._patience_s = work, values, patience_s
        self._until = time.monotonic() + patience_s
        self._failure: str | None = None  # no exception: its traceback would refer to this

    def is_completed(self) -> bool:
        """Whether it has ended, in success or failure."""
        if self._failure is not None or self._is_done():
            return True
        if time.monotonic() < self._until:
            return False
        self._failure = f"a broadcast was not complete within {self._patience_s:g} s"
        return True

    def _is_done(self) -> bool:
        try:
            return self._work.is_completed()
        except RuntimeError as error:
            self._failure = str(error) or type(error).__name__
            return True

    def wait(self) -> None:
        """Of one that has ended: raises RuntimeError if it has failed; what is queued from now on sees its values."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        self._work.wait()

    @property
    def is_over(self) -> bool:
        """Whether the library does not touch its memory any more."""
        return self._failure is None and self._is_done()


@dataclass(frozen=True)
class _Group:
    """A group that is made. `under_way`: its broadcasts; their memory is kept, whoever has given them up."""

    epoch: int
    members: tuple[int, ...]
    backend: Any
    under_way: deque[Broadcast] = field(default_factory=deque)

    def shrinks_to(self, members: tuple[int, ...]) -> bool:
        """Whether these are some of its members and not all, in their order."""
        return members == tuple(member for member in self.members if member in members) != self.members


class GroupInBackground:
    """The group of one worker's stage.

    Args:
        make: makes this process's end of a group; all members call it together.
        broadcast: (backend, values, rank of the root in the group) -> c10d's work, begun.
        open_store: opens the store that all workers of the run share, one connection for each caller.
        token: a small tensor on the device; a first broadcast of it has the library connect.
        timeout_s: of making a group once all its members are there, and of a broadcast.
        enter: called first in every thread of its own: gives it the device, and a stream of its own there.
        abort: (backend, reason): ends what is under way at once, where the library can.
        shrink: (backend, ranks in it that are gone) -> the backend of the others; None: the library cannot.
    """

    def __init__(
        self,
        make: Make,
        broadcast: Callable[[Any, Any, int], Any],
        open_store: Callable[[str], Any],
        token: Callable[[], Any],
        *,
        timeout_s: float,
        enter: Callable[[], None] = lambda: None,
        abort: Callable[[Any, str], None] = lambda backend, reason: None,
        shrink: Callable[[Any, list[int]], Any] | None = None,
    ) -> None:
        self._make, self._broadcast, self._open_store, self._token = make, broadcast, open_store, token
        self._timeout_s, self._enter, self._abort, self._shrink = timeout_s, enter, abort, shrink
        self._lock = threading.Lock()
        self._epoch = -1
        self._made: _Group | None = None  # of the newest epoch, sound, and to be used
        self.failure: str | None = None
        """Why the newest group could not be made; links serve on. No exception: its traceback refers to the group."""

    @property
    def ready(self) -> int | None:
        """The newest epoch if its group is made: all members have met."""
        made = self._made
        return made.epoch if made is not None else None

    def change(self, epoch: int, members: Sequence[int], rank: int) -> None:
        """The members of a stage in a newer mesh epoch: links serve from now on, and a group is made in the background.

        Args:
            members: in the order of their ranks within the group. One alone needs no group.
        """
        assert rank in members and epoch > self._epoch, (epoch, members, rank)
        with self._lock:
            old = self._taken()
            self._epoch = epoch
            self.failure = None
        arguments = (old, epoch, tuple(members), rank)
        threading.Thread(target=self._replace, args=arguments, name=f"group of epoch {epoch}", daemon=True).start()

    def broadcast(self, values: Any, root: int) -> Broadcast:
        """Begins a broadcast by worker `root`.

        Raises:
            RuntimeError: the library refuses, as it knows of a peer that is gone.
        """
        made = self._made
        assert made is not None, self._epoch
        while made.under_way and made.under_way[0].is_over:
            made.under_way.popleft()
        work = self._broadcast(made.backend, values, made.members.index(root))
        made.under_way.append(Broadcast(work, values, self._timeout_s))
        return made.under_way[-1]

    def give_up(self) -> None:
        """The group has failed: what is under way in it ends, and no group is made of it.

        The caller has dropped its broadcasts before.
        """
        with self._lock:
            old = self._taken()
        self._end_beside(old, "it has failed")

    def _taken(self) -> list[_Group]:
        """The group that has been made, or nothing, to be handed over; it is not used from now on."""
        taken = [] if self._made is None else [self._made]
        self._made = None
        return taken

    # ---- in threads of their own

    def _replace(self, old: list[_Group], epoch: int, members: tuple[int, ...], rank: int) -> None:
        try:
            self._enter()
            if self._shrink is None or not any(group.shrinks_to(members) for group in old):
                self._end_beside(old, f"mesh epoch {epoch}")
                old = []
            if len(members) == 1:
                return
            # Other stages meet in the same store, and have other members.
            store = self._open_store(f"epoch{epoch}/{members[0]}")
            if old:
                store.add(f"has{old[0].epoch}", 1)
            if not self._meets(store, epoch, len(members)):
                return
            backend = None
            if old and store.add(f"has{old[0].epoch}", 0) == len(members):
                backend = self._shrunk(old[0], members)
            if backend is None:
                backend = self._make(store, members.index(rank), len(members))
            self._connect(backend)
            made = _Group(epoch, members, backend)
            with self._lock:
                if current := epoch == self._epoch:
                    self._made = made
            if not current:
                self._end([made], f"mesh epoch {epoch} is over")
        except Exception as error:  # a member is lost while they connect: the next mesh epoch makes another
            with self._lock:
                if epoch == self._epoch:
                    self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._end_beside(old, f"mesh epoch {epoch}")

    def _meets(self, store: Any, epoch: int, number: int) -> bool:
        """Waits for all members, as long as no newer epoch is there: then either all go on to make a group, or nobody.

        Making one cannot be broken off, so nobody begins while another may not come.
        """
        if store.add("here", 1) == number:
            store.compare_set("fate", "", _ALL)
        # The store's own `wait` would complain on stderr whenever its time is up.
        if not _look_until(lambda: store.check(["fate"]), lambda: self._is_past(epoch)):
            store.compare_set("fate", "", _LEFT)
        return store.get("fate") == _ALL.encode()

    def _connect(self, backend: Any) -> None:
        """The library connects at the first collective: now, and not in the middle of a step."""
        first = Broadcast(self._broadcast(backend, self._token(), 0), None, self._timeout_s)
        _look_until(first.is_completed)
        first.wait()

    def _shrunk(self, old: _Group, members: tuple[int, ...]) -> Any:
        """The backend without members that are gone; None: an older library, the same on all members."""
        assert self._shrink is not None
        with suppress(AttributeError, TypeError, RuntimeError):
            return self._shrink(old.backend, [i for i, member in enumerate(old.members) if member not in members])
        return None

    def _end_beside(self, handed_over: list[_Group], reason: str) -> None:
        """To end a group may take as long as what hangs in it."""
        if handed_over:
            threading.Thread(target=self._end, args=(handed_over, reason), daemon=True).start()

    def _end(self, handed_over: list[_Group], reason: str) -> None:
        group = handed_over.pop()
        with suppress(Exception):  # it is given up, in whatever state
            self._enter()
            self._abort(group.backend, reason)

    def _is_past(self, epoch: int) -> bool:
        with self._lock:
            return epoch != self._epoch


def _look_until(condition: Callable[[], bool], gives_up: Callable[[], bool] = lambda: False) -> bool:
    """Looks, less and less often, until the condition holds; False: it is given up before."""
    pause = _PAUSE_S
    while not condition():
        if gives_up():
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True


# Where the members of a stage's process group meet: a TCPStore of the run, served by the controller.
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
                f"the controller cannot listen on {host} ({error.strerror or error})",
                rule="the members of a process group meet at a store on the controller's machine",
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
        store = connect_store(store_host, int(port), _CONNECT_S)
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
