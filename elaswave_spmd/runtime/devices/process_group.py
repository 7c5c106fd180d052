"""A process group whose members change: it is abandoned and made anew in the background, while links carry the data.

The group copies bytes between the workers of a stage (partial sums to the primaries that add them, reduced gradients to
their mirrors, new parameters to the workers that compute with them) by NCCL, HCCL or gloo. It never sums gradients,
since the library would choose the order of the sum, and so the bits. Making a group takes a while, up to seconds. A
mesh epoch does not wait for that: the old group is abandoned at once, links carry everything meanwhile, and the new
group is used from the step on for which all of its members have voted to use it.

A group is a backend object of c10d by itself, unknown to torch.distributed. So there may be several at a time, and one
that hangs while it connects or ends blocks no other.

The thread that drops the last reference to a backend, or to a collective in it, runs the destructor, and gloo's
destructor waits for its peers: for seconds, if one of them is stopped. That must never happen in the training thread,
which could not answer a Prepare meanwhile, nor in the thread that makes the next group. So an abandoned group is handed
over, in a list of one, to a thread whose only task is to end it, and the others keep no reference to it: no local
variable, no collective, and no exception, since a traceback refers to the frames that it passed through. If that thread
cannot be started the list is kept until another one can.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.runtime.devices.group_store import connect_group_store

if TYPE_CHECKING:
    from torch import Tensor

_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1  # between two polls; the pause doubles from the first to the second
_ALL, _LEFT = "all", "left"  # outcomes of a meeting: all members came, or a member has left, as for a newer mesh epoch


class GroupLibrary(ABC):
    """The calls of a collective library that a group is made of, and the store at which its members meet.

    `DeviceGroups` has those of a device; tests have their own. A backend is an object of c10d.
    """

    @abstractmethod
    def open_store(self, prefix: str) -> Any:
        """Open a connection to the store that all workers of the run share, for the keys below a prefix."""
        ...

    @abstractmethod
    def make(self, store: Any, rank: int, size: int) -> Any:
        """Make this process's end of a group, a backend. All members call this together."""
        ...

    @abstractmethod
    def gather(self, backend: Any, share: Any, gathered: Any) -> Any:
        """Start an all-gather of shares of one size; this one's may lie in its place. Returns c10d's work."""
        ...

    @abstractmethod
    def exchange(self, backend: Any, sent: Any, received: Any, sent_sizes: list[int], received_sizes: list[int]) -> Any:
        """Start an all-to-all, uneven: elements to each member, and from each. Returns c10d's work."""
        ...

    @abstractmethod
    def token(self, size: int) -> Any:
        """A small tensor on the device. The first collectives, at which the library connects, are of such tensors."""
        ...

    def enter_thread(self) -> None:  # noqa: B027  (a library without threads needs none)
        """Give the calling thread the device, and a stream of its own. Called first in every thread that is started."""

    def abort(self, backend: Any, reason: str) -> None:  # noqa: B027  (a library that cannot is left to its time limit)
        """End everything in progress in a backend at once, if the library can."""


class Collective:
    """A collective in progress, with a time limit. It fails if it takes longer, or if the library reports an error.

    The limit is here and not in c10d: a collective that c10d's watchdogs have ended looks like one that is complete.

    Args:
        work: c10d's handle.
        values: the tensors that are sent or received; kept alive for the library until the collective has succeeded.
        timeout_s: the time limit, from now on.
        what: the kind of message that it stands for; "": not named.
    """

    def __init__(self, work: Any, values: Any, timeout_s: float, what: str = "") -> None:
        self.values = values
        self._work = work
        self._timeout_s = timeout_s
        self._name = f"a collective ({what})" if what else "a collective"
        self._until = time.monotonic() + timeout_s
        self._failure: str | None = None  # text, not an exception: its traceback would refer to this object

    def is_completed(self) -> bool:
        """True if it has ended, in success or failure. Does not wait."""
        if self._failure is not None or self._is_done():
            return True
        if time.monotonic() < self._until:
            return False
        self._failure = f"{self._name} was not complete within {self._timeout_s:g} s"
        return True

    def _is_done(self) -> bool:
        try:
            return self._work is None or self._work.is_completed()
        except RuntimeError as error:
            self._failure = str(error) or type(error).__name__
            return True

    def wait(self) -> None:
        """Order the device's later work after a collective that has ended, so that it sees the values.

        If it has succeeded, its memory is the caller's alone from now on: the next collective may be a whole step away.

        Raises:
            RuntimeError: the collective has failed.
        """
        if self._failure is not None:
            raise RuntimeError(self._failure)
        if self._work is not None:
            self._work.wait()
            self._work = self.values = None

    @property
    def is_over(self) -> bool:
        """True if it is known to have succeeded (`wait`), so that the library no longer accesses the values.

        A failed one may still be writing to them until its group is aborted, and c10d calls it completed as well.
        """
        return self._work is None


