"""Corpora: which files, in which order, with which hash."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import pytest

from elaswave_spmd.data import corpus as corpora
from elaswave_spmd.data import stdlib_corpus, text_corpus
from elaswave_spmd.errors import DataError


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_stdlib_is_source_without_tests_and_packages() -> None:
    found = stdlib_corpus()
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in found.files]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "unittest/case.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert found.num_bytes > 5_000_000


def test_stdlib_is_deterministic_and_hashes_the_concatenation() -> None:
    found = stdlib_corpus()
    assert found == stdlib_corpus()
    assert found.sha256 == hashlib.sha256(b"".join(path.read_bytes() for path in found.files)).hexdigest()
    assert found.num_bytes == sum(path.stat().st_size for path in found.files)


def test_stdlib_files_are_the_same_in_all_installations(tmp_path: Path) -> None:
    kept = {"b.py": "b", "a/__init__.py": "", "a/z.py": "z", "a.py": "a", "latest/x.py": "x"}
    left_out = {
        "test/x.py": "",
        "a/tests/x.py": "",
        "ctypes/test/x.py": "",
        "idlelib/idle_test/x.py": "",
        "lib2to3/tests/x.py": "",
        "site-packages/x.py": "",
        "dist-packages/x.py": "",
        "_sysconfigdata__linux.py": "",
        "config-3.11/python-config.py": "",
        "sitecustomize.py": "",
        "a/notes.txt": "",
    }
    _write(tmp_path, {**kept, **left_out})
    names = [path.relative_to(tmp_path).as_posix() for path in corpora.stdlib_files(tmp_path)]
    assert names == sorted(kept)


def test_a_python_without_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="source text of Python's standard library"):
        stdlib_corpus()


def test_text_globs_in_sorted_order(tmp_path: Path) -> None:
    _write(tmp_path, {"b.txt": "bb", "a.txt": "a", "deep/c.txt": "ccc", "deep/no.md": "no"})
    found = text_corpus(f"{tmp_path}/**/*.txt")
    assert [path.name for path in found.files] == ["a.txt", "b.txt", "c.txt"]
    assert (found.num_bytes, found.sha256) == (6, hashlib.sha256(b"abbccc").hexdigest())


def test_a_file_that_a_glob_finds_in_several_ways_is_one_document(tmp_path: Path) -> None:
    _write(tmp_path, {"a/b/c/x.txt": "one", "a/y.txt": "two"})
    corpus = text_corpus(str(tmp_path / "**" / "**" / "*.txt"))
    assert [path.name for path in corpus.files] == ["x.txt", "y.txt"] and corpus.num_bytes == 6


def test_boundaries_distinguish_equal_concatenations(tmp_path: Path) -> None:
    _write(tmp_path, {"x/1.txt": "ab", "x/2.txt": "c", "y/1.txt": "a", "y/2.txt": "bc"})
    x, y = text_corpus(f"{tmp_path}/x/*"), text_corpus(f"{tmp_path}/y/*")
    assert x.sha256 == y.sha256
    assert x.boundaries != y.boundaries


@pytest.mark.parametrize("pattern", ["nothing*.txt", "no/such/folder/*.txt", ""])
def test_no_match_lists_what_exists(tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path, {"present.md": "x"})
    with pytest.raises(DataError, match="matches no file") as caught:
        text_corpus(pattern)
    assert "present.md" in caught.value.exists


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    _write(tmp_path, {"folder/a.txt": "x"})
    with pytest.raises(DataError) as caught:
        text_corpus(str(tmp_path / "folder"))
    assert "/**/*" in caught.value.exists


def test_a_device_is_not_a_file() -> None:
    with pytest.raises(DataError, match="matches no file") as caught:
        text_corpus("/dev/null")  # as /dev/zero, which has no end
    assert caught.value.exists == "/dev/null, which is no regular file"


def test_empty_files_are_an_empty_corpus(tmp_path: Path) -> None:
    _write(tmp_path, {"a.txt": "", "b.txt": ""})
    with pytest.raises(DataError, match="empty") as caught:
        text_corpus(f"{tmp_path}/*.txt")
    assert "2 files with 0 bytes" in str(caught.value)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    # A directory cannot be read as a file by anyone, so this holds for root too.
    with pytest.raises(DataError, match="cannot be read") as caught:
        corpora.read_corpus("text", [tmp_path])
    assert str(tmp_path) in str(caught.value)
