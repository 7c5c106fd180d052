"""Tables for tests, by pyarrow alone: folders as `Dataset.save_to_disk` makes them, and parquet files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pyarrow: Any = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[arrow]'")
ipc: Any = pytest.importorskip("pyarrow.ipc")
parquet: Any = pytest.importorskip("pyarrow.parquet")


def save_to_disk(folder: Path, tables: Sequence[Any], *, batch_rows: int = 3, options: Any = None) -> None:
    """Write tables as the files of one saved dataset, in small record batches."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{len(tables):05}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with ipc.new_stream(str(folder / name), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=batch_rows)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train", "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def write_parquet(file: Path, table: Any, *, group_rows: int = 4) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, str(file), row_group_size=group_rows)


def ids_table(rows: Sequence[Sequence[int]], kind: Any = None) -> Any:
    """A table with the column `input_ids`, of lists of int32 unless `kind` is another type, and two columns more."""
    column = pyarrow.array([list(row) for row in rows], pyarrow.list_(pyarrow.int32()) if kind is None else kind)
    number = pyarrow.array(range(len(rows)))
    return pyarrow.table({"number": number, "input_ids": column, "mask": column})


def text_table(rows: Sequence[str], kind: Any = None) -> Any:
    return pyarrow.table({"text": pyarrow.array(rows, pyarrow.string() if kind is None else kind)})
