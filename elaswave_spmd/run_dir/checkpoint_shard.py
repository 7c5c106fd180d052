"""Shards: the pages of state that one worker writes for a checkpoint (docs/run_files.md).

A shard is a safetensors file of flat fp32 arrays, one for each page range and each kind of state, named
`<layer>.<first page>.<stop page>.<kind>`, so that any part of it can be read alone. Its metadata names the run, the
step and the worker, and contains the sha256 of the file, which is computed with 64 zeros in place of the hash itself.
So a shard is written and hashed in one pass, and can be verified without any other file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from elaswave_spmd.errors import CheckpointError
from elaswave_spmd.regular_files import regular_fd
from elaswave_spmd.run_dir.atomic_write import make_private_folder, replacing, write_all, writing
from elaswave_spmd.run_dir.journal import Ballot
from elaswave_spmd.sharding.replicas import PageRange

CHECKPOINTS = "checkpoints"
_ZEROS = b"0" * 64
_OPENING = b'{"__metadata__":{"sha256":"'
_LENGTH = 8  # a safetensors file begins with the length of its header, as a 64-bit number
_HASH_AT = _LENGTH + len(_OPENING)
_CHUNK = 4 * 2**20  # the number of bytes that are hashed and written at a time
_ALIGNMENT = 64  # the first array begins at a multiple of this many bytes, for readers that map the file


class UnreadableError(CheckpointError):
    """A file of a checkpoint exists, but cannot be read now, so it is not known whether it is good."""


@dataclass(frozen=True)
class ShardInfo:
    """A shard as the worker that wrote it reports it, and as a manifest lists it.

    Args:
        name: the name of the file, in the checkpoint's directory.
        run: id of the run.
        step: the version of the state.
        ballot: the incarnation and the mesh epoch in which it was written.
        rank: the worker that wrote it.
        num_bytes: the size of the file.
        sha256: the hash, in hexadecimal, of the file with 64 zeros in place of the hash itself.
        pages: the page ranges in it, (layer, first, stop), ascending.
    """

    name: str
    run: str
    step: int
    ballot: Ballot
    rank: int
    num_bytes: int
    sha256: str
    pages: tuple[PageRange, ...]

    def to_dict(self) -> dict[str, Any]:
        """The fields in JSON's own types, without those that all shards of a checkpoint share."""
        return {
            "name": self.name,
            "rank": self.rank,
            "epoch": self.ballot.epoch,
            "bytes": self.num_bytes,
            "sha256": self.sha256,
            "pages": [list(page_range) for page_range in self.pages],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], *, run: str, step: int, incarnation: int) -> ShardInfo:
        """Inverse of `to_dict`."""
        pages = tuple((int(layer), int(first), int(stop)) for layer, first, stop in fields["pages"])
        ballot = Ballot(incarnation, fields["epoch"])
        return cls(fields["name"], run, step, ballot, fields["rank"], fields["bytes"], fields["sha256"], pages)


@dataclass(frozen=True)
class Shard:
    """A shard's file whose header was read. Its arrays stay on the disk.

    Args:
        path: the file.
        info: what its header says.
        arrays: (page range, kind of state) -> (offset in the file in bytes, number of elements).
    """

    path: Path
    info: ShardInfo
    arrays: Mapping[tuple[PageRange, str], tuple[int, int]]

    def read_into(self, target: np.ndarray, page_range: PageRange, kind: str, start: int) -> None:
        """Fill `target`, fp32 and flat, with the elements [start, start + target.size) of one array.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
        """
        offset, size = self.arrays[page_range, kind]
        assert start >= 0 and start + target.size <= size, (page_range, kind, start, target.size, size)
        # Read with preadv, not through slices of safe_open: that maps the file, and a mapped file that cannot be read
        # ends the process by SIGBUS instead of an error; its backend without a mapping reads a whole array per slice.
        left, at = target.data.cast("B"), offset + 4 * start
        try:
            with open(regular_fd(self.path, os.O_RDONLY), "rb", buffering=0) as file:
                while left:
                    count = os.preadv(file.fileno(), [left], at)
                    if not count:
                        raise CheckpointError(f"{self.path.name} has become shorter while it was read")
                    left, at = left[count:], at + count
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def verify(self) -> None:
        """Compare the whole file with its hash.

        Raises:
            CheckpointError: it does not match, or cannot be read.
        """
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
        try:
            with open(regular_fd(self.path, os.O_RDONLY), "rb", buffering=0) as file:
                start = file.read(_HASH_AT + len(_ZEROS))
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


