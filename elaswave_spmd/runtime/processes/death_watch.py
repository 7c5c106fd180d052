"""Latches: the death of a process on this host, told before the kernel has freed its memory.

Closed sockets, EOF, pidfd and waitpid all come after the dead process's memory is torn down, which takes tens of
milliseconds per gigabyte. A robust mutex in shared memory comes first: the kernel walks a dying thread's list of locked
ones before anything else, and whoever waits for one gets EOWNERDEAD. So each worker's main thread locks a mutex and
never unlocks it, and the controller waits for it. A stopped process (SIGSTOP) keeps its latch: that is no death. A
process that writes a core file first is noticed after that, like everywhere else.

Linux only. Where `available` is false, the launcher's wait, closed links and heartbeats serve alone.
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
_STRUCK_AT = 56  # in a slot, behind the mutex: a double
_ATTRIBUTE_BYTES = 64  # pthread_mutexattr_t has 4 to 8
_CAPACITY = 1024  # ranks per file
_PTHREAD_PROCESS_SHARED = _PTHREAD_MUTEX_ROBUST = 1
_PERIOD_S = 0.5  # how long `Watcher.close` may take while a worker lives
_MAP_FAILED = ctypes.c_void_p(-1).value


class Seat(NamedTuple):
    """Where a worker finds its latch: plain data for its orders."""

    path: str
    slot: int


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Libc:
    """The calls of the C library, each with the types of its arguments. ctypes lets go of the GIL during a call."""

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
        """The address at which the file is mapped, shared. Never unmapped: a mutex that somebody holds or waits for
        must stay where it is, and only the end of this process tells that nobody does."""
        address = self.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return address

    def make_mutex(self, address: int) -> None:
        """A robust mutex between processes, free. OSError where the system has none."""
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
        """0, EOWNERDEAD, or ETIMEDOUT after `seconds` of the wall clock: setting it makes them shorter or longer."""
        until = time.time() + seconds
        return self.timedlock(address, ctypes.byref(_Timespec(int(until), int(until % 1 * 1e9))))

    def free(self, address: int) -> None:
        """Take over from a dead owner and unlock."""
        self.consistent(address)
        self.unlock(address)


def available() -> bool:
    """Whether a latch works here, by trying one: a thread locks a mutex and ends."""
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
    owner.join()  # its last moments may come after this
    noticed = libc.lock(address, 5.0) == errno.EOWNERDEAD
    if noticed:
        libc.free(address)
    return noticed


def hold(path: str, slot: int) -> Callable[[], None]:
    """Lock this process's latch, until the process dies. In a worker's main thread, before it says that it is ready.

    Returns:
        To be called when a fault on purpose is about to strike this process: writes the instant down beside the latch.

    Raises:
        OSError: the file is not there or cannot be mapped.
    """
    assert threading.current_thread() is threading.main_thread(), "the death that tells is that of the locking thread"
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        assert 0 <= slot < size // _SLOT_BYTES, (slot, size)
        libc = _Libc()
        address = libc.map_file(fd, size) + slot * _SLOT_BYTES
        code = libc.trylock(address)
    finally:
        os.close(fd)
    assert code == 0, f"latch {slot} of {path} has an owner already: {errno.errorcode[code]}"
    instant = ctypes.c_double.from_address(address + _STRUCK_AT)

    def strike() -> None:
        instant.value = time.monotonic()

    return strike


class RobustMutexTable:
    """The latches of a run, made by the controller: one per rank, in files of `capacity` ranks, made when needed.

    Args:
        directory: existing directory for the files; its own, on one host.
        capacity: ranks per file.

    Raises:
        OSError: a file cannot be made.

    A rank is never used again within a run, and neither is its latch.
    """

    def __init__(self, directory: str, capacity: int = _CAPACITY) -> None:
        assert capacity > 0
        self._directory, self._capacity = Path(directory).absolute(), capacity
        self._libc = _Libc()
        self._addresses: dict[int, int] = {}  # number of the file -> where it is mapped

    def seat(self, rank: int) -> Seat:
        """What worker `rank` hands to `hold`."""
        number, slot = divmod(rank, self._capacity)
        if number not in self._addresses:
            self._addresses[number] = self._make_file(number)
        return Seat(str(self._path(number)), slot)

    def address(self, rank: int) -> int:
        """Where this process has the mutex of a rank that was given a seat."""
        number, slot = divmod(rank, self._capacity)
        return self._addresses[number] + slot * _SLOT_BYTES

    def struck_at(self, rank: int) -> float | None:
        """When a fault on purpose struck the worker, if it said so: time.monotonic(), which all processes share."""
        if rank // self._capacity not in self._addresses:
            return None
        return ctypes.c_double.from_address(self.address(rank) + _STRUCK_AT).value or None

    def close(self) -> None:
        """Remove the files. Those who hold and those who watch keep what they have; nobody can take a seat any more."""
        for number in self._addresses:
            self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._directory / f"latches-{os.getpid()}-{number}"

    def _make_file(self, number: int) -> int:
        size = self._capacity * _SLOT_BYTES
        path = self._path(number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # a full disk must not be met by writing to the mapping: that is SIGBUS
            address = self._libc.map_file(fd, size)
            for slot in range(self._capacity):
                self._libc.make_mutex(address + slot * _SLOT_BYTES)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)
        return address


class Watcher:
    """Waits for the deaths of workers that hold their latch: one thread per rank, named `latch-<rank>`.

    Args:
        board: where the latches are.
        on_death: called once per rank, at once, from a thread of the watcher: it must be short and must not wait
            (`Mailbox.put`). Ends that were expected are told as well; it is for the caller to ignore them.
    """

    def __init__(self, board: RobustMutexTable, on_death: Callable[[int], None]) -> None:
        self._board, self._on_death = board, on_death
        self._libc = _Libc()
        self._threads: dict[int, threading.Thread] = {}
        self._closed = False

    def watch(self, rank: int) -> bool:
        """Tell the death of `rank` from now on, or that it has died already. Once per rank, from one thread.

        To be called after the worker has said that it holds its latch; False when it does not hold it.
        """
        assert rank not in self._threads and not self._closed
        address = self._board.address(rank)
        code = self._libc.trylock(address)
        if code == 0:
            self._libc.unlock(address)
            return False
        dead = code == errno.EOWNERDEAD
        if dead:
            self._libc.free(address)
        assert dead or code == errno.EBUSY, errno.errorcode[code]
        target = self._tell if dead else self._wait
        self._threads[rank] = threading.Thread(target=target, args=(rank,), name=f"latch-{rank}", daemon=True)
        self._threads[rank].start()
        return True

    def close(self) -> None:
        """End the threads, whether the workers live or not. No death is told afterwards. Idempotent."""
        self._closed = True
        deadline = time.monotonic() + 4 * _PERIOD_S  # a clock that was set back: they are daemons, let them be
        for thread in self._threads.values():
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _wait(self, rank: int) -> None:
        address = self._board.address(rank)
        while not self._closed:
            code = self._libc.lock(address, _PERIOD_S)
            if code == errno.ETIMEDOUT:
                continue
            assert code == errno.EOWNERDEAD, errno.errorcode.get(code, code)
            self._tell(rank)
            self._libc.free(address)
            return

    def _tell(self, rank: int) -> None:
        if not self._closed:
            self._on_death(rank)
