"""The lock on a run's directory: a run has one controller at a time.

The lock keeps a second controller out while the first one lives. The journal (journal.py) outlives both, and keeps a
controller from using mesh epochs that an earlier controller of the run has used. A second lock is held by the workers.
They outlive a controller that was killed, and write their state for the next controller, which waits until they have
ended.
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
from elaswave_spmd.regular_files import A_LINK, regular_fd
from elaswave_spmd.run_dir.atomic_write import open_private, writing

LOCK = "controller.lock"
WORKERS_LOCK = "workers.lock"
"""The file whose lock is held by the fork server of the controller's machine, and by the workers that it started."""
_POLL_S = 0.05
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""The errors of flock on file systems without locks, and on NFS without a lock server."""


class RunLock:
    """An exclusive lock on a run's directory. It lasts until `close`, or until this process ends, however it ends.

    Programs that this process starts do not inherit the file descriptor, and processes that the user's code forks close
    it. Otherwise such a process could outlive the controller and keep the lock.

    Attributes:
        was_left: True if the last controller did not release the lock. Then it was killed, and workers may wait for the
            next controller.
    """

    def __init__(self, path: Path, fd: int, left: bytes = b"") -> None:
        self.path = path
        self.was_left = bool(left)
        self._fd = fd
        self._left = left  # the content of the file when this process locked it; empty after a regular end
        call_in_forks(self._drop)

    def life_began(self) -> None:
        """Note that this process now drives the run: `close` empties the lock file from now on, even if it was left."""
        self._left = b""

    def close(self) -> None:
        """Release the lock; closing again is allowed.

        The file is not removed. Otherwise one process could lock the removed file, which it had opened before, and
        another process a new file of that name. The file is emptied, as a sign that no worker waits for a controller.
        But if a controller that was killed has left it, and this process has not begun to drive the run (`life_began`),
        its old content is restored.
        """
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, self._left, 0)
                os.ftruncate(self._fd, len(self._left))
            self._drop()

    def _drop(self) -> None:
        """Close the descriptor. The lock is released once no other process has a copy of the descriptor."""
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
        ConfigError: another process has locked it (the error names the process if its number can be read), the file
            system has no locks, or the lock file, or that of the workers, is a link or not a regular file.
        FilesError: the lock file cannot be written.
    """
    file = Path(path) / LOCK
    with writing(file):
        _refuse_link(Path(path) / WORKERS_LOCK)
        with _refusing_others(file):
            fd = open_private(file, os.O_RDWR | os.O_CREAT)
        try:
            take_flock(fd, path)
            left = os.pread(fd, 32, 0)  # locked now, so any content was left by a controller that was killed
            number = f"{os.getpid()}\n".encode()
            os.pwrite(fd, number, 0)
            os.ftruncate(fd, len(number))  # never empty in between: this process may be killed here
        except BlockingIOError:
            pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            # The file is locked before its owner writes its number into it, so the number may be missing.
            user = _process(int(pid)) if pid.isdigit() else "another process, which has not written its number yet"
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


def _refuse_link(file: Path) -> None:
    """Refuse a lock file that is a link, before the fork server, which has no words for it, is to make that file."""
    with _refusing_others(file):
        if os.path.islink(file):
            raise OSError(errno.ELOOP, A_LINK, str(file))


def _process(pid: int) -> str:
    """The process that has written its number, in words. The lock may be held on another machine."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return f"process {pid} on the machine that has locked it"
    except OSError:
        pass  # a process of another user
    return f"process {pid}"


@contextlib.contextmanager
def _refusing_others(file: Path) -> Iterator[None]:
    """Context in which a lock file is opened.

    Raises:
        ConfigError: it is a link, a pipe, a device or a directory.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EISDIR, errno.ELOOP):
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
    """True if workers that an earlier controller started on this machine still live, or their fork server."""
    return not _is_free(Path(path) / WORKERS_LOCK)


def wait_for_workers(path: str | Path, seconds: float, on_wait: Callable[[], object]) -> None:
    """Wait until all workers have ended that an earlier controller started on this machine.

    Args:
        seconds: the longest time to wait. In this time they write their state, or are killed.
        on_wait: called once, if there is something to wait for.

    Raises:
        ConfigError: some still live after that time.
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
        ConfigError: it is a link or not a regular file, or the file system has no locks.
        FilesError: the file cannot be opened.
    """
    try:
        with _refusing_others(file):
            fd = regular_fd(file, os.O_RDWR | os.O_NOFOLLOW)
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
