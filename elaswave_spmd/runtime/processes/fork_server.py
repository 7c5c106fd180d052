"""The fork server: a process that has imported everything a worker needs and makes workers by forking itself.

It is started by `ForkServerClient.start`. So that it can fork safely it has one thread, runs no operator and opens no
zmq context. It only waits for three events: an order from the controller, the end of a child, the end of the
controller. It is the parent of all workers, so it alone reaps them, can signal them without a race on process ids, and
outlives a controller that was killed. It also ends the processes that a worker leaves behind (strays.py).

Lines of JSON, controller -> fork server: first the setup, then {"spawn": rank, "spec": {...}}, {"signal": number,
"rank": rank}, {"orphan_grace_s": seconds}, {"hold": path}, {"settled": true}, {"stop": grace_s}. The setup is answered
by one line. Every order also has an "order", its number, and is answered by one line that has this number as "to", so
that the controller can tell a late answer to an order that it has given up from that to the next one; the answer for a
worker that cannot be started has {"not_started": why}. On a second pipe the fork server writes a line {"exited": rank,
...} for each worker that ended. `by_value` in the setup is the descriptor of what the run gets by value, or null. With
`adopt_s` in the setup another controller may take it over for so many seconds once the controller is gone
(adoption.py).
"""

from __future__ import annotations

import contextlib
import ctypes  # noqa: F401  (children need it; imported once, here)
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any, NoReturn

from elaswave_spmd import by_value
from elaswave_spmd.output import flush_output
from elaswave_spmd.ready import is_any_ready, ready_among
from elaswave_spmd.runtime.processes import child
from elaswave_spmd.runtime.processes.adoption import accept_next, listen_for_next
from elaswave_spmd.runtime.processes.scratch import hold_lock, hold_scratch
from elaswave_spmd.runtime.processes.strays import adopt_strays, kill_strays, reap_strays
from elaswave_spmd.runtime.transport.links import socket_names

_UNREAD_S = 5.0  # how often to empty the file that workers print to, if nobody reads it any more
_REAP_PERIOD_S = 0.01  # how often to look for ended children while all workers are being ended
_STRAYS_S = 5.0  # how long to wait for killed strays: one may be in a call that the kernel does not interrupt


