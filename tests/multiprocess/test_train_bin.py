"""`python train.py data=bin`: token files in place, equal bits on meshes, bad files refused before any worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.faults.fault_runs import Bits, chaos
from tests.multiprocess.real_runs import SMALL, train

WORDS = (*(word for word in SMALL if not word.startswith("data")), "data=bin", "data.path=tokens")


def write_tokens(folder: Path) -> None:
    (folder / "tokens").mkdir()
    for name, seed, number in (("train", 1, 3000), ("val", 2, 400)):
        tokens = np.random.default_rng(seed).integers(0, 300, number)  # above what a byte holds
        tokens.astype("<u2").tofile(folder / "tokens" / f"{name}.bin")


def test_a_mesh_with_a_kill_has_the_bits_of_one_worker(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    for name, words in (("one", ()), ("meshed", ("mesh=dp2_pp2", chaos("step: 3, kind: kill, rank: 1")))):
        done = train(tmp_path, *WORDS, f"run.dir={name}", *words)
        assert done.code == 0, done.err
    assert Bits.of(tmp_path / "one") == Bits.of(tmp_path / "meshed")


@pytest.mark.parametrize(
    ("content", "told"), [(b"", "has 0 bytes"), (b"abc", "has 3 bytes"), (b"ab" * 4, "shorter than one sample")]
)
def test_bad_files_are_refused(tmp_path: Path, content: bytes, told: str) -> None:
    write_tokens(tmp_path)
    (tmp_path / "tokens" / "train.bin").write_bytes(content)
    done = train(tmp_path, *WORDS)
    assert done.code == 2 and told in done.err and not (tmp_path / "run").exists()
