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

    A payload starts at a multiple of 8 bytes, no more: code that feeds one to a kernel whose bits may depend on
    alignment copies it into aligned memory first (boundary tensors); elementwise sums may read it where it lies.

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
        was_linked: False if there was no link, by `Links.drop_all_but`, and something was to be sent on it.
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
class LinksFailed:
    """Nothing is received any more: an exception has ended the thread of this process's links.

    Nobody gets it as an item: `take_all` and `get` raise it, so that no process goes on deaf, whatever it waits for.
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
        reply: sends the answer, JSON-ready; to be called once; never blocks.
    """

    body: Mapping[str, Any]
    reply: Callable[[Mapping[str, Any]], None]


Item: TypeAlias = Envelope | PeerClosed | ControllerLost | Interrupted | LinksFailed | Request


class Source(Protocol):
    """A source of messages that nobody files until the consumer asks for them (shared_inbox.py)."""

    def drain(self) -> None:
        """File everything that is there."""
        ...

    def sleeps(self) -> bool:
        """Have the mailbox woken, by `Mailbox.wake`, when something comes. Returns False if something is there."""
        ...


class Mailbox:
    """A queue of items for any number of putting threads and exactly one consuming thread.

    Items of one sender stay in the order in which they were put.

    Args:
        tap: sees every item first, in the thread that puts it; returning True keeps the item out of the queue. It
            serves messages that are answered while the consuming thread computes (LinkProbe's). It must be short and
            must not block.
    """

    def __init__(self, tap: Callable[[Item], bool] | None = None) -> None:
        self._tap = tap
        self._source: Source | None = None
        self._items: deque[Item] = deque()
        # Locked means "nothing new since the consumer last looked". A bare lock wakes its waiter through one semaphore,
        # a fraction of what Condition does in Python code; the deque itself needs no lock.
        self._bell = threading.Lock()
        self._bell.acquire()

    def __len__(self) -> int:
        return len(self._items)

    def attach(self, source: Source) -> None:
        """Have the consumer look for messages in a source too."""
        self._source = source

    def put(self, item: Item, *, wake: bool = True) -> None:
        """File `item` and wake the consumer. Any thread; never blocks.

        Args:
            wake: False if this is the consumer's thread.
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
            pass  # rung already; the consumer looks at the queue after acquiring the bell, so it sees this item

    def interrupt(self, reason: str) -> None:
        """File `Interrupted(reason)`, in order with everything else."""
        self.put(Interrupted(reason))

    def take_all(self) -> list[Item]:
        """Remove and return everything filed so far, oldest first; never blocks.

        Raises:
            RunError: nothing can be received any more. Once; what was filed before is lost with it.
        """
        if self._source is not None:
            self._source.drain()
        items = self._items
        if not items:  # as between two layers, mostly
            return []
        found = [items.popleft() for _ in range(len(items))]
        for item in found:
            if isinstance(item, LinksFailed):
                raise item.to_error() from item.error
        return found

    def wait(self, timeout: float | None = None) -> bool:
        """Block until an item is there (True) or `timeout` seconds have passed (False). None waits without a limit."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        # The bell may have rung for an item that was removed earlier: hence the loop.
        while not self._has_items():
            left = deadline - time.monotonic()
            if left <= 0 or not self._bell.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
                return self._has_items()
        return True

    def _has_items(self) -> bool:
        """True if something is there; else the bell will ring when something comes."""
        if self._source is not None:
            # What was there may be of a kind that nobody is told of, so look until the source sleeps.
            while not self._items and not self._source.sleeps():
                self._source.drain()
        return bool(self._items)

    def get(self, timeout: float | None = None) -> Item | None:
        """Remove and return the oldest item, waiting up to `timeout` seconds for one; None if there was none.

        Raises:
            RunError: nothing can be received any more. Once, after all that was filed before.
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
        with contextlib.suppress(BlockingIOError):  # a full pipe is readable as well
            os.write(self._write, b"\0")  # after the item is filed: a woken consumer finds it

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
