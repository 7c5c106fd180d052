"""Layers that hand on tuples in `python train.py`: equal bits on meshes, through a kill, with checks, compiled."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_events
from tests import tuple_models
from tests.faults.fault_runs import Bits, Changes, chaos
from tests.multiprocess.real_runs import SMALL, train, write_text

TUPLES = (*SMALL, "model.target=tuple_models.Skips", "model.dropout=0.1", "model.layers=3")
KILL = chaos("step: 3, kind: kill, rank: 1, point: backward")


def run(folder: Path, *words: str, timeout: float | None = None) -> Bits:
    folder.mkdir(parents=True)
    write_text(folder)
    shutil.copy(tuple_models.__file__, folder / "tuple_models.py")
    done = train(folder, *TUPLES, *words, **({} if timeout is None else {"timeout": timeout}))
    assert done.code == 0, done.err
    if KILL in words:
        assert Changes.of(folder / "run").ranks("fail") == [[1]]
    return Bits.of(folder / "run")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    return run(tmp_path_factory.mktemp("tuples") / "single", "mesh=single")


@pytest.mark.parametrize(
    "words",
    [
        ("mesh=pp3", "sharding=zero3"),
        ("mesh=dp2_pp2", "sharding=zero2", KILL),
        ("mesh=dp2_pp2", "verify.rate=1", "runtime.activation_checkpointing=true"),
        ("mesh=dp2_pp2", "runtime.transport=tcp", KILL),
    ],
    ids=["pp3", "kill", "checks", "tcp"],
)
def test_meshes_have_the_bits_of_one_worker(single: Bits, tmp_path: Path, words: tuple[str, ...]) -> None:
    assert run(tmp_path / "meshed", *words) == single


@pytest.mark.mends("corrupt", "mismatch")
def test_a_wrong_result_is_found(single: Bits, tmp_path: Path) -> None:
    """One bit of the first tensor of a tuple is flipped on worker 1; checks find it, and the step is computed again."""
    wrong = chaos("step: 3, kind: miscompute, rank: 1, point: forward")
    assert run(tmp_path / "wrong", "mesh=dp2_pp2", "verify.rate=1", wrong) == single
    assert [event["ranks"] for event in read_events(tmp_path / "wrong" / "run") if event["event"] == "corrupt"] == [[1]]


def test_layers_that_pack_tokens_have_equal_bits(tmp_path: Path) -> None:
    """Micro-batches have other shapes between layers, also where they are computed again after a kill, and checked."""
    packed = "model.target=tuple_models.Packed"
    single = run(tmp_path / "single", "mesh=single", packed)
    assert run(tmp_path / "meshed", "mesh=dp2_pp2", packed, "sharding=zero2", "verify.rate=1", KILL) == single


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("runtime.transport=ipc", KILL),
        ("runtime.transport=tcp",),
        ("runtime.collectives=group", "runtime.pairs=true"),
    ],
    ids=["shm", "ipc", "tcp", "pairs"],
)
def test_what_crosses_a_boundary_may_have_no_elements(tmp_path: Path, words: tuple[str, ...]) -> None:
    emptied = "model.target=tuple_models.Emptied"
    single = run(tmp_path / "single", "mesh=single", emptied)
    assert run(tmp_path / "meshed", "mesh=dp2_pp2", emptied, *words) == single


@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: torch.compile needs a C++ compiler")
def test_compiled_meshes_have_the_bits_of_one_compiled_worker(tmp_path: Path) -> None:
    compiled = "runtime.compile=true"
    assert run(tmp_path / "one", "mesh=single", compiled, timeout=400) == run(
        tmp_path / "meshed", "mesh=pp2", compiled, KILL, timeout=400
    )
