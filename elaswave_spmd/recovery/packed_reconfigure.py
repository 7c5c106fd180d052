"""The compressed form in which a Reconfigure goes over a link: what has changed since the Reconfigure before.

A Reconfigure describes a whole mesh epoch: its members and their addresses, micro-batches, replicas. On 10,000 workers
it has a megabyte, of which a loss changes only a few places. So both ends of a link keep the last Reconfigure, and a
new one is compressed with the last one as the dictionary. The numbers in it are replaced by the differences of
consecutive numbers before. If a number is inserted or left out, most differences stay the same.

Both ends always have the same last Reconfigure: a link keeps the order of messages, every Reconfigure is sent to all
members of its epoch, and a worker unpacks each one as it comes, whether it then enters the epoch or not. A worker that
was not a member before gets the whole message. A digest of the unpacked message goes with it, so that no worker ever
acts on a wrong one (docs/protocol.md, C15).

On a large mesh two parts differ from member to member and are sent separately, so that the message itself is the same
for all. The addresses of a worker's own peers (peers.py) come before it, in a small message, as far as the worker may
not have them yet. The lines of a recovery plan that the worker needs come beside it, and the digest covers them too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, chain, islice, pairwise

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery.messages import (
    Message,
    PackedReconfigure,
    PeerAddresses,
    Recompute,
    Reconfigure,
    decode,
    encode,
)
from elaswave_spmd.recovery.peers import Keys, Peers, by_rank

_NOBODY: frozenset[int] = frozenset()
_NOTHING = -1
"""`PackedReconfigure.base` of a message that is packed without a dictionary; no mesh epoch has this number."""
_LEVEL = 6  # the level of zstandard's compression
_FEW = 8
"""Up to this number of addresses, they are sent uncompressed: a loss changes a few peers of many workers, and to
compress a message for each of them takes time."""
_WINDOW_LOGS = 10, 30
"""The least and the largest window of a zstandard frame, as powers of 2. It must reach back to the start of the
dictionary."""
_HASH_LOGS = 10, 24
"""The least and the largest size of its hash table, as powers of 2. The default is too small for the dictionary of
100,000 workers."""


@dataclass(frozen=True)
class _Last:
    """The Reconfigure that a link carried last.

    Args:
        epoch: its mesh epoch.
        data: its bytes, as `_to_bytes` makes them.
    """

    epoch: int
    data: bytes


class Packer:
    """The controller's end of all links to workers: encodes messages, and packs each Reconfigure against the last."""

    def __init__(self) -> None:
        self._last: _Last | None = None
        self._receivers: frozenset[int] = frozenset()  # the workers to which the last one was sent
        # The peers by the last Reconfigure; and the peers whose addresses workers have, by the last two of them.
        self._peers = self._addressed = Peers.among(())

    def encoded(
        self, ranks: Sequence[int], message: Message, peers: Peers | None = None
    ) -> Iterator[tuple[Sequence[int], bytes]]:
        """The bytes to send to these workers.

        Args:
            ranks: the receivers. If the message is a Reconfigure, they are all members of its mesh epoch.
            message: the message.
            peers: the peers of each member. A member is sent the addresses of its peers only, and the lines of the
                recovery plan of its micro-batches only. None if every member is sent all addresses and lines.

        Returns:
            (workers, bytes for all of them), in the order in which to send them. It is an iterator, so that messages
            for single workers need not all be in memory at once.
        """
        if not isinstance(message, Reconfigure):
            return iter([(ranks, encode(message))])
        last, known, addressed = self._last, self._receivers, self._addressed
        plan = message.recovery_plan
        apart = peers.microbatches if peers is not None and plan else None
        common: dict[str, object] = {} if peers is None else {"addresses": {}}
        if apart is not None:
            common["recovery_plan"] = ()
        data = _to_bytes(msgspec.structs.replace(message, **common))
        self._last, self._receivers = _Last(message.epoch, data), frozenset(ranks)
        now = peers if peers is not None else Peers.among(ranks)
        self._peers, self._addressed = now, now | self._peers
        had, new = [rank for rank in ranks if rank in known], [rank for rank in ranks if rank not in known]
        packed = ((some, _pack(data, base)) for some, base in ((had, last), (new, None)) if some)
        if plan and apart is not None:
            packed = _with_lines(packed, data, plan, apart)
        encoded = ((some, encode(each)) for some, each in packed)
        if peers is None:
            return encoded
        gone = addressed.not_in(self._addressed)
        return chain(_addresses(ranks, message.addresses, peers, addressed, gone), encoded)


