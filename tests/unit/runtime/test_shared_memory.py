"""Shared memory: payloads are read as they were written, for as long as somebody refers to them, and no longer."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.runtime.transport.shared_memory import (
    _TRIM_EVERY,
    MemoryLocation,
    PeerMemory,
    SharedMemory,
    _rounded,
    why_not_shared,
)

pytestmark = pytest.mark.skipif(bool(why_not_shared()), reason=why_not_shared())
MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    found = SharedMemory(64 * MIB)
    yield found
    found.close()


def placed(memory: SharedMemory, payload: bytes | np.ndarray, link: int = 1) -> int:
    at = memory.place(payload.data if isinstance(payload, np.ndarray) else memoryview(payload), link)
    assert at is not None and at % 64 == 0
    return at


def let_go(peer: PeerMemory, at: int) -> None:
    """Reads a payload, and refers to it no more."""
    peer.payload(at, 1)


@given(st.integers(1, 1 << 40))
def test_a_block_is_at_most_an_eighth_larger_than_what_it_holds(num_bytes: int) -> None:
    size = _rounded(num_bytes)
    assert size >= num_bytes and size % 64 == 0 and (size - num_bytes < 64 or 8 * (size - num_bytes) <= num_bytes)


def test_a_payload_is_read_where_it_lies_and_may_be_changed(memory: SharedMemory) -> None:
    values = np.arange(10_000, dtype=np.float32)
    at = placed(memory, values)
    values[:] = 0  # the sender's memory is its own again
    got = PeerMemory(memory.location).payload(at, 40_000)
    tensor = torch.frombuffer(got, dtype=torch.float32)
    assert torch.equal(tensor, torch.arange(10_000, dtype=torch.float32)) and tensor.data_ptr() % 64 == 0
    tensor += 1
    assert memory.view[at : at + 4] == np.float32(1).tobytes()


def test_a_block_is_used_again_when_nothing_refers_to_it(memory: SharedMemory) -> None:
    peer = PeerMemory(memory.location)
    first = placed(memory, bytes(5000))
    tensor = torch.frombuffer(peer.payload(first, 5000), dtype=torch.uint8)
    part = tensor[100:200].view(10, 10)
    del tensor
    second = placed(memory, bytes(5000))
    assert second != first and memory.num_held == 2
    let_go(peer, second)
    del part  # the last reference
    assert memory.num_held == 0
    assert {placed(memory, bytes(5000)), placed(memory, bytes(5000))} == {first, second}
    assert placed(memory, bytes(5000)) not in (first, second)


def lent(memory: SharedMemory, num_bytes: int, link: int = 1) -> np.ndarray:
    found = memory.lend(num_bytes, link)
    assert found is not None and found.nbytes == num_bytes
    return found


def test_what_is_written_into_memory_that_was_lent_is_handed_over_without_a_copy(memory: SharedMemory) -> None:
    peer = PeerMemory(memory.location)
    values = torch.from_numpy(lent(memory, 40_000)).view(torch.float32)
    values.copy_(torch.arange(10_000))
    used = memory.num_used_bytes
    at = placed(memory, values.numpy())
    assert memory.num_used_bytes == used
    got = torch.frombuffer(peer.payload(at, 40_000), dtype=torch.float32)
    assert torch.equal(got, torch.arange(10_000, dtype=torch.float32))
    values[0] = 7.0
    assert got[0] == 7.0, "it is the same memory"


@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_a_block_that_was_lent_is_used_again_when_both_ends_have_let_go_of_it(memory: SharedMemory, first: str) -> None:
    peer = PeerMemory(memory.location)
    values = lent(memory, 5000)
    at = placed(memory, values)
    got = peer.payload(at, 5000)
    if first == "sender":
        del values
    else:
        del got
    others = [placed(memory, bytes(5000)), placed(memory, lent(memory, 5000))]
    assert at not in others
    values, got = None, None
    assert at in (placed(memory, bytes(5000)), placed(memory, bytes(5000)))


def test_what_was_lent_for_one_link_is_copied_for_another_and_the_second_time(memory: SharedMemory) -> None:
    values = lent(memory, 5000, link=2)
    values[:] = 3
    first, second = placed(memory, values, link=1), placed(memory, values, link=2)
    third = placed(memory, values, link=2)  # it is the receiver's already
    assert len({first, second, third}) == 3
    peer = PeerMemory(memory.location)
    assert {bytes(peer.payload(at, 5000)) for at in (first, second, third)} == {bytes([3] * 5000)}


def test_a_block_that_was_lent_and_not_sent_is_used_again(memory: SharedMemory) -> None:
    values = lent(memory, 5000)
    part = values[17:]
    del values
    other = lent(memory, 5000)
    used = memory.num_used_bytes
    del part, other
    assert memory.num_held == 0
    placed(memory, bytes(5000))
    lent(memory, 5000)
    assert memory.num_used_bytes == used


def test_nothing_is_lent_of_memory_that_is_full_or_closed(memory: SharedMemory) -> None:
    assert memory.lend(65 * MIB, 1) is None
    memory.close()
    assert memory.lend(5000, 1) is None


def test_as_much_memory_is_used_as_is_held_at_once(memory: SharedMemory) -> None:
    """In whatever order receivers let go."""
    peer, draw, held = PeerMemory(memory.location), np.random.default_rng(0), []
    used = 0
    for number in range(3000):
        held.append(peer.payload(placed(memory, bytes(4500)), 4500))
        while len(held) > 20:
            held.pop(int(draw.integers(len(held))))
        if number == 500:
            used = memory.num_used_bytes
    assert memory.num_used_bytes <= used + 10 * 5000 and used < 60 * 5000


def test_memory_that_is_full_takes_nothing(memory: SharedMemory) -> None:
    peer = PeerMemory(memory.location)
    held = []
    while (at := memory.place(memoryview(bytes(5 * MIB)), 1)) is not None:
        held.append(at)
    assert len(held) >= 11 and memory.place(memoryview(bytes(5 * MIB)), 1) is None
    let_go(peer, held[3])
    assert memory.place(memoryview(bytes(5 * MIB)), 1) == held[3]


def test_blocks_of_a_receiver_are_free_when_it_has_ended_and_not_before(memory: SharedMemory) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as receiver:
        theirs, others = placed(memory, bytes(5000), link=1), placed(memory, bytes(5000), link=2)
        memory.close_link(1, receiver.pid)
        assert placed(memory, bytes(5000), link=3) not in (theirs, others), "the receiver may still read"
        receiver.kill()
        receiver.wait()
        assert placed(memory, bytes(5000), link=3) == theirs


def test_what_was_reserved_for_a_link_is_used_again_when_its_receiver_has_ended(memory: SharedMemory) -> None:
    first = memory.reserve(1000, link=1)
    assert first is not None
    memory.view[first : first + 3] = b"old"
    memory.close_link(1, os.getpid())
    second = memory.reserve(1000, link=2)
    assert second not in (None, first)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as receiver:
        receiver.wait()
    memory.close_link(2, receiver.pid)
    again = memory.reserve(1000, link=4)
    assert again == second and bytes(memory.view[second : second + 1000]) == bytes(1000)


def test_what_was_reserved_for_a_link_is_used_again_when_its_receiver_has_a_newer_one(memory: SharedMemory) -> None:
    """Once; and its blocks are free when the receiver has let go of them, and not before."""
    first, block = memory.reserve(1000, link=1), placed(memory, bytes(5000), link=1)
    assert first is not None
    memory.view[first : first + 3] = b"old"
    memory.close_link(1, os.getpid())
    second = memory.reserve(1000, link=2)
    memory.replace_links([1, 77])
    assert placed(memory, bytes(5000), link=2) != block
    assert memory.reserve(1000, link=3) == first and bytes(memory.view[first : first + 1000]) == bytes(1000)
    assert memory.reserve(1000, link=4) not in (first, second)


def files_of(pid: int) -> set[str]:
    """Returns what a process has open or mapped."""
    opened = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    rows = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return opened | {row[5] for row in rows if len(row) > 5}


def test_the_memory_outlives_its_owner_and_leaves_no_file() -> None:
    code = """
