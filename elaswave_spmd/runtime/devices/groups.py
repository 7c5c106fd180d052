"""A process group whose members change: given up and made anew in the background, while links go on serving.

What it is for: copying bytes between the workers of a stage (parameters to those that compute with them) by NCCL, HCCL
or gloo. Sums never go through it: their order would be the library's, and with it the bits. A new group takes seconds,
and HCCL has no way to take a member out of one. A mesh epoch does not wait for that: the old group is given up at once,
links carry everything meanwhile, and the new one is used from a step on for which all its members have voted so.

A group here is a backend object of c10d by itself, none that torch.distributed knows: there may be several at a time,
so one that hangs while it is made, or ends, keeps nobody waiting.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1  # between two looks at who is there, or whether a newer epoch is
_ALL, _LEFT = b"all", b"left"

Make = Callable[[Any, int, int], Any]
"""(store, rank, size) -> a backend of c10d; connects, or does so at the first collective."""


class Broadcast:
    """A broadcast under way that has failed, too, when it takes too long or cannot be asked for.

    Nobody but this ends it: c10d's own watchdogs would make one that they have ended look like one that is complete.
    """

    def __init__(self, work: Any, values: Any, patience_s: float) -> None:
        self._work, self.values, self._patience_s = work, values, patience_s
        self._until = time.monotonic() + patience_s
        self._error: RuntimeError | None = None

    def is_completed(self) -> bool:
        """Whether it has ended, in success or failure."""
        if self._error is not None or self._is_done():
            return True
        if time.monotonic() < self._until:
            return False
        self._error = self._error or RuntimeError(f"a broadcast was not complete within {self._patience_s:g} s")
        return True

    def _is_done(self) -> bool:
        try:
            return self._work.is_completed()
        except RuntimeError as error:
            self._error = error
            return True

    def wait(self) -> None:
        """Of one that has ended: raises RuntimeError if it has failed; what is queued from now on sees its values."""
        if self._error is not None:
            raise self._error
        self._work.wait()

    @property
    def is_over(self) -> bool:
        """Whether the library does not touch its memory any more."""
        return self._error is None and self._is_done()


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
        self._epoch, self._members = -1, ()
        self._made: tuple[int, tuple[int, ...], Any] | None = None  # (epoch, members, backend): sound, and to be used
        self._under_way: deque[Broadcast] = deque()  # holds their memory, whoever has given them up
        self.failure: BaseException | None = None
        """Why the newest group could not be made; links serve on."""

    @property
    def ready(self) -> int | None:
        """The newest epoch if its group is made: all members have met."""
        made = self._made
        return made[0] if made is not None and made[0] == self._epoch else None

    def change(self, epoch: int, members: Sequence[int], rank: int) -> None:
        """The members of a stage in a newer mesh epoch: links serve from now on, and a group is made in the background.

        Args:
            members: in the order of their ranks within the group. One alone needs no group.
        """
        assert rank in members and epoch > self._epoch, (epoch, members, rank)
        with self._lock:
            old, self._made = self._made, None
            self._epoch, self._members, self.failure = epoch, tuple(members), None
        under_way, self._under_way = self._under_way, deque()
        work = self._replace, old, under_way, epoch, tuple(members), rank
        threading.Thread(target=work[0], args=work[1:], name=f"group of epoch {epoch}", daemon=True).start()

    def broadcast(self, values: Any, root: int) -> Broadcast:
        """Begins a broadcast by worker `root`.

        Raises:
            RuntimeError: the library refuses, as it knows of a peer that is gone.
        """
        assert self._made is not None and self._made[0] == self._epoch, (self._made, self._epoch)
        while self._under_way and self._under_way[0].is_over:
            self._under_way.popleft()
        work = self._broadcast(self._made[2], values, self._members.index(root))
        self._under_way.append(Broadcast(work, values, self._timeout_s))
        return self._under_way[-1]

    def give_up(self) -> None:
        """The group has failed: what is under way in it ends, and no group is made of it."""
        with self._lock:
            old, self._made = self._made, None
        under_way, self._under_way = self._under_way, deque()
        if old is not None:
            threading.Thread(target=self._end, args=(old[2], under_way, "it has failed"), daemon=True).start()

    # ---- in threads of their own

    def _replace(self, old: Any, under_way: Any, epoch: int, members: tuple[int, ...], rank: int) -> None:
        try:
            self._enter()
            keeps = self._shrink is not None and old is not None and _is_part(members, old[1])
            if old is not None and not keeps:
                self._end_beside(old[2], under_way, f"mesh epoch {epoch}")
                old = None
            if len(members) == 1:
                return
            # Other stages meet in the same store, and have other members.
            store = self._open_store(f"epoch{epoch}/{members[0]}")
            if old is not None:
                store.add(f"has{old[0]}", 1)
            if not self._meets(store, epoch, len(members)):
                return
            backend = None
            if old is not None and store.add(f"has{old[0]}", 0) == len(members):
                backend = self._shrunk(old[2], [i for i, member in enumerate(old[1]) if member not in members])
            if backend is None:
                backend = self._make(store, members.index(rank), len(members))
            self._connect(backend)
            with self._lock:
                if epoch == self._epoch:
                    self._made, backend = (epoch, members, backend), None
            if backend is not None:  # a newer epoch is there already
                self._end(backend, deque(), f"mesh epoch {epoch} is over")
        except Exception as error:  # a member is lost while they connect: the next mesh epoch makes another
            with self._lock:
                if epoch == self._epoch:
                    self.failure = error
        finally:
            if old is not None:
                self._end_beside(old[2], under_way, f"mesh epoch {epoch}")

    def _meets(self, store: Any, epoch: int, number: int) -> bool:
        """Waits for all members, as long as no newer epoch is there: then either all go on to make a group, or nobody.

        Making one cannot be broken off, so nobody begins while another may not come.
        """
        if store.add("here", 1) == number:
            store.compare_set("fate", "", _ALL.decode())
        pause = _PAUSE_S
        while not store.check(["fate"]):  # `wait` would complain on stderr whenever its time is up
            if self._is_past(epoch):
                store.compare_set("fate", "", _LEFT.decode())
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return store.get("fate") == _ALL

    def _connect(self, backend: Any) -> None:
        """The library connects at the first collective: now, and not in the middle of a step."""
        first = Broadcast(self._broadcast(backend, self._token(), 0), None, self._timeout_s)
        pause = _PAUSE_S
        while not first.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        first.wait()

    def _shrunk(self, backend: Any, gone: list[int]) -> Any:
        """The backend without members that are gone; None: an older library, the same on all members."""
        assert self._shrink is not None
        with suppress(AttributeError, TypeError, RuntimeError):
            return self._shrink(backend, gone)
        return None

    def _end_beside(self, backend: Any, under_way: Any, reason: str) -> None:
        """To end a group may take as long as what hangs in it."""
        threading.Thread(target=self._end, args=(backend, under_way, reason), daemon=True).start()

    def _end(self, backend: Any, under_way: Any, reason: str) -> None:
        with suppress(Exception):  # it is given up, in whatever state
            self._enter()
            self._abort(backend, reason)
        del backend
        under_way.clear()

    def _is_past(self, epoch: int) -> bool:
        with self._lock:
            return epoch != self._epoch


def _is_part(members: tuple[int, ...], of: tuple[int, ...]) -> bool:
    """Whether these are some of the members of a group and not all, in their order."""
    return members == tuple(member for member in of if member in members) != of
