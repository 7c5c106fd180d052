"""The cache of token files. Each is written once per (corpus, tokenizer) and mapped read-only by every process.

An entry is a folder `<key>/` with `tokens.bin` (raw little-endian unsigned integers) and `meta.json`. It is written
into a scratch folder and published by one rename, so no process sees half of it. A process that is killed leaves its
scratch folder; the next one that makes the same entry, on the same machine, removes it. Whoever finds an entry reads it
once and compares its hash: with that of the corpus, if tokens are bytes or ids, so that no other tokens are believed,
else with the hash that was written beside it, which shows damage.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from elaswave_spmd.data.columns import TokenColumn
from elaswave_spmd.data.corpus import READ_BYTES, Documents
from elaswave_spmd.data.tokenizer import ByteTokenizer, Tokenizer
from elaswave_spmd.errors import ConfigError, DataError
from elaswave_spmd.regular_files import open_regular, read_regular, regular_fd

FORMAT = 1
_META = "meta.json"
_LOCK = "lock"  # a file in a scratch folder that its process has locked


@dataclass(frozen=True)
class TokenFile:
    """A token file, which holds the tokens of a whole corpus.

    Args:
        path: absolute path.
        dtype: uint8, uint16 or uint32, stored little-endian.
        num_tokens: number of tokens in the file.
        vocab_size: every token lies in [0, vocab_size).
        tokens_sha256: hash of the file. It is empty for columns of token ids, which are determined by the hash of the
            data that they were made of.
    """

    path: str
    dtype: str
    num_tokens: int
    vocab_size: int
    tokens_sha256: str = ""

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * np.dtype(self.dtype).itemsize


def default_cache() -> Path:
    """The default directory of token files: `$XDG_CACHE_HOME/elaswave_spmd`, or `~/.cache/elaswave_spmd`.

    Raises:
        ConfigError: there is neither an absolute `$XDG_CACHE_HOME` nor a home directory.
    """
    # The XDG specification demands that a relative path is ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache"))
    if not folder.is_absolute():  # `~` was not expanded: no HOME, and no entry in the user database, as in containers
        raise ConfigError(
            "there is no home directory, in whose cache folder token files are kept",
            rule="tokens are made once and kept in data.cache, or else in the user's cache folder",
            where="data.cache",
            fix="data.cache=DIR, or set HOME",
        )
    return folder / "elaswave_spmd"


def token_dtype(vocab_size: int) -> str:
    """The smallest stored dtype for tokens in [0, vocab_size)."""
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"


def tokenize_once(
    corpus: Documents,
    tokenizer: Tokenizer,
    cache: Path,
    *,
    accept: Callable[[int], None] = lambda num_tokens: None,
    progress: bool = False,
) -> TokenFile:
    """The token file of a corpus: the one in the cache, or a new one that is written there.

    Args:
        accept: called with the number of tokens, before a new entry is published. It raises an error to refuse them.
        progress: show a progress bar on stderr while tokenising.

    Raises:
        ConfigError: the cache cannot be written.
        DataError: a document is not UTF-8, or the corpus changed while it was read.
    """

    def write(scratch: Path) -> TokenFile:
        return _write_entry(scratch, corpus, tokenizer, progress)

    def read(entry: Path) -> TokenFile | None:
        found = _read_entry(entry, tokenizer.vocab_size)
        if found is None or (digest := _digest(found)) is None:
            return None
        if isinstance(tokenizer, ByteTokenizer):
            return replace(found, tokens_sha256=digest) if digest == corpus.sha256 else None
        if not found.tokens_sha256:
            return _with_hash(found, digest)
        return found if digest == found.tokens_sha256 else None

    return _find_or_make(cache, _cache_key(corpus, tokenizer), write, read, accept)


def store_once(column: TokenColumn, vocab_size: int, cache: Path) -> TokenFile:
    """The token file of a column of token ids that cannot be read in place: the one in the cache, or a new one.

    Args:
        vocab_size: larger than every id; it decides the dtype in which ids are stored.

    Raises:
        ConfigError: the cache cannot be written.
        DataError: the column changed while it was read.
    """

    def write(scratch: Path) -> TokenFile:
        return _write_column(scratch, column, vocab_size)

    def read(entry: Path) -> TokenFile | None:
        found = _read_entry(entry, vocab_size)
        return found if found is not None and _digest(found, "<u4") == column.sha256 else None

    key = hashlib.sha256(json.dumps([FORMAT, "tokens", column.sha256, vocab_size]).encode()).hexdigest()[:32]
    return _find_or_make(cache, key, write, read, lambda num_tokens: None)


def _find_or_make(
    cache: Path,
    key: str,
    write: Callable[[Path], TokenFile],
    read: Callable[[Path], TokenFile | None],
    accept: Callable[[int], None],
) -> TokenFile:
    """The cache entry with this key: the one that exists, or a new one.

    Args:
        write: writes a new entry into the scratch folder that it is given.
        read: returns the entry in a folder; None if there is none, or it is damaged.
        accept: as for `tokenize_once`; also called for an entry that exists.
    """
    cache = Path(os.path.expanduser(cache)).absolute()
    entry = cache / key
    if (found := read(entry)) is not None:
        accept(found.num_tokens)
        return found
    with _cache_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        # Of this machine only: on a network file system locks may hold on each machine by itself.
        begin = f".{entry.name}.{os.uname().nodename}."
        _remove_left(cache, begin)
        # Not tempfile.mkdtemp: its mode 0700 would hide the entry of a shared cache from all other users.
        scratch = cache / f"{begin}{os.getpid()}.{secrets.token_hex(4)}"
        scratch.mkdir()
    try:
        with _cache_errors(cache), _locked(scratch):
            made = write(scratch)
            accept(made.num_tokens)
            _publish(scratch, entry, read)
        with contextlib.suppress(OSError):  # the entry of a process that was first may be another user's
            (entry / _LOCK).unlink(missing_ok=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    published = read(entry)
    if published is None:
        raise ConfigError(
            f"{entry} has disappeared or changed just after it was written",
            rule="no other program may write to the token cache",
            where="data.cache",
            fix="data.cache=DIR with a directory of its own",
        )
    return published


@contextlib.contextmanager
def _locked(scratch: Path) -> Iterator[None]:
    """A context in which a new scratch folder is locked, if its file system has locks; others leave it alone then."""
    unnamed = scratch / f"{_LOCK}.new"
    fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(scratch / _LOCK)  # only now: who finds the name finds it locked while this process lives
        except OSError:
            unnamed.unlink()
        yield
    finally:
        os.close(fd)


def _remove_left(cache: Path, begin: str) -> None:
    """Remove the scratch folders, of names that begin so, that killed processes have left."""
    for left in cache.glob(f"{glob.escape(begin)}*"):
        with contextlib.suppress(OSError):  # not locked yet; in use; another user's; or just removed
            fd = regular_fd(left / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(fd)
            shutil.rmtree(left, ignore_errors=True)


def _cache_key(corpus: Documents, tokenizer: Tokenizer) -> str:
    parts = [FORMAT, corpus.sha256, corpus.boundaries, tokenizer.identity]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _read_entry(entry: Path, vocab_size: int) -> TokenFile | None:
    """The entry if it exists and has its size; None if there is none or it is damaged, so that a new one is written.

    Args:
        vocab_size: that of the tokenizer, or of the ids, from which the dtype follows: what meta.json says is not read.
    """
    tokens = entry / "tokens.bin"
    try:
        meta = json.loads(read_regular(entry / _META))
        digest = str(meta.get("tokens_sha256", ""))
        found = TokenFile(str(tokens), token_dtype(vocab_size), int(meta["num_tokens"]), vocab_size, digest)
        return found if tokens.stat().st_size == found.num_bytes else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _digest(found: TokenFile, dtype: str = "") -> str | None:
    """The hash of a token file as it is, or of its tokens as another dtype; None if it cannot be read."""
    content, stored = hashlib.sha256(), np.dtype(found.dtype).newbyteorder("<")
    try:
        with open_regular(found.path) as file:
            while block := file.read(READ_BYTES):
                content.update(np.frombuffer(block, stored).astype(dtype).data if dtype else block)
    except (OSError, ValueError):  # the latter: it was cut meanwhile
        return None
    return content.hexdigest()


def _with_hash(found: TokenFile, digest: str) -> TokenFile:
    """Add the hash to an entry that an earlier version has written without one, and store it in its meta.json."""
    path, hashed = Path(found.path), replace(found, tokens_sha256=digest)
    scratch = path.with_name(f".meta.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with contextlib.suppress(OSError, ValueError, TypeError):  # a filled cache may be read-only
            about = {**json.loads(read_regular(path.with_name(_META))), "tokens_sha256": digest}
            scratch.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
            os.replace(scratch, path.with_name(_META))
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
    return hashed


def _write_entry(scratch: Path, corpus: Documents, tokenizer: Tokenizer, progress: bool) -> TokenFile:
    path = scratch / "tokens.bin"
    dtype = np.dtype(token_dtype(tokenizer.vocab_size))
    content, written, num_tokens = hashlib.sha256(), hashlib.sha256(), 0
    with open(path, "wb") as out, _progress_bar(corpus, progress) as advance:

        def count(blocks: Iterator[bytes]) -> Iterator[bytes]:
            for block in blocks:
                content.update(block)
                advance(len(block))
                yield block

        for document, blocks in corpus.documents():
            try:
                for tokens in tokenizer.encode(count(blocks)):
                    stored = tokens.astype(dtype.newbyteorder("<"), copy=False).data
                    out.write(stored)
                    written.update(stored)
                    num_tokens += tokens.size
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{document} is not UTF-8 text ({error.reason})",
                    fix="convert it, leave it out of data.path, or use data.tokenizer=bytes",
                ) from error
        out.flush()
        os.fsync(out.fileno())
    # The corpus was hashed when it was found, which gave the key of this entry, and was read again here. If it changed
    # in between, its tokens must not be stored under that key.
    if content.hexdigest() != corpus.sha256:
        raise _changed(corpus.name)
    made = TokenFile(str(path), dtype.name, num_tokens, tokenizer.vocab_size, written.hexdigest())
    about = {"corpus": corpus.name, "sha256": corpus.sha256, "bytes": corpus.num_bytes, "tokenizer": tokenizer.name}
    _write_meta(scratch, made, about)
    return made


def _write_column(scratch: Path, column: TokenColumn, vocab_size: int) -> TokenFile:
    path = scratch / "tokens.bin"
    dtype = np.dtype(token_dtype(vocab_size))
    content, num_tokens = hashlib.sha256(), 0
    with open(path, "wb") as out:
        for tokens in column.arrays():
            content.update(np.ascontiguousarray(tokens, dtype="<u4").data)
            out.write(np.ascontiguousarray(tokens, dtype=dtype.newbyteorder("<")).data)
            num_tokens += tokens.size
        out.flush()
        os.fsync(out.fileno())
    if content.hexdigest() != column.sha256:
        raise _changed(column.table.kind)
    made = TokenFile(str(path), dtype.name, num_tokens, vocab_size)
    _write_meta(scratch, made, {"corpus": column.table.kind, "sha256": column.sha256, "column": column.column})
    return made


def _changed(name: str) -> DataError:
    return DataError(
        f"the corpus {name} changed while it was read",
        where="data.path",
        fix="start again when no program writes to its files",
    )


def _write_meta(scratch: Path, made: TokenFile, about: Mapping[str, object]) -> None:
    """Write meta.json of an entry: the facts needed to read the tokens and, for people, where they come from."""
    fields = {name: value for name, value in asdict(made).items() if name != "path" and value != ""}
    written = json.dumps({"format": FORMAT, **fields, **about}, indent=1)
    (scratch / _META).write_text(written + "\n", encoding="utf-8")


def _publish(scratch: Path, entry: Path, read: Callable[[Path], TokenFile | None]) -> None:
    """Rename an entry into place. If another process was first, its entry stays: it has the same tokens."""
    try:
        os.rename(scratch, entry)
    except OSError:
        if read(entry) is None:  # the present entry is damaged
            shutil.rmtree(entry, ignore_errors=True)
            os.rename(scratch, entry)


@contextlib.contextmanager
def _cache_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the token cache {cache} cannot be written ({error.strerror or error})",
            where="data.cache",
            fix="data.cache=DIR with a directory that can be written and has room for the tokens",
        ) from error


@contextlib.contextmanager
def _progress_bar(corpus: Documents, shown: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr; yields advance(num_bytes).

    It has no thread of its own, because the controller forks later: `advance` redraws it, at each per cent.
    """
    if not shown:
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("tokenising {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), auto_refresh=False, transient=True) as bar:
        task = bar.add_task(corpus.name, total=corpus.num_bytes)
        shown_bytes = unshown = 0

        def advance(num_bytes: int) -> None:
            nonlocal shown_bytes, unshown
            unshown += num_bytes
            if unshown * 100 >= corpus.num_bytes or shown_bytes + unshown == corpus.num_bytes:
                bar.update(task, advance=unshown, refresh=True)
                shown_bytes, unshown = shown_bytes + unshown, 0

        yield advance
