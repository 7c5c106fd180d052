"""Finds and opens a user's tables: datasets saved by Hugging Face's `Dataset.save_to_disk`, and parquet files.

Both are read by pyarrow, which is optional and imported on first use. Arrow files are memory-mapped; parquet files are
read batch by batch. pyarrow's threads are not used, so that a process that forks later has none.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_spmd.data.corpus import nearest_folder
from elaswave_spmd.errors import DataError
from elaswave_spmd.regular_files import open_regular, read_regular

ARROW, PARQUET = "arrow", "parquet"
TABLES = (ARROW, PARQUET)

_WHERE = "data.path"
_HELD_OUT = ("validation", "valid", "val", "dev", "test")
"""Names that a split to validate on may have. The first of them that exists is used."""
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_BATCH_ROWS = 1024
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Table:
    """Rows in one or several files, in order.

    Args:
        kind: `arrow` (streams of Arrow's IPC format) or `parquet`.
        files: the absolute paths of the files.
    """

    kind: str
    files: tuple[str, ...]


def find_tables(kind: str, path: str) -> tuple[Table, Table | None]:
    """Find the tables for training and for validation.

    The second is None if the data has no split to validate on. The caller then holds out the tail of the first.

    Raises:
        DataError: there is no table of this kind at `path`, it is incomplete, or it cannot be read in place.
    """
    try:
        return _find_arrow(path) if kind == ARROW else _find_parquet(path)
    except OSError as error:
        raise DataError(
            f"data.path={path} cannot be read ({error.strerror or error})", where=_WHERE, fix="make it readable"
        ) from error


def pyarrow_package() -> Any:
    """The optional package `pyarrow`, with its modules `ipc` and `parquet` imported.

    Raises:
        DataError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "data=arrow and data=parquet need the optional package pyarrow, which is not installed",
            where="data",
            exists="data=stdlib, data=text, data=bin, data=custom",
            fix="pip install 'elaswave-spmd[arrow]' (in a checkout: pip install -e '.[arrow]')",
        ) from error
    return pyarrow


def columns_of(table: Table) -> dict[str, Any]:
    """The pyarrow type of each column, which all files of a table must agree on.

    Raises:
        DataError: a file cannot be read, or the files differ.
    """
    found: dict[str, Any] = {}
    for path in table.files:
        with _opened(table.kind, path) as file:
            columns = {field.name: field.type for field in file.schema}
        if found and found != columns:
            differing = sorted(n for n in {*found, *columns} if found.get(n) != columns.get(n))
            raise DataError(
                f"{path} has other columns than {table.files[0]}: {', '.join(differing)}",
                rule="all files of a table have the same columns, of the same types",
                where=_WHERE,
                fix="narrow data.path, or write the files anew with one schema",
            )
        found = columns
    return found


def column_arrays(table: Table, column: str) -> Iterator[tuple[str, Any]]:
    """The rows of a column as (path of the file, pyarrow array), batch by batch. One batch is in memory at a time.

    Raises:
        DataError: a file cannot be read, or is truncated.
    """
    for path in table.files:
        with _opened(table.kind, path, column) as file:
            for array in file.arrays():
                yield path, array


def mapped_arrays(table: Table, column: str) -> list[Any]:
    """The whole column of an arrow table, as pyarrow arrays that point into memory maps of the files.

    Raises:
        DataError: a file cannot be read, is truncated, or is compressed and so cannot be read in place.
    """
    assert table.kind == ARROW
    arrays: list[Any] = []
    for path in table.files:
        with _opened(ARROW, path, column) as file:
            arrays += file.arrays()
    return arrays


