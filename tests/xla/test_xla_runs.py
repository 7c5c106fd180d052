"""`runtime.device=xla`: losses of the CPU, the same bits on every mesh and after faults, nothing compiled late."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaswave_spmd.observe import read_metrics
from tests.multiprocess.real_runs import launch, train, write_text
from tests.xla.xla_runs import NEEDS_XLA, SMALL, STEPS, XlaRun, chaos, run

pytestmark = [pytest.mark.xla, pytest.mark.multiprocess, pytest.mark.timeout(300), NEEDS_XLA]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> XlaRun:
    """One worker with two devices: its bits are those of every mesh of such workers."""
    return run(tmp_path_factory.mktemp("undisturbed"), "mesh.tp=2")


def test_losses_are_those_of_the_cpu(undisturbed: XlaRun, tmp_path: Path) -> None:
    write_text(tmp_path)
    done = train(tmp_path, *SMALL, "runtime.device=cpu", "train.steps=5", "optim.schedule=constant")
    assert done.code == 0, done.err
    xla = run(tmp_path / "xla", "mesh.tp=2", "train.steps=5", "optim.schedule=constant")
    cpu = [line.loss for line in read_metrics(tmp_path / "run")]
    assert len(cpu) == 5 and all(abs(a - b) < 1e-5 for a, b in zip(cpu, xla.losses, strict=True))
    assert cpu != list(xla.losses), "it ran on the CPU"


def test_two_stages_have_the_bits_of_one_worker(undisturbed: XlaRun, tmp_path: Path) -> None:
    found = run(tmp_path, "mesh=pp2", "mesh.tp=2")
    assert found.bits == undisturbed.bits and len(found.losses) == STEPS
    assert found.summary["mesh"] == "pp2_tp2"
    found.assert_nothing_compiled_in_training(2)
    assert "variables of the workers: CPU_NUM_DEVICES=2" in found.done.out


def test_checkpointing_and_zero3_change_no_bit(undisturbed: XlaRun, tmp_path: Path) -> None:
    found = run(tmp_path, "mesh=dp2", "mesh.tp=2", "sharding=zero3", "runtime.activation_checkpointing=true")
    assert found.bits == undisturbed.bits
    found.assert_nothing_compiled_in_training(2)


def test_a_kill_on_dp2_pp2_changes_no_bit_and_compiles_nothing(undisturbed: XlaRun, tmp_path: Path) -> None:
    found = run(tmp_path, "mesh=dp2_pp2", "mesh.tp=2", chaos("step: 8, kind: kill, rank: 1"))
    assert found.changes.ranks("fail") == [[1]] and found.bits == undisturbed.bits
    found.assert_nothing_compiled_in_training(4)


def test_a_stage_that_is_lost_goes_to_the_other(undisturbed: XlaRun, tmp_path: Path) -> None:
    """Its layers run where they never ran: all layers were compiled there."""
    found = run(tmp_path, "mesh=pp2", "mesh.tp=2", chaos("step: 8, kind: kill, rank: 1, point: backward"))
    assert found.changes.ranks("fail") == [[1]] and found.bits == undisturbed.bits
    found.assert_nothing_compiled_in_training(2)


def test_a_drained_worker_changes_no_bit(undisturbed: XlaRun, tmp_path: Path) -> None:
    found = run(tmp_path, "mesh=dp2", "mesh.tp=2", chaos("step: 6, kind: term, rank: 0"))
    assert found.changes.ranks("leave") == [[0]] and found.bits == undisturbed.bits
    found.assert_nothing_compiled_in_training(2)


def test_a_joiner_has_compiled_before_it_is_promoted(tmp_path: Path) -> None:
    many = "train.steps=400"
    reference = run(tmp_path / "reference", "mesh.tp=2", many)
    found = run(tmp_path / "joined", "mesh.tp=2", many, chaos("step: 2, kind: join"))
    assert found.changes.ranks("join") == [[1]] and found.bits == reference.bits
    order = [event["event"] for event in found.events if event["event"] in ("compile", "join")]
    assert order == ["compile", "compile", "join"]
    found.assert_nothing_compiled_in_training(2)


@pytest.mark.parametrize(("variable", "value"), [("CPU_NUM_DEVICES", "3"), ("WORLD_SIZE", "2")])
def test_variables_that_contradict_are_refused(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    write_text(tmp_path)
    with launch(tmp_path, *SMALL, "mesh=dp2", "mesh.tp=2") as launched:
        done = launched.finish()
    assert (done.code, done.out) == (2, "") and variable in done.err and "Traceback" not in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        (["mesh.tp=3"], "no multiple of 3"),
        (["mesh.fsdp=2", "model.target=mlp"], "fsdp"),
    ],
)
def test_islands_that_a_model_does_not_fit_are_refused(arguments: list[str], telling: str, tmp_path: Path) -> None:
    write_text(tmp_path)
    done = train(tmp_path, *SMALL, *arguments)
    assert done.code == 2 and telling in done.err and "Traceback" not in done.err
    assert not (tmp_path / "run").exists()


def test_another_size_of_islands_or_number_of_threads_is_not_resumed(tmp_path: Path) -> None:
    first = run(tmp_path, "mesh.tp=2", "train.steps=6", "train.validate_every=0", "checkpoint.every=3")
    assert first.summary["steps"] == 6
    for other in ("mesh.tp=1", "runtime.threads_per_worker=2"):
        done = train(tmp_path, "train.resume=run", "run.dir=again", other)
        assert done.code == 2 and "saved" in done.err, done.err
