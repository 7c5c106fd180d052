"""The thread that receives everything: what follows all messages that have arrived, however many these are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from elaswave_spmd.runtime.transport import event_loop as module
from elaswave_spmd.runtime.transport.event_loop import EventLoop, LoopHandlers
from tests.waiting import PATIENCE_S, eventually


class World:
    """An event loop whose messages are numbers, and what it has done, in order."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.pull, self.push = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        for socket in (self.pull, self.push):  # what was sent has arrived at once, however much it is
            socket.setsockopt(zmq.RCVHWM if socket is self.pull else zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
        self.pull.bind("inproc://messages")
        self.push.connect("inproc://messages")
        self.done: list[int | str] = []
        self.is_flooded = False
        handlers = LoopHandlers(self.file, cast(Any, None), self.done.append, cast(Any, None), {})  # type: ignore[arg-type]
        self.loop = EventLoop(self.pull, cast(Any, SimpleNamespace(read=self.read)), None, handlers, None)
        self.thread = threading.Thread(target=self.loop.run, daemon=True)

    def read(self) -> int:
        return -1 if self.is_flooded else int(self.pull.recv(zmq.NOBLOCK))

    def file(self, message: Any) -> None:
        self.done.append(message)

    def close(self) -> None:
        self.loop.stop()
        self.thread.join(PATIENCE_S)
        self.loop.close_wake_pipe()
        self.push.close(0)
        self.context.term()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_what_is_asked_for_follows_all_that_has_arrived(world: World) -> None:
    """Also where that is many bursts."""
    for number in range(1_000):
        world.push.send(b"%d" % number)
    world.loop.when_read(lambda: world.done.append("read"))
    world.thread.start()
    eventually(lambda: "read" in world.done)
    assert world.done == [*range(1_000), "read"]


def test_it_comes_at_once_where_nothing_waits_and_each_time_in_its_turn(world: World) -> None:
    world.thread.start()
    for number in range(3):
        world.loop.when_read(lambda number=number: world.done.append(number))
    eventually(lambda: world.done == [0, 1, 2])


def test_a_flood_without_an_end_does_not_keep_it_away_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BURSTS", 5)
    world.is_flooded = True
    world.loop.when_read(lambda: world.done.append("read"))
    world.thread.start()
    eventually(lambda: "read" in world.done)
    assert world.done.index("read") == 5 * module._BURST
