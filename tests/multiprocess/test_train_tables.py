"""`python train.py data=arrow` and `data=parquet`: equal bits on meshes and of both formats, bad tables refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from elaswave_spmd.run_dir import read_summary
from tests.faults.fault_runs import Bits, chaos
from tests.multiprocess.real_runs import SMALL, train
from tests.unit.data.tables import ids_table, pyarrow, save_to_disk, write_parquet

WORDS = [word for word in SMALL if not word.startswith("data=") and not word.startswith("data.path")]
MESHED = ("mesh=dp2_pp2", chaos("step: 3, kind: kill, rank: 1"))


def write_tables(folder: Path) -> None:
    """The same rows as a saved dataset and as parquet: token ids above what a byte holds, and text."""
    random = np.random.default_rng(1)
    for split, num_rows in (("train", 200), ("validation", 30)):
        ids = ids_table([random.integers(0, 300, n).tolist() for n in random.integers(1, 30, num_rows)])
        text = pyarrow.array([f"row {number} of {split}\n" for number in range(num_rows)])
        table = ids.append_column("text", text)
        save_to_disk(folder / "saved" / split, [table.slice(0, num_rows // 2), table.slice(num_rows // 2)])
        write_parquet(folder / "parquet" / f"{split}-0.parquet", table)


def test_meshes_with_a_kill_have_the_bits_of_one_worker_whatever_the_format(tmp_path: Path) -> None:
    write_tables(tmp_path)
    arrow, parquet = ("data=arrow", "data.path=saved"), ("data=parquet", "data.path=parquet")
    runs = {
        "ids": {"one": arrow, "arrow": (*arrow, *MESHED), "parquet": (*parquet, *MESHED)},
        "text": {"one": parquet, "arrow": (*arrow, *MESHED)},
    }
    for column, of_column in runs.items():
        for name, words in of_column.items():
            column_word = f"data.column={'text' if column == 'text' else 'input_ids'}"
            done = train(tmp_path, *WORDS, *words, column_word, f"run.dir={column}_{name}")
            assert done.code == 0, done.err
        assert len({str(Bits.of(tmp_path / f"{column}_{name}")) for name in of_column}) == 1
    assert read_summary(tmp_path / "ids_arrow")["corpus"]["tokenizer"] == "tokens"


def test_bad_tables_are_refused(tmp_path: Path) -> None:
    """With exit code 2, and nothing is left."""
    write_tables(tmp_path)
    file = tmp_path / "saved" / "train" / "data-00001-of-00002.arrow"
    file.write_bytes(file.read_bytes()[:-8])
    refused = {
        ("data=arrow", "data.path=saved", "data.column=input_ids"): "is not a whole stream of Arrow",
        ("data=parquet", "data.path=parquet", "data.column=mask_"): "not a column of the data",
    }
    for words, told in refused.items():
        done = train(tmp_path, *WORDS, *words)
        assert done.code == 2 and told in done.err and "fix:" in done.err, done.err
        assert not (tmp_path / "run").exists()
