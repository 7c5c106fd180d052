"""The directory of a command's sockets, which is removed with the command's last process, however that ends.

A command, its fork server and the workers that are forked from it hold a lock on a file in the directory. What code of
the user forks from a command does not, as it may outlive it. If all that hold it are killed at once, a process that
waits for the lock removes the directory (scratch_remover.py). If that process is killed too, the next command that
makes such a directory beside this one removes it.

All of these processes also share a lock of the directory itself. It protects the directory from programs that clean up
/tmp: systemd-tmpfiles leaves a directory and its content alone while another process has it locked (tmpfiles.d(5)).
Without the lock a run of weeks would lose its sockets and mutexes, as their use does not change the times of the files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from elaswave_spmd.forks import call_in_forks
from elaswave_spmd.runtime.processes import scratch_remover
from elaswave_spmd.runtime.transport.links import SOCKETS, no_socket_directory, socket_directory

_OWNER = "owner"


class Scratch:
    """A directory for sockets, as `socket_directory` makes it, that this process holds until `remove`, or its own end.

    Directories beside it whose processes were killed are removed.

    Raises:
        ConfigError: none can be made, or held.
    """

    def __init__(self) -> None:
        self._make()
        call_in_forks(self.give_up)  # the fork server, which is forked as well, takes locks of its own

    @classmethod
    def adopted(cls, path: str) -> Scratch:
        """The directory of a command that has died and whose processes go on. Its remover process still waits.

        Raises:
            OSError: the directory is gone, or is being removed; or another user has made one of its name since.
        """
        scratch = cls.__new__(cls)
        scratch.path = path
        scratch._held = _share(_open_owner(path))
        scratch._kept = _keep_from_cleaners(path)
        scratch._remover = None
        call_in_forks(scratch.give_up)
        return scratch

    def make_again(self) -> None:
        """Make a new directory in place of this one, for another fork server, as the one before has removed this one.

        The new directory has another name, so that processes that still know the old one, such as one that removes it,
        do not touch the new one.
        """
        self.remove()
        self._make()

    def _make(self) -> None:
        folder = Path(socket_directory())
        self.path = str(folder)
        self._held: int | None = None
        self._kept: int | None = None
        self._remover: subprocess.Popen[bytes] | None = None
        try:
            _remove_dead(folder.parent)
            # The file gets its name only when it is locked. Other commands leave a directory without such a file alone.
            new = folder / f".{_OWNER}"
            self._held = hold_lock(new)
            self._kept = _keep_from_cleaners(folder)
            new.rename(folder / _OWNER)
            self._remover = _start_remover(folder)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            self.give_up()
            raise no_socket_directory(folder.parent, error) from error

    def give_up(self) -> None:
        """Stop holding the directory, and leave it to its other processes. `remove` does nothing afterwards."""
        held, kept = self._held, self._kept
        self._held = self._kept = None
        for lock in (held, kept):
            if lock is not None:
                os.close(lock)

    def remove(self) -> None:
        """Remove the directory, unless its fork server has done so. A second call does nothing."""
        if self._held is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self.give_up()
        if self._remover is not None:
            self._remover.kill()
            self._remover.wait()


def hold_scratch(folder: str) -> list[int]:
    """Hold the directory of a `Scratch` in this process, and in all processes that are forked from it later.

    Returns:
        The descriptors of the locks. Closing them gives the locks up for this process.
    """
    held: list[int] = []
    # These errors mean that the directory is not a `Scratch`, or that its command has ended and it is being removed.
    with contextlib.suppress(FileNotFoundError, BlockingIOError):
        held.append(hold_lock(Path(folder) / _OWNER, os.O_RDWR))
        if (kept := _keep_from_cleaners(folder)) is not None:
            held.append(kept)
    return held


def remove_with(folder: str, path: Path) -> None:
    """Have a file removed together with a `Scratch` whose processes were killed, if it is still the same file then."""
    with contextlib.suppress(OSError), (Path(folder) / scratch_remover.WITH).open("ab") as entries:
        entries.write(scratch_remover.entry(os.fsencode(path.absolute())))


def hold_lock(file: str | Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Share the lock of a file until this process, and all processes that are forked from it later, have ended.

    A link is not followed, as others may be able to write to the directory of a run.

    Returns:
        The descriptor of the lock. Closing it gives the lock up for this process. Started programs do not inherit it.
    """
    return _share(os.open(file, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


def _share(fd: int) -> int:
    """Share the lock of an open file. Returns its descriptor, which is closed if somebody has the lock alone."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _keep_from_cleaners(folder: str | Path) -> int | None:
    """Share the lock of a directory, like `hold_lock` for a file. Returns None if its file system has no such locks."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # This may wait, but only for a moment: the only programs that take the lock exclusively are cleaners of /tmp.
        fcntl.flock(fd, fcntl.LOCK_SH)
    except OSError:
        os.close(fd)
        return None
    return fd


def _start_remover(folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that removes the directory if all processes that hold it are killed.

    It runs in a session of its own, so that signals to the command's group do not reach it, and with none of the
    command's streams and environment.
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
        # Another user's; held; just removed by another command; or nested deeper than Python before 3.13 can remove.
        with contextlib.suppress(OSError, RecursionError):
            owner = _open_owner(folder)
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(owner)


def _open_owner(folder: str | Path) -> int:
    """Open the file by which a directory is held. Returns its descriptor.

    Everybody may make directories and links of such names in /tmp, so nothing is followed or opened that is not this
    user's own: the mere opening of some devices has an effect, or waits.

    Raises:
        OSError: it is no directory of this user, or has no such file.
    """
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(directory).st_uid != os.geteuid():
            raise PermissionError(f"{folder} is another user's")
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        owner = os.open(_OWNER, flags, dir_fd=directory)
    finally:
        os.close(directory)
    status = os.fstat(owner)
    if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
        os.close(owner)
        raise PermissionError(f"{folder}/{_OWNER} is no file of this user")
    return owner