class Unpacker:
    """A worker's end of its link from the controller."""

    def __init__(self) -> None:
        self._last: _Last | None = None
        self._addresses: dict[int, str] = {}  # of the members that this worker knows

    @property
    def last(self) -> tuple[int, bytes]:
        """The mesh epoch of the Reconfigure that came last, and its bytes (`reconfigure_of`); (-1, b"") before it."""
        return (_NOTHING, b"") if self._last is None else (self._last.epoch, self._last.data)

    def unpacked(self, packed: PackedReconfigure) -> Reconfigure:
        """The whole message. It becomes the last Reconfigure of this link.

        Raises:
            RunError: the message is a change of another Reconfigure than the last one, or its digest is wrong.
        """
        base = self._last if packed.base != _NOTHING else None
        if packed.base != (_NOTHING if base is None else base.epoch):
            what = f"the controller sends what has changed since the Reconfigure of mesh epoch {packed.base}"
            last = "none" if base is None else f"that of mesh epoch {base.epoch}"
            raise RunError(f"{what}, but the last one that came here was {last}")
        data = _unpack(packed, base)
        message = _from_bytes(data)
        self._last = _Last(message.epoch, data)
        if packed.lines:
            message = msgspec.structs.replace(message, recovery_plan=_unpack_lines(packed.lines))
        if not message.addresses:
            members = {rank for ranks in message.stages for rank in ranks}
            known = {rank: address for rank, address in self._addresses.items() if rank in members}
            message = msgspec.structs.replace(message, addresses=known)
        self._addresses = message.addresses
        return message

    def addresses_received(self, message: PeerAddresses) -> None:
        """Note changed addresses, which come before the Reconfigure that they belong to."""
        left = {rank: address for rank, address in self._addresses.items() if rank not in message.gone}
        self._addresses = left | _unpack_addresses(message.came)


def reconfigure_of(data: bytes) -> Reconfigure:
    """The Reconfigure that a worker had kept as these bytes (`Unpacker.last`)."""
    return _from_bytes(data)


# ---- addresses, on large meshes


def _addresses(
    ranks: Sequence[int],
    addresses: Mapping[int, str],
    peers: Peers,
    addressed: Peers,
    gone: Mapping[int, frozenset[int]],
) -> Iterator[tuple[Sequence[int], bytes]]:
    """(workers, encoded PeerAddresses): the messages with the changes of the addresses that these workers have.

    Args:
        ranks: the workers.
        addresses: rank -> address, of all members.
        peers: the peers of each worker from now on.
        addressed: the peers whose addresses workers have.
        gone: worker -> members whose addresses it does not need any more.
    """
    shared: dict[int, tuple[frozenset[int], list[int]]] = {}  # by set object: many workers have the same new peers
    few: dict[tuple[frozenset[int], frozenset[int]], list[int]] = defaultdict(list)  # many have lost the same ones
    for rank, common, own in peers.since(addressed, ranks):
        if common:
            shared.setdefault(id(common), (common, []))[1].append(rank)
        if not own and rank not in gone:
            continue
        left = gone.get(rank, _NOBODY)
        if len(own) > _FEW:
            yield [rank], _encoded_addresses(own, addresses, left)
        else:
            few[own, left].append(rank)
    for (own, left), some in few.items():
        yield some, _encoded_addresses(own, addresses, left)
    for common, some in shared.values():
        yield some, _encoded_addresses(common, addresses)


def _encoded_addresses(came: Collection[int], addresses: Mapping[int, str], gone: Collection[int] = ()) -> bytes:
    """An encoded PeerAddresses with the addresses of the workers in `came`."""
    return encode(PeerAddresses(_pack_addresses(came, addresses), tuple(sorted(gone))))


def _pack_addresses(ranks: Collection[int], addresses: Mapping[int, str]) -> bytes:
    """The addresses of these workers, compressed if they are many."""
    order = sorted(ranks)
    steps = [b - a for a, b in pairwise((0, *order))]  # differences are small numbers, which msgpack encodes shortly
    data = msgspec.msgpack.encode((steps, [addresses[rank] for rank in order]))
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data) if len(order) > _FEW else data


def _unpack_addresses(packed: bytes) -> dict[int, str]:
    is_compressed = packed.startswith(zstandard.FRAME_HEADER)
    steps, addresses = _ADDRESSES.decode(zstandard.ZstdDecompressor().decompress(packed) if is_compressed else packed)
    return dict(zip(accumulate(steps), addresses, strict=True))


# ---- lines of a recovery plan, on large meshes


