"""A user's own files of uint16 tokens (`data=bin`), laid out as in nanoGPT: `train.bin` and `val.bin`, or one file."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from elaswave_spmd.data.corpus import read_blocks
from elaswave_spmd.errors import DataError

BIN_DTYPE = "uint16"
_WHERE = "data.path"


@dataclass(frozen=True)
class BinFile:
    """One file of little-endian uint16 tokens: its absolute path, length, largest token and sha256."""

    path: str
    num_tokens: int
    largest: int
    sha256: str


def find_bin_files(path: str) -> tuple[Path, Path | None]:
    """Find the token files for training and for validation.

    The second is None if `path` is a single file. The caller then holds out the tail of that file.

    Raises:
        DataError: there is no such file or folder, or the folder lacks one of the two files.
    """
    found = Path(os.path.expanduser(path)).absolute()
    train, validation = found / "train.bin", found / "val.bin"
    try:
        if found.is_file():
            return found, None
        if train.is_file() and validation.is_file():
            return train, validation
        names = sorted(entry.name for entry in found.iterdir())[:8] if found.is_dir() else []
    except OSError as error:
        raise DataError(
            f"data.path={path} cannot be read ({error.strerror or error})", where=_WHERE, fix="make it readable"
        ) from error
    raise DataError(
        f"data.path={path} is neither a token file nor a folder with train.bin and val.bin",
        rule="data=bin reads one file of uint16 tokens, or train.bin and val.bin of a folder",
        where=_WHERE,
        exists=", ".join(names) or "nothing",
        fix="data=bin data.path=FILE.bin, whose tail is held out for validation",
    )


def read_bin_file(path: Path) -> BinFile:
    """Read a token file once, to find its hash and its largest token.

    Raises:
        DataError: the file cannot be read, is empty, or does not hold a whole number of tokens.
    """
    content, num_bytes, largest, odd = hashlib.sha256(), 0, 0, b""
    for block in read_blocks(path):
        content.update(block)
        num_bytes += len(block)
        # A block may have any size, so it may end in the middle of a token.
        block = odd + block
        whole = len(block) // 2 * 2
        odd = block[whole:]
        if whole:
            largest = max(largest, int(np.frombuffer(block[:whole], dtype="<u2").max()))
    if num_bytes == 0 or odd:
        raise DataError(
            f"{path} has {num_bytes} bytes",
            rule="a token file holds uint16 tokens, two bytes each, and at least one",
            where=_WHERE,
            fix="write it by numpy.asarray(tokens, dtype='<u2').tofile(path), without a header",
        )
    return BinFile(str(path), num_bytes // 2, largest, content.hexdigest())