class _File:
    """One open Arrow or parquet file: its schema, and the batches of one of its columns."""

    def __init__(self, kind: str, path: str, column: str | None) -> None:
        self._package = pyarrow_package()
        self._kind = kind
        self._path = path
        self._column = column
        if kind == PARQUET:
            self._parquet = self._package.parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            self.schema = self._parquet.schema_arrow
        else:
            self._open_stream()

    def _open_stream(self) -> None:
        with open_regular(self._path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - len(_END_OF_STREAM)))
            end = file.read()
        if end != _END_OF_STREAM:  # pyarrow reads a stream that was cut between two batches as a shorter whole one
            raise DataError(
                f"{self._path} is not a whole stream of Arrow: it has {size} bytes and no end mark",
                rule="data=arrow reads what Dataset.save_to_disk writes, and each file is whole",
                where=_WHERE,
                fix="copy or save it again",
            )
        self._map = self._package.memory_map(self._path)
        self.schema = self._package.ipc.open_stream(self._map).schema

    def arrays(self) -> Iterator[Any]:
        if self._kind == PARQUET:
            batches = self._parquet.iter_batches(_BATCH_ROWS, columns=[self._column], use_threads=False)
            for batch in batches:
                yield batch.column(0)
            return
        self._map.seek(0)
        first = self._map.read_buffer(1).address
        mapped = range(first, first + self._map.size())
        self._map.seek(0)
        field = self.schema.get_field_index(self._column)
        options = self._package.ipc.IpcReadOptions(use_threads=False, included_fields=[field])
        for batch in self._package.ipc.open_stream(self._map, options=options):
            array = batch.column(0)
            if any(buffer is not None and buffer.size and buffer.address not in mapped for buffer in array.buffers()):
                raise DataError(
                    f"{self._path} is compressed",
                    rule="data=arrow maps its files into memory and reads them in place",
                    where=_WHERE,
                    fix="save it again by Dataset.save_to_disk, which does not compress",
                )
            yield array


@contextlib.contextmanager
def _opened(kind: str, path: str, column: str | None = None) -> Iterator[_File]:
    """Open a file. Errors of pyarrow and of the system become a DataError, also while the file is read."""
    package = pyarrow_package()
    try:
        yield _File(kind, path, column)
    except (package.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{path} cannot be read as {kind} ({reason})",
            rule="each file is whole, and of the format that data= names",
            where=_WHERE,
            fix="write or copy the file again, or narrow data.path",
        ) from error


def _find_arrow(path: str) -> tuple[Table, Table | None]:
    folder = Path(os.path.expanduser(path)).absolute()
    if (folder / "state.json").is_file():
        return _saved_dataset(folder), None
    splits = sorted(state.parent.name for state in folder.glob("*/state.json"))
    if "train" in splits:
        held_out = next((name for name in _HELD_OUT if name in splits), None)
        return _saved_dataset(folder / "train"), None if held_out is None else _saved_dataset(folder / held_out)
    names = sorted(entry.name for entry in folder.iterdir())[:8] if folder.is_dir() else []
    raise DataError(
        f"data.path={path} is not a dataset that was saved to disk",
        rule="data=arrow reads a folder that Dataset.save_to_disk or DatasetDict.save_to_disk of Hugging Face has "
        "written: with state.json, or with train/state.json",
        where=_WHERE,
        exists=", ".join(names) or "nothing",
        fix="dataset.save_to_disk(FOLDER), or data.path=FOLDER/SPLIT to train on that split",
    )


def _saved_dataset(folder: Path) -> Table:
    state_file = folder / "state.json"
    try:
        state = json.loads(read_regular(state_file))
        files = tuple(str(folder / entry["filename"]) for entry in state["_data_files"])
        # Older versions of `datasets` saved a selection or a shuffle as row numbers beside the rows.
        indices = state.get("_indices_files") or state.get("_indices_data_files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{state_file} does not list the dataset's files ({type(error).__name__}: {error})",
            rule="state.json names the files as _data_files",
            where=_WHERE,
            fix="save the dataset again by Dataset.save_to_disk",
        ) from error
    if indices:
        raise DataError(
            f"{folder} has rows that were selected or shuffled without being written so",
            rule="rows are read in place, in the order of the files",
            where=_WHERE,
            fix="dataset.flatten_indices().save_to_disk(FOLDER), or save with datasets 2.8 or later",
        )
    missing = [file for file in files if not Path(file).is_file()]
    if missing or not files:
        raise DataError(
            f"{state_file} names {missing[0] if missing else 'no file'}" + (", which is missing" if missing else ""),
            rule="all files of a dataset are there",
            where=_WHERE,
            exists=", ".join(sorted(entry.name for entry in folder.iterdir())[:8]),
            fix="copy the whole folder, or save the dataset again",
        )
    return Table(ARROW, files)