def shard_name(rank: int, ballot: Ballot, *, for_others: bool = False) -> str:
    """The file name of a worker's shard. Within one step no two shards of a run have the same name.

    Args:
        ballot: the incarnation and the mesh epoch in which it is written.
        for_others: as for `write_shard`.
    """
    others = "_for_others" if for_others else ""
    return f"shard_{rank}_{ballot.incarnation}-{ballot.epoch}{others}.safetensors"


def make_checkpoint_folder(directory: Path) -> None:
    """Create the directory of a checkpoint if it is missing, but not the run's directory.

    Raises:
        FilesError: it cannot be created.
    """
    with writing(directory):
        # Not `parents=True`: if the run's directory was removed the run must end, not write into a new directory.
        for folder in (directory.parent, directory):
            with contextlib.suppress(FileExistsError):
                make_private_folder(folder)


def write_shard(
    directory: Path,
    step: int,
    ballot: Ballot,
    rank: int,
    arrays: Mapping[PageRange, Mapping[str, np.ndarray]],
    *,
    run: str,
    for_others: bool = False,
) -> ShardInfo:
    """Write a worker's shard, whole or not at all, and flush it to the disk.

    May be called in another thread than the training thread. Arrays are written in pieces directly from their memory
    (only an array that is not contiguous is copied), so they must not change meanwhile.

    Args:
        directory: `checkpoint_path(...)`. It is created if it is missing, but the run's directory is not.
        step: the version of the state.
        ballot: the present incarnation and mesh epoch.
        rank: the worker that writes it.
        arrays: page range -> kind of state -> fp32 [elements]. All page ranges have the same kinds, except that frozen
            ones have only the master.
        run: id of the run.
        for_others: True for a worker's second shard, of pages that other workers should have written and have not.

    Returns:
        The description of the shard, for the report to the controller.

    Raises:
        FilesError: the disk is full, or the run's directory is missing.
    """
    _assert_state(arrays)
    ordered = [(key, kind, arrays[key][kind]) for key in sorted(arrays) for kind in sorted(arrays[key])]
    path = directory / shard_name(rank, ballot, for_others=for_others)
    make_checkpoint_folder(directory)
    metadata = {
        "run": run,
        "step": str(step),
        "incarnation": str(ballot.incarnation),
        "epoch": str(ballot.epoch),
        "rank": str(rank),
    }
    header = _header(metadata, [(f"{k[0]}.{k[1]}.{k[2]}.{kind}", values.size) for k, kind, values in ordered])
    digest = hashlib.sha256(header)
    with replacing(path, durable=True) as scratch, open(scratch, "wb", buffering=0) as file:
        write_all(file, header)
        for _, _, values in ordered:
            for piece in _pieces(values):
                digest.update(piece)
                write_all(file, piece)
        # Now the hash replaces the 64 zeros with which it was computed.
        sha256 = digest.hexdigest()
        num_bytes = file.tell()
        file.seek(_HASH_AT)
        write_all(file, sha256.encode())
    return ShardInfo(path.name, run, step, ballot, rank, num_bytes, sha256, tuple(sorted(arrays)))