def num_threads() -> int:
    """Threads of this process (Linux; elsewhere Python's own)."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        import threading

        return threading.active_count()


class ForkServer:
    """The fork server's descriptors and living children.

    Args:
        orders: the socket to the controller.
        notices: the write end of the pipe on which ended workers are reported.
    """

    def __init__(self, orders: socket.socket, notices: int) -> None:
        self._orders = orders
        self._notices = notices
        self._pids: dict[int, int] = {}  # rank -> pid, of the living workers
        self._next_rank = 0  # the rank above those of all workers that were ever started
        self._made: list[int] = []  # the ranks of all workers that were ever started
        self._others: frozenset[int] = frozenset()  # children that are not workers, and were there before any worker
        self._gone: set[int] = set()  # process ids of workers that have ended, and may have left strays
        self._ended: list[int] = []  # ranks that ended while there was no controller, or while it was still adopting
        self._is_settled = True  # the controller has handled all ends that happened before it had adopted the workers
        self._unread: list[int] = []  # the streams of workers whose reader, the first controller, is gone
        self._waited_s = 0.0  # how long there has been no controller, since the last one was lost
        self._listener: socket.socket | None = None  # where the next controller connects
        self._buffer = b""
        # Descriptors of locks. Workers inherit them, so that the locks are held as long as a worker lives. Processes
        # that a user's code forks in a worker close them.
        self._locks: list[int] = []
        read, write = os.pipe()  # written by Python's signal handler when a child has ended
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        self._wake_read = read
        self._wake_write = write
        self._setup: dict[str, Any] = {}

    def serve(self) -> None:
        """Run until the controller orders it to stop, or has ended. When this returns no worker is left."""
        setup = self._next_order()
        if setup is None:
            return
        self._setup = setup
        sys.path[:] = setup["sys_path"]
        for folder in setup["scratch"]:
            self._locks += hold_scratch(folder)
        try:
            problem = self._preload()
            if problem:
                self._answer({"error": problem})
                return
            refusal = self._take_by_value()
            if refusal:
                self._answer({"refused": refusal})
                return
            self._others = adopt_strays()
            # Python writes to the wake-up descriptor only for signals that have a handler.
            signal.signal(signal.SIGCHLD, lambda *_: None)
            signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
            gc.collect()
            gc.freeze()  # children share these objects' pages as long as no collector writes to them
            if setup["adopt_s"] is not None:
                with contextlib.suppress(OSError):  # on a file system without sockets, workers cannot be adopted
                    self._listener = listen_for_next(setup["scratch"][0])
            self._answer({"ready": True, "threads": num_threads()})
            self._serve_controllers()
        except _ControllerLostError:
            # Workers notice the loss by the life pipe, and may write a checkpoint before they end. The time that they
            # have waited for another controller is a part of their grace.
            grace = float(setup["orphan_grace_s"])
            self._wait_until_none(grace - self._waited_s)
            self._end_all(min(grace, 1.0))
        finally:
            for path in setup["scratch"]:
                shutil.rmtree(path, ignore_errors=True)

    def _preload(self) -> str:
        """Import the modules that workers need. Returns an error text, empty on success."""
        for name in self._setup["preload"]:
            try:
                importlib.import_module(name)
            except BaseException:
                return f"the fork server could not import {name}:\n{traceback.format_exc()}"
            if self._setup["method"] == "fork" and num_threads() != 1:
                return (
                    f"importing {name} left {num_threads()} threads running; a process that forks must have "
                    "one. Leave the module out of preload, or use method='spawn'."
                )
            # Imports take seconds; if the controller has ended meanwhile, there is no reason to go on.
            if is_any_ready([self._orders], timeout_s=0.0) and not self._orders.recv(1, socket.MSG_PEEK):
                raise _ControllerLostError
        return ""

    def _take_by_value(self) -> dict[str, str]:
        """Unpickle the objects that the run gets by value, for all forked workers. Spawned workers do this themselves.

        Returns the fields of the user's error, empty on success.
        """
        fd = self._setup["by_value"]
        if fd is None or self._setup["method"] != "fork":
            return {}
        before = num_threads()
        try:
            by_value.take(fd)
        except Exception as error:
            return by_value.untakeable(error).fields()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # again: a module that was imported for it may have set a handler
        os.close(fd)  # otherwise the bytes would stay in memory twice
        if num_threads() != before:
            return by_value.leaves_threads(num_threads()).fields()
        return {}

    def _serve_controllers(self) -> None:
        """Serve one controller after another, until one orders the end.

        Raises:
            _ControllerLostError: the last controller is gone, and no other one came in its place.
        """
        while True:
            try:
                self._loop()
                return
            except _ControllerLostError:
                if not self._next_controller():
                    raise
                self._unread = self._setup["captured"]

    def _next_controller(self) -> bool:
        """Wait for another controller, as long as there is a worker. Returns False if none came."""
        lost_at, self._waited_s = time.monotonic(), 0.0
        if self._is_settled:
            self._ended.clear()
        while self._listener is not None and self._pids:
            left = lost_at + float(self._setup["adopt_s"]) - time.monotonic()
            if left <= 0:
                break
            ready = ready_among([self._listener, self._wake_read], left)
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            self._reap()
            if self._listener in ready and self._pids and (taken := accept_next(self._listener)) is not None:
                self._orders.close()
                os.close(self._notices)
                os.close(
                    self._setup["life_fd"]
                )  # living workers have it, and see the end of the next one by their links
                self._orders, self._notices, self._setup["life_fd"] = taken
                self._buffer, self._is_settled = b"", False
                about = {"pids": self._pids, "next_rank": self._next_rank, "ended": self._ended}
                self._answer({**about, "made": self._made, "seconds": time.monotonic() - lost_at})
                return True
        self._waited_s = time.monotonic() - lost_at
        return False

    def _drop_unread(self) -> None:
        """Empty the file that workers print to, once nobody reads it: it is in memory, and grows."""
        for stream in self._unread:
            with contextlib.suppress(OSError):
                os.ftruncate(stream, 0)

    def _loop(self) -> None:
        while True:
            self._drop_unread()
            # An order that was received together with the one before is in the buffer: the socket does not become
            # readable for it.
            is_read = b"\n" in self._buffer
            ready = ready_among(
                [self._orders, self._wake_read], 0.0 if is_read else _UNREAD_S if self._unread else None
            )
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                self._reap()
            if is_read or self._orders in ready:
                order = self._next_order()
                if order is None:
                    raise _ControllerLostError
                if "stop" in order:
                    self._end_all(float(order["stop"]))
                    self._answer({"stopped": True, "to": order["order"]})
                    return
                try:
                    done = self._execute(order)
                except Exception:
                    done = {"error": traceback.format_exc()}
                self._answer(done | {"to": order["order"]})

    def _execute(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out any order but `stop`. Returns the answer."""
        if "spawn" in order:
            rank = int(order["spawn"])
            spec = order["spec"] | {"rank": rank, "life_fd": self._setup["life_fd"]}
            self._next_rank = max(self._next_rank, rank + 1)
            try:
                self._pids[rank] = self._fork(spec) if self._setup["method"] == "fork" else self._spawn(spec)
            except (OSError, MemoryError) as error:  # no process, memory, descriptor or disk is left for it
                return {"not_started": str(error) or type(error).__name__}
            self._made.append(rank)
            return {"pid": self._pids[rank]}
        if "orphan_grace_s" in order:
            self._setup["orphan_grace_s"] = float(order["orphan_grace_s"])
            return {"set": True}
        if "settled" in order:
            self._is_settled = True
            return {"settled": True}
        if "hold" in order:
            self._locks.append(hold_lock(order["hold"]))
            return {"held": True}
        return {"sent": self._signal(int(order["rank"]), int(order["signal"]))}

    def _fork(self, spec: dict[str, Any]) -> int:
        """Make a worker by a fork. Returns its process id; in the child this never returns."""
        parent = os.getpid()
        # Text that is still in the buffers would be written a second time by the child.
        flush_output()
        pid = os.fork()
        if pid:
            return pid
        try:
            child.die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            # The child must not keep the server's descriptors open: the controller sees by their end that the server
            # has died.
            self._orders.close()
            if self._listener is not None:
                self._listener.close()
            for fd in (self._notices, self._wake_read, self._wake_write):
                os.close(fd)
            mark = child.set_up()  # noqa: F841  (kept until the worker ends)
            os.register_at_fork(after_in_child=self._give_up_locks)
            child.run(self._setup["target"], spec)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # never back into the fork server's loop

    def _give_up_locks(self) -> None:
        """Close the locks in this process. Only once: afterwards the same numbers may belong to other files."""
        while self._locks:
            os.close(self._locks.pop())

    def _spawn(self, spec: dict[str, Any]) -> int:
        """Start a worker in a fresh interpreter. Returns its process id."""
        orders = {
            "parent": os.getpid(),
            "sys_path": self._setup["sys_path"],
            "target": self._setup["target"],
            "spec": spec,
            "by_value": self._setup["by_value"],
        }
        # The orders go through a file: a pipe holds 64 KiB, and writing more would wait for a child that may have
        # failed.
        with tempfile.TemporaryFile("w+") as file:
            json.dump(orders, file)
            file.seek(0)
            command = [sys.executable, "-m", "elaswave_spmd.runtime.processes.child"]
            fds = [fd for fd in (self._setup["life_fd"], self._setup["by_value"]) if fd is not None]
            process = subprocess.Popen(command, stdin=file, pass_fds=fds)
        process.returncode = 0  # `_reap` waits for it; the Popen object must not
        return process.pid

    def _signal(self, rank: int, number: int) -> bool:
        """Send a signal; False if the child has ended. Only this process reaps, so the pid is still the child's."""
        self._reap()
        if rank not in self._pids:
            return False
        os.kill(self._pids[rank], number)
        return True

    def _reap(self) -> None:
        """Report and forget the children that have ended."""
        for rank, pid in list(self._pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done == 0:
                continue
            del self._pids[rank]
            self._ended.append(rank)
            self._gone.add(pid)
            code = os.waitstatus_to_exitcode(status)
            notice = {
                "exited": rank,
                "pid": pid,
                "code": code if code >= 0 else None,
                "signal": -code if code < 0 else None,
            }
            with contextlib.suppress(OSError):  # the controller has ended
                os.write(self._notices, json.dumps(notice).encode() + b"\n")
            self._remove_files(rank, pid)
        # A killed stray wakes this process when it has ended. Then the strays that it has itself left are killed.
        known = self._others.union(self._pids.values())
        has_ended = reap_strays(known)
        if self._gone and not (kill_strays(known, self._gone if self._pids else None) or has_ended):
            self._gone.clear()

    def _remove_files(self, rank: int, pid: int) -> None:
        """Remove the sockets of a worker that has ended, of which the directory would otherwise have ever more.

        Its file with its address stays: by that the next controller knows that the worker was a member, and has not
        been about to join (`orphaned_run.newcomers`).
        """
        for folder in self._setup["scratch"]:
            for name in socket_names(rank, pid):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, name))

    def _wait_until_none(self, seconds: float, *, strays: bool = False) -> None:
        """Wait until all workers have ended and are reaped; with `strays`, their strays as well."""
        deadline = time.monotonic() + seconds
        self._reap()
        while (self._pids or (strays and self._gone)) and time.monotonic() < deadline:
            is_any_ready([self._wake_read], timeout_s=_REAP_PERIOD_S)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            self._reap()

    def _end_all(self, grace_s: float) -> None:
        """End all workers: SIGTERM, `grace_s` seconds, then SIGKILL, which ends stopped ones too. All are reaped."""
        if grace_s > 0:
            for rank in list(self._pids):
                self._signal(rank, signal.SIGTERM)
            self._wait_until_none(grace_s)
        for rank in list(self._pids):
            self._signal(rank, signal.SIGKILL)
        self._wait_until_none(float("inf"))
        self._wait_until_none(_STRAYS_S, strays=True)

    def _next_order(self) -> dict[str, Any] | None:
        """The next line as JSON; None if the controller has closed its end."""
        while b"\n" not in self._buffer:
            try:
                data = self._orders.recv(65536)
            except ConnectionError:
                return None
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _answer(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the controller has ended; the next read finds that out
            self._orders.sendall(json.dumps(message).encode() + b"\n")


class _ControllerLostError(Exception):
    pass


def run(orders: int, notices: int) -> NoReturn:
    """Serve until the end of the run, then end the process. SIGINT, SIGTERM and SIGHUP must be blocked.

    Args:
        orders: the descriptor of the socket to the controller.
        notices: the descriptor of the pipe on which ended workers are reported.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        ForkServer(socket.socket(fileno=orders), notices).serve()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # tearing down an interpreter that has imported torch takes longer than ending all workers


# `python -m elaswave_spmd.runtime.processes.fork_server ORDERS_FD NOTICES_FD` is a fork server in an interpreter of
# its own. It is started with SIGINT, SIGTERM and SIGHUP blocked.
if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