import sys
from elaswave_spmd.runtime.transport.shared_memory import SharedMemory
memory = SharedMemory(1 << 20)
at = memory.location
print(at.pid, at.fd, at.inode, memory.place(memoryview(b"still here"), 1), flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid, fd, inode, at = map(int, owner.stdout.readline().split())
        location = MemoryLocation(pid, fd, inode, 1 << 20)
        peer = PeerMemory(location)
        used = files_of(owner.pid)
        owner.kill()
        owner.wait()
    assert bytes(peer.payload(at, 10)) == b"still here"
    # Other programs' files in /dev/shm come and go.
    assert any("memfd:" in path for path in used) and not [path for path in used if path.startswith("/dev/shm/")], used
    with pytest.raises(OSError, match=str(pid)):
        PeerMemory(location)


def test_only_memory_of_a_worker_is_mapped(memory: SharedMemory, tmp_path: os.PathLike[str]) -> None:
    other = os.open(os.path.join(tmp_path, "file"), os.O_CREAT | os.O_RDWR)
    os.ftruncate(other, 4096)
    with pytest.raises(OSError, match="no shared memory"):
        PeerMemory(MemoryLocation(os.getpid(), other, os.fstat(other).st_ino, 4096))
    os.close(other)
    at = memory.location
    for wrong in (replace(at, num_bytes=at.num_bytes - 4096), replace(at, inode=at.inode + 1)):
        with pytest.raises(OSError, match="not the memory"):  # of a process, perhaps, that has an old one's number
            PeerMemory(wrong)
    peer = PeerMemory(at)
    for where, size in ((0, 1), (64, 1), (130, 1), (128, 64 * MIB), (1 << 60, 1)):
        with pytest.raises(ValueError, match="no block"):
            peer.payload(where, size)


def test_pages_that_are_not_used_any_more_go_back_to_the_machine(memory: SharedMemory) -> None:
    peer = PeerMemory(memory.location)
    large = placed(memory, b"\1" * (8 * MIB))
    held = placed(memory, b"\2" * (2 * MIB))
    let_go(peer, large)
    before = blocks_of(memory)
    for _ in range(2 * _TRIM_EVERY):
        let_go(peer, placed(memory, b"small"))
    assert blocks_of(memory) <= before - 7 * MIB
    assert bytes(peer.payload(held, 2 * MIB)) == b"\2" * (2 * MIB)
    assert placed(memory, b"\3" * (8 * MIB)) == large
    assert bytes(peer.payload(large, 8 * MIB)) == b"\3" * (8 * MIB)


def test_where_the_machine_gives_no_memory_nothing_is_placed(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may have no memory left when such pages are written to, which would end the process."""
    held = placed(memory, bytes(2 * MIB))
    assert blocks_of(memory) >= 2 * MIB

    def none_left(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", none_left)
    assert memory.place(memoryview(bytes(2 * MIB)), 1) is None and memory.reserve(1000, 1) is None
    let_go(PeerMemory(memory.location), held)
    assert placed(memory, bytes(2 * MIB)) == held, "that was given before"


def test_core_dumps_do_not_fill_the_memory(memory: SharedMemory) -> None:
    """A dump reads, and so allocates, what was never written to: most of it."""
    peer = PeerMemory(memory.location)
    text = Path("/proc/self/smaps").read_text(encoding="utf-8")
    flags = re.findall(r"/memfd:elaswave .*\n(?:\w+: .*\n)*?VmFlags: (.*)\n", text)
    assert len(flags) >= 2 and all("dd" in found.split() for found in flags), (flags, peer)


def blocks_of(memory: SharedMemory) -> int:
    """The bytes that the machine has given it."""
    return 512 * os.fstat(memory.location.fd).st_blocks


def test_a_process_that_was_forked_lets_go_of_nothing(memory: SharedMemory) -> None:
    peer = PeerMemory(memory.location)
    at = placed(memory, b"of the parent")
    got = peer.payload(at, 13)
    child = os.fork()
    if child == 0:
        got = None
        os._exit(0)
    os.waitpid(child, 0)
    assert memory.num_held == 1 and got is not None and bytes(got) == b"of the parent"
