"""Checks that a run's directory is still at its path, so that nothing is written into the files of another run."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from elaswave_spmd.errors import FilesError
from elaswave_spmd.regular_files import open_regular

_WITNESS = "epochs.jsonl"
"""The file by which a run's directory is recognised: its first line names the run and never changes."""


class InPlace:
    """The check of a directory that somebody may move, remove or replace by another one of the same name.

    The directory is recognised by its device and inode numbers, which costs nearly nothing. Some file systems change
    these by themselves. In that case the first line of the journal is compared, which names the run.

    Args:
        folder: the run's directory. If it does not exist yet, the first `check` that finds it remembers it.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._number = self._number_now()
        self._witness = b""

    def check(self) -> None:
        """Check that the directory is still the same.

        Raises:
            FilesError: another directory is at this path, or none.
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