def read_shard(path: Path) -> Shard:
    """Read a shard's header. The arrays are not compared with their hash; `Shard.verify` does that.

    Raises:
        CheckpointError: the file is missing, too short, too long, or not a shard.
    """
    try:
        with open(regular_fd(path, os.O_RDONLY), "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            offset = _LENGTH + int.from_bytes(file.read(_LENGTH), "little")
        # safe_open checks that the header is well-formed and that its arrays cover the rest of the file exactly.
        with safe_open(path, "np") as opened:
            metadata = opened.metadata()
            arrays: dict[tuple[PageRange, str], tuple[int, int]] = {}
            for name in opened.offset_keys():  # in the order in which they follow each other in the file
                layer, first, stop, kind = name.split(".", 3)
                array = opened.get_slice(name)
                (elements,) = array.get_shape()
                if array.get_dtype() != "F32":
                    raise ValueError(name)
                arrays[(int(layer), int(first), int(stop)), kind] = (offset, elements)
                offset += 4 * elements
        info = ShardInfo(
            path.name,
            metadata["run"],
            int(metadata["step"]),
            Ballot(int(metadata["incarnation"]), int(metadata["epoch"])),
            int(metadata["rank"]),
            num_bytes,
            metadata["sha256"],
            tuple(sorted({page_range for page_range, _ in arrays})),
        )
    except OSError as error:
        raise _unreadable(path, error) from error
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} is torn or damaged ({error})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path.name} is not a shard: its header names other arrays or metadata") from error
    return Shard(path, info, arrays)


def find_shards(directory: Path) -> tuple[list[ShardInfo], list[tuple[Path, CheckpointError]]]:
    """Read all shards in a checkpoint's directory, and verify their hashes.

    Called by a controller that completes a checkpoint whose own controller died before it wrote the manifest.

    Returns:
        The good shards; and (path, error) of the others. A shard with an UnreadableError may be good.

    Raises:
        UnreadableError: the directory cannot be listed now.
    """
    good: list[ShardInfo] = []
    bad: list[tuple[Path, CheckpointError]] = []
    try:
        names = os.listdir(directory)  # not glob, which finds nothing in a directory that may not be read
    except OSError as error:
        raise UnreadableError(f"{directory} cannot be listed ({error.strerror or error})") from error
    for path in (directory / name for name in sorted(names) if fnmatchcase(name, "shard_*.safetensors")):
        try:
            shard = read_shard(path)
            shard.verify()
            good.append(shard.info)
        except CheckpointError as error:
            bad.append((path, error))
    return good, bad


def _assert_state(arrays: Mapping[PageRange, Mapping[str, np.ndarray]]) -> None:
    """Check the form of the arrays, as no checkpoint may be made of malformed ones. A failure is a bug of ours."""
    most = max(arrays.values(), key=len, default={})
    for key, kinds in arrays.items():
        assert kinds.keys() == most.keys() or (len(kinds) == 1 and kinds.keys() <= most.keys()), (key, kinds.keys())
        for kind, values in kinds.items():
            assert values.dtype == np.float32 and values.ndim == 1 and values.size, (key, kind, values.dtype)
            assert values.size == next(iter(kinds.values())).size, (key, kind, values.size)


def _header(metadata: Mapping[str, str], sizes: list[tuple[str, int]]) -> bytes:
    """A safetensors header with its length in front, padded so that the arrays begin at a multiple of 64 bytes.

    It is made here because the safetensors library writes header and arrays in one call, and the hash in the header is
    known only after the arrays.
    """
    fields: dict[str, Any] = {"__metadata__": {"sha256": _ZEROS.decode(), **metadata}}
    offset = 0
    for name, size in sizes:
        fields[name] = {"dtype": "F32", "shape": [size], "data_offsets": [offset, offset + 4 * size]}
        offset += 4 * size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH + len(text)) % _ALIGNMENT)
    assert text.startswith(_OPENING + _ZEROS)
    return len(text).to_bytes(_LENGTH, "little") + text


def _pieces(values: np.ndarray) -> Iterator[memoryview]:
    """The array's little-endian bytes, a few MiB at a time."""
    data = np.ascontiguousarray(values, dtype="<f4").data.cast("B")
    return (data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK))


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a shard whose file cannot be opened or read."""
    # Checked again, as safetensors raises FileNotFoundError for any file that it cannot open.
    if isinstance(error, FileNotFoundError) and not os.path.exists(path):
        return CheckpointError(f"{path.name} is missing")
    return UnreadableError(f"cannot read {path.name} ({error.strerror or error})")
