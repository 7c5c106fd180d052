"""Death watch: notices the death of a process on this host before the kernel has freed the process's memory.

Closed sockets, EOF, pidfd and waitpid all come after the dead process's memory is torn down, which takes tens of
milliseconds per gigabyte. A robust mutex in shared memory comes first: the kernel walks the list of mutexes that a
dying thread has locked before anything else, and a thread that waits for one of them gets EOWNERDEAD. So each worker's
main thread locks a mutex and never unlocks it, and the controller waits for it. A stopped process (SIGSTOP) keeps its
mutex and is not reported. A process that writes a core file is noticed after that, as by every other means.

Linux only. Where `is_available()` is false, the launcher's wait, closed links and heartbeats serve alone.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_SLOT_BYTES = 64  # pthread_mutex_t has 40 (x86-64) to 48 (aarch64); a cache line each
_INJECTED_AT = 56  # offset in a slot, behind the mutex: a double
_ATTRIBUTE_BYTES = 64  # pthread_mutexattr_t has 4 to 8
_CAPACITY = 1024  # ranks per file
_PTHREAD_PROCESS_SHARED = _PTHREAD_MUTEX_ROBUST = 1
_PERIOD_S = 0.5  # `DeathWatch.close` may take this long while a worker lives
_MAP_FAILED = ctypes.c_void_p(-1).value


class MutexSlot(NamedTuple):
    """The place of one worker's mutex: plain data that is sent to the worker.

    Args:
        path: file of the table.
        position: of the slot in the file.
    """

    path: str
    position: int


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Libc:
    """The C library's functions, with the types of their arguments. ctypes releases the GIL during a call."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.mmap = library.mmap
        self.mmap.restype = pointer
        self.mmap.argtypes = (pointer, ctypes.c_size_t, number, number, number, ctypes.c_long)
        self.attribute_init = library.pthread_mutexattr_init
        self.set_shared = library.pthread_mutexattr_setpshared
        self.set_robust = library.pthread_mutexattr_setrobust
        self.init = library.pthread_mutex_init
        self.trylock = library.pthread_mutex_trylock
        self.timedlock = library.pthread_mutex_timedlock
        self.consistent = library.pthread_mutex_consistent
        self.unlock = library.pthread_mutex_unlock
        for call in (self.attribute_init, self.trylock, self.consistent, self.unlock):
            call.argtypes = (pointer,)
        for call in (self.set_shared, self.set_robust):
            call.argtypes = (pointer, number)
        self.init.argtypes = (pointer, pointer)
        self.timedlock.argtypes = (pointer, ctypes.POINTER(_Timespec))

    def map_file(self, fd: int, size: int) -> int:
        """Map a file, shared, and return the address.

        It is never unmapped: a mutex that is held or waited for must stay where it is, and only the end of this process
        guarantees that none is.
        """
        address = self.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return address

    def make_mutex(self, address: int) -> None:
        """Initialize a robust mutex between processes, unlocked. OSError on a system without them."""
        attribute = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        for code in (
            self.attribute_init(attribute),
            self.set_shared(attribute, _PTHREAD_PROCESS_SHARED),
            self.set_robust(attribute, _PTHREAD_MUTEX_ROBUST),
            self.init(address, attribute),
        ):
            if code:
                raise OSError(code, os.strerror(code))

    def lock(self, address: int, seconds: float) -> int:
        """Lock a mutex: 0, EOWNERDEAD, or ETIMEDOUT after `seconds`.

        They are seconds of the wall clock: setting the clock makes them shorter or longer.
        """
        # pthread_mutex_timedlock takes a time of CLOCK_REALTIME. pthread_mutex_clocklock, for other clocks, needs glibc
        # 2.30, and other C libraries do not have it.
        until = time.time() + seconds
        return self.timedlock(address, ctypes.byref(_Timespec(int(until), int(until % 1 * 1e9))))

    def release_dead(self, address: int) -> None:
        """Unlock a mutex whose owner has died and that this thread has just locked with EOWNERDEAD."""
        self.consistent(address)
        self.unlock(address)


def is_available() -> bool:
    """True if a death watch works on this system; tries it with a thread that locks a mutex and ends."""
    if sys.platform != "linux":
        return False
    try:
        libc = _Libc()
        memory = ctypes.create_string_buffer(2 * _SLOT_BYTES)
        address = ctypes.addressof(memory) + -ctypes.addressof(memory) % _SLOT_BYTES
        libc.make_mutex(address)
    except (OSError, AttributeError):  # AttributeError: a C library without these functions
        return False
    owner = threading.Thread(target=libc.trylock, args=(address,))
    owner.start()
    owner.join()  # the kernel may release the mutex a moment later: hence the wait below
    noticed = libc.lock(address, 5.0) == errno.EOWNERDEAD
    if noticed:
        libc.release_dead(address)
    return noticed


