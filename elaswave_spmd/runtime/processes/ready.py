"""The wait for any of some file descriptors, whatever their numbers.

`select.select` refuses descriptors from 1,024 on. A process that listens on a port may be given such ones while
strangers hold connections to it.
"""

from __future__ import annotations

import math
import select
from collections.abc import Sequence
from typing import Protocol


class HasFileno(Protocol):
    """A socket, or what else has a descriptor."""

    def fileno(self) -> int: ...


def is_any_ready(
    readable: Sequence[int | HasFileno], writable: Sequence[int | HasFileno] = (), timeout_s: float | None = None
) -> bool:
    """Wait until one can be read or written, or has ended.

    Args:
        timeout_s: seconds to wait at most; 0: only look; None: for ever.

    Returns:
        False: none was within this time.
    """
    poll = select.poll()
    for of_kind, kind in ((readable, select.POLLIN), (writable, select.POLLOUT)):
        for one in of_kind:
            poll.register(one, kind)
    return bool(poll.poll(None if timeout_s is None else math.ceil(1000 * max(0.0, timeout_s))))
