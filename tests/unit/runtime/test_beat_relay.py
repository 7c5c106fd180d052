"""Heartbeats by an agent's relay: gathered, one message at a time, and never by a relay that does not answer."""

from __future__ import annotations

import queue
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaswave_spmd.runtime.processes.beat_relay import BeatRelay, RelayClient
from tests.descriptors import OF_SELECT, beyond_select
from tests.waiting import PATIENCE_S, eventually

OFTEN, SELDOM = 0.01, 1000.0
Sent = queue.SimpleQueue[dict[int, bytes]]


class World:
    """A relay, what it sends on, and its workers."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.ranks = set(range(5))
        self.sent: Sent = queue.SimpleQueue()
        self.relay = self.started()
        self.clients: dict[int, RelayClient] = {}

    def started(self) -> BeatRelay:
        return BeatRelay(self.path, self.ranks, lambda beats: self.sent.put(dict(beats)))

    def send(self, rank: int, beat: bytes, period_s: float = OFTEN) -> bool:
        if rank not in self.clients:
            self.clients[rank] = RelayClient(rank, self.path)
        return self.clients[rank].send(beat, period_s)

    def heard(self) -> dict[int, bytes]:
        """The next message, which the controller answers."""
        beats = self.sent.get(timeout=PATIENCE_S)
        self.relay.answered()
        return beats

    def close(self) -> None:
        self.relay.close()
        for client in self.clients.values():
            client.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "beats")
    yield made
    made.close()


def test_a_worker_goes_by_the_relay_once_it_has_answered(world: World) -> None:
    assert not world.send(3, b"first"), "nothing is known of the relay yet"
    assert world.heard() == {3: b"first"}
    assert world.send(3, b"second")
    assert world.heard() == {3: b"second"}


def test_a_worker_whose_heartbeat_has_no_answer_sends_the_next_one_itself_until_one_has(world: World) -> None:
    world.send(3, b"0")
    world.heard()
    assert [world.send(3, b"1"), world.send(3, b"2")] == [True, False]
    while world.heard() != {3: b"2"}:
        pass
    assert world.send(3, b"3")


def test_messages_come_at_half_the_shortest_period_of_a_worker(world: World) -> None:
    world.send(1, b"1", SELDOM)
    assert world.heard() == {1: b"1"}, "the first one at once"
    world.send(2, b"2", OFTEN)
    eventually(lambda: 2 in world.relay._newest)
    assert world.sent.empty(), "half of a long period is not over"


def test_the_controller_gets_the_newest_of_each_worker_and_one_message_at_a_time(world: World) -> None:
    world.send(1, b"1a")
    assert world.sent.get(timeout=PATIENCE_S) == {1: b"1a"}  # which is not answered yet
    for rank, beat in ((1, b"1b"), (2, b"2a"), (1, b"1c"), (4, b"4a")):
        world.send(rank, beat)
    assert world.sent.empty()
    eventually(lambda: world.relay._newest == {1: b"1c", 2: b"2a", 4: b"4a"})
    world.relay.answered()
    assert world.heard() == {1: b"1c", 2: b"2a", 4: b"4a"}


def test_nothing_of_a_worker_follows_its_end(world: World) -> None:
    world.send(1, b"1a")
    assert world.sent.get(timeout=PATIENCE_S) == {1: b"1a"}
    world.send(1, b"1b")
    world.send(2, b"2b")
    eventually(lambda: world.relay._newest.keys() == {1, 2})
    world.ranks.remove(1)
    world.relay.forget(1)
    world.send(1, b"1c")  # was on its way
    world.relay.answered()
    assert world.heard() == {2: b"2b"}
    world.send(2, b"2c")
    assert world.heard() == {2: b"2c"}
    assert not Path(f"{world.path}-1").exists()


def test_a_relay_that_is_gone_is_noticed_at_once_and_the_next_one_at_the_same_place_is_used(world: World) -> None:
    world.send(3, b"0")
    world.heard()
    assert world.send(3, b"1")
    world.relay.close()
    assert not world.send(3, b"2") and not Path(world.path).exists()
    world.relay = world.started()
    while not world.send(3, b"3"):
        world.heard()


def test_what_is_no_heartbeat_of_a_worker_here_is_nothing_and_an_answer_that_nobody_waits_for_either(
    world: World,
) -> None:
    head = struct.pack("<qd", 3, OFTEN)
    bad = [b"", head, head[:-1], head + b"x" * 9000, struct.pack("<qd", 77, OFTEN) + b"x"]
    bad += [struct.pack("<qd", 3, period_s) + b"x" for period_s in (0.0, -1.0, float("nan"))]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for data in bad:
            stranger.sendto(data, world.path)
    world.relay.answered()
    world.send(3, b"0")
    assert world.heard() == {3: b"0"}


def test_a_full_queue_makes_nobody_wait(world: World) -> None:
    """As of an agent that is stopped."""
    world.send(3, b"0")
    world.heard()
    world.relay.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(world.path)
        with pytest.raises(BlockingIOError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            while True:
                other.sendto(b"x", world.path)
        assert not world.send(3, b"1"), "though the one before was answered"
        assert not world.send(3, b"2")
    world.relay = world.started()


def test_two_ends_of_a_relay_lie_in_a_directory_that_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        BeatRelay(str(tmp_path / "nowhere" / "beats"), (), lambda _: None)
    with pytest.raises(OSError):
        RelayClient(1, str(tmp_path / "nowhere" / "beats"))


def test_a_relay_serves_also_where_strangers_hold_so_many_connections_that_its_descriptors_are_large(
    tmp_path: Path,
) -> None:
    with beyond_select():
        world = World(tmp_path / "beats")
        try:
            assert world.relay._socket.fileno() >= OF_SELECT
            world.send(3, b"0")
            assert world.heard() == {3: b"0"}
            assert world.send(3, b"1"), "it was answered"
        finally:
            world.close()
