"""Whether a run's directory is still where it was: what is written by its path must not go into another run's files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from elaswave_spmd.errors import FilesError
from elaswave_spmd.regular_files import open_regular

_WITNESS = "epochs.jsonl"
"""Its first line names the run, and is never written again."""


class InPlace:
    """A directory that may be moved, removed or replaced by another one of that name.

    It is looked at by its number in the file system, which costs next to nothing. Some file systems change that by
    themselves; then the first line of the journal tells.

    Args:
        folder: of the run. If it is not there yet, it is known from the first look on at which it is.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._number = self._number_now()
        self._witness = b""

    def check(self) -> None:
        """Look at it.

        Raises:
            FilesError: the directory at this path is another one, or there is none.
        """
        number = self._number_now()
        self._number = self._number or number
        if number == self._number:
            self._witness = self._witness or self._witness_now()
        elif number and self._witness and self._witness == self._witness_now():
            self._number = number
        else:
            raise FilesError(self._folder, OSError(errno.ENOENT, "the directory was moved, removed or replaced"))

    def _number_now(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._folder)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _witness_now(self) -> bytes:
        try:
            with open_regular(self._folder / _WITNESS) as file:
                return file.readline()
        except OSError:
            return b""