def _with_lines(
    packed: Iterable[tuple[Sequence[int], PackedReconfigure]], data: bytes, plan: Sequence[Recompute], sent: Keys
) -> Iterator[tuple[Sequence[int], PackedReconfigure]]:
    """The packed messages with lines of the recovery plan added: one message for all workers that get the same lines.

    Args:
        packed: (workers, a message without lines).
        data: the bytes of these messages when they are unpacked.
        plan: the recovery plan.
        sent: the micro-batches of each worker, as `Peers.microbatches`.
    """
    lines_of, microbatches_of = _lines_of_microbatches(plan), by_rank(sent)
    compressor, digest = zstandard.ZstdCompressor(level=_LEVEL), _hash(data)
    for ranks, whole in packed:
        groups: dict[frozenset[int], list[int]] = defaultdict(list)
        for rank in ranks:
            groups[microbatches_of.get(rank, frozenset())].append(rank)
        for microbatches, some in groups.items():
            found = [lines_of[microbatch] for microbatch in sorted(microbatches) if microbatch in lines_of]
            own = compressor.compress(msgspec.msgpack.encode(found)) if found else b""
            (both := digest.copy()).update(own)
            yield some, PackedReconfigure(whole.base, whole.size, both.digest(), whole.data, own)


def _lines_of_microbatches(plan: Sequence[Recompute]) -> dict[int, bytes]:
    """Micro-batch -> its lines, as rows."""
    lines = _lines(plan)
    lines = lines[np.lexsort((lines[:, 0], lines[:, 1]))]
    steps, starts = np.diff(lines, axis=0, prepend=0), np.flatnonzero(np.diff(lines[:, 1], prepend=-1))
    steps[starts] = lines[starts]
    rows, width = steps.astype(_NUMBER).tobytes(), steps.shape[1] * _NUMBER.itemsize
    bounds = pairwise((*(width * starts).tolist(), len(rows)))
    return {microbatch: rows[a:b] for microbatch, (a, b) in zip(lines[starts, 1].tolist(), bounds, strict=True)}


def _unpack_lines(packed: bytes) -> tuple[Recompute, ...]:
    """The lines of some micro-batches, in the order of a plan."""
    of_each = _BLOCKS.decode(zstandard.ZstdDecompressor().decompress(packed))
    lines = np.concatenate([_rows_of(rows, 5) for rows in of_each])
    return _plan_of(lines[np.lexsort((lines[:, 1], lines[:, 0]))])


# ---- compression


def _pack(data: bytes, base: _Last | None) -> PackedReconfigure:
    dictionary = b"" if base is None else base.data
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL,
        source_size=len(data),
        dict_size=len(dictionary),
        window_log=_log(len(data) + len(dictionary), *_WINDOW_LOGS),
        hash_log=_log(len(dictionary) // 2, *_HASH_LOGS),
        write_content_size=False,
    )
    compressor = zstandard.ZstdCompressor(dict_data=_dictionary(dictionary), compression_params=parameters)
    epoch = _NOTHING if base is None else base.epoch
    return PackedReconfigure(epoch, len(data), _hash(data).digest(), compressor.compress(data))


def _unpack(packed: PackedReconfigure, base: _Last | None) -> bytes:
    dictionary = b"" if base is None else base.data
    decompressor = zstandard.ZstdDecompressor(dict_data=_dictionary(dictionary), max_window_size=1 << _WINDOW_LOGS[1])
    try:
        data = decompressor.decompress(packed.data, max_output_size=packed.size)
    except zstandard.ZstdError as error:
        raise RunError(f"a Reconfigure of the controller cannot be unpacked: {error}") from None
    (found := _hash(data)).update(packed.lines)
    if found.digest() != packed.digest:
        raise RunError("a Reconfigure of the controller is not what it was: its digest is another")
    return data


def _hash(data: bytes) -> blake2b:
    return blake2b(data, digest_size=8)


def _log(number: int, least: int, most: int) -> int:
    """The exponent of the power of 2 above a number, at least `least` and at most `most`."""
    return min(max(number.bit_length(), least), most)


def _dictionary(data: bytes) -> zstandard.ZstdCompressionDict | None:
    return zstandard.ZstdCompressionDict(data, dict_type=zstandard.DICT_TYPE_RAWCONTENT) if data else None


# ---- as bytes: the small fields as they are, the others as columns of numbers