@dataclass(frozen=True)
class _Group:
    """A group that is connected.

    Args:
        epoch: the mesh epoch that it was made for.
        members: worker ids, in the order of their ranks in the group.
        backend: c10d's object.
        in_progress: its collectives, oldest first. They keep the tensors alive, even if the callers no longer do.
    """

    epoch: int
    members: tuple[int, ...]
    backend: Any
    in_progress: deque[Collective] = field(default_factory=deque)


class GroupInBackground:
    """The process group of the stage of one worker. The training thread calls it; the slow parts run in other threads.

    Args:
        library: makes groups and collectives.
        timeout_s: time limit of making a group once all its members have met, and of a collective.
        name: under which its members meet, where they have other groups besides that of their stage.
        gathers: the group is used for all-gathers as well, and connects for them.
    """

    def __init__(self, library: GroupLibrary, timeout_s: float, name: str = "", *, gathers: bool = True) -> None:
        self._library = library
        self._timeout_s = timeout_s
        self._name = name
        self._gathers = gathers
        self._lock = threading.Lock()  # guards the next three, and failure
        self._epoch = -1
        self._is_given_up = False  # True if this epoch is to have no group any more
        self._made: _Group | None = None  # the group of the newest epoch, once it is connected and as long as it works
        self.failure: str | None = None
        """The reason why the newest group could not be made. Text, since an exception would refer to the group."""
        # Abandoned groups, each in a list of one, for whose end no thread could be started: the training thread's.
        self._unended: list[list[_Group]] = []

    @property
    def ready(self) -> int | None:
        """The newest mesh epoch if its group is connected, else None."""
        made = self._made
        return made.epoch if made is not None else None

    def enter_epoch(self, epoch: int, members: Sequence[int], rank: int) -> None:
        """Abandon the present group, and start to make one for the stage's members in a newer mesh epoch.

        Args:
            members: worker ids, in the order of their ranks in the group. One member alone needs no group.
            rank: this worker.
        """
        assert rank in members and epoch > self._epoch, (epoch, members, rank)
        with self._lock:
            old = self._detach()
            self._epoch, self._is_given_up = epoch, False
            self.failure = None
        self._end_in_thread(old, f"mesh epoch {epoch}")
        if len(members) == 1:
            return
        arguments = (epoch, tuple(members), rank)
        name = f"group of epoch {epoch}" + (f", {self._name}" if self._name else "")
        if why := _not_started(threading.Thread(target=self._make, args=arguments, name=name, daemon=True)):
            with self._lock:
                self.failure = why

    def gather(self, share: Any, gathered: Any, what: str = "") -> Collective:
        """Start an all-gather among all members, whose shares are of one size, in the order of their ranks.

        Args:
            what: the kind of message that it stands for. The reason names it if it takes too long.

        Raises:
            RuntimeError: the library refuses, since it has lost the connection to a peer.
        """
        made = self._serving()
        return self._begun(made, self._library.gather(made.backend, share, gathered), gathered, what)

    def exchange(
        self, sent: Any, received: Any, sent_sizes: Sequence[int], received_sizes: Sequence[int], what: str = ""
    ) -> Collective:
        """Start an all-to-all among all members. Sizes are in elements, by member, in the order of their ranks.

        Args:
            what: the kind of message that it stands for. The reason names it if it takes too long.

        Raises:
            RuntimeError: the library refuses, since it has lost the connection to a peer.
        """
        made = self._serving()
        work = self._library.exchange(made.backend, sent, received, list(sent_sizes), list(received_sizes))
        return self._begun(made, work, (sent, received), what)

    def _serving(self) -> _Group:
        made = self._made
        assert made is not None, self._epoch
        while made.in_progress and made.in_progress[0].is_over:
            made.in_progress.popleft()
        return made

    def _begun(self, made: _Group, work: Any, values: Any, what: str = "") -> Collective:
        made.in_progress.append(Collective(work, values, self._timeout_s, what))
        return made.in_progress[-1]

    def give_up(self) -> None:
        """Abandon a group that has failed, or that is being made. The next one is made in the next mesh epoch.

        The caller must have dropped its collectives before; see the top of this file.
        """
        with self._lock:
            old = self._detach()
            self._is_given_up = True
        self._end_in_thread(old, "it has failed")

    def close(self) -> bool:
        """Abandon the present group, and what is done to make one. No other is made.

        The caller must have dropped its collectives before; see the top of this file.

        Returns:
            False if no thread could be started that ends a group. The caller keeps this object, and calls this again.
        """
        with self._lock:
            old = self._detach()
            self._epoch = -1
        self._end_in_thread(old, "it is not used any more")
        return not self._unended

    def _detach(self) -> list[_Group]:
        """Remove the present group from this object, and return it in a list of one, or an empty list if there is none.

        A list, since its receiver can empty it: then no frame refers to the group any more.
        """
        detached = [] if self._made is None else [self._made]
        self._made = None
        return detached

    # ---- called in threads of their own

    def _make(self, epoch: int, members: tuple[int, ...], rank: int) -> None:
        """Make the group of a mesh epoch.

        It is made anew even where the library can remove members (NCCL's shrink). With a peer lost in the middle of a
        collective that failed in one member and went on in another, and there was no group until a time limit had
        passed (NCCL 2.28.9); and what is made in the background delays nobody.
        """
        made: list[_Group] = []  # a list, as in `_detach`
        reason = f"it is not needed any more in mesh epoch {epoch}, or that is over"
        try:
            self._library.enter_thread()
            # All stages meet in the same store; the prefix keeps them apart, since their first members differ.
            store = self._library.open_store(f"epoch{epoch}/{self._name or members[0]}")
            if not self._meet(store, epoch, len(members)):
                return
            made.append(_Group(epoch, members, self._library.make(store, members.index(rank), len(members))))
            if self._connect(made[0], rank):
                with self._lock:
                    if self._is_wanted(epoch):
                        self._made = made.pop()
        except Exception as error:  # a member was lost while they connected; the next mesh epoch makes another group
            reason = f"{type(error).__name__}: {error}"
            with self._lock:
                if self._is_wanted(epoch):
                    self.failure = reason
        finally:
            if made:
                self._end(made, reason)

    def _meet(self, store: Any, epoch: int, number: int) -> bool:
        """Wait until all members are here, or until the group is not wanted here any more. True if they make the group.

        All members get the same answer, since making a group cannot be cancelled: if one made it and another had left,
        the first would hang. Whoever comes first, the last member to arrive or one that leaves, decides the outcome for
        all, by a compare-and-set in the store.
        """
        if store.add("here", 1) == number:
            store.compare_set("fate", "", _ALL)
        # Polled, since the store's own `wait` prints a warning on stderr whenever its timeout passes.
        if not _poll_until(lambda: store.check(["fate"]), lambda: self._is_past(epoch)):
            store.compare_set("fate", "", _LEFT)
        return store.get("fate") == _ALL.encode()

    def _connect(self, group: _Group, rank: int) -> bool:
        """Run a first all-gather, if there will be others, and a first exchange, each to the end.

        NCCL and HCCL connect in the thread that calls: at the first all-gather, and two members to each other at the
        first sends between them, where the one waits for the other. That must not be in the middle of a backward.

        Returns:
            False if its mesh epoch is over before, or it is given up.
        """
        if self._gathers:
            share, gathered = self._library.token(1), self._library.token(len(group.members))
            if not self._runs_through(group, self._library.gather(group.backend, share, gathered), (share, gathered)):
                return False
        sizes = [int(member != rank) for member in group.members]
        sent, received = self._library.token(sum(sizes)), self._library.token(sum(sizes))
        work = self._library.exchange(group.backend, sent, received, sizes, sizes)
        return self._runs_through(group, work, (sent, received))

    def _runs_through(self, group: _Group, work: Any, values: Any) -> bool:
        collective = self._begun(group, work, values)
        if not _poll_until(collective.is_completed, lambda: self._is_past(group.epoch)):
            return False
        collective.wait()
        return True

    def _end_in_thread(self, handed_over: list[_Group], reason: str) -> None:
        """End a group in a thread of its own, since that may take as long as whatever hangs in the group.

        If no thread can be started it is kept, and ended with the next one, or as the next mesh epoch begins.
        """
        self._unended += [handed_over] if handed_over else []
        while self._unended:
            arguments = (self._unended[-1], reason)
            if _not_started(threading.Thread(target=self._end, args=arguments, daemon=True)):
                return
            self._unended.pop()

    def _end(self, handed_over: list[_Group], reason: str) -> None:
        """Abort a group and drop the last reference to it, which runs its destructor in this thread."""
        group = handed_over.pop()
        with suppress(Exception):  # the group is abandoned, whatever state it is in
            self._library.enter_thread()
            self._library.abort(group.backend, reason)

    def _is_past(self, epoch: int) -> bool:
        with self._lock:
            return not self._is_wanted(epoch)

    def _is_wanted(self, epoch: int) -> bool:
        """True if the group of a mesh epoch is to be made, or used. The caller holds the lock."""
        return epoch == self._epoch and not self._is_given_up


