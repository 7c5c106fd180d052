"""A process group whose members change: given up and made anew in the background, while links go on serving.

What it is for: copying bytes between the workers of a stage (parameters to those that compute with them) by NCCL, HCCL
or gloo. Sums never go through it: their order would be the library's, and with it the bits. A new group takes seconds,
and HCCL has no way to take a member out of one. A mesh epoch does not wait for that: the old group is given up at once,
links carry everything meanwhile, and the new one is used from a step on for which all its members have voted so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1  # between two looks at who is there, or whether a newer epoch is


class GroupInBackground:
    """The group of one worker's stage.

    Args:
        distributed: torch.distributed, or what is like it. A worker belongs to one stage, so its group is the default
            group of its process.
        backend: "gloo", "hccl" or "nccl".
        open_store: opens the store that all workers of the run share; called once, in the background.
        timeout: of making a group, once all its members are there, and of a broadcast.
        enter: called first in every thread of its own: makes the device the thread's.
        abort: ends the present group's communicators; before it is destroyed, which may wait for them.
        shrinks: a group can lose members without being made anew.
    """

    def __init__(
        self,
        distributed: Any,
        backend: str,
        open_store: Callable[[], Any],
        *,
        timeout: timedelta,
        enter: Callable[[], None] = lambda: None,
        abort: Callable[[Any, str], None] = lambda group, reason: None,
        shrinks: bool = False,
    ) -> None:
        self._distributed, self._backend, self._open_store = distributed, backend, open_store
        self._timeout, self._enter, self._abort, self._shrinks = timeout, enter, abort, shrinks
        self._store: Any = None
        self._lock = threading.Lock()
        self._epoch, self._members = -1, ()
        self._ready: int | None = None
        self._exists: tuple[int, tuple[int, ...]] | None = None  # (epoch, members) of the group that there is
        self._worker: threading.Thread | None = None
        self.failure: BaseException | None = None
        """Why the newest group could not be made; links serve on."""

    @property
    def ready(self) -> int | None:
        """The newest epoch if its group is made: all members have met."""
        return self._ready

    def change(self, epoch: int, members: Sequence[int], rank: int) -> None:
        """The members of a stage in a newer mesh epoch: links serve from now on, and a group is made in the background.

        Args:
            members: in the order of their ranks within the group. One alone needs no group.
        """
        assert rank in members and epoch > self._epoch, (epoch, members, rank)
        with self._lock:
            self._epoch, self._members, self._ready, self.failure = epoch, tuple(members), None, None
        before = self._worker
        self._worker = threading.Thread(
            target=self._make, args=(before, epoch, tuple(members), rank), name=f"group of epoch {epoch}", daemon=True
        )
        self._worker.start()

    def broadcast(self, values: Any, root: int) -> Any:
        """Begins a broadcast by worker `root`; returns c10d's work.

        Raises:
            RuntimeError: the library refuses, as it knows of a peer that is gone.
        """
        assert self._ready == self._epoch, (self._ready, self._epoch)
        return self._distributed.broadcast(values, group_src=self._members.index(root), async_op=True)

    def wait(self, timeout: float | None = None) -> None:
        """Until nothing is being made any more."""
        if self._worker is not None:
            self._worker.join(timeout)

    def close(self) -> None:
        """Gives the group up."""
        self.wait()
        self._ready = None
        self._destroy("the end of the run")

    def _make(self, before: threading.Thread | None, epoch: int, members: tuple[int, ...], rank: int) -> None:
        if before is not None:
            before.join()  # one at a time: the default group is one
        try:
            self._enter()
            if not self._may_shrink(members):
                self._destroy(f"mesh epoch {epoch}")
            if len(members) == 1:
                return
            if self._store is None:
                self._store = self._open_store()
            # Other stages meet in the same store, and have other members.
            store = self._distributed.PrefixStore(f"epoch{epoch}/{members[0]}", self._store)
            if not self._meets(store, epoch, members):
                return
            if not self._shrinks_with_all(store, members):
                self._destroy(f"mesh epoch {epoch}")
                self._distributed.init_process_group(
                    self._backend,
                    store=store,
                    rank=members.index(rank),
                    world_size=len(members),
                    timeout=self._timeout,
                )
            self._exists = epoch, members
            # The library connects at the first collective: now, and not in the middle of a step.
            self._distributed.barrier()
            with self._lock:
                if epoch == self._epoch:
                    self._ready = epoch
        except Exception as error:  # a member is lost while they connect: the next mesh epoch makes another
            with self._lock:
                if epoch == self._epoch:
                    self.failure = error

    def _meets(self, store: Any, epoch: int, members: tuple[int, ...]) -> bool:
        """Waits for all members, as long as no newer epoch is there. Making a group could not be broken off."""
        if self._exists is not None:
            store.add(f"has{self._exists[0]}", 1)
        if store.add("here", 1) == len(members):
            store.set("all", "here")
        pause = _PAUSE_S
        while not self._is_past(epoch):
            if store.check(["all"]):  # `wait` complains on stderr whenever its time is up
                return True
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return False

    def _may_shrink(self, members: tuple[int, ...]) -> bool:
        """Whether the group that there is has all these members, in their order, and more."""
        if not self._shrinks or self._exists is None:
            return False
        return members == tuple(member for member in self._exists[1] if member in members) != self._exists[1]

    def _shrinks_with_all(self, store: Any, members: tuple[int, ...]) -> bool:
        """Takes members out of the group that there is, if all the others have the very same one.

        Returns: whether that was possible; all members come to the same answer, and fail together.
        """
        if not self._may_shrink(members):
            return False
        assert self._exists is not None
        epoch, old = self._exists
        if store.add(f"has{epoch}", 0) < len(members):
            return False
        gone = [index for index, member in enumerate(old) if member not in members]
        try:
            self._distributed.shrink_group(gone, shrink_flags=self._distributed.distributed_c10d.SHRINK_ABORT)
        except (TypeError, RuntimeError):  # an older library: on every member alike
            return False
        return True

    def _destroy(self, reason: str) -> None:
        if self._exists is None:
            return
        self._exists = None
        self._abort(self._distributed.group.WORLD, reason)
        self._distributed.destroy_process_group()

    def _is_past(self, epoch: int) -> bool:
        with self._lock:
            return epoch != self._epoch
