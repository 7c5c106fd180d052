"""A process group whose members change: destroyed and made anew in the background, while links go on serving.

What it is for: moving bytes between the workers of a stage (parameters to those that compute with them) by NCCL or HCCL
where that is faster than links. Sums never go through it: their order would be the library's, and with it the bits.
HCCL has no way to take a member out of a group, and a new group takes seconds. A mesh epoch does not wait for that: the
old group is given up at once, links carry everything meanwhile, and the new one is used from a step on which all its
members agree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any


class GroupInBackground:
    """The group of one worker's stage.

    Args:
        distributed: torch.distributed, or what is like it: init_process_group, destroy_process_group, PrefixStore,
            barrier, group. A worker belongs to one stage, so its group is the default group of its process.
        backend: "hccl" or "nccl".
        store: shared by all workers of the run.
        timeout: of making a group.
        abort: ends the present group's communicators; before it is destroyed, which may wait for them.
    """

    def __init__(
        self,
        distributed: Any,
        backend: str,
        store: Any,
        *,
        timeout: timedelta,
        abort: Callable[[Any, str], None] = lambda group, reason: None,
    ) -> None:
        self._distributed, self._backend, self._store = distributed, backend, store
        self._timeout, self._abort = timeout, abort
        self._lock = threading.Lock()
        self._epoch = -1
        self._made: tuple[int, Any] | None = None  # (epoch, group): all its members have met
        self._used: tuple[int, Any] | None = None
        self._exists = False
        self._worker: threading.Thread | None = None
        self.failure: BaseException | None = None
        """Why the newest group could not be made; links serve on."""

    @property
    def group(self) -> Any:
        """The group to use; None: links serve."""
        return self._used[1] if self._used is not None else None

    @property
    def ready(self) -> int | None:
        """The epoch whose group is made and not used yet. When all members say so, they `use` it at one boundary."""
        with self._lock:
            return self._made[0] if self._made is not None else None

    def change(self, epoch: int, members: Sequence[int], rank: int) -> None:
        """The members of a stage in a new mesh epoch: links serve from now on, and a group is made in the background.

        Args:
            members: in the order of their ranks within the group. One alone needs no group.
        """
        assert rank in members and epoch > self._epoch, (epoch, members, rank)
        with self._lock:
            self._epoch, self._made, self.failure = epoch, None, None
        self._used = None
        before = self._worker
        self._worker = threading.Thread(
            target=self._make, args=(before, epoch, tuple(members), rank), name=f"group of epoch {epoch}", daemon=True
        )
        self._worker.start()

    def use(self, epoch: int) -> None:
        """From now on the group of this epoch serves: between two steps, and only when every member is ready."""
        with self._lock:
            assert self._made is not None and self._made[0] == epoch, (epoch, self._made)
            self._used, self._made = self._made, None

    def wait(self, timeout: float | None = None) -> None:
        """Until nothing is being made any more."""
        if self._worker is not None:
            self._worker.join(timeout)

    def close(self) -> None:
        """Gives the group up."""
        self.wait()
        self._used = self._made = None
        self._destroy("the end of the run")

    def _make(self, before: threading.Thread | None, epoch: int, members: tuple[int, ...], rank: int) -> None:
        if before is not None:
            before.join()  # one at a time: the default group is one
        try:
            self._destroy(f"mesh epoch {epoch}")
            if len(members) == 1 or self._is_past(epoch):
                return
            self._distributed.init_process_group(
                self._backend,
                store=self._distributed.PrefixStore(f"epoch{epoch}", self._store),
                rank=members.index(rank),
                world_size=len(members),
                timeout=self._timeout,
            )
            self._exists = True
            # The library connects at the first collective: now, and not in the middle of a step.
            self._distributed.barrier()
            with self._lock:
                if epoch == self._epoch:
                    self._made = epoch, self._distributed.group.WORLD
        except Exception as error:  # a member is lost before all have met: the next mesh epoch makes another
            with self._lock:
                if epoch == self._epoch:
                    self.failure = error

    def _destroy(self, reason: str) -> None:
        if not self._exists:
            return
        self._exists = False
        self._abort(self._distributed.group.WORLD, reason)
        self._distributed.destroy_process_group()

    def _is_past(self, epoch: int) -> bool:
        with self._lock:
            return epoch != self._epoch
