"""Small runs of `python train.py runtime.device=xla`, and what is true of each of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from elaswave_spmd.runtime.devices import ThisMachine, device_of
from tests.faults.fault_runs import Bits, Changes, chaos
from tests.multiprocess.real_runs import TRAIN, Done, fork_command, write_text
from tests.waiting import PATIENCE_S

LACKS = device_of("xla").missing(ThisMachine())
NEEDS_XLA = pytest.mark.skipif(bool(LACKS), reason="; ".join(f"no {lack.what}: {lack.fix}" for lack in LACKS))
STEPS = 20
# 5 micro-batches of 2 sequences: uneven on every mesh of more than one worker. Dropout on, heads that two devices can
# share.
SMALL = (
    "runtime.device=xla model.layers=2 model.d_model=32 model.heads=2 model.dropout=0.1 train.seq_len=16 "
    f"train.global_batch=10 train.microbatch_size=2 train.steps={STEPS} train.validate_every=10 "
    "train.validate_microbatches=3 "
    "optim.warmup_steps=2 page.size=256 run.tensorboard=false data=text data.path=text.txt data.cache=cache "
    # exactly the events of a test: nobody is stopped, and a busy machine makes none
    "run.dir=run schedule.microbatches=false schedule.layers=false "
    "timeouts.suspect=10 timeouts.status=12 timeouts.leave=14"
).split()
LAYERS = 4  # embedding and head included


@dataclass(frozen=True)
class XlaRun:
    """A run that has ended well."""

    done: Done
    bits: Bits
    losses: tuple[float, ...]
    changes: Changes
    events: tuple[dict[str, Any], ...]
    summary: Mapping[str, Any]

    @classmethod
    def of(cls, done: Done, run_dir: Path) -> XlaRun:
        losses = tuple(line.loss for line in read_metrics(run_dir))
        summary = read_summary(run_dir)
        return cls(done, Bits.of(run_dir), losses, Changes.of(run_dir), tuple(read_events(run_dir)), summary)

    def assert_nothing_compiled_in_training(self, workers: int) -> None:
        """Every worker that there was compiled before it was ready, and nothing afterwards."""
        found = self.summary["programs_compiled_per_worker"]
        assert len(found) == workers and all(before >= 3 and later == 0 for before, later in found.values()), found
        assert not [event for event in self.events if event["event"] == "recompile"]

    def assert_pairs(self) -> None:
        """Embedding, block and head: forward, backward and evaluation, and a fourth program where B and W are two."""
        assert all(before == 3 + 4 + 4 for before, _ in self.summary["programs_compiled_per_worker"].values())
        (check,) = [event for event in self.events if event["event"] == "model_check"]
        assert [row["layer"] for row in check["layers"] if row["put_off_bytes"]] == ["block0", "head"]
        assert self.summary["split_backward"] == {"kinds": ["block0", "head"]}


def run(folder: Path, *arguments: str, optimized: bool = False, timeout: float = PATIENCE_S) -> XlaRun:
    """Trains to the end; later arguments count before the ones here.

    Args:
        optimized: XLA has its compiler make fast code, as it does for users. Most runs here do without: it is more than
            half of the time that they take, and nothing that this project has a say in.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder)
    environment = dict(os.environ)
    if not optimized:
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
    done = fork_command(TRAIN, folder, *SMALL, *arguments, environment=environment, timeout=timeout)
    assert done.code == 0, done.err
    return XlaRun.of(done, folder / "run")


__all__ = ["LAYERS", "NEEDS_XLA", "SMALL", "STEPS", "Bits", "XlaRun", "chaos", "run"]
