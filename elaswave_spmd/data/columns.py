"""One column of a table. Its rows are documents of text, or lists of token ids, which are read one after another.

The facts about a column (number of tokens, largest token, sha256) depend on its content alone: the same rows in other
files, or in the other format, are the same data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from elaswave_spmd.data.tables import Table, column_arrays, columns_of, mapped_arrays, pyarrow_package
from elaswave_spmd.errors import DataError

TEXT, TOKENS = "text", "tokens"
_WHERE = "data.column"
_LARGEST = 2**32 - 1


@dataclass(frozen=True)
class TokenColumn:
    """A column of token ids, with the facts that `read_token_column` has found about it.

    Args:
        table, column: the table, and the name of its column.
        dtype: numpy name of the dtype in which the ids are stored.
        num_tokens: the number of ids in all rows.
        largest: the largest id.
        sha256: hash of the ids as little-endian uint32, one row after another.
    """

    table: Table
    column: str
    dtype: str
    num_tokens: int
    largest: int
    sha256: str

    def arrays(self) -> Iterator[np.ndarray]:
        """The ids of all rows in order, as one array for each batch of rows."""
        for path, array in column_arrays(self.table, self.column):
            yield _token_values(path, self.column, array)


@dataclass(frozen=True)
class TextColumn:
    """A column of text as a corpus whose documents are the rows. The attributes are those of `corpus.Corpus`."""

    table: Table
    column: str
    num_documents: int
    sha256: str
    num_bytes: int
    boundaries: str

    @property
    def name(self) -> str:
        return self.table.kind

    def documents(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Each row's name for errors, and its text in UTF-8 as one block."""
        row = 0
        for path, array in column_arrays(self.table, self.column):
            data, ends = _text_values(path, self.column, array)
            for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
                yield f"row {row} of data.column={self.column}", iter((bytes(data[begin:end]),))
                row += 1


def kind_of_column(table: Table, column: str | None) -> str:
    """The kind of a column by its type: TEXT for strings, TOKENS for lists of integers.

    Raises:
        DataError: no column is named, the table has no such column, or it is of neither kind.
    """
    types = columns_of(table)
    listed = ", ".join(f"{name} ({found})" for name, found in types.items()) or "no columns"
    if column is None:
        what = f"data={table.kind} is given without data.column"
        raise DataError(what, where=_WHERE, exists=listed, fix="data.column=NAME of a column of text or of token ids")
    if column not in types:
        raise DataError(
            f"data.column={column} is not a column of the data", where=_WHERE, exists=listed, fix="name one"
        )
    found, package = types[column], pyarrow_package()
    if package.types.is_string(found) or package.types.is_large_string(found):
        return TEXT
    is_list = package.types.is_list(found) or package.types.is_large_list(found)
    if (is_list or package.types.is_fixed_size_list(found)) and package.types.is_integer(found.value_type):
        return TOKENS
    raise DataError(
        f"data.column={column} has the type {found}",
        rule="a column is text (string), or lists of integers: the token ids of a row",
        where=_WHERE,
        exists=listed,
        fix="name a column of text or of token ids",
    )


def read_token_column(table: Table, column: str) -> TokenColumn:
    """Read a column of token ids once, to find its size, its hash and its largest id.

    Raises:
        DataError: the column cannot be read, has null values or no ids, or an id is negative or 2**32 or more.
    """
    content, num_tokens, largest, dtype = hashlib.sha256(), 0, 0, ""
    for path, array in column_arrays(table, column):
        tokens = _token_values(path, column, array)
        dtype = tokens.dtype.name
        if not tokens.size:
            continue
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high > _LARGEST:
            raise DataError(
                f"data.column={column} has token ids from {low} to {high}, in {path}",
                rule="token ids are 0 or more, and below 2 ** 32; a label such as -100 for padding is none",
                where=_WHERE,
                fix="name the column of the ids that go into the model",
            )
        content.update(np.ascontiguousarray(tokens, dtype="<u4").data)
        num_tokens += tokens.size
        largest = max(largest, high)
    if not num_tokens:
        raise DataError(f"data.column={column} has no token in any row", where=_WHERE, fix="point data.path at rows")
    return TokenColumn(table, column, dtype, num_tokens, largest, content.hexdigest())


def read_text_column(table: Table, column: str) -> TextColumn:
    """Read a column of text once, to find its size and its hashes.

    Raises:
        DataError: the column cannot be read, or has null values or no text.
    """
    content, sizes, num_bytes, num_documents = hashlib.sha256(), hashlib.sha256(), 0, 0
    for path, array in column_arrays(table, column):
        data, ends = _text_values(path, column, array)
        content.update(data)
        sizes.update(np.diff(ends).astype("<u8").tobytes())
        num_bytes += len(data)
        num_documents += len(array)
    if not num_bytes:
        raise DataError(f"data.column={column} has no text in any row", where=_WHERE, fix="point data.path at rows")
    return TextColumn(table, column, num_documents, content.hexdigest(), num_bytes, sizes.hexdigest())


class ChunkedTokens:
    """Several arrays of tokens that are addressed as one, by numpy's indexing with an array of positions.

    Args:
        chunks: 1-D arrays of integers, usually views of memory-mapped files. Some may be empty.
    """

    def __init__(self, chunks: list[np.ndarray]) -> None:
        self._chunks = [chunk for chunk in chunks if chunk.size]
        self._ends = np.cumsum([chunk.size for chunk in self._chunks], dtype=np.int64)
        self.ndim = 1
        self.shape = (int(self._ends[-1]) if self._chunks else 0,)

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """The tokens at these positions, int64 of the same shape. Positions must lie in [0, shape[0])."""
        numbers = np.searchsorted(self._ends, positions, side="right")
        found = np.empty(positions.shape, dtype=np.int64)
        for number in np.unique(numbers):
            here, chunk = numbers == number, self._chunks[number]
            found[here] = chunk[positions[here] - (self._ends[number] - chunk.size)]
        return found


def map_tokens(table: Table, column: str) -> ChunkedTokens:
    """Map the token ids of an arrow table's column into memory, one row after another, without copying them.

    Raises:
        DataError: a file cannot be read, or not in place.
    """
    return ChunkedTokens([_token_values(table.files[0], column, array) for array in mapped_arrays(table, column)])


def _token_values(path: str, column: str, array: Any) -> np.ndarray:
    """The ids of an array of lists, one row after another, as a view of its memory."""
    _refuse_empty_rows(path, column, array)
    values = array.flatten()
    _refuse_empty_rows(path, column, values)
    return values.to_numpy(zero_copy_only=True)


def _text_values(path: str, column: str, array: Any) -> tuple[memoryview, np.ndarray]:
    """The UTF-8 bytes of all rows, and int64 offsets [rows + 1] into them: row i is bytes[ends[i] : ends[i + 1]]."""
    _refuse_empty_rows(path, column, array)
    if not len(array):
        return memoryview(b""), np.zeros(1, dtype=np.int64)
    dtype = np.int64 if pyarrow_package().types.is_large_string(array.type) else np.int32
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, dtype=dtype)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    view = memoryview(b"" if data is None else data)[int(ends[0]) : int(ends[-1])]
    return view, ends - ends[0]


def _refuse_empty_rows(path: str, column: str, array: Any) -> None:
    """Raise DataError if a value is null."""
    if array.null_count:
        raise DataError(
            f"data.column={column} has {array.null_count} values that are null, in {path}",
            rule="each row has a value",
            where=_WHERE,
            fix="leave these rows out: dataset.filter(lambda row: row[COLUMN] is not None)",
        )
