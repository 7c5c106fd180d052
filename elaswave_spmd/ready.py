"""The wait for any of some file descriptors, whatever their numbers.

`select.select` refuses descriptors from 1,024 on. A process that listens on a port may be given such ones while
strangers hold connections to it, and so may what it starts.
"""

from __future__ import annotations

import math
import select
from collections.abc import Sequence
from typing import Protocol, TypeVar

_LONGEST_MS = 2**31 - 1  # of a wait; poll takes no more


class HasFileno(Protocol):
    """A socket, or what else has a descriptor."""

    def fileno(self) -> int: ...


_Readable = TypeVar("_Readable", bound=int | HasFileno)


def is_any_ready(
    readable: Sequence[int | HasFileno] = (), writable: Sequence[int | HasFileno] = (), timeout_s: float | None = None
) -> bool:
    """Wait until one can be read or written, or has ended, so that this would fail at once.

    Args:
        timeout_s: seconds to wait at most, and 24 days; 0: only look; None: for ever.

    Returns:
        False: none was within this time.
    """
    poll = select.poll()
    for of_kind, kind in ((readable, select.POLLIN), (writable, select.POLLOUT)):
        for one in of_kind:
            poll.register(one, kind)
    return bool(poll.poll(_milliseconds(timeout_s)))


def ready_among(readable: Sequence[_Readable], timeout_s: float | None = None) -> list[_Readable]:
    """Wait until one can be read, or has ended. Returns those; none: it took longer.

    Args:
        timeout_s: as for `is_any_ready`.
    """
    poll = select.poll()
    by_number: dict[int, _Readable] = {}
    for one in readable:
        number = one if isinstance(one, int) else one.fileno()
        by_number[number] = one
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(_milliseconds(timeout_s))]


def _milliseconds(timeout_s: float | None) -> int | None:
    return None if timeout_s is None else math.ceil(min(1000 * max(0.0, timeout_s), _LONGEST_MS))
