"""Tokenizers and the token cache."""

from __future__ import annotations

import builtins
import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from elaswave_spmd.controller.agent import check_same_data
from elaswave_spmd.data import (
    ByteTokenizer,
    DataSpec,
    JsonTokenizer,
    PreparedData,
    default_cache,
    prepare_data,
    text_corpus,
)
from elaswave_spmd.data import cache as caches
from elaswave_spmd.data import tokenizer as tokenizers_room
from elaswave_spmd.data.cache import TokenFile, token_dtype, tokenize_once
from elaswave_spmd.data.corpus import Corpus
from elaswave_spmd.data.tokenizer import load_tokenizer
from elaswave_spmd.errors import ConfigError, DataError


def _corpus(tmp_path: Path, *texts: bytes) -> Corpus:
    folder = tmp_path / "text"
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_bytes(text)
    return text_corpus(f"{folder}/*.txt")


def _read(tokens: TokenFile) -> np.ndarray:
    return np.fromfile(tokens.path, dtype=tokens.dtype)


def _json_tokenizer(path: Path, num_extra: int = 0) -> Path:
    vocab = {"[UNK]": 0, "hello": 1, "world": 2, "é": 3, **{f"w{i}": 4 + i for i in range(num_extra)}}
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
    }
    path.write_text(json.dumps(spec), encoding="utf-8")
    return path


class _Counting(ByteTokenizer):
    """Counts the documents that it was asked to encode."""

    documents = 0

    def encode(self, blocks: Iterable[bytes]) -> Iterator[np.ndarray]:
        self.documents += 1
        return super().encode(blocks)


def test_bytes_are_tokens(tmp_path: Path) -> None:
    made = tokenize_once(_corpus(tmp_path, b"ab\xff", b"", b"c"), ByteTokenizer(), tmp_path / "cache")
    assert (made.dtype, made.num_tokens, made.vocab_size) == ("uint8", 4, 256)
    assert _read(made).tolist() == [97, 98, 255, 99]
    assert os.path.isabs(made.path)


def test_tokenised_once(tmp_path: Path) -> None:
    corpus, tokenizer = _corpus(tmp_path, b"abc", b"def"), _Counting()
    first = tokenize_once(corpus, tokenizer, tmp_path / "cache")
    assert tokenize_once(corpus, tokenizer, tmp_path / "cache") == first
    assert tokenizer.documents == 2
    assert [path.name.startswith(".") for path in (tmp_path / "cache").iterdir()] == [False]


def test_changed_text_gets_another_entry(tmp_path: Path) -> None:
    first = tokenize_once(_corpus(tmp_path, b"abc"), ByteTokenizer(), tmp_path / "cache")
    second = tokenize_once(_corpus(tmp_path, b"abd"), ByteTokenizer(), tmp_path / "cache")
    assert first.path != second.path
    assert _read(first).tolist() == list(b"abc")


