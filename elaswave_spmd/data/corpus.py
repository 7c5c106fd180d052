"""A corpus is an ordered list of text files, with the sha256 of their bytes."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elaswave_spmd.errors import DataError
from elaswave_spmd.regular_files import open_regular

READ_BYTES = 1 << 20

# Folders in the standard library's folder that are not its source (installed packages, caches), or are its tests.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "testing", "_test", "__phello__"}
)
# Names of files that are tests, or that are written at build or installation time. The latter contain paths of the
# machine, so equal Python versions would give different corpora.
_SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize", "test_", "config-")


class Documents(Protocol):
    """An ordered sequence of text documents with the hashes of their content. The attributes are those of `Corpus`."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def boundaries(self) -> str: ...
    @property
    def num_documents(self) -> int: ...
    def documents(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Each document's name for errors, and its bytes in blocks."""
        ...


@dataclass(frozen=True)
class Corpus:
    """An ordered list of documents.

    Attributes:
        name: `stdlib` or `text`.
        files: the documents.
        sha256: hash of the bytes of all documents, one after another.
        num_bytes: size of all documents in bytes.
        boundaries: hash of the sizes of the documents. The tokens depend on it as well, because a tokenizer may give
            other tokens if the same bytes are divided into other documents.

    Raises:
        DataError: there is no document, or all are empty.
    """

    name: str
    files: tuple[Path, ...]
    sha256: str
    num_bytes: int
    boundaries: str

    def __post_init__(self) -> None:
        if not self.files or self.num_bytes < 1:
            raise DataError(
                f"the corpus is empty: {len(self.files)} files with {self.num_bytes} bytes",
                where=f"data={self.name}",
                fix="point data.path at files that hold text",
            )

    @property
    def num_documents(self) -> int:
        return len(self.files)

    def documents(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Each file's path, and its bytes in blocks."""
        return ((str(path), read_blocks(path)) for path in self.files)


def stdlib_corpus() -> Corpus:
    """Source text of the running Python's standard library: its `.py` files by path, without tests and site-packages.

    Raises:
        DataError: this Python has no source text (a zipped or stripped installation), or it cannot be read.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = stdlib_files(root)
    if not files:
        raise DataError(
            f"there are no .py files under {root}",
            rule="data=stdlib needs the source text of Python's standard library",
            where="data=stdlib",
            fix="data=text data.path='corpus/**/*.txt', or a Python that comes with its source",
        )
    return read_corpus("stdlib", files)


def stdlib_files(root: Path) -> tuple[Path, ...]:
    """Files of the standard library below `root`, sorted by relative path with `/`, code point by code point."""
    found: list[tuple[str, Path]] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not _skipped(name)]
        for name in names:
            if name.endswith(".py") and not _skipped(name):
                path = Path(folder, name)
                found.append((path.relative_to(root).as_posix(), path))
    return tuple(path for _, path in sorted(found))


def _skipped(name: str) -> bool:
    return name in _SKIPPED_FOLDERS or name.startswith(_SKIPPED_PREFIXES)


def text_corpus(pattern: str) -> Corpus:
    """A corpus of the files that match a glob, sorted by path. `**` goes into folders, `~` is the home directory.

    Raises:
        DataError: nothing matches, a file cannot be read, or all files are empty.
    """
    expanded = os.path.expanduser(pattern)
    matches = sorted({*glob.glob(expanded, recursive=True)})  # a set, as a/**/**/b.txt finds some files several times
    files = tuple(Path(match) for match in matches if os.path.isfile(match))
    if not files:
        raise DataError(
            f"data.path={pattern} matches no file",
            rule="data.path matches at least one file",
            where="data.path",
            exists=_what_is_there(expanded, matches),
            fix="quote the pattern in a shell: data=text 'data.path=corpus/**/*.txt'",
        )
    return read_corpus("text", files)


def _what_is_there(pattern: str, matches: list[str]) -> str:
    """The files and folders nearest to a pattern that matched no file, for the error message."""
    if folders := [match for match in matches if os.path.isdir(match)]:
        return f"{len(folders)} folders match; a folder's files are '{folders[0]}/**/*'"
    if matches:  # a pipe or a device, which may have no end
        return f"{matches[0]}, which is no regular file"
    try:
        folder = nearest_folder(pattern)
    except OSError as error:  # a name that is too long for a file
        return f"nothing of this name ({error.strerror or error})"
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return f"folder {folder}, which cannot be listed"
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"in {folder}: {shown or 'nothing'}"


def nearest_folder(pattern: str) -> Path:
    """The innermost existing folder on the way to a path, or to the first star of a glob."""
    folder = Path(pattern.split("*")[0])
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def read_corpus(name: str, files: Iterable[Path]) -> Corpus:
    """Read every file once, and describe them as a corpus.

    Raises:
        DataError: a file cannot be read, or all files are empty.
    """
    files = tuple(files)
    content, sizes, total = hashlib.sha256(), hashlib.sha256(), 0
    for path in files:
        size = 0
        for block in read_blocks(path):
            content.update(block)
            size += len(block)
        sizes.update(size.to_bytes(8, "little"))
        total += size
    return Corpus(name, files, content.hexdigest(), total, sizes.hexdigest())


def read_blocks(path: Path) -> Iterator[bytes]:
    """The bytes of one file, in blocks of at most `READ_BYTES`.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            while block := file.read(READ_BYTES):
                yield block
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or error})",
            where="data.path",
            fix="make it readable, or narrow the pattern",
        ) from error
