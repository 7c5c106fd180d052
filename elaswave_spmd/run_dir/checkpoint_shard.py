"""Shards: the state pages that one worker writes for a durable checkpoint (docs/run_files.md).

A shard is a safetensors file of flat fp32 arrays, one for each page range and each kind of state, named
`<layer>.<first>.<stop>.<kind>`: any page of it can be read alone. Its metadata says whose it is and carries the sha256
of the file with that hash written as 64 zeros; so a shard is written and hashed in one pass, and proves itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elaswave_spmd.errors import CheckpointError
from elaswave_spmd.run_dir.json_lines import replacing, write_all, writing
from elaswave_spmd.run_dir.lock import Ballot
from elaswave_spmd.sharding.replicas import PageRange

CHECKPOINTS = "checkpoints"
_ZEROS = b"0" * 64
_OPENING = b'{"__metadata__":{"sha256":"'
_HASH_AT = 8 + len(_OPENING)
_CHUNK = 4 * 2**20
_MAX_HEADER = 100 * 2**20
_ALIGNMENT = 64


@dataclass(frozen=True)
class ShardInfo:
    """What a worker reports of a shard that it has written, and what a manifest says of it.

    Args:
        name: of the file, in the checkpoint's directory.
        run: id of the run.
        step: version of the state.
        ballot: incarnation and mesh epoch in which it was written.
        rank: of the worker that wrote it.
        num_bytes: of the file.
        sha256: of the file with this hash in it as 64 zeros.
        runs: (layer, first, stop) that it holds, ascending.
    """

    name: str
    run: str
    step: int
    ballot: Ballot
    rank: int
    num_bytes: int
    sha256: str
    runs: tuple[PageRange, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON's own types; what all shards of a checkpoint share is left out."""
        return {
            "name": self.name,
            "rank": self.rank,
            "epoch": self.ballot.epoch,
            "bytes": self.num_bytes,
            "sha256": self.sha256,
            "runs": [list(run) for run in self.runs],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], *, run: str, step: int, incarnation: int) -> ShardInfo:
        """Inverse of `to_dict`."""
        runs = tuple((int(layer), int(first), int(stop)) for layer, first, stop in fields["runs"])
        ballot = Ballot(incarnation, fields["epoch"])
        return cls(fields["name"], run, step, ballot, fields["rank"], fields["bytes"], fields["sha256"], runs)


@dataclass(frozen=True)
class Shard:
    """A shard's file with its header read.

    Args:
        arrays: (run, kind of state) -> (offset in the file, elements).
    """

    path: Path
    info: ShardInfo
    arrays: Mapping[tuple[PageRange, str], tuple[int, int]]

    def read_into(self, target: np.ndarray, run: PageRange, kind: str, start: int) -> None:
        """Fill `target`, fp32, flat, with elements [start, start + target.size) of one array.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
        """
        offset, size = self.arrays[run, kind]
        assert start >= 0 and start + target.size <= size, (run, kind, start, target.size, size)
        left, at = target.data.cast("B"), offset + 4 * start
        try:
            with open(self.path, "rb", buffering=0) as file:
                while left:
                    count = os.preadv(file.fileno(), [left], at)
                    if not count:
                        raise CheckpointError(f"{self.path.name} has become shorter while it was read")
                    left, at = left[count:], at + count
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def verify(self) -> None:
        """Compare the file with its hash.

        Raises:
            CheckpointError: it does not match, or cannot be read.
        """
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
        try:
            with open(self.path, "rb", buffering=0) as file:
                start = file.read(_HASH_AT + 64)
                digest.update(start[:_HASH_AT] + _ZEROS)
                while count := file.readinto(buffer):
                    digest.update(buffer[:count])
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if digest.hexdigest() != self.info.sha256:
            raise CheckpointError(f"{self.path.name} does not match its sha256")


def checkpoint_path(run_dir: str | Path, step: int) -> Path:
    """The directory of the checkpoint of a step."""
    return Path(run_dir) / CHECKPOINTS / f"step_{step:08d}"


def shard_name(rank: int, ballot: Ballot) -> str:
    """The name of a worker's shard: no two of a run are the same within one step."""
    return f"shard_{rank}_{ballot.incarnation}-{ballot.epoch}.safetensors"


