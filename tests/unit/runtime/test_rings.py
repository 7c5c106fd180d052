"""Rings: records arrive whole and in order, a full ring takes nothing, and a reader that sleeps is woken."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.runtime.transport.rings import (
    MEMORY_BYTES,
    MOST_RECORD_BYTES,
    RING_BYTES,
    Bell,
    BellRope,
    RingReader,
    RingWriter,
)
from tests.waiting import PATIENCE_S

TAIL = 0  # word of the control part


def ends() -> tuple[RingWriter, RingReader, memoryview]:
    memory = memoryview(bytearray(MEMORY_BYTES))
    return RingWriter(memory), RingReader(memory), memory


@given(st.lists(st.integers(0, MOST_RECORD_BYTES), min_size=1, max_size=40), st.integers(0, 1 << 32))
def test_records_arrive_whole_and_in_order_whatever_their_sizes(sizes: list[int], seed: int) -> None:
    writer, reader, _ = ends()
    draw = random.Random(seed)
    sent: list[bytes] = []
    got = 0
    for size in sizes * 3:  # several times around the ring
        record = draw.randbytes(size)
        cut = draw.randint(0, size)
        if writer.write([record[:cut], memoryview(record)[cut:]]):
            sent.append(record)
        while draw.random() < 0.5 and (found := reader.read()) is not None:
            assert found == sent[got]
            got += 1
    while (found := reader.read()) is not None:
        assert found == sent[got]
        got += 1
    assert got == len(sent)
    assert writer.write([b"there is room again"]) and reader.read() == b"there is room again"


def test_a_full_ring_takes_nothing_until_something_is_read() -> None:
    writer, reader, memory = ends()
    record, taken = bytes(1000), 0
    while writer.write([record]):
        taken += 1
    assert taken == RING_BYTES // 1008
    before = bytes(memory)
    assert not writer.write([record]) and bytes(memory) == before
    assert reader.read() == record
    assert writer.write([record])
    assert [reader.read() for _ in range(taken)] == [record] * taken and reader.read() is None


def test_a_record_that_is_too_large_is_not_taken() -> None:
    writer, reader, _ = ends()
    assert not writer.write([bytes(MOST_RECORD_BYTES + 1)]) and reader.read() is None


@pytest.mark.parametrize("word", [MOST_RECORD_BYTES + 1, 1 << 63, (1 << 64) - 1])
def test_what_is_no_record_is_refused(word: int) -> None:
    writer, reader, memory = ends()
    writer.write([b"fine"])
    lengths = memory[MEMORY_BYTES - RING_BYTES :].cast("Q")
    lengths[0] = word
    with pytest.raises(ValueError, match="a record of"):
        reader.read()
        lengths[0] = word
        reader.read()


def test_a_record_is_not_seen_before_the_tail_has_moved() -> None:
    """A writer that is killed within `write` leaves nothing."""
    writer, reader, memory = ends()
    writer.write([b"whole"])
    assert reader.read() == b"whole"
    words = memory[: MEMORY_BYTES - RING_BYTES].cast("Q")
    tail = words[TAIL]
    writer.write([b"not yet"])
    words[TAIL] = tail
    assert reader.read() is None


def test_a_reader_that_sleeps_is_to_be_woken_once() -> None:
    writer, reader, _ = ends()
    writer.write([b"awake"])
    assert not writer.must_ring()
    reader.wait()
    assert reader.has_record()
    writer.write([b"asleep"])
    assert writer.must_ring() and not writer.must_ring()
    reader.wait()
    reader.is_awake()
    assert not writer.must_ring()


def test_a_bell_rings_as_often_as_it_is_asked_and_is_quiet_after_that(tmp_path: Path) -> None:
    bell = Bell(str(tmp_path / "bell"))
    rope = BellRope(str(tmp_path / "bell"))
    for _ in range(100_000):  # more than a pipe holds
        rope.ring()
    bell.quiet()
    with pytest.raises(BlockingIOError):
        os.read(bell.fd, 1)
    rope.ring()
    assert os.read(bell.fd, 10) == b"\0"
    bell.close()
    rope.ring()
    rope.close()
    rope.ring()
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="bell"):
        BellRope(str(tmp_path / "bell"))


def test_a_reader_that_sleeps_misses_no_record(tmp_path: Path) -> None:
    """Two threads, as two processes do it: the reader sleeps in `select` whenever the ring is empty."""
    writer, reader, _ = ends()
    bell = Bell(str(tmp_path / "bell"))
    rope, number, fence = BellRope(str(tmp_path / "bell")), 20_000, threading.Lock()
    got: list[bytes] = []

    def read() -> None:
        import select

        while len(got) < number:
            reader.wait()
            with fence:
                pass
            while (record := reader.read()) is not None:
                got.append(bytes(record))
            if len(got) < number and not reader.has_record():
                assert select.select([bell.fd], [], [], PATIENCE_S)[0], f"not woken after {len(got)} records"
                bell.quiet()

    thread = threading.Thread(target=read)
    thread.start()
    for i in range(number):
        while not writer.write([i.to_bytes(4, "big")]):
            pass
        if writer.must_ring():
            rope.ring()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and got == [i.to_bytes(4, "big") for i in range(number)]
    rope.close()
    bell.close()
