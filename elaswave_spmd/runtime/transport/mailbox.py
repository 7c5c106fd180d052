"""Mailbox: the single queue through which everything from outside reaches a process.

Messages, closed links, the end of the controller and interruptions all become items of one queue. Event loops put
items; one thread (the training thread, or the controller's main thread) removes them. Neither side waits for the other
to finish anything, so no thread is stranded in a wait that only a remote process could end. This module needs neither
zmq nor torch: the simulated cluster files into the same class.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from elaswave_spmd.errors import LinksError, headline_of


@dataclass(frozen=True, slots=True)
class Envelope:
    """One message.

    The address of a payload is a multiple of 8, but not necessarily of more. A kernel's result may depend on alignment,
    so code that gives a payload to such a kernel copies it into aligned memory first (boundary tensors). Elementwise
    sums may read it in place.

    Args:
        sender: peer id of the sender.
        header: the encoded message.
        payloads: contiguous bytes; valid while referenced.
    """

    sender: int
    header: bytes
    payloads: tuple[memoryview, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The link to `peer` is closed: its process ended, the connection broke, or the connect was refused.

    Filed once per `Links.connect`; calling that again makes another link. Messages that the peer sent before its end
    may still follow this notice, and stay valid.

    Args:
        peer: peer id.
        was_linked: False if there was no link to this member (`Links.drop_all_but`) and a message to it was lost.
    """

    peer: int
    was_linked: bool = True


@dataclass(frozen=True, slots=True)
class ControllerLost:
    """The controller's process has ended without stopping its workers."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Another thread or a signal handler of this process called `Mailbox.interrupt(reason)`."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReadMark:
    """All messages that had arrived at this process's links before the time `at` were filed before this item.

    It answers `Links.mark`. Messages that wait in the sockets are read by another thread than the one that handles
    them, and while that one is busy, few are filed: so the length of the queue does not show how far behind it is.

    Args:
        at: as given to `Links.mark`.
    """

    at: float


@dataclass(frozen=True, slots=True)
class LinksFailed:
    """Nothing is received any more: an exception has ended the thread of this process's links.

    It is never returned as an item: `take_all` and `get` raise it. So no process goes on without receiving anything,
    whatever it is waiting for.
    """

    error: BaseException

    def to_error(self) -> LinksError:
        """The error that ends this process."""
        return LinksError(f"this process cannot receive messages any more: {headline_of(self.error)}")


@dataclass(frozen=True, slots=True)
class Request:
    """A request from outside the run (`ctl`).

    Args:
        body: the decoded JSON, unchecked.
        reply: sends the answer, which must be JSON-ready. To be called once; never blocks.
        is_awaited: False if whoever asked has gone without an answer, and so must take the request for one that was not
            followed. Any thread; never blocks.
    """

    body: Mapping[str, Any]
    reply: Callable[[Mapping[str, Any]], None]
    is_awaited: Callable[[], bool] = lambda: True


Item: TypeAlias = Envelope | PeerClosed | ControllerLost | Interrupted | ReadMark | LinksFailed | Request


class Source(Protocol):
    """A source of messages that are filed only when the consuming thread asks for them (shared_inbox.py)."""

    def drain(self) -> None:
        """File all messages that have arrived."""
        ...

    def sleeps(self) -> bool:
        """Have `Mailbox.wake` called when the next message arrives. Returns False if one has arrived already."""
        ...


class Mailbox:
    """A queue of items for any number of putting threads and exactly one consuming thread.

    Items of one sender stay in the order in which they were put.

    Args:
        tap: called with every item first, in the thread that puts it. If it returns True the item is not queued. It is
            for messages that are answered while the consuming thread computes (LinkProbe's). It must be short and must
            not block.
    """

    def __init__(self, tap: Callable[[Item], bool] | None = None) -> None:
        self._tap = tap
        self._source: Source | None = None
        self._items: deque[Item] = deque()
        # A lock that serves as a bell: locked means "nothing new since the consumer last looked". A bare lock wakes its
        # waiter through one semaphore, which costs a fraction of what Condition does in Python code. The deque itself
        # needs no lock.
        self._bell = threading.Lock()
        self._bell.acquire()

    def __len__(self) -> int:
        return len(self._items)

    def attach(self, source: Source) -> None:
        """Make the consumer look for messages in this source as well."""
        self._source = source

    def put(self, item: Item, *, wake: bool = True) -> None:
        """File `item` and wake the consumer. Any thread; never blocks.

        Args:
            wake: False if this is called in the consuming thread, which need not be woken.
        """
        if self._tap is not None and self._tap(item):
            return
        self._items.append(item)
        if wake:
            self.wake()

    def wake(self) -> None:
        """Have the consumer look for items. Any thread; never blocks."""
        try:  # noqa: SIM105  (the hot path: a context manager costs ten times the call)
            self._bell.release()
        except RuntimeError:
            pass  # it has rung already; the consumer looks at the queue after acquiring the bell, so it sees this item

    def interrupt(self, reason: str) -> None:
        """File `Interrupted(reason)`, in order with everything else."""
        self.put(Interrupted(reason))

    def take_all(self) -> list[Item]:
        """Remove and return everything filed so far, oldest first; never blocks.

        Raises:
            RunError: nothing can be received any more. Raised once; items that were filed before are lost.
        """
        if self._source is not None:
            self._source.drain()
        items = self._items
        if not items:  # the usual case: a worker calls this between any two layers
            return []
        found = [items.popleft() for _ in range(len(items))]
        for item in found:
            if isinstance(item, LinksFailed):
                raise item.to_error() from item.error
        return found

    def wait(self, timeout: float | None = None) -> bool:
        """Block until there is an item (True) or `timeout` seconds have passed (False). None waits without a limit."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        # The bell may have rung for an item that was removed earlier: hence the loop.
        while not self._has_items():
            left = deadline - time.monotonic()
            if left <= 0 or not self._bell.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
                return self._has_items()
        return True

    def _has_items(self) -> bool:
        """True if there is an item. If not, the bell will ring when one comes."""
        if self._source is not None:
            # A message of the source may yield no item (it was rejected, or `tap` took it), so drain until it sleeps.
            while not self._items and not self._source.sleeps():
                self._source.drain()
        return bool(self._items)

    def get(self, timeout: float | None = None) -> Item | None:
        """Remove and return the oldest item, waiting up to `timeout` seconds for one; None if there was none.

        Raises:
            RunError: nothing can be received any more. Raised once, after all items that were filed before.
        """
        item = self._items.popleft() if self.wait(timeout) else None
        if isinstance(item, LinksFailed):
            raise item.to_error() from item.error
        return item


class SelectableMailbox(Mailbox):
    """A mailbox for processes that also wait for other descriptors, in a select loop.

    `fileno` is readable whenever `take_all` would return something, and sometimes when it would not.
    """

    def __init__(self) -> None:
        super().__init__()
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        self._read = read
        self._write = write

    def put(self, item: Item, *, wake: bool = True) -> None:
        super().put(item, wake=wake)
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so it is readable already
            os.write(self._write, b"\0")  # after the item is filed, so that the consumer finds it when it wakes

    def take_all(self) -> list[Item]:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass
        return super().take_all()

    def fileno(self) -> int:
        return self._read

    def close(self) -> None:
        """Close the pipe. To be called after the last `put`."""
        os.close(self._read)
        os.close(self._write)
