"""Runs with layer programs by torch.compile: the same bits with a kill and without, nothing compiled in between."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.controller.admin_client import ask
from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from tests.faults.fault_runs import Bits, Changes, chaos
from tests.multiprocess.real_runs import SMALL, eventually, launch, train, write_text

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: torch.compile needs a C++ compiler"),
]
# With the events of the test and no others.
ARGUMENTS = (
    *SMALL,
    "mesh=dp2",
    "model.dropout=0.1",
    "train.steps=12",
    "schedule.microbatches=false",
    "schedule.layers=false",
)
LIMIT = 400
# Bytes, as of a text, so that all programs have the shapes of those of other runs. Until there is a file `go` samples
# take time, and longer the more were read: however slowly a worker starts, the run goes on meanwhile.
DATASET = """
import os, time
import numpy as np

class Waiting:
    vocab_size = 256

    def __init__(self, seq_len):
        self.seq_len, self.pause_s = seq_len, 0.01

    def __len__(self):
        return 400

    def __getitem__(self, index):
        if not os.path.exists("go"):
            time.sleep(self.pause_s)
            self.pause_s = min(1.05 * self.pause_s, 0.5)
        return (np.arange(self.seq_len + 1) * (index % 7) + index) % self.vocab_size
"""


@dataclass(frozen=True)
class Run:
    bits: Bits
    changes: Changes
    losses: tuple[float, ...]
    validations: tuple[float, ...]
    events: tuple[dict[str, Any], ...]
    programs: dict[str, list[int]]


def run(folder: Path, *arguments: str) -> Run:
    folder.mkdir()
    write_text(folder)
    done = train(folder, *ARGUMENTS, *arguments, timeout=LIMIT)
    assert done.code == 0, done.err
    made, events = folder / "run", tuple(read_events(folder / "run"))
    losses = tuple(line.loss for line in read_metrics(made))
    validations = tuple(event["loss"] for event in events if event["event"] == "validation")
    programs = read_summary(made).get("programs_compiled_per_worker", {})
    return Run(Bits.of(made), Changes.of(made), losses, validations, events, programs)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One worker: the others find what it has compiled in the compiler's cache."""
    return run(tmp_path_factory.mktemp("compiled") / "undisturbed", "runtime.compile=true", "mesh=single")


def assert_all_compiled_before(found: Run, workers: int, *, forwards: int = 1) -> None:
    """Embedding, block and head, each for validation, forward, and backward; that of the last two is a pair."""
    assert len(found.programs) == workers
    wanted = [3 + 3 * forwards + 5, 0]
    assert all(programs == wanted for programs in found.programs.values()), found.programs
    assert not [event for event in found.events if event["event"] == "recompile"]


def test_losses_are_those_of_the_layers_as_they_are_written(undisturbed: Run, tmp_path: Path) -> None:
    assert_all_compiled_before(undisturbed, 1)
    plain = run(tmp_path / "plain")
    assert plain.programs == {} and len(plain.losses) == 12
    assert undisturbed.losses == pytest.approx(plain.losses, abs=1e-4)
    assert undisturbed.validations == pytest.approx(plain.validations, abs=1e-4)


def test_a_kill_on_another_mesh_changes_no_bit_and_compiles_nothing(undisturbed: Run, tmp_path: Path) -> None:
    """The worker that is left runs the layers of the other stage, by programs that it has."""
    kill = chaos("step: 5, kind: kill, rank: 1, point: backward")
    found = run(tmp_path / "kill", "runtime.compile=true", "mesh=dp1_pp2", kill)
    assert found.changes.ranks("fail") == [[1]]
    assert found.bits == undisturbed.bits
    assert_all_compiled_before(found, 2)


@pytest.mark.parametrize(
    ("point", "setting"), [("input", "runtime.activation_checkpointing=true"), ("weights", "sharding=zero3")]
)
def test_no_bit_depends_on_whether_weight_gradients_are_put_off(
    undisturbed: Run, tmp_path: Path, point: str, setting: str
) -> None:
    """On one stage none are; on the second of two they are, and a worker there is killed in either part."""
    kill = chaos(f"step: 5, kind: kill, rank: 1, point: {point}")
    found = run(tmp_path / "kill", "runtime.compile=true", "mesh=dp1_pp2", setting, kill)
    assert found.changes.ranks("fail") == [[1]]
    assert found.bits == undisturbed.bits
    # With activation checkpointing forwards without a graph, and those that are repeated.
    assert_all_compiled_before(found, 2, forwards=1 + setting.endswith("=true"))
    (check,) = [event for event in found.events if event["event"] == "model_check"]
    assert [row["layer"] for row in check["layers"] if row["put_off_bytes"]] == ["block0", "head"]


def test_a_spare_has_its_programs_before_it_takes_a_place(undisturbed: Run, tmp_path: Path) -> None:
    """It joins in the epoch of the loss, and compiles nothing from then on. (`undisturbed` has filled the cache.)"""
    (tmp_path / "waiting_data.py").write_text(DATASET)
    run_dir = tmp_path / "run"

    def events(kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(run_dir) if event["event"] == kind]

    words = [word for word in ARGUMENTS if not word.startswith("data")] + ["data.target=waiting_data.Waiting"]
    settings = ["runtime.compile=true", "elastic.spares=1", "train.steps=200", "train.validate_every=0"]
    with launch(tmp_path, *words, *settings) as command:
        command.wait_for_steps(1)
        eventually(lambda: events("spare"), command.process, LIMIT)
        status = ask(str(run_dir), {"command": "status"})
        (member,) = [worker["pid"] for worker in status["members"] if worker["rank"] == 1]
        os.kill(member, signal.SIGKILL)
        eventually(lambda: events("join"), command.process, LIMIT)
        (tmp_path / "go").touch()
        done = command.finish(LIMIT)
    # A CUDA build of torch says on a machine without a GPU that it compiles for none.
    err = [line for line in done.err.splitlines() if "No CUDA runtime is found" not in line]
    assert (done.code, err) == (0, []), done.err
    (fail,), (join,) = events("fail"), events("join")
    assert (fail["ranks"], join["ranks"]) == ([1], [2]) and fail["mesh_epoch"] == join["mesh_epoch"]
    programs = read_summary(run_dir)["programs_compiled_per_worker"]
    assert programs["2"][0] > 0 and not any(later for _, later in programs.values()), programs


def test_frozen_parameters_on_two_stages_through_a_kill(tmp_path: Path) -> None:
    """Both layers of the first stage are frozen, and the last layer reads one: no backward there, nor late programs."""
    frozen = ["+model.args.tied=true", 'optim.freeze="embed.* head.weight block0.* *.bias"', "model.dropout=0"]
    plain = run(tmp_path / "plain", *frozen)
    alone = run(tmp_path / "alone", *frozen, "runtime.compile=true", "mesh=single")
    kill = chaos("step: 5, kind: kill, rank: 1, point: backward")
    killed = run(tmp_path / "killed", *frozen, "runtime.compile=true", "mesh=dp2_pp2", "sharding=zero3", kill)
    assert alone.losses == pytest.approx(plain.losses, abs=1e-4) and len(set(alone.losses)) == 12
    assert killed.changes.ranks("fail") == [[1]] and killed.bits == alone.bits
    for found in (alone, killed):
        assert not any(later for _, later in found.programs.values()), found.programs
        assert not [event for event in found.events if event["event"] == "recompile"]
