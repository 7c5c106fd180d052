"""Loading of samples ahead of their use, on one thread beside the training thread.

A batch is a function of its arguments (sample ids, and the step where a dataset uses it), so no bit depends on who
reads it, or when. What was not announced, as after a change of the mesh, is read when it is asked for. Tokens in memory
maps need none of this, and no thread is started for them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from elaswave_spmd.worker.programs.eager import Batches

_JOIN_S = 5.0  # of the thread, which may be in code of the user that does not return; the process ends without it then

Key = tuple[bool, bytes, tuple[int, ...]]
"""Which batch: of the training split?, its sample ids, and the seed and step where samples depend on these."""


class BackgroundLoader:
    """Reads the batches of a dataset ahead, in the order in which they will be used.

    Its thread alone reads, from the first batch on, which is one of the checks before the first step: so the user's
    dataset is used by one thread, and one that can only be used by the thread that made it is refused there. The
    training thread waits until what it asks for has been read.

    Args:
        train, validation: the splits of the user's dataset.
        ahead: the most batches that are kept before they are asked for; 0: there is no thread, and who asks reads.
    """

    def __init__(self, train: Batches, validation: Batches | None, ahead: int) -> None:
        self.train = LoadedSplit(self, train, is_train=True)
        self.validation = None if validation is None else LoadedSplit(self, validation, is_train=False)
        self._ahead = ahead
        self._changed = threading.Condition()
        # All of these belong to `_changed`.
        self._coming: deque[tuple[Key, LoadedSplit, tuple[Any, ...]]] = deque()
        self._reading: Key | None = None
        self._wanted: set[Key] = set()  # announced, and not asked for yet
        self._found: dict[Key, tuple[Any, BaseException | None]] = {}
        self._asked: Key | None = None  # the training thread waits for it
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._waited_s = 0.0

    def expect(self, seed: int, batches: Sequence[tuple[int, np.ndarray]]) -> None:
        """Announce the batches of the training split that will be asked for next: (step, sample ids), in order.

        What was announced before, and is not announced again, is dropped.
        """
        if not self._ahead:
            return
        wanted: dict[Key, tuple[Key, LoadedSplit, tuple[Any, ...]]] = {}
        for step, ids in batches:
            arguments = (ids, seed, step) if self.train.keyed else (ids,)
            key = self.train.key(arguments)
            wanted[key] = key, self.train, arguments
        with self._changed:
            self._found = {key: found for key, found in self._found.items() if key in wanted}
            self._coming = deque(v for key, v in wanted.items() if key not in self._found and key != self._reading)
            self._wanted = {*wanted}
            self._start()
            self._changed.notify_all()

    def _start(self) -> None:
        """Start the thread, if it has not been."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
            self._thread.start()

    def read(self, split: LoadedSplit, key: Key, arguments: tuple[Any, ...]) -> Any:
        """The batch, read ahead or now.

        Raises:
            Exception: what the user's dataset raised for it, whichever thread it was read by.
        """
        began = time.perf_counter()
        try:
            if not self._ahead:
                return split.data.batch(*arguments)
            found, error = self._wait_for(split, key, arguments)
        finally:
            if split.is_train:
                self._waited_s += time.perf_counter() - began
        if error is not None:
            raise error
        return found

    def _wait_for(self, split: LoadedSplit, key: Key, arguments: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
        with self._changed:
            self._start()
            if key not in self._found and key != self._reading:
                self._coming = deque(entry for entry in self._coming if entry[0] != key)
                self._coming.appendleft((key, split, arguments))
            self._asked = key
            self._changed.notify_all()
            self._changed.wait_for(lambda: key in self._found)
            self._asked = None
            self._wanted.discard(key)
            self._changed.notify_all()  # there is room for another one
            return self._found.pop(key)

    def _run(self) -> None:
        """The thread: read what comes next, as long as there is room for it."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._may_read())
                if self._is_closed:
                    return
                key, split, arguments = self._coming.popleft()
                self._reading = key
            found, raised = None, None
            try:
                found = split.data.batch(*arguments)
            except BaseException as error:  # it is raised by the training thread, when that comes to this batch
                raised = error
            with self._changed:
                self._reading = None
                if key in self._wanted or key == self._asked:
                    self._found[key] = found, raised
                self._changed.notify_all()

    def _may_read(self) -> bool:
        if not self._coming:
            return False
        return len(self._found) < self._ahead or self._coming[0][0] == self._asked

    def pop_waited(self) -> float:
        """Seconds that batches of the training split were waited for since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def close(self) -> None:
        """End the thread, after the batch that it is reading."""
        with self._changed:
            self._is_closed = True
            self._coming.clear()
            self._found.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_S)


class LoadedSplit:
    """One split of a dataset whose batches are read by a loader. It has the interface of the split itself."""

    def __init__(self, loader: BackgroundLoader, data: Batches, *, is_train: bool) -> None:
        self._loader = loader
        self.data = data
        self.is_train = is_train
        self.keyed = bool(getattr(data, "keyed", False))

    def __len__(self) -> int:
        return len(self.data)

    def key(self, arguments: tuple[Any, ...]) -> Key:
        """The key of the batch with these arguments of `batch`."""
        ids, *others = arguments
        return self.is_train, np.asarray(ids, dtype=np.int64).tobytes(), tuple(others)

    def batch(self, ids: np.ndarray, *others: int) -> Any:
        """The batch of the split itself for these sample ids, and for the seed and step if it is `keyed`."""
        arguments = ids, *others
        return self._loader.read(self, self.key(arguments), arguments)
