"""data=arrow and data=parquet: columns of token ids and of text, in saved datasets and parquet files."""

from __future__ import annotations

import builtins
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elaswave_spmd.data import DataSpec, PreparedData, open_split, prepare_data
from elaswave_spmd.data.columns import ChunkedTokens, map_tokens
from elaswave_spmd.data.tables import PARQUET, Table, find_tables
from elaswave_spmd.errors import ConfigError, DataError
from tests.token_splits import token_split
from tests.unit.data.tables import ids_table, ipc, parquet, pyarrow, save_to_disk, text_table, write_parquet

# Rows of different lengths, one of them empty, whose tokens are counted through.
ROWS = [range(0, 5), range(5, 5), range(5, 18), range(18, 19), range(19, 30), range(30, 41)]


def spec(kind: str, folder: Path, column: str | None = "input_ids", **others: Any) -> DataSpec:
    return DataSpec(kind, str(folder), column=column, cache=str(folder.parent / "cache"), **others)


def write(kind: str, folder: Path, *tables: Any) -> None:
    """Tables as a dataset of either kind."""
    if kind == "arrow":
        save_to_disk(folder, tables)
        return
    for number, table in enumerate(tables):
        write_parquet(folder / f"part-{number}.parquet", table)


kinds = pytest.mark.parametrize("kind", ["arrow", "parquet"])


@kinds
def test_rows_of_token_ids_are_joined_and_cut_into_samples(tmp_path: Path, kind: str) -> None:
    write(kind, tmp_path / "data", ids_table(ROWS[:4]), ids_table(ROWS[4:]))
    prepared = prepare_data(spec(kind, tmp_path / "data", validation_fraction=0.25), 10)
    assert (prepared.num_train_samples, prepared.num_validation_samples, prepared.vocab_size) == (3, 1, 41)
    assert PreparedData.from_dict(json.loads(json.dumps(prepared.to_dict()))) == prepared
    train = token_split(prepared, "train")
    assert [train[i].tolist() for i in range(3)] == [list(range(10 * i, 10 * i + 11)) for i in range(3)]
    tokens, targets = train.batch(np.array([2, 0]))
    assert tokens.dtype == targets.dtype == np.int64
    assert tokens.tolist() == [list(range(20, 30)), list(range(10))] and np.array_equal(targets, tokens + 1)
    assert token_split(prepared, "validation")[0].tolist() == list(range(30, 41))


