"""The form in which a Reconfigure goes over a link: what arrives is what was meant, and never anything else."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import count, islice

import msgspec
import numpy as np
import pytest

from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery.messages import (
    PackedReconfigure,
    PeerAddresses,
    Prepare,
    Recompute,
    Reconfigure,
    decode,
    encode,
)
from elaswave_spmd.recovery.packed_reconfigure import Packer, Unpacker
from elaswave_spmd.recovery.peers import Peers

SMALL = Reconfigure(0, ((0, 1), (2,)), (0, 2, 4), ((3, 2), (5,)), {0: "a", 1: "b", 2: "c"})


def drawn(draw: random.Random, epoch: int) -> Reconfigure:
    """Any mesh: uneven stages, workers without micro-batches, rows with any number of mirrors, a plan or none."""
    ranks = draw.sample(range(100), draw.randint(1, 12))
    cuts = sorted(draw.sample(range(1, len(ranks)), draw.randint(0, min(3, len(ranks) - 1)))) if ranks[1:] else []
    stages = tuple(tuple(ranks[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ranks)], strict=True))
    rows = tuple(
        (
            draw.randint(0, 5),
            first := draw.randint(0, 2**20),
            first + draw.randint(1, 9),
            draw.choice(ranks),
            tuple(draw.choices(ranks, k=draw.randint(0, 3))),
            tuple(draw.choices(ranks, k=draw.randint(0, 1))),
        )
        for _ in range(draw.randint(0, 9))
    )
    lines = tuple(
        Recompute(draw.randint(0, 3), draw.randint(0, 99), draw.choice(ranks), draw.random() < 0.5, draw.randint(0, 3))
        for _ in range(draw.randint(0, 6))
    )
    return Reconfigure(
        epoch,
        stages,
        (0, *range(1, len(stages)), 9),
        tuple(tuple(draw.randint(0, 7) for _ in members) for members in stages),
        {rank: f"tcp://10.0.0.{rank}:{draw.randint(1, 65535)} \n\0é" for rank in ranks},
        rows,
        version=draw.randint(0, 2**40),
        recovery_plan=draw.choice((None, lines)),
        validate=draw.choice((None, 7)),
        save=draw.random() < 0.2,
        resend_to=tuple(ranks[: draw.randint(0, 2)]),
        attempt=draw.choice((0, epoch)),
        split_layers=draw.choice(((), (0, 3))),
        in_flight=draw.choice(((), (4,))),
        is_last=draw.random() < 0.2,
    )


def sent(packer: Packer, ranks: Sequence[int], message: Reconfigure) -> dict[int, PackedReconfigure]:
    """Rank -> what the controller sends to it, off the wire."""
    found: dict[int, PackedReconfigure] = {}
    for receivers, header in packer.encoded(ranks, message):
        packed = decode(header)
        assert isinstance(packed, PackedReconfigure)
        assert not found.keys() & set(receivers)
        found.update(dict.fromkeys(receivers, packed))
    assert found.keys() == set(ranks)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_whoever_comes_and_goes_each_member_gets_every_message_whole(seed: int) -> None:
    draw, packer, ends, ranks = random.Random(seed), Packer(), defaultdict[int, Unpacker](Unpacker), count()
    members: list[int] = []
    for epoch in range(12):
        stay = [rank for rank in members if draw.random() < 0.8]
        members = [*stay, *islice(ranks, draw.randint(0, 3))]  # a rank is given once
        draw.shuffle(members)
        message = drawn(draw, epoch)
        for rank, packed in sent(packer, members, message).items():
            got = ends[rank].unpacked(packed)
            assert got == message and encode(got) == encode(message)


def test_an_empty_plan_is_not_the_lack_of_one() -> None:
    for plan in (None, ()):
        message = Reconfigure(5, ((0,),), (0, 4), ((5,),), {}, recovery_plan=plan)
        assert Unpacker().unpacked(sent(Packer(), [0], message)[0]).recovery_plan == plan


def test_a_member_gets_a_change_and_a_newcomer_the_whole() -> None:
    packer = Packer()
    assert {packed.base for packed in sent(packer, [0, 1, 2], SMALL).values()} == {-1}
    after = Reconfigure(4, ((0, 1), (3,)), (0, 2, 4), ((3, 2), (5,)), {0: "a", 1: "b", 3: "d"})
    assert {rank: packed.base for rank, packed in sent(packer, [0, 1, 3], after).items()} == {0: 0, 1: 0, 3: -1}


def test_a_change_to_another_message_than_the_last_one_is_refused() -> None:
    packer, end = Packer(), Unpacker()
    first = sent(packer, [0, 1, 2], SMALL)[0]
    second = sent(packer, [0, 1, 2], Reconfigure(1, ((0, 1, 2),), (0, 4), ((1, 2, 2),), SMALL.addresses))[0]
    with pytest.raises(RunError, match="mesh epoch 0, but the last one that came here was none"):
        end.unpacked(second)
    assert end.unpacked(first) == SMALL
    end.unpacked(second)
    with pytest.raises(RunError, match="mesh epoch 0, but the last one that came here was that of mesh epoch 1"):
        end.unpacked(second)


def test_bits_that_have_changed_on_the_way_are_refused() -> None:
    """Each bit, of the whole and of a change: nobody enters a mesh that the controller has not decided."""
    packer = Packer()
    first, after = SMALL, Reconfigure(1, ((0, 1), (2,)), (0, 1, 4), ((4, 1), (5,)), SMALL.addresses)
    packed = [sent(packer, [0], message)[0] for message in (first, after)]
    for number, message in enumerate((first, after)):
        data = packed[number].data
        for bit in range(8 * len(data)):
            end = Unpacker()
            for before in packed[:number]:
                end.unpacked(before)
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            try:
                got = end.unpacked(msgspec.structs.replace(packed[number], data=bytes(flipped)))
            except RunError:
                continue
            assert got == message  # a bit of the frame's form, which says nothing about the content


def test_other_messages_are_encoded_once_for_all() -> None:
    assert [*Packer().encoded((3, 4), Prepare(2))] == [((3, 4), encode(Prepare(2)))]


def large(workers: int, lost: frozenset[int], epoch: int) -> Reconfigure:
    """Ten stages, two micro-batches a worker, a mirror for each page range."""
    width = workers // 10
    stages = tuple(tuple(r for r in range(s * width, (s + 1) * width) if r not in lost) for s in range(10))
    counts = tuple(tuple(2 + (i < 2 * (width - len(members))) for i in range(len(members))) for members in stages)
    rows = tuple(
        (layer, 3 * i, 3 * i + 3, rank, (members[(i + 1) % len(members)],), ())
        for layer in range(20)
        for members in [stages[layer // 2]]
        for i, rank in enumerate(members)
    )
    left = [r for r in range(workers) if r not in lost]
    addresses = {r: f"tcp://10.{r >> 8}.{r & 255}.1:{40000 + r * 7919 % 20000}" for r in left}
    return Reconfigure(epoch, stages, tuple(range(0, 21, 2)), counts, addresses, rows, version=17)


def test_a_loss_on_a_large_mesh_is_a_small_message() -> None:
    """Not a time: the number of bytes is the same on every machine."""
    packer = Packer()
    before, after = large(5_000, frozenset(), 0), large(5_000, frozenset({2_345}), 1)
    first = sent(packer, [r for s in before.stages for r in s], before)[0]
    change = sent(packer, [r for s in after.stages for r in s], after)[0]
    assert len(encode(after)) > 200_000
    assert len(change.data) < 1_000, len(change.data)
    end = Unpacker()
    assert end.unpacked(first) == before and end.unpacked(change) == after


def peers_among(draw: random.Random, ranks: Sequence[int]) -> Peers | None:
    """Two halves, of which each shares its peers, and some pairs; or everybody is a peer of everybody."""
    if draw.random() < 0.25:
        return None
    half, other = frozenset(ranks[::2]), frozenset(ranks[1::2])
    pairs = [draw.choices(ranks, k=2) for _ in range(draw.randint(0, 9))]
    ends = np.unique(np.array([min(pair) << 32 | max(pair) for pair in pairs], np.int64))
    return Peers({rank: half if rank in half else other for rank in ranks}, ends)


@pytest.mark.parametrize("seed", range(30))
def test_on_a_large_mesh_each_member_gets_the_addresses_of_its_peers(seed: int) -> None:
    """And all the rest whole; of members that were peers in the epoch before it still has them, and of no others."""
    draw, packer, ends = random.Random(seed), Packer(), defaultdict[int, Unpacker](Unpacker)
    members, new = list(range(9)), count(9)
    before: dict[int, set[int]] = {}
    for epoch in range(10):
        if epoch:
            members = [*draw.sample(members, draw.randint(5, len(members))), *islice(new, draw.randint(0, 3))]
        stages = tuple(members[:3]), tuple(members[3:])
        message = msgspec.structs.replace(
            drawn(draw, epoch), stages=stages, addresses={rank: f"tcp://10.0.0.{rank}:9" for rank in members}
        )
        peers = peers_among(draw, members)
        now = {rank: {*members} if peers is None else {*peers.of(rank)} for rank in members}
        got: dict[int, Reconfigure] = {}
        for receivers, header in packer.encoded(members, message, peers):
            found = decode(header)
            for rank in receivers:
                if isinstance(found, PeerAddresses):
                    assert rank not in got, "they belong to what follows"
                    ends[rank].addresses_received(found)
                else:
                    assert isinstance(found, PackedReconfigure)
                    got[rank] = ends[rank].unpacked(found)
        assert got.keys() == {*members}
        for rank in members:
            told = now[rank] | (before.get(rank, set()) & {*members})
            assert got[rank] == msgspec.structs.replace(message, addresses=got[rank].addresses)
            assert got[rank].addresses == {peer: message.addresses[peer] for peer in told}
        before = now


def planned(draw: random.Random, stages: Sequence[Sequence[int]], microbatches: int) -> tuple[Recompute, ...]:
    """A plan for some of the micro-batches on each stage, in the order of a plan."""
    return tuple(
        Recompute(stage, u, draw.choice(ranks), draw.random() < 0.5, draw.randint(0, 3))
        for stage, ranks in enumerate(stages)
        for u in range(microbatches)
        if draw.random() < 0.6
    )


@pytest.mark.parametrize("seed", range(40))
def test_on_a_large_mesh_each_member_gets_the_lines_of_its_micro_batches(seed: int) -> None:
    """On ragged stages, whoever comes and goes: these, in the order of the plan, and all the rest whole."""
    draw, packer, ends = random.Random(seed), Packer(), defaultdict[int, Unpacker](Unpacker)
    members, new = draw.sample(range(50), 9), count(50)
    for epoch in range(8):
        if epoch:
            members = [*draw.sample(members, draw.randint(5, len(members))), *islice(new, draw.randint(0, 3))]
        stages, number = (tuple(members[:1]), tuple(members[1:3]), tuple(members[3:])), draw.randint(1, 400)
        plan = draw.choice((None, (), planned(draw, stages, number), planned(draw, stages, number)))
        told = {rank: {*draw.sample(range(number), draw.randint(0, min(number, 4)))} for rank in members}
        everything = draw.random() < 0.2
        keys = np.array(sorted(rank << 32 | u for rank in members for u in told[rank]), np.int64)
        peers = Peers(dict.fromkeys(members, frozenset(members)), np.empty(0, np.int64), None if everything else keys)
        addresses = {rank: f"at {rank}" for rank in members}
        message = msgspec.structs.replace(drawn(draw, epoch), stages=stages, addresses=addresses, recovery_plan=plan)
        got: dict[int, Reconfigure] = {}
        for receivers, header in packer.encoded(members, message, peers):
            for rank in receivers:
                found = decode(header)
                if isinstance(found, PeerAddresses):
                    ends[rank].addresses_received(found)
                    continue
                assert isinstance(found, PackedReconfigure) and rank not in got
                got[rank] = ends[rank].unpacked(found)
        for rank in members:
            own = None if plan is None else tuple(line for line in plan if everything or line.microbatch in told[rank])
            assert got[rank] == msgspec.structs.replace(message, recovery_plan=own)


def test_lines_that_have_changed_on_the_way_or_are_of_another_member_are_refused() -> None:
    plan = tuple(Recompute(stage, u, 2 * stage + u % 2, True, 2) for stage in (0, 1) for u in range(4))
    addresses = {rank: f"at {rank}" for rank in range(4)}
    message = msgspec.structs.replace(SMALL, stages=((0, 1), (2, 3)), addresses=addresses, recovery_plan=plan)
    told = np.array([rank << 32 | u for rank in range(4) for u in range(4) if u % 2 == rank % 2], np.int64)
    peers = Peers(dict.fromkeys(range(4), frozenset(range(4))), np.empty(0, np.int64), told)
    packed = [decode(header) for _, header in Packer().encoded(range(4), message, peers)]
    first, second = (each for each in packed if isinstance(each, PackedReconfigure))
    assert first.data == second.data and first.digest != second.digest, "the rest is packed once for all"
    for lines in (second.lines, b"", *(_flipped(first.lines, bit) for bit in range(8 * len(first.lines)))):
        with pytest.raises(RunError, match="digest"):
            Unpacker().unpacked(msgspec.structs.replace(first, lines=lines))


def _flipped(data: bytes, bit: int) -> bytes:
    found = bytearray(data)
    found[bit // 8] ^= 1 << bit % 8
    return bytes(found)


def test_the_whole_is_encoded_once_and_what_workers_of_a_stage_are_told_as_well() -> None:
    """And after a loss on a large mesh no address is on the wire, where peers stay."""
    packer, message = Packer(), large(400, frozenset(), 0)
    members = [rank for ranks in message.stages for rank in ranks]
    shared: dict[int, frozenset[int]] = {}
    for ranks in message.stages:
        shared |= dict.fromkeys(ranks, frozenset(ranks))
    pairs = np.array([3 << 32 | 300], np.int64)
    *told, (receivers, whole) = packer.encoded(members, message, Peers(shared, pairs))
    assert receivers == members and isinstance(decode(whole), PackedReconfigure)
    assert [(len(some), type(decode(header))) for some, header in told] == [
        *[(1, PeerAddresses)] * 2,
        *[(40, PeerAddresses)] * 10,
    ], "two workers that have another peer, and ten stages"
    assert len(whole) + max(len(header) for _, header in told) < len(next(Packer().encoded(members, message))[1])
    after = large(400, frozenset({222}), 1)
    left = [rank for rank in members if rank != 222]
    ((receivers, header),) = packer.encoded(left, after, Peers({r: shared[r] - {222} for r in left}, pairs))
    assert receivers == left and isinstance(decode(header), PackedReconfigure)


def test_what_is_of_one_worker_alone_is_made_when_it_is_sent() -> None:
    """On 100,000 workers that would be gigabytes. What the packer knows of its links has changed by then."""
    packer, ends = Packer(), [Unpacker(), Unpacker()]
    first, second = (Reconfigure(e, ((0,), (1,)), (0, 2, 4), ((5,), (5,)), {0: "a", 1: "b"}) for e in (0, 1))
    strangers = Peers({0: frozenset({0}), 1: frozenset({1})}, np.empty(0, np.int64))
    sendings = [packer.encoded((0, 1), first, strangers), packer.encoded((0, 1), second, Peers.among((0, 1)))]
    got: list[Reconfigure] = []
    for sending in sendings:
        for receivers, header in sending:
            found = decode(header)
            for rank in receivers:
                if isinstance(found, PeerAddresses):
                    ends[rank].addresses_received(found)
                elif isinstance(found, PackedReconfigure):
                    got.append(ends[rank].unpacked(found))
    assert [message.addresses for message in got[:2]] == [{0: "a"}, {1: "b"}]
    assert got[2:] == [second, second]
