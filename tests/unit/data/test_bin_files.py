"""data=bin: a user's files of uint16 tokens, in place."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from elaswave_spmd.data import DataSpec, PreparedData, open_split, prepare_data
from elaswave_spmd.errors import ConfigError, DataError
from tests.token_splits import token_split


def _write(path: Path, tokens: np.ndarray) -> None:
    tokens.astype("<u2").tofile(path)


def test_a_folder_has_a_file_for_each_split(tmp_path: Path) -> None:
    _write(tmp_path / "train.bin", np.arange(41) + 300)
    _write(tmp_path / "val.bin", np.arange(21) + 50000)
    prepared = prepare_data(DataSpec("bin", str(tmp_path)), 10)
    assert (prepared.num_train_samples, prepared.num_validation_samples, prepared.vocab_size) == (4, 2, 50021)
    assert PreparedData.from_dict(prepared.to_dict()) == prepared
    assert token_split(prepared, "train")[3].tolist() == list(range(330, 341))
    tokens, targets = open_split(prepared, "validation").batch(np.array([1, 0]))
    assert tokens.tolist() == [list(range(50010, 50020)), list(range(50000, 50010))]
    assert np.array_equal(targets, tokens + 1)
    assert prepare_data(DataSpec("bin", str(tmp_path), validation_fraction=0), 10).num_validation_samples == 0
    with pytest.raises(ConfigError, match=r"data\.validation_fraction=0\.25 is given with data .*val\.bin"):
        prepare_data(DataSpec("bin", str(tmp_path), validation_fraction=0.25), 10)


def test_of_one_file_the_tail_is_held_out(tmp_path: Path) -> None:
    _write(tmp_path / "all.bin", np.arange(41))
    prepared = prepare_data(DataSpec("bin", str(tmp_path / "all.bin"), validation_fraction=0.25), 10)
    assert (prepared.num_train_samples, prepared.num_validation_samples) == (3, 1)
    assert token_split(prepared, "validation")[0].tolist() == list(range(30, 41))


def test_a_fraction_of_zero_holds_nothing_out(tmp_path: Path) -> None:
    for name in ("train.bin", "val.bin"):
        _write(tmp_path / name, np.arange(41))
    prepared = prepare_data(DataSpec("bin", str(tmp_path), validation_fraction=0), 10)
    assert (prepared.num_train_samples, len(open_split(prepared, "validation"))) == (4, 0)


def test_the_hash_covers_both_files(tmp_path: Path) -> None:
    hashes = set()
    for last in (1, 2):
        _write(tmp_path / "train.bin", np.arange(41))
        _write(tmp_path / "val.bin", np.full(41, last))
        hashes.add(prepare_data(DataSpec("bin", str(tmp_path)), 10).sha256)
    assert len(hashes) == 2


def test_tokens_of_another_block_count(tmp_path: Path) -> None:
    tokens = np.zeros((1 << 20) // 2 + 5)
    tokens[-1] = 65535
    _write(tmp_path / "all.bin", tokens)
    assert prepare_data(DataSpec("bin", str(tmp_path / "all.bin")), 10).vocab_size == 65536


@pytest.mark.parametrize("content", [b"", b"abc", b"abcd"], ids=["empty", "half a token", "shorter than a sample"])
def test_bad_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "all.bin").write_bytes(content)
    with pytest.raises(DataError) as caught:
        prepare_data(DataSpec("bin", str(tmp_path / "all.bin")), 10)
    assert caught.value.where == "data.path"
    assert caught.value.fix


def test_a_folder_without_val_bin_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "train.bin", np.arange(41))
    with pytest.raises(DataError, match=r"train\.bin and val\.bin"):
        prepare_data(DataSpec("bin", str(tmp_path)), 10)


def test_settings_that_mean_nothing_for_tokens_are_refused() -> None:
    with pytest.raises(DataError, match=r"without data\.path"):
        DataSpec("bin")
    with pytest.raises(ConfigError, match="hold tokens already"):
        DataSpec("bin", "x.bin", tokenizer="t.json")


def test_a_file_that_changed_its_size_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "all.bin", np.arange(41))
    prepared = prepare_data(DataSpec("bin", str(tmp_path / "all.bin")), 10)
    with pytest.raises(DataError, match="nobody writes to it"):
        open_split(dataclasses.replace(prepared, num_tokens=40), "train")