def _not_started(thread: threading.Thread) -> str:
    """Start a thread. Returns the reason if that cannot be, as the system allows no more of them; else ""."""
    try:
        thread.start()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _poll_until(condition: Callable[[], bool], is_cancelled: Callable[[], bool] = lambda: False) -> bool:
    """Poll, less and less often, until the condition holds. False if it was cancelled before."""
    pause = _PAUSE_S
    while not condition():
        if is_cancelled():
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True


class DeviceGroups(GroupLibrary):
    """The groups of a worker's device, made by its kind.

    Args:
        address: address of the run's `GroupStore`.
        host: address at which the other machines reach this one.
        timeout_s: time limit of the library itself for connecting, and for a collective.
    """

    def __init__(self, device: Device, address: str, host: str, timeout_s: float) -> None:
        self._device = device
        self._address = address
        self._host = host
        self._timeout = timedelta(seconds=timeout_s)

    def open_store(self, prefix: str) -> Any:
        return connect_group_store(self._address, prefix)

    def make(self, store: Any, rank: int, size: int) -> Any:
        return self._device.kind.make_group(store, rank, size, self._timeout, self._host)

    def gather(self, backend: Any, share: Tensor, gathered: Tensor) -> Any:
        from torch._C._distributed_c10d import AllgatherOptions  # torch.distributed does not export it

        options = AllgatherOptions()
        options.asyncOp = True
        return backend._allgather_base(gathered, share, options)

    def exchange(
        self, backend: Any, sent: Tensor, received: Tensor, sent_sizes: list[int], received_sizes: list[int]
    ) -> Any:
        from torch.distributed import distributed_c10d as c10d

        options = c10d.AllToAllOptions()
        options.asyncOp = True
        return backend.alltoall_base(received, sent, received_sizes, sent_sizes, options)

    def token(self, size: int) -> Tensor:
        import torch

        return torch.zeros(size, device=self._device.place)

    def enter_thread(self) -> None:
        self._device.enter_thread()

    def abort(self, backend: Any, reason: str) -> None:
        self._device.kind.abort_group(backend, reason)


def group_of(device: Device, address: str, host: str, timeout_s: float) -> GroupInBackground:
    """The process group of a worker's stage, with the backend of its device. Nothing is connected yet.

    Args:
        address: address of the run's `GroupStore`.
        host: address at which the other machines reach this one.
        timeout_s: time limit of making a group once all its members have met, and of a collective.
    """
    return GroupInBackground(DeviceGroups(device, address, host, timeout_s), timeout_s)
