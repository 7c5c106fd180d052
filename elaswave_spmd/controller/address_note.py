"""A note for an agent: the run is at another HOST:PORT now, as its controller was started again on another machine.

Whoever starts controllers writes it, on the agent's machine. The agent looks for one only while it looks for its
controller, and takes it away when it reads it: as long as a controller is there, no note leads an agent away from it,
and a note that is still there has not been read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from elaswave_spmd.run_dir.atomic_write import replacing

_LONGEST_BYTES = 1024


def take_note(note: Path) -> str | None:
    """Take a note away, and read it; None: there is none, or it cannot be read.

    What is no regular file stays where it is: root would take away a device.
    """
    taken = note.with_name(f".{note.name}.taken")
    try:
        if not stat.S_ISREG(os.lstat(note).st_mode):
            return None
        os.replace(note, taken)  # whole, and once: another one may be written at this moment
        with taken.open("rb") as file:
            text = file.read(_LONGEST_BYTES)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        taken.unlink()
    return text.decode("utf-8", "replace").strip()


class AddressNote:
    """The note for one agent, as the process keeps it that has started the agent: which address the agent knows.

    Args:
        path: of the note. One that an earlier agent has not read is removed.
        rendezvous: HOST:PORT that the agent was started with.
    """

    def __init__(self, path: Path, rendezvous: str) -> None:
        self.path = path
        self._known = rendezvous  # to the agent
        self._last = rendezvous  # that a note named, or the agent was started with
        self._written_at = 0.0
        take_note(path)

    def tell(self, rendezvous: str, now: float) -> None:
        """Tell the agent another address, or that it is the one that it knows.

        Raises:
            FilesError: the note cannot be written.
        """
        if self._last != self._known and take_note(self.path) is None:
            self._known = self._last  # the agent has taken the last one
        if rendezvous != self._known:
            with replacing(self.path, durable=False) as scratch:
                scratch.write_text(f"{rendezvous}\n", encoding="utf-8")
        self._last, self._written_at = rendezvous, now

    def unread_s(self, now: float) -> float | None:
        """For how long a note has not been read; None: there is none."""
        if self._last == self._known:
            return None
        try:
            is_there = self.path.exists()
        except OSError:  # of a mount that is stale
            is_there = True
        if not is_there:
            self._known = self._last
            return None
        return now - self._written_at