@pytest.mark.parametrize("damage", ["truncate", "other bytes", "no meta", "no json", "foreign", "infinite", "nested"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, damage: str) -> None:
    corpus = _corpus(tmp_path, b"abcdef")
    made = tokenize_once(corpus, ByteTokenizer(), tmp_path / "cache")
    entry = Path(made.path).parent
    if damage == "truncate":
        Path(made.path).write_bytes(b"abc")
    elif damage == "other bytes":
        Path(made.path).write_bytes(b"abcdeF")
    elif damage == "no meta":
        (entry / "meta.json").unlink()
    else:
        content = {
            "no json": "{",
            "foreign": '{"dtype": 1}',
            "infinite": '{"num_tokens": Infinity}',
            "nested": "[" * 100_000,
        }
        (entry / "meta.json").write_text(content[damage])
    again = tokenize_once(corpus, ByteTokenizer(), tmp_path / "cache")
    assert again == made
    assert _read(again).tolist() == list(b"abcdef")


def test_the_second_of_two_writers_keeps_the_first_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, folder = _corpus(tmp_path, b"abcdef"), tmp_path / "cache"
    made: list[TokenFile] = []

    def meanwhile(num_tokens: int) -> None:
        if not made:
            made.append(tokenize_once(corpus, ByteTokenizer(), folder))

    assert tokenize_once(corpus, ByteTokenizer(), folder, accept=meanwhile) == made[0]
    assert len(list(folder.iterdir())) == 1


# A command that makes an entry, and tells so when its tokens are written. It goes on when its standard input ends.
WRITER = """
import sys
from elaswave_spmd.data import ByteTokenizer, text_corpus
from elaswave_spmd.data.cache import tokenize_once
def accept(num_tokens):
    print("written", flush=True)
    sys.stdin.read()
print(tokenize_once(text_corpus(sys.argv[1]), ByteTokenizer(), sys.argv[2], accept=accept).path, flush=True)
"""


@contextmanager
def _writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that has written its tokens, and has not published them."""
    command = [sys.executable, "-c", WRITER, f"{tmp_path}/text/*.txt", str(tmp_path / "cache")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "written\n"
            yield process
        finally:
            process.kill()


def test_what_a_killed_command_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    corpus, folder = _corpus(tmp_path, b"abcdef"), tmp_path / "cache"
    with _writer(tmp_path):
        pass
    (left,) = folder.iterdir()
    assert left.name.startswith(".")
    made = tokenize_once(corpus, ByteTokenizer(), folder)
    assert [*folder.iterdir()] == [Path(made.path).parent]
    assert {path.name for path in Path(made.path).parent.iterdir()} == {"tokens.bin", "meta.json"}


def test_what_a_living_command_writes_is_left_alone(tmp_path: Path) -> None:
    corpus, folder = _corpus(tmp_path, b"abcdef"), tmp_path / "cache"
    with _writer(tmp_path) as writer:
        (theirs,) = folder.iterdir()
        made = tokenize_once(corpus, ByteTokenizer(), folder)
        assert {*folder.iterdir()} == {theirs, Path(made.path).parent}
        assert (theirs / "tokens.bin").read_bytes() == b"abcdef"
        assert writer.communicate()[0] == f"{made.path}\n"
    assert [*folder.iterdir()] == [Path(made.path).parent]


def test_a_file_system_without_locks_keeps_what_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell there whether its command lives."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    corpus, folder = _corpus(tmp_path, b"abcdef"), tmp_path / "cache"
    with _writer(tmp_path):
        pass
    (left,) = folder.iterdir()
    monkeypatch.setattr(caches.fcntl, "flock", unsupported)
    made = tokenize_once(corpus, ByteTokenizer(), folder)
    assert {*folder.iterdir()} == {left, Path(made.path).parent}
    assert {path.name for path in Path(made.path).parent.iterdir()} == {"tokens.bin", "meta.json"}


def test_a_refused_corpus_leaves_no_entry(tmp_path: Path) -> None:
    def refuse(num_tokens: int) -> None:
        raise DataError(f"too short: {num_tokens}")

    with pytest.raises(DataError, match="too short"):
        tokenize_once(_corpus(tmp_path, b"abc"), ByteTokenizer(), tmp_path / "cache", accept=refuse)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_corpus_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    corpus = _corpus(tmp_path, b"abc")
    corpus.files[0].write_bytes(b"xyz")
    with pytest.raises(DataError, match="changed while it was read"):
        tokenize_once(corpus, ByteTokenizer(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        tokenize_once(_corpus(tmp_path, b"abc"), ByteTokenizer(), tmp_path / "file" / "cache")
    assert caught.value.where == "data.cache"
    assert "data.cache=DIR" in caught.value.fix


def test_a_filled_cache_need_not_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = _corpus(tmp_path, b"abc")
    made = tokenize_once(corpus, ByteTokenizer(), tmp_path / "cache")
    monkeypatch.setattr(Path, "mkdir", lambda *args, **kwargs: pytest.fail("wrote to the cache"))
    assert tokenize_once(corpus, ByteTokenizer(), tmp_path / "cache") == made


def test_default_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "elaswave_spmd"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_cache() == tmp_path / "home" / ".cache" / "elaswave_spmd"


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_dtype_is_the_smallest_that_fits(vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == dtype


def test_the_bar_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenize_once(_corpus(tmp_path, b"abc" * 1000), ByteTokenizer(), tmp_path / "cache", progress=True)
    assert capsys.readouterr().out == ""


def test_json_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = JsonTokenizer(_json_tokenizer(tmp_path / "tok.json", num_extra=300))
    assert tokenizer.vocab_size == 304
    assert tokenizer.name.startswith("tok.json:")
    corpus = _corpus(tmp_path, b"hello world\nnobody", "é hello".encode())
    made = tokenize_once(corpus, tokenizer, tmp_path / "cache")
    assert made.dtype == "uint16"
    assert _read(made).tolist() == [1, 2, 0, 3, 1]


def test_an_entry_is_believed_in_nothing_that_can_be_computed(tmp_path: Path) -> None:
    """Others may write to a shared cache: its numbers decided the size of the model, and how the file was read."""
    corpus = _corpus(tmp_path, b"abcdef")
    made = tokenize_once(corpus, ByteTokenizer(), tmp_path / "cache")
    meta = Path(made.path).with_name("meta.json")
    other = hashlib.sha256(b"ABCDEF").hexdigest()
    meta.write_text(json.dumps({"dtype": "uint16", "vocab_size": 9, "num_tokens": 6, "tokens_sha256": other}))
    assert tokenize_once(corpus, ByteTokenizer(), tmp_path / "cache") == made
    Path(made.path).write_bytes(b"ABCDEF")
    assert tokenize_once(corpus, ByteTokenizer(), tmp_path / "cache") == made
    assert _read(made).tolist() == list(b"abcdef")


def test_tokens_of_a_file_that_are_damaged_are_made_again(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer, corpus = JsonTokenizer(_json_tokenizer(tmp_path / "tok.json")), _corpus(tmp_path, b"hello world")
    made = tokenize_once(corpus, tokenizer, tmp_path / "cache")
    assert _read(made).tolist() == [1, 2]
    Path(made.path).write_bytes(bytes([2, 1]))
    assert tokenize_once(corpus, tokenizer, tmp_path / "cache") == made
    assert _read(made).tolist() == [1, 2]


def test_the_hash_of_tokens_shows_that_the_same_text_is_divided_otherwise(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path, cache = str(_json_tokenizer(tmp_path / "tok.json")), str(tmp_path / "cache")

    def prepared(*texts: bytes, tokenizer: str = path) -> PreparedData:
        _corpus(tmp_path, *texts)
        data = DataSpec("text", f"{tmp_path}/text/*.txt", tokenizer=tokenizer, cache=cache, validation_fraction=0)
        return prepare_data(data, 2)

    one, other = prepared(b"hello wor", b"ld hello hello"), prepared(b"hello world hello hello", b"")
    assert one.sha256 == other.sha256 and one.tokens_sha256 != other.tokens_sha256
    assert other.tokens_sha256 == hashlib.sha256(Path(other.token_file).read_bytes()).hexdigest()
    assert PreparedData.from_dict(json.loads(json.dumps(other.to_dict()))) == other
    with pytest.raises(DataError, match=f"tokens_sha256 {one.tokens_sha256}"):
        check_same_data(one, other)
    assert prepared(b"hello world", tokenizer="bytes").tokens_sha256 == ""


def test_an_entry_that_was_made_without_the_hash_of_its_tokens_gets_it(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer, corpus = JsonTokenizer(_json_tokenizer(tmp_path / "tok.json")), _corpus(tmp_path, b"hello world")
    made = tokenize_once(corpus, tokenizer, tmp_path / "cache")
    meta = Path(made.path).with_name("meta.json")
    fields = json.loads(meta.read_text())
    former = {name: value for name, value in fields.items() if name != "tokens_sha256"}
    meta.write_text(json.dumps(former))
    inode = Path(made.path).stat().st_ino
    assert tokenize_once(corpus, tokenizer, tmp_path / "cache") == made and made.tokens_sha256
    assert json.loads(meta.read_text()) == fields
    assert Path(made.path).stat().st_ino == inode and len(list(meta.parent.iterdir())) == 2


@pytest.mark.parametrize("stored", ["truncation", "padding"])
def test_truncation_and_padding_in_the_file_change_no_text(tmp_path: Path, stored: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = _json_tokenizer(tmp_path / "tok.json")
    plain, text = JsonTokenizer(path), b"hello world " * 5
    file = tokenizers.Tokenizer.from_file(str(path))
    if stored == "truncation":
        file.enable_truncation(3)
    else:
        file.enable_padding(length=64)
    file.save(str(path))
    again = JsonTokenizer(path)
    assert np.concatenate(list(again.encode([text]))).tolist() == [1, 2] * 5
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert again.identity not in (plain.identity, f"json:{digest}:{tokenizers.__version__}"), "what was cut is not used"
    assert len(plain.identity.split(":")) == 3, "entries of tokenizers without either are used again"


def test_json_tokenizer_cuts_long_documents_after_a_newline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(tokenizers_room, "BLOCK_CHARACTERS", 8)
    monkeypatch.setattr("elaswave_spmd.data.corpus.READ_BYTES", 3)  # also cuts é in two
    tokenizer = JsonTokenizer(_json_tokenizer(tmp_path / "tok.json"))
    made = tokenize_once(_corpus(tmp_path, "hello\nworld é\nhello é".encode()), tokenizer, tmp_path / "cache")
    assert _read(made).tolist() == [1, 2, 3, 1, 3]


def test_tokenizers_do_not_share_an_entry(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    corpus = _corpus(tmp_path, b"hello world")
    small = JsonTokenizer(_json_tokenizer(tmp_path / "a.json"))
    large = JsonTokenizer(_json_tokenizer(tmp_path / "b.json", num_extra=1))
    paths = {tokenize_once(corpus, t, tmp_path / "cache").path for t in (ByteTokenizer(), small, large)}
    assert len(paths) == 3


def test_a_document_that_is_not_text_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = JsonTokenizer(_json_tokenizer(tmp_path / "tok.json"))
    with pytest.raises(DataError, match="not UTF-8") as caught:
        tokenize_once(_corpus(tmp_path, b"fine", b"\x80"), tokenizer, tmp_path / "cache")
    assert "001.txt" in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not json", b"{}", b"\xff\xfe", b'{"version": "1.0"}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tok.json").write_bytes(content)
    with pytest.raises(DataError, match="not one that the tokenizers package reads") as caught:
        load_tokenizer(str(tmp_path / "tok.json"))
    assert caught.value.where == "data.tokenizer"


def test_a_missing_tokenizer_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read") as caught:
        load_tokenizer(str(tmp_path / "absent.json"))
    assert "bytes" in caught.value.exists


def test_a_device_is_no_tokenizer_file() -> None:
    with pytest.raises(DataError, match=r"data.tokenizer=/dev/null cannot be read .it is no regular file"):
        load_tokenizer("/dev/null")  # as /dev/zero, which has no end


def test_a_folder_is_refused_with_the_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read") as caught:
        load_tokenizer(str(tmp_path))
    assert caught.value.fix == f"data.tokenizer={tmp_path / 'tokenizer.json'}"


def test_without_the_package_the_pip_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name == "tokenizers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match="optional package tokenizers") as caught:
        load_tokenizer(str(_json_tokenizer(tmp_path / "tok.json")))
    assert "pip install 'elaswave-spmd[tokenizers]'" in caught.value.fix


def test_no_space_is_a_cache_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caches.os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        tokenize_once(_corpus(tmp_path, b"abc"), ByteTokenizer(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