def test_a_file_that_a_glob_finds_in_several_ways_is_read_once(tmp_path: Path) -> None:
    for name in ("a/b/c/x.parquet", "a/y.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    table, held_out = find_tables(PARQUET, str(tmp_path / "**" / "**" / "*.parquet"))
    assert [Path(file).name for file in table.files] == ["x.parquet", "y.parquet"] and held_out is None


def test_arrow_files_are_read_in_place_and_parquet_is_decoded_once(tmp_path: Path) -> None:
    write("arrow", tmp_path / "arrow", ids_table(ROWS))
    write("parquet", tmp_path / "parquet", ids_table(ROWS))
    files = (str(tmp_path / "arrow" / "data-00000-of-00001.arrow"),)
    assert prepare_data(spec("arrow", tmp_path / "arrow"), 10).arrow_files == files
    before = pyarrow.total_allocated_bytes()
    mapped = map_tokens(Table("arrow", files), "input_ids")
    assert mapped.shape == (41,) and pyarrow.total_allocated_bytes() - before < 41 * 4
    assert not (tmp_path / "cache").exists()

    first = prepare_data(spec("parquet", tmp_path / "parquet"), 10)
    made = Path(first.token_file).stat()
    second = prepare_data(spec("parquet", tmp_path / "parquet"), 10)
    assert first == second and Path(second.token_file).stat().st_mtime_ns == made.st_mtime_ns
    content = Path(first.token_file).read_bytes()
    Path(first.token_file).write_bytes(content[::-1])
    assert prepare_data(spec("parquet", tmp_path / "parquet"), 10) == first, "its hash is compared: it is made again"
    assert Path(first.token_file).read_bytes() == content != content[::-1]


def test_the_hash_is_of_the_content_whatever_the_files(tmp_path: Path) -> None:
    """The same rows cut and stored in another way are the same data, and a resume may use them; other rows are not."""
    large = pyarrow.large_list(pyarrow.int64())
    write("arrow", tmp_path / "one", ids_table(ROWS))
    write("arrow", tmp_path / "two", ids_table(ROWS[:3], large), ids_table(ROWS[3:], large))
    write("parquet", tmp_path / "three", ids_table(ROWS))
    write("arrow", tmp_path / "other", ids_table([*ROWS[:5], [*ROWS[5]][::-1]]))
    hashes = [
        prepare_data(spec(kind, tmp_path / name), 10).sha256
        for kind, name in (("arrow", "one"), ("arrow", "two"), ("parquet", "three"), ("arrow", "other"))
    ]
    assert hashes[0] == hashes[1] == hashes[2] != hashes[3]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_lists_of_any_integers(tmp_path: Path, dtype: str) -> None:
    """Lists of fixed length, too, of which a slice begins within the buffer."""
    kind = pyarrow.list_(getattr(pyarrow, dtype)(), 7)
    table = ids_table([range(7 * n, 7 * n + 7) for n in range(8)], kind).slice(1)
    write("arrow", tmp_path / "data", table)
    prepared = prepare_data(spec("arrow", tmp_path / "data", validation_fraction=0), 6)
    assert prepared.dtype == dtype and prepared.num_train_samples == 8
    assert token_split(prepared, "train")[7].tolist() == list(range(49, 56))


@kinds
def test_splits_that_are_saved_side_by_side(tmp_path: Path, kind: str) -> None:
    """`validation` is validated on, `test` if there is no such split, and neither is trained on."""
    for name, begin in (("train", 0), ("validation", 100), ("test", 200)):
        write(kind, tmp_path / "data" / name, ids_table([range(begin, begin + 21)]))
    for validation in (range(100, 111), range(200, 211)):
        prepared = prepare_data(spec(kind, tmp_path / "data"), 10)
        assert (prepared.num_train_samples, prepared.num_validation_samples) == (2, 2)
        assert token_split(prepared, "train")[0].tolist() == list(range(11))
        assert token_split(prepared, "validation")[0].tolist() == list(validation)
        with pytest.raises(ConfigError, match=r"data\.validation_fraction=0\.5 is given with data that has a"):
            prepare_data(spec(kind, tmp_path / "data", validation_fraction=0.5), 10)
        shutil.rmtree(tmp_path / "data" / "validation", ignore_errors=True)
    unheld = prepare_data(spec(kind, tmp_path / "data", validation_fraction=0), 10)
    assert (unheld.num_train_samples, unheld.num_validation_samples, unheld.vocab_size) == (2, 0, 21)


def test_parquet_files_named_after_their_split(tmp_path: Path) -> None:
    """The layout of datasets on the Hub; files of Spark that are no data are left out."""
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", ids_table([range(0, 11)]))
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", ids_table([range(11, 31)]))
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", ids_table([range(90, 101)]))
    write_parquet(tmp_path / "data" / "_metadata.parquet", ids_table([range(0, 5)]))
    prepared = prepare_data(spec("parquet", tmp_path / "data"), 10)
    assert (prepared.num_train_samples, prepared.num_validation_samples) == (3, 1)
    assert token_split(prepared, "train")[2].tolist() == list(range(20, 31))
    only = prepare_data(spec("parquet", tmp_path / "data" / "train*.parquet", validation_fraction=0), 10)
    assert only.num_train_samples == 3
    for found in ("data/t*.parquet", "*/t*.parquet"):  # held-out rows are not trained on, however files are named
        both = prepare_data(spec("parquet", tmp_path / found), 10)
        assert (both.num_train_samples, both.num_validation_samples, both.sha256) == (3, 1, prepared.sha256)
    write_parquet(tmp_path / "data" / "train" / "part.parquet", ids_table([range(40, 51)]))
    beside = prepare_data(spec("parquet", tmp_path / "data" / "train*.parquet", validation_fraction=0), 10)
    assert beside.num_train_samples == 3, "a folder of the name before the star is beside the point"
    shutil.rmtree(tmp_path / "data" / "train")
    write_parquet(tmp_path / "data" / "more.parquet", ids_table([range(0, 5)]))
    with pytest.raises(DataError, match="has files of no split, test, train"):
        prepare_data(spec("parquet", tmp_path / "data"), 10)


TEXT = ["Grüße.\n", "", "ab", "the last row is longer than the others"]


@pytest.mark.parametrize("large", [False, True])
@kinds
def test_rows_of_text_are_the_documents_of_a_corpus(tmp_path: Path, kind: str, large: bool) -> None:
    """The tokens, the hash and the entry of the token cache are those of `data=text` with one file for each row."""
    tables = [text_table(rows, pyarrow.large_string() if large else None) for rows in (TEXT[:3], TEXT[3:])]
    write(kind, tmp_path / "data", *tables)
    (tmp_path / "texts").mkdir()
    for number, row in enumerate(TEXT):
        (tmp_path / "texts" / f"{number}.txt").write_text(row, encoding="utf-8")
    cache = str(tmp_path / "cache")
    ours = prepare_data(DataSpec(kind, str(tmp_path / "data"), column="text", cache=cache), 10)
    theirs = prepare_data(DataSpec("text", str(tmp_path / "texts" / "*.txt"), cache=cache), 10)
    assert (ours.sha256, ours.token_file, ours.num_bytes) == (theirs.sha256, theirs.token_file, theirs.num_bytes)
    assert bytes(token_split(ours, "train")[1].astype(np.uint8)) == "".join(TEXT).encode()[10:21]


def test_both_splits_of_a_text_are_tokenised(tmp_path: Path) -> None:
    write("arrow", tmp_path / "data" / "train", text_table(["a" * 31]))
    write("arrow", tmp_path / "data" / "test", text_table(["b" * 21]))
    prepared = prepare_data(spec("arrow", tmp_path / "data", "text"), 10)
    assert (prepared.num_train_samples, prepared.num_validation_samples) == (3, 2)
    assert {*token_split(prepared, "validation")[0]} == {ord("b")}


def test_the_hash_of_tokens_shows_that_rows_of_text_are_divided_otherwise(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    vocab = {"[UNK]": 0, "a": 1, "b": 2, "c": 3, "ab": 4, "bc": 5}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    (tmp_path / "tok.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    found = []
    for name, rows in (("one", ["ab", "c"]), ("other", ["a", "bc"])):
        write("arrow", tmp_path / name, text_table(rows * 20))
        tokenizer, cache = str(tmp_path / "tok.json"), str(tmp_path / "cache")
        data = DataSpec("arrow", str(tmp_path / name), tokenizer=tokenizer, cache=cache, column="text")
        found.append(prepare_data(data, 4))
    one, other = found
    assert (one.sha256, one.num_tokens) == (other.sha256, other.num_tokens)
    assert one.tokens_sha256 != other.tokens_sha256


def test_tokens_in_several_arrays_are_indexed_as_one() -> None:
    """Positions of any shape and order, over chunks of any length."""
    random = np.random.default_rng(0)
    whole = random.integers(0, 1000, 300)
    chunks = np.split(whole.astype(np.int32), np.sort(random.integers(0, 301, 25)))
    positions = random.integers(0, 300, (40, 7))
    assert np.array_equal(ChunkedTokens(chunks)[positions], whole[positions])


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def cut_between_batches(file: Path) -> None:
    """Cut a file before its end mark. A reader that does not look for the mark sees a whole stream with fewer rows."""
    file.write_bytes(file.read_bytes()[:-8])


@pytest.mark.parametrize("damage", [truncate, cut_between_batches, lambda file: file.write_bytes(b""), Path.unlink])
def test_damaged_arrow_files_are_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    write("arrow", tmp_path / "data", ids_table(ROWS), ids_table(ROWS))
    damage(tmp_path / "data" / "data-00001-of-00002.arrow")
    with pytest.raises(DataError, match=r"data-00001-of-00002\.arrow") as caught:
        prepare_data(spec("arrow", tmp_path / "data"), 10)
    assert caught.value.where == "data.path" and caught.value.fix


@pytest.mark.parametrize(
    "damage", [truncate, lambda file: file.write_bytes(b""), lambda file: file.write_text("a" * 99)]
)
def test_damaged_parquet_files_are_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    write("parquet", tmp_path / "data", ids_table(ROWS), ids_table(ROWS))
    damage(tmp_path / "data" / "part-1.parquet")
    with pytest.raises(DataError, match=r"part-1\.parquet cannot be read as parquet"):
        prepare_data(spec("parquet", tmp_path / "data"), 10)


@kinds
def test_columns_that_cannot_be_used_are_refused(tmp_path: Path, kind: str) -> None:
    table = ids_table(ROWS).append_column("text", pyarrow.array(["a"] * 5 + [None]))
    write(kind, tmp_path / "data", table)
    refused = {
        None: "without data.column",
        "inputs": "not a column",
        "number": "has the type int64",
        "text": "1 values that are null",
    }
    for column, told in refused.items():
        with pytest.raises(DataError, match=told) as caught:
            prepare_data(spec(kind, tmp_path / "data", column), 10)
        assert caught.value.where == "data.column" and caught.value.fix
        if column != "text":
            assert "input_ids (list<" in caught.value.exists


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([[1, -100]], "from -100 to 1"),
        ([[1, 2**32]], "from 1 to 4294967296"),
        ([[1, None]], "1 values that are null"),
        ([[], []], "no token in any row"),
        ([], "no token in any row"),
        ([[1, 2, 3]], "shorter than one sample: 3 tokens"),
    ],
)
@kinds
def test_token_ids_that_cannot_be_used_are_refused(tmp_path: Path, kind: str, rows: list[list[int]], told: str) -> None:
    write(kind, tmp_path / "data", ids_table(rows, pyarrow.list_(pyarrow.int64())))
    with pytest.raises(DataError, match=told):
        prepare_data(spec(kind, tmp_path / "data"), 10)


@kinds
def test_files_with_different_columns_are_refused(tmp_path: Path, kind: str) -> None:
    write(kind, tmp_path / "data", ids_table(ROWS), text_table(["a"]))
    with pytest.raises(DataError, match=r"has other columns than .*: input_ids, mask, number, text"):
        prepare_data(spec(kind, tmp_path / "data"), 10)


def test_compressed_arrow_files_are_refused(tmp_path: Path) -> None:
    options = ipc.IpcWriteOptions(compression="zstd")
    save_to_disk(tmp_path / "data", [ids_table([range(1000)])], options=options)
    with pytest.raises(DataError, match="is compressed"):
        open_split(prepare_data(spec("arrow", tmp_path / "data"), 10), "train")


def test_rows_that_are_selected_by_numbers_beside_them_are_refused(tmp_path: Path) -> None:
    write("arrow", tmp_path / "data", ids_table(ROWS))
    state = json.loads((tmp_path / "data" / "state.json").read_text())
    (tmp_path / "data" / "state.json").write_text(json.dumps({**state, "_indices_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(DataError, match="selected or shuffled") as caught:
        prepare_data(spec("arrow", tmp_path / "data"), 10)
    assert "flatten_indices" in caught.value.fix


@pytest.mark.parametrize("content", ["{", "[1]", '{"_data_files": 1}', '{"_data_files": ["a"]}', "[" * 100_000])
def test_a_malformed_list_of_files_is_refused(tmp_path: Path, content: str) -> None:
    write("arrow", tmp_path / "data", ids_table(ROWS))
    (tmp_path / "data" / "state.json").write_text(content)
    with pytest.raises(DataError, match="does not list the dataset's files"):
        prepare_data(spec("arrow", tmp_path / "data"), 10)


@kinds
def test_paths_with_nothing_to_read_are_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("text")
    for name in ("empty", "missing", "file.txt" if kind == "arrow" else "*.csv"):
        with pytest.raises(DataError) as caught:
            prepare_data(spec(kind, tmp_path / name), 10)
        assert caught.value.where == "data.path" and caught.value.exists


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data=arrow is given without data\.path"):
        DataSpec("arrow", column="text")
    with pytest.raises(ConfigError, match="data=text, which has no columns"):
        DataSpec("text", "a.txt", column="text")
    write("arrow", tmp_path / "data", ids_table(ROWS))
    with pytest.raises(ConfigError, match="holds token ids already"):
        prepare_data(spec("arrow", tmp_path / "data", tokenizer="t.json"), 10)


def test_files_that_have_changed_since_are_refused(tmp_path: Path) -> None:
    write("arrow", tmp_path / "data", ids_table(ROWS))
    prepared = prepare_data(spec("arrow", tmp_path / "data"), 10)
    shutil.rmtree(tmp_path / "data")
    write("arrow", tmp_path / "data", ids_table(ROWS[:5]))
    with pytest.raises(DataError, match="has 30 tokens, not 41"):
        open_split(prepared, "train")


def test_without_pyarrow_the_command_that_installs_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", ids_table(ROWS))
    found = builtins.__import__

    def without(name: str, *arguments: Any, **others: Any) -> Any:
        if name.split(".")[0] == "pyarrow":
            raise ImportError(name)
        return found(name, *arguments, **others)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match="optional package pyarrow") as caught:
        prepare_data(spec("parquet", tmp_path / "a.parquet"), 10)
    assert "[arrow]" in caught.value.fix


def test_parquet_is_read_in_batches(tmp_path: Path) -> None:
    """More rows than a batch holds."""
    rows = [[n % 7] for n in range(3000)]
    parquet.write_table(ids_table(rows), str(tmp_path / "a.parquet"))
    prepared = prepare_data(spec("parquet", tmp_path / "a.parquet", validation_fraction=0), 2999)
    assert token_split(prepared, "train")[0].tolist() == [n % 7 for n in range(3000)]
