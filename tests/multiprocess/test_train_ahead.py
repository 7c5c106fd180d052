"""A dataset of the user's is read on a thread beside the training: with the same bits, and its exceptions as before."""

from __future__ import annotations

import json
from pathlib import Path

from elaswave_spmd.run_dir import read_metrics
from tests.faults.fault_runs import Bits, chaos
from tests.multiprocess.real_runs import SMALL, train

# Each worker writes down which of its threads has read how many samples.
DATASET = """
import collections, os, pathlib, threading
import numpy as np

class Noted:
    vocab_size = 50

    def __init__(self, seq_len, fails_at=-1):
        self.seq_len, self.fails_at, self.counts = seq_len, fails_at, collections.Counter()

    def __len__(self):
        return 60

    def __getitem__(self, index):
        name = threading.current_thread().name
        self.counts[name] += 1
        if index == self.fails_at and name == "loader":
            raise RuntimeError("this sample is broken")
        pathlib.Path("threads", f"{os.getpid()}-{name}").write_text(str(self.counts[name]))
        return (np.arange(self.seq_len + 1) * (index % 7) + index) % 50
"""
WORDS = [word for word in SMALL if not word.startswith("data")] + ["data.target=noted_data.Noted"]


def write_dataset(folder: Path) -> None:
    (folder / "noted_data.py").write_text(DATASET)
    (folder / "threads").mkdir()


def test_reading_ahead_changes_no_bit(tmp_path: Path) -> None:
    """On one worker without it, and with it on four, of which one is killed."""
    write_dataset(tmp_path)
    done = train(tmp_path, *WORDS, "data.ahead=0", "run.dir=one")
    assert done.code == 0, done.err
    assert not [*tmp_path.glob("threads/*-loader")]
    done = train(tmp_path, *WORDS, "mesh=dp2_pp2", chaos("step: 3, kind: kill, rank: 1"), "run.dir=meshed")
    assert done.code == 0, done.err
    assert len([*tmp_path.glob("threads/*-loader")]) == 4
    assert Bits.of(tmp_path / "one") == Bits.of(tmp_path / "meshed")
    for name in ("one", "meshed"):
        waited = [line.data_seconds for line in read_metrics(tmp_path / name)]
        assert all(seconds is not None and seconds >= 0 for seconds in waited), waited


def test_an_exception_of_the_dataset_names_the_sample(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    done = train(tmp_path, *WORDS, "+data.args.fails_at=17", "train.steps=40")
    assert done.code == 1
    assert "RuntimeError: this sample is broken" in done.err and "in sample 17 of noted_data.Noted" in done.err
    assert 'raise RuntimeError("this sample is broken")' in done.err  # the line of the user's file


def test_tokens_in_memory_have_no_waits_in_their_metrics(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b c d e f g " * 60)
    done = train(tmp_path, *SMALL, "train.steps=2")
    assert done.code == 0, done.err
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert not [line for line in lines if "data_seconds" in json.loads(line)]