class _Columns(msgspec.Struct, frozen=True, array_like=True):
    """A Reconfigure whose large fields are columns, each the differences of its numbers, little-endian, 4 bytes each.

    Rows of numbers are the differences of consecutive rows: what changes in a few of them changes in one place.

    Args:
        rest: the message without these fields, encoded.
        stage_sizes, members: of `stages`.
        count_sizes, counts: of `microbatch_counts`.
        ranks, addresses: of `addresses`.
        replicas: rows of layer, first page, stop page, primary, numbers of mirrors and learners; then all mirrors, and
            all learners.
        plan: rows of stage, micro-batch, worker, forward, backward; None: there is no plan.
    """

    rest: bytes
    stage_sizes: bytes
    members: bytes
    count_sizes: bytes
    counts: bytes
    ranks: bytes
    addresses: tuple[str, ...]
    replicas: tuple[bytes, bytes, bytes]
    plan: bytes | None


_COLUMNS = msgspec.msgpack.Decoder(_Columns)
_ADDRESSES = msgspec.msgpack.Decoder(tuple[list[int], list[str]])
_BLOCKS = msgspec.msgpack.Decoder(list[bytes])
_NUMBER = np.dtype("<i4")
_LARGE = {"stages": (), "microbatch_counts": (), "addresses": {}, "replicas": (), "recovery_plan": None}
"""The fields that grow with the mesh, when they are taken out."""


def _to_bytes(message: Reconfigure) -> bytes:
    rows, plan = message.replicas, message.recovery_plan
    *fixed, mirrors, learners = zip(*rows, strict=True) if rows else ((),) * 6
    table = np.array([*fixed, [*map(len, mirrors)], [*map(len, learners)]], np.int64).T
    columns = _Columns(
        encode(msgspec.structs.replace(message, **_LARGE)),
        *_ragged(message.stages),
        *_ragged(message.microbatch_counts),
        _numbers(message.addresses),
        tuple(message.addresses.values()),
        (_rows(table), _numbers(chain.from_iterable(mirrors)), _numbers(chain.from_iterable(learners))),
        None if plan is None else _rows(_lines(plan)),
    )
    return msgspec.msgpack.encode(columns)


def _from_bytes(data: bytes) -> Reconfigure:
    columns = _COLUMNS.decode(data)
    table, mirrors, learners = columns.replicas
    *fixed, num_mirrors, num_learners = _rows_of(table, 6).T.tolist()
    several = _grouped(num_mirrors, mirrors), _grouped(num_learners, learners)
    rest = decode(columns.rest)
    assert isinstance(rest, Reconfigure), rest
    return msgspec.structs.replace(
        rest,
        stages=_grouped(_listed(columns.stage_sizes), columns.members),
        microbatch_counts=_grouped(_listed(columns.count_sizes), columns.counts),
        addresses=dict(zip(_listed(columns.ranks), columns.addresses, strict=True)),
        replicas=tuple(zip(*fixed, *several, strict=True)),
        recovery_plan=None if columns.plan is None else _plan_of(_rows_of(columns.plan, 5)),
    )


def _lines(plan: Sequence[Recompute]) -> npt.NDArray[np.int64]:
    """The lines of a plan: [n, 5]."""
    return np.fromiter(chain.from_iterable(map(msgspec.structs.astuple, plan)), np.int64, 5 * len(plan)).reshape(-1, 5)


def _plan_of(lines: npt.NDArray[np.int64]) -> tuple[Recompute, ...]:
    """The inverse of `_lines`."""
    rows = lines.tolist()
    return tuple(Recompute(stage, u, worker, bool(forward), backward) for stage, u, worker, forward, backward in rows)


def _ragged(groups: Sequence[Sequence[int]]) -> tuple[bytes, bytes]:
    """The sizes of groups, and all of their numbers."""
    return _numbers(map(len, groups)), _numbers(chain.from_iterable(groups))


def _grouped(sizes: Sequence[int], numbers: bytes) -> tuple[tuple[int, ...], ...]:
    """Groups of these sizes of all of these numbers."""
    flat = iter(_listed(numbers))
    return tuple(tuple(islice(flat, size)) for size in sizes)


def _numbers(values: Iterable[int]) -> bytes:
    """The differences of consecutive numbers."""
    return _rows(np.fromiter(values, np.int64).reshape(-1, 1))


def _listed(differences: bytes) -> list[int]:
    """The inverse of `_numbers`."""
    return _rows_of(differences, 1)[:, 0].tolist()


def _rows(table: npt.NDArray[np.int64]) -> bytes:
    """The differences of consecutive rows, one row after another."""
    found = np.diff(table, axis=0, prepend=0)
    assert not found.size or max(abs(found.min()), abs(found.max())) < 2**31, found
    return found.astype(_NUMBER).tobytes()


def _rows_of(differences: bytes, width: int) -> npt.NDArray[np.int64]:
    """The inverse of `_rows`."""
    return np.cumsum(np.frombuffer(differences, _NUMBER).reshape(-1, width), axis=0, dtype=np.int64)
