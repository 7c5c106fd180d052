"""The lock on a run's directory: a run has one controller at a time.

The lock keeps a second controller out while the first one lives. The journal (journal.py) outlives both, and keeps a
controller from using mesh epochs that an earlier controller of the run has used. A second lock is held by the workers:
they outlive a controller that was killed, and write their state for the next one, which waits for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from elaswave_spmd.errors import ConfigError, FilesError
from elaswave_spmd.forks import call_in_forks
from elaswave_spmd.regular_files import regular_fd
from elaswave_spmd.run_dir.atomic_write import open_private, writing

LOCK = "controller.lock"
WORKERS_LOCK = "workers.lock"
"""Shared by the fork server of the controller's machine and by its workers."""
_POLL_S = 0.05
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of flock on file systems that have none, and of NFS whose server of locks is not there."""


class RunLock:
    """An exclusive lock on a run's directory. It lasts until `close`, or until this process ends, however it ends.

    The file descriptor is not inherited by programs that this process starts, and not kept by processes that code of
    the user forks from it: one that outlives its controller would keep the lock.

    Attributes:
        was_left: the last controller has not given it up: it was killed, and workers may wait for the next one.
    """

    def __init__(self, path: Path, fd: int, left: bytes = b"") -> None:
        self.path = path
        self.was_left = bool(left)
        self._fd = fd
        self._left = left  # the content of the file when this process has locked it
        call_in_forks(self._drop)

    def life_began(self) -> None:
        """This process has begun a life of the run, or goes on with one: what was left is its own from now on."""
        self._left = b""

    def close(self) -> None:
        """Release the lock; closing again is allowed.

        The file stays. If it were removed, a process that had opened it before and one that makes it anew would each
        lock a file of their own. It is emptied, which tells that no worker waits. But if it was left by a controller
        that was killed, and this process has not come so far that it drives the run, it is as it was.
        """
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, self._left, 0)
                os.ftruncate(self._fd, len(self._left))
            self._drop()

    def _drop(self) -> None:
        """Close the descriptor. The lock is kept by processes that have it, too."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lock_run_dir(path: str | Path) -> RunLock:
    """Lock a run's directory, without waiting.

    Raises:
        ConfigError: another process has locked it; the error names that process where its number can be read. Or its
            file system has no locks, or something else has the name of the lock file.
        FilesError: the lock file cannot be written.
    """
    file = Path(path) / LOCK
    with writing(file):
        with _refusing_others(file):
            fd = open_private(file, os.O_RDWR | os.O_CREAT)
        try:
            take_flock(fd, path)
            left = os.pread(fd, 32, 0)  # by now nobody else has it: what it says is what a death has left
            number = f"{os.getpid()}\n".encode()
            os.pwrite(fd, number, 0)
            os.ftruncate(fd, len(number))  # never empty in between: this process may be killed here
        except BlockingIOError:
            pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            # The file is locked before its owner writes its number into it, so the number may be missing.
            user = f"process {pid}" if pid.isdigit() else "another process, which has not written its number yet"
            os.close(fd)
            raise ConfigError(
                f"run.dir={path} is in use by {user}",
                rule="a run has one controller at a time, which locks its directory",
                where="run.dir",
                fix="wait until that process has ended, or end it, or choose another run.dir",
            ) from None
        except BaseException:
            os.close(fd)
            raise
    return RunLock(Path(path), fd, left)


@contextlib.contextmanager
def _refusing_others(file: Path) -> Iterator[None]:
    """A `with` that opens a lock file, which is refused if it is a pipe, a device or a directory.

    Raises:
        ConfigError: it is.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EISDIR):
            raise
        raise ConfigError(
            f"{file} cannot be locked ({error.strerror or error})",
            rule="a run makes its lock files itself, and they are regular files",
            where="run.dir",
            fix="remove it, if the run has no process any more, or choose another run.dir",
        ) from error


def take_flock(fd: int, path: str | Path) -> None:
    """Lock an open file for this process alone, without waiting.

    Args:
        path: the directory in which it is, for the error.

    Raises:
        BlockingIOError: another process has locked it.
        ConfigError: the file system has no such locks.
        OSError: any other error.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        raise ConfigError(
            f"the file system of {path} has no locks by flock ({error.strerror or error})",
            rule="a run has one controller at a time, which locks its directory by flock",
            where="run.dir",
            fix="run.dir=DIR on another file system, or mount this one with locks (Lustre: mount -o flock)",
        ) from error


def workers_live(path: str | Path) -> bool:
    """True if workers live that were started on this machine, or their fork server."""
    return not _is_free(Path(path) / WORKERS_LOCK)


def wait_for_workers(path: str | Path, seconds: float, on_wait: Callable[[], object]) -> None:
    """Wait until no worker of an earlier controller lives that was started on this machine.

    Args:
        seconds: that they may take: they write their state, or are killed.
        on_wait: called once, if there is something to wait for.

    Raises:
        ConfigError: they still live.
    """
    deadline = time.monotonic() + seconds
    waits = False
    while not _is_free(Path(path) / WORKERS_LOCK):
        if not waits:
            on_wait()
        waits = True
        if time.monotonic() > deadline:
            raise ConfigError(
                f"run.dir={path} is in use by workers whose controller was killed, after {seconds:g} s",
                rule="workers end within timeouts.controller + timeouts.shutdown after their controller; those of a "
                "run with timeouts.adopt within timeouts.adopt + timeouts.shutdown",
                where="run.dir",
                fix="wait until they have ended, or end them",
            )
        time.sleep(_POLL_S)


def _is_free(file: Path) -> bool:
    """True if nobody holds the lock.

    Raises:
        ConfigError: something else than a file has this name.
        FilesError: the file cannot be opened.
    """
    try:
        with _refusing_others(file):
            fd = regular_fd(file, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise FilesError(file, error) from error
    try:
        take_flock(fd, file.parent)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
