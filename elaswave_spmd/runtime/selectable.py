"""A mailbox for processes that also wait for something else, in a select loop."""

from __future__ import annotations

import contextlib
import os

from elaswave_spmd.runtime.transport.mailbox import Item, Mailbox


class SelectableMailbox(Mailbox):
    """A mailbox whose `fileno` is readable when `take_all` has something to give, and sometimes when it has not."""

    def __init__(self) -> None:
        super().__init__()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def put(self, item: Item) -> None:
        super().put(item)
        with contextlib.suppress(BlockingIOError):  # a full pipe is readable as well
            os.write(self._write, b"\0")  # after the item is there: who is woken finds it

    def take_all(self) -> list[Item]:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass
        return super().take_all()

    def fileno(self) -> int:
        return self._read

    def close(self) -> None:
        """After the last `put`."""
        os.close(self._read)
        os.close(self._write)