def write_shard(
    directory: Path,
    step: int,
    ballot: Ballot,
    rank: int,
    arrays: Mapping[PageRange, Mapping[str, np.ndarray]],
    *,
    run: str,
) -> ShardInfo:
    """Write a worker's shard, whole or not at all, and flush it to the disk. May run beside the training thread.

    Arrays are written from where they lie, in pieces; only one that is not contiguous is copied, alone. They must not
    change meanwhile.

    Args:
        directory: `checkpoint_path(...)`; made if missing, its run's directory is not.
        step: version of the state.
        arrays: (layer, first page, stop page) -> kind of state -> fp32 [elements]; the same kinds for every run.
        run: id of the run.

    Raises:
        FilesError: the disk is full, or the run's directory is gone.
    """
    ordered = [(key, kind, arrays[key][kind]) for key in sorted(arrays) for kind in sorted(arrays[key])]
    for key, kind, values in ordered:
        assert values.dtype == np.float32 and values.ndim == 1 and values.size, (key, kind, values.dtype, values.shape)
        assert arrays[key].keys() == arrays[ordered[0][0]].keys(), "every run has the same kinds of state"
        assert values.size == arrays[key][ordered[0][1]].size, (key, kind, values.size)
    path = directory / shard_name(rank, ballot)
    with writing(path):
        directory.parent.mkdir(exist_ok=True)
        directory.mkdir(exist_ok=True)
    metadata = {
        "run": run,
        "step": str(step),
        "incarnation": str(ballot.incarnation),
        "epoch": str(ballot.epoch),
        "rank": str(rank),
    }
    header = _header(metadata, [(f"{k[0]}.{k[1]}.{k[2]}.{kind}", values.size) for k, kind, values in ordered])
    digest = hashlib.sha256(header)
    with replacing(path) as file:
        write_all(file, header)
        for _, _, values in ordered:
            for piece in _pieces(values):
                digest.update(piece)
                write_all(file, piece)
        sha256 = digest.hexdigest()
        num_bytes = file.tell()
        file.seek(_HASH_AT)
        write_all(file, sha256.encode())
    return ShardInfo(path.name, run, step, ballot, rank, num_bytes, sha256, tuple(sorted(arrays)))


def read_shard(path: Path) -> Shard:
    """Read a shard's header. That the rest matches its hash is for `Shard.verify`.

    Raises:
        CheckpointError: the file is missing, too short, too long, or no shard.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= min(_MAX_HEADER, size) else b""
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(header) < length or not header.startswith(_OPENING):
        raise CheckpointError(f"{path.name} is torn, or is not a shard")
    try:
        shard, end = _parse(path, 8 + length, json.loads(header))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.name} has a damaged header") from error
    if end != size:
        raise CheckpointError(f"{path.name} has {size} bytes and should have {end}")
    return shard


def find_shards(directory: Path) -> tuple[list[ShardInfo], list[tuple[Path, str]]]:
    """All good shards that lie in a checkpoint's directory, hashes verified, and (path, reason) of the others.

    For a controller that completes a checkpoint whose own controller died before the manifest.
    """
    good: list[ShardInfo] = []
    bad: list[tuple[Path, str]] = []
    for path in sorted(directory.glob("shard_*.safetensors")):
        try:
            shard = read_shard(path)
            shard.verify()
            good.append(shard.info)
        except CheckpointError as error:
            bad.append((path, error.what))
    return good, bad


def _header(metadata: Mapping[str, str], sizes: list[tuple[str, int]]) -> bytes:
    """A safetensors header, its length in front, padded so that the arrays begin at a multiple of 64 bytes."""
    fields: dict[str, Any] = {"__metadata__": {"sha256": _ZEROS.decode(), **metadata}}
    offset = 0
    for name, size in sizes:
        fields[name] = {"dtype": "F32", "shape": [size], "data_offsets": [offset, offset + 4 * size]}
        offset += 4 * size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    assert text.startswith(_OPENING + _ZEROS)
    return len(text).to_bytes(8, "little") + text


def _parse(path: Path, start: int, header: dict[str, Any]) -> tuple[Shard, int]:
    """What a header says, and how many bytes the file must have.

    Args:
        start: where the arrays begin.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: not a header of ours.
    """
    metadata = header.pop("__metadata__")
    arrays: dict[tuple[PageRange, str], tuple[int, int]] = {}
    end = start
    for name, entry in header.items():
        layer, first, stop, kind = name.split(".", 3)
        (elements,) = entry["shape"]
        if entry["dtype"] != "F32" or entry["data_offsets"] != [end - start, end - start + 4 * elements]:
            raise ValueError(name)
        arrays[(int(layer), int(first), int(stop)), kind] = (end, elements)
        end += 4 * elements
    info = ShardInfo(
        path.name,
        metadata["run"],
        int(metadata["step"]),
        Ballot(int(metadata["incarnation"]), int(metadata["epoch"])),
        int(metadata["rank"]),
        end,
        metadata["sha256"],
        tuple(sorted({run for run, _ in arrays})),
    )
    return Shard(path, info, arrays), end


def _pieces(values: np.ndarray) -> Iterator[memoryview]:
    """The array's little-endian bytes, a few MiB at a time."""
    data = np.ascontiguousarray(values, dtype="<f4").data.cast("B")
    return (data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK))


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{path.name} is missing")
    return CheckpointError(f"cannot read {path.name} ({error.strerror or error})")