def hold_mutex(path: str, position: int) -> Callable[[], None]:
    """Lock this process's mutex until the process dies. In a worker's main thread, before it reports that it is ready.

    Args:
        path, position: the worker's `MutexSlot`.

    Returns:
        A function to be called immediately before a fault is injected into this process: it writes the instant beside
        the mutex, from where the controller reads it.

    Raises:
        OSError: the file does not exist or cannot be mapped.
    """
    # A robust mutex is released by the death of the thread that locked it, not of the process.
    assert threading.current_thread() is threading.main_thread(), "the watched death is that of the locking thread"
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        assert 0 <= position < size // _SLOT_BYTES, (position, size)
        libc = _Libc()
        address = libc.map_file(fd, size) + position * _SLOT_BYTES
        code = libc.trylock(address)
    finally:
        os.close(fd)
    assert code == 0, f"mutex {position} of {path} has an owner already: {errno.errorcode[code]}"
    instant = ctypes.c_double.from_address(address + _INJECTED_AT)

    def mark_injected() -> None:
        instant.value = time.monotonic()

    return mark_injected


class RobustMutexTable:
    """The mutexes of a run, made by the controller: one per rank, in files that are created when needed.

    A rank, and with it its mutex, is not reused while this table exists: each controller makes a table of its own.

    Args:
        directory: existing directory of this host, for these files alone.
        capacity: ranks per file.
    """

    def __init__(self, directory: str, capacity: int = _CAPACITY) -> None:
        assert capacity > 0
        self._directory = Path(directory).absolute()
        self._capacity = capacity
        self._libc = _Libc()
        self._addresses: dict[int, int] = {}  # number of the file -> address at which it is mapped

    def slot(self, rank: int) -> MutexSlot:
        """The slot of worker `rank`, which the worker passes to `hold_mutex`.

        Raises:
            OSError: its file cannot be created.
        """
        number, position = divmod(rank, self._capacity)
        if number not in self._addresses:
            self._addresses[number] = self._make_file(number)
        return MutexSlot(str(self._path(number)), position)

    def address(self, rank: int) -> int:
        """The address in this process of the mutex of a rank whose slot was asked for before."""
        number, position = divmod(rank, self._capacity)
        return self._addresses[number] + position * _SLOT_BYTES

    def injected_at(self, rank: int) -> float | None:
        """The instant at which a fault was injected into the worker, if it wrote one down.

        In seconds of time.monotonic(), which all processes of a host share.
        """
        if rank // self._capacity not in self._addresses:
            return None
        return ctypes.c_double.from_address(self.address(rank) + _INJECTED_AT).value or None

    def close(self) -> None:
        """Remove the files. Mutexes that are held or watched stay in memory; new workers can no longer lock theirs."""
        for number in self._addresses:
            self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._directory / f"mutexes-{os.getpid()}-{number}"

    def _make_file(self, number: int) -> int:
        size = self._capacity * _SLOT_BYTES
        path = self._path(number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # without this, a full disk would be met at a write to the mapping: SIGBUS
            address = self._libc.map_file(fd, size)
            for position in range(self._capacity):
                self._libc.make_mutex(address + position * _SLOT_BYTES)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)
        return address


class NotWatchedError(RuntimeError):
    """No thread could be started that waits for a worker's death. The launcher and closed links tell it later."""


class DeathWatch:
    """The threads that wait for the deaths of workers that hold their mutex: one per rank, `death-watch-<rank>`.

    Args:
        table: the workers' mutexes.
        on_death: called once per rank, at once, from a thread of the watch: it must be short and must not block
            (`Mailbox.put`). Expected ends are reported as well; the caller ignores them.
    """

    def __init__(self, table: RobustMutexTable, on_death: Callable[[int], None]) -> None:
        self._table = table
        self._on_death = on_death
        self._libc = _Libc()
        self._threads: dict[int, threading.Thread] = {}  # those that run, or are about to
        self._closed = False

    def watch(self, rank: int) -> bool:
        """Report the death of `rank` from now on, or at once if it has died already. Once per rank, from one thread.

        To be called after the worker has reported that it holds its mutex. False if it does not hold it.

        Raises:
            NotWatchedError: the system has no thread left for it.
        """
        assert rank not in self._threads and not self._closed
        address = self._table.address(rank)
        code = self._libc.trylock(address)
        if code == 0:
            self._libc.unlock(address)
            return False
        dead = code == errno.EOWNERDEAD
        if dead:
            self._libc.release_dead(address)
        assert dead or code == errno.EBUSY, errno.errorcode[code]
        target = self._report if dead else self._wait
        thread = threading.Thread(target=self._run, args=(target, rank), name=f"death-watch-{rank}", daemon=True)
        self._threads[rank] = thread  # before it starts, as its end takes it out
        try:
            thread.start()
        except RuntimeError as error:  # "can't start new thread"
            del self._threads[rank]
            if dead:
                return False
            raise NotWatchedError(str(error)) from error
        return True

    def close(self) -> None:
        """End the threads, whether the workers live or not. No death is reported afterwards. Idempotent."""
        self._closed = True
        deadline = time.monotonic() + 4 * _PERIOD_S  # longer only if the clock was set back; they are daemons
        for thread in list(self._threads.values()):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, target: Callable[[int], None], rank: int) -> None:
        """A thread of the watch. It is forgotten at its end, or the table would grow with each worker of the run."""
        try:
            target(rank)
        finally:
            self._threads.pop(rank, None)

    def _wait(self, rank: int) -> None:
        address = self._table.address(rank)
        while not self._closed:
            code = self._libc.lock(address, _PERIOD_S)
            if code == errno.ETIMEDOUT:
                continue
            assert code == errno.EOWNERDEAD, errno.errorcode.get(code, code)
            self._report(rank)
            self._libc.release_dead(address)
            return

    def _report(self, rank: int) -> None:
        if not self._closed:
            self._on_death(rank)
