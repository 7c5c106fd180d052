"""The directory of a command's sockets, which is removed with its last process, however that ends.

A command and its fork server hold a lock on a file in it, and so do the workers that are forked from there. If all of
them are killed at once, a process that waits for the lock removes it. Should that one be killed too, the next command
that makes such a directory beside it does.

They share a lock of the directory itself as well, for programs that remove from /tmp what nobody has used for days:
systemd-tmpfiles leaves a directory alone, with all that is in it, while another process has it locked (tmpfiles.d(5)).
Sockets and mutexes are used without their files' times ever changing, so a run of weeks would lose them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from elaswave_spmd.runtime.processes import scratch_remover
from elaswave_spmd.runtime.transport.links import SOCKETS, socket_directory

_OWNER = "owner"


class Scratch:
    """A directory for sockets, as `socket_directory` makes it, that this process holds until `remove`, or its own end.

    Directories beside it whose processes were killed are removed.
    """

    def __init__(self) -> None:
        self._make()

    @classmethod
    def adopted(cls, path: str) -> Scratch:
        """The directory of a command that has died, whose processes go on; the one that removes it still waits.

        Raises:
            OSError: it is gone, or is being removed.
        """
        scratch = cls.__new__(cls)
        scratch.path = path
        scratch._held = hold_lock(Path(path) / _OWNER, os.O_RDWR)
        scratch._kept = _keep_from_cleaners(path)
        scratch._remover = None
        return scratch

    def make_again(self) -> None:
        """Have another directory instead, for another fork server: the one before has removed its own at its end.

        Under another name: whatever still knows the old one, a process that removes it too, has no part in this one.
        """
        self.remove()
        self._make()

    def _make(self) -> None:
        folder = Path(socket_directory())
        self.path = str(folder)
        _remove_dead(folder.parent)
        # The file gets its name when it is locked: without it, a directory is left alone.
        new = folder / f".{_OWNER}"
        self._held = hold_lock(new)
        self._kept = _keep_from_cleaners(folder)
        new.rename(folder / _OWNER)
        self._remover: subprocess.Popen[bytes] | None = _start_remover(folder)

    def give_up(self) -> None:
        """Hold one that was adopted no more, and leave it to its other processes; `remove` does nothing then."""
        self._close()
        self._held = -1

    def remove(self) -> None:
        """Remove the directory, if its fork server has not; once."""
        if self._held < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self._close()
        if self._remover is not None:
            self._remover.kill()
            self._remover.wait()

    def _close(self) -> None:
        """Hold neither lock any more."""
        os.close(self._held)
        if self._kept is not None:
            os.close(self._kept)


def hold_scratch(folder: str) -> list[int]:
    """Hold a `Scratch` as well, with all processes that are forked from this one later.

    Returns:
        The descriptors, whose closing ends it for this process.
    """
    held: list[int] = []
    # It was made by other means, or its command has ended, and it is being removed.
    with contextlib.suppress(FileNotFoundError, BlockingIOError):
        held.append(hold_lock(Path(folder) / _OWNER, os.O_RDWR))
        if (kept := _keep_from_cleaners(folder)) is not None:
            held.append(kept)
    return held


def remove_with(folder: str, path: Path) -> None:
    """Have a file removed together with a `Scratch` whose processes are killed, if it is still the same file then."""
    with contextlib.suppress(OSError), (Path(folder) / scratch_remover.WITH).open("ab") as entries:
        entries.write(scratch_remover.entry(os.fsencode(path.absolute())))


def hold_lock(file: str | Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Share the lock of a file until this process has ended, and all that are forked from it from now on.

    Returns:
        The descriptor, whose closing ends it for this process. Programs that are started do not inherit it.
    """
    fd = os.open(file, flags | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def _keep_from_cleaners(folder: str | Path) -> int | None:
    """Share the lock of a directory, as `hold_lock` does that of a file; None: its file system has no such locks."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # It waits, for a moment: nobody but a cleaner that is in there just now takes the lock for itself.
        fcntl.flock(fd, fcntl.LOCK_SH)
    except OSError:
        os.close(fd)
        return None
    return fd


def _start_remover(folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that removes the directory if all who hold it are killed.

    In a session of its own, since signals to the command's group are not for it, and with nothing of its streams and
    environment.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", scratch_remover.__file__, str(folder), _OWNER],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
        start_new_session=True,
    )


def _remove_dead(base: Path) -> None:
    """Remove the directories in `base` that no process holds any more."""
    for folder in base.glob(f"{SOCKETS}*"):
        with contextlib.suppress(OSError):  # another user's; held; or just removed by another command
            fd = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(fd)
