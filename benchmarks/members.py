"""Processes that carry out orders: for benchmarks that measure a part of the product between real processes.

The driver forks them from the product's fork server, so that each begins with everything imported. It sends orders over
a Unix socket, one line of JSON each, and gets one line back. Each benchmark defines the orders of its members.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient, ForkServerSpec

_TIMEOUT_S = 120.0
_LOOK_S = 0.2

Answer = dict[str, Any]


def follow(spec: Mapping[str, Any], make: Callable[[Mapping[str, Any]], Any]) -> None:
    """Runs a member until the driver ends.

    `make(spec)` returns an object. Its method `hello` returns the first answer to the driver; an order
    {"do": NAME, ...} calls its method NAME with the rest of the order."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(spec["orders"])
        stream: Any = link.makefile("rwb")

        def answer(call: Callable[[], Mapping[str, Any] | None]) -> None:
            try:
                reply = dict(call() or {})
            except Exception:
                reply = {"error": traceback.format_exc()}
            stream.write(json.dumps({"key": spec["rank"], **reply}).encode() + b"\n")
            stream.flush()

        member: Any = None

        def begin() -> Mapping[str, Any]:
            nonlocal member
            member = make(spec)
            return member.hello()

        answer(begin)
        for line in stream:
            order = json.loads(line)
            answer(lambda order=order: getattr(member, order.pop("do"))(**order))


class Members:
    """The driver's end. Each member has a key: 0, 1, ... in the order of their start.

    Args:
        target: "module:function", called in each with its spec; it calls `follow`.
        preload: modules to import before any member starts.
        directory: for the socket.
    """

    def __init__(self, target: str, preload: tuple[str, ...], directory: Path) -> None:
        self._fork_server = ForkServerClient.start(
            target, ForkServerSpec(preload=preload, env={"OMP_NUM_THREADS": "1"}, orphan_grace_s=1.0)
        )
        self._path = str(directory / "orders.sock")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen(128)
        self._listener.settimeout(_LOOK_S)
        self._streams: dict[int, BinaryIO] = {}
        self._next = 0

    @property
    def next_key(self) -> int:
        """The key of the member that is started next."""
        return self._next

    def start(self, spec: Mapping[str, Any], count: int = 1) -> dict[int, Answer]:
        """Starts members with the same spec. Returns their first answers by key.

        Raises:
            RuntimeError: one failed, or did not connect.
        """
        keys = range(self._next, self._next + count)
        self._next += count
        for key in keys:
            self._fork_server.spawn(key, {**spec, "orders": self._path})
        hellos: dict[int, Answer] = {}
        deadline = time.monotonic() + _TIMEOUT_S
        while len(hellos) < count:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._look(keys)
                if time.monotonic() > deadline:
                    raise RuntimeError(f"members {sorted(set(keys) - set(hellos))} did not come") from None
                continue
            connection.settimeout(_TIMEOUT_S)
            stream: Any = connection.makefile("rwb")
            connection.close()  # the stream keeps it open
            reply = _read(stream, "a new member")
            self._streams[reply["key"]], hellos[reply["key"]] = stream, reply
        return hellos

    def order(self, orders: Mapping[int, Mapping[str, Any]]) -> dict[int, Answer]:
        """Sends each member its order, all before the first answer is read. Returns the answers by key.

        Raises:
            RuntimeError: a member failed or ended.
        """
        self.give(orders)
        return {key: self.answer(key) for key in orders}

    def all(self, keys: Iterable[int], do: str, **rest: Any) -> dict[int, Answer]:
        """Sends these members the same order; otherwise like `order`."""
        return self.order({key: {"do": do, **rest} for key in keys})

    def give(self, orders: Mapping[int, Mapping[str, Any]]) -> None:
        """Sends each member its order without waiting. Call `answer` for each of them."""
        for key, order in orders.items():
            self._streams[key].write(json.dumps(order).encode() + b"\n")
            self._streams[key].flush()

    def answer(self, key: int) -> Answer:
        """Returns a member's answer to the last order that it was sent."""
        return _read(self._streams[key], f"member {key}")

    def kill(self, key: int) -> None:
        """Kills a member by SIGKILL. Returns when the process has ended and is reaped."""
        self._fork_server.signal(key, signal.SIGKILL)
        deadline = time.monotonic() + _TIMEOUT_S
        while not any(exited.rank == key for exited in self._exits()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"member {key} was killed and has not ended")
        self._streams.pop(key).close()

    def close(self) -> None:
        """Ends all members."""
        for stream in self._streams.values():
            stream.close()
        self._listener.close()
        self._fork_server.stop(0.0)
        os.unlink(self._path)

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exits(self) -> list[Any]:
        select.select([self._fork_server], [], [], _LOOK_S)
        return self._fork_server.poll()

    def _look(self, keys: range) -> None:
        for exited in self._fork_server.poll():
            if exited.rank in keys:
                raise RuntimeError(f"{exited}; its output says why")


def _read(stream: BinaryIO, who: str) -> Answer:
    line = stream.readline()
    if not line:
        raise RuntimeError(f"{who} has ended")
    reply = json.loads(line)
    if "error" in reply:
        raise RuntimeError(f"{who} failed:\n{reply['error']}")
    return reply