def _find_parquet(path: str) -> tuple[Table, Table | None]:
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        return Table(PARQUET, (os.path.abspath(expanded),)), None
    folder = Path(expanded).absolute()
    if folder.is_dir():
        return _of_splits(path, folder, [file for file in folder.rglob("*.parquet") if _is_data(file, folder)])
    before = os.path.dirname(re.split(r"[*?[]", expanded)[0])  # every match is below this folder
    folder = Path(os.path.abspath(nearest_folder(before or ".")))
    matches = {*glob.glob(expanded, recursive=True)}  # a set, as a/**/**/b.parquet finds some files several times
    return _of_splits(path, folder, map(Path, map(os.path.abspath, matches)))


def _is_data(file: Path, folder: Path) -> bool:
    """False for files that Spark writes beside the data, whose names or folders begin with an underscore or a dot."""
    return not any(part.startswith(("_", ".")) for part in file.relative_to(folder).parts)


def _of_splits(path: str, folder: Path, found: Iterable[Path]) -> tuple[Table, Table | None]:
    """The tables for training and for validation, made of the files that were found in a folder.

    The name of a file, or of a folder that it is in, says which split the file belongs to, as in datasets on the
    Hugging Face Hub: `data/train-00000-of-00002.parquet`, or `train/part-0.parquet`. If all files belong to one split,
    or to none, all are trained on.

    Args:
        path: `data.path` as it was given, for errors.
        folder: the folder below which all files are.
        found: the files, in any order.

    Raises:
        DataError: there is no file, or the splits do not say what to train on and what to validate on.
    """
    splits: dict[str, list[str]] = {}
    files = (file for file in found if file.is_file())
    for file in sorted(files, key=lambda file: file.relative_to(folder).as_posix()):
        splits.setdefault(_split_of(file.relative_to(folder).parts), []).append(str(file))
    if not splits:
        raise _no_parquet(path)
    if len(splits) == 1:
        return Table(PARQUET, tuple(*splits.values())), None
    held_out = next((name for name in _HELD_OUT if name in splits), None)
    if "" in splits or "train" not in splits or held_out is None:
        raise DataError(
            f"data.path={path} has files of {', '.join(name or 'no split' for name in sorted(splits))}",
            rule="files are of the splits train and validation (or test), or of no split at all: else held-out rows "
            "would be trained on",
            where=_WHERE,
            fix="a glob of the files to train on: 'data.path=\"FOLDER/train*.parquet\"'",
        )
    return Table(PARQUET, tuple(splits["train"])), Table(PARQUET, tuple(splits[held_out]))


def _split_of(parts: tuple[str, ...]) -> str:
    """The split that a file belongs to, named by a folder or by the first word of the file's name; "" if none is."""
    first_word = parts[-1].removesuffix(".parquet").replace("_", "-").replace(".", "-").split("-")[0]
    return next((name for name in (*parts[:-1], first_word) if name in ("train", *_HELD_OUT)), "")


def _no_parquet(path: str) -> DataError:
    folder = nearest_folder(os.path.expanduser(path))
    names = sorted(entry.name for entry in folder.iterdir())[:8]
    return DataError(
        f"data.path={path} has no parquet file",
        rule="data=parquet reads a file, the files that match a glob, or a folder of files *.parquet",
        where=_WHERE,
        exists=f"in {folder}: {', '.join(names) or 'nothing'}",
        fix="data=parquet data.path=FOLDER, or quoted in a shell: 'data.path=\"FOLDER/*.parquet\"'",
    )
