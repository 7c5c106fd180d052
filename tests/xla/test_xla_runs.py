"""`runtime.device=xla`: losses of the CPU, the same bits on every mesh and after faults, nothing compiled late."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from elaswave_spmd.cli import FIRST_LINE
from elaswave_spmd.run_dir import read_events, read_metrics
from elaswave_spmd.scheduling.cost_model import CostModel, LayerCost
from tests import sample_models
from tests.multiprocess.real_runs import eventually, launch, train, write_text
from tests.xla.xla_runs import LAYERS, NEEDS_XLA, SMALL, STEPS, XlaRun, chaos, run

pytestmark = NEEDS_XLA


UNFOLDS = """
from elaswave_spmd.models.mlp import MLP, Block

class Unfolding(Block):
    def forward(self, x_BTD, keys):
        return super().forward(x_BTD.unfold(1, 1, 1)[..., 0], keys)

class Unfolds(MLP):
    def __init__(self, vocab_size, layers, d_model, dropout=0.0):
        super().__init__(vocab_size, layers, d_model, dropout)
        for module in self.modules():
            if isinstance(module, Block):
                module.__class__ = Unfolding
"""
READS = """
from elaswave_spmd.models.mlp import MLP

class Reads(MLP):
    def loss(self, output, batch):
        return super().loss(output, batch), (batch.targets >= 0).sum().item()
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> XlaRun:
    """One worker with two devices: its bits are those of every mesh of such workers."""
    return run(tmp_path_factory.mktemp("undisturbed"), "mesh.tp=2")


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> XlaRun:
    """The same, as users' devices compute."""
    return run(tmp_path_factory.mktemp("optimized"), "mesh.tp=2", optimized=True)


def test_losses_are_those_of_the_cpu(tmp_path: Path) -> None:
    write_text(tmp_path)
    done = train(tmp_path, *SMALL, "runtime.device=cpu", "train.steps=5", "optim.schedule=constant")
    assert done.code == 0, done.err
    xla = run(tmp_path / "xla", "mesh.tp=2", "train.steps=5", "optim.schedule=constant", optimized=True)
    cpu = [line.loss for line in read_metrics(tmp_path / "run")]
    assert len(cpu) == 5 and all(abs(a - b) < 1e-5 for a, b in zip(cpu, xla.losses, strict=True))
    assert cpu != list(xla.losses), "it ran on the CPU"


def test_the_mlp_has_the_losses_of_the_cpu(tmp_path: Path) -> None:
    write_text(tmp_path)
    same = "model.target=tests.tuple_models.AnySizes", "train.steps=3", "optim.schedule=constant"
    done = train(tmp_path, *SMALL, "runtime.device=cpu", *same)
    assert done.code == 0, done.err
    xla = run(tmp_path / "xla", "mesh.tp=2", *same)
    cpu = [line.loss for line in read_metrics(tmp_path / "run")]
    assert len(cpu) == 3 and all(abs(a - b) < 1e-5 for a, b in zip(cpu, xla.losses, strict=True))


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


def test_a_kill_on_dp2_pp2_changes_no_bit_and_compiles_nothing(optimized: XlaRun, tmp_path: Path) -> None:
    found = run(tmp_path, "mesh=dp2_pp2", "mesh.tp=2", chaos("step: 8, kind: kill, rank: 1"), optimized=True)
    assert found.changes.ranks("fail") == [[1]] and found.bits == optimized.bits
    found.assert_nothing_compiled_in_training(4)


@pytest.mark.parametrize(
    ("mesh", "rank", "point", "setting"),
    [
        ("pp2", 1, "input", "runtime.activation_checkpointing=true"),
        ("dp2_pp2", 2, "weights", "sharding=zero3"),
    ],
)
def test_no_bit_depends_on_whether_weight_gradients_are_put_off(
    undisturbed: XlaRun, tmp_path: Path, mesh: str, rank: int, point: str, setting: str
) -> None:
    """On one stage none are; on the second of two they are, and a worker there is killed in either part."""
    kill = chaos(f"step: 8, kind: kill, rank: {rank}, point: {point}")
    found = run(tmp_path, f"mesh={mesh}", "mesh.tp=2", setting, kill)
    assert found.changes.ranks("fail") == [[rank]] and found.bits == undisturbed.bits
    found.assert_nothing_compiled_in_training(2 if mesh == "pp2" else 4)
    found.assert_pairs()


FROZEN = ("+model.args.tied=true", 'optim.freeze="embed.* head.weight block0.* *.bias"', "model.dropout=0")


def test_frozen_parameters_have_the_losses_of_the_cpu_and_equal_bits(tmp_path: Path) -> None:
    """The first stage is frozen, with a tie that the last layer reads: no backward there, also after a kill."""
    alone = run(tmp_path / "alone", *FROZEN)
    write_text(tmp_path)
    done = train(tmp_path, *SMALL, *FROZEN, "runtime.device=cpu")
    assert done.code == 0, done.err
    cpu = [line.loss for line in read_metrics(tmp_path / "run")]
    assert len(cpu) == STEPS and all(abs(a - b) < 1e-4 for a, b in zip(cpu, alone.losses, strict=True))
    kill = chaos("step: 8, kind: kill, rank: 1, point: backward")
    killed = run(tmp_path / "killed", *FROZEN, "mesh=dp2_pp2", "sharding=zero3", kill)
    assert killed.changes.ranks("fail") == [[1]] and killed.bits == alone.bits
    killed.assert_nothing_compiled_in_training(4)


def test_a_stage_that_is_lost_goes_to_the_other(undisturbed: XlaRun, tmp_path: Path) -> None:
    """Its layers run where they never ran: all layers were compiled there."""
    found = run(tmp_path, "mesh=pp2", "mesh.tp=2", chaos("step: 8, kind: kill, rank: 1, point: backward"))
    assert found.changes.ranks("fail") == [[1]] and found.bits == undisturbed.bits
    found.assert_nothing_compiled_in_training(2)


def test_a_step_that_begins_anew_after_a_repair_computes_with_the_repaired_parameters(
    undisturbed: XlaRun, tmp_path: Path
) -> None:
    """A parameter flips before it is sent to the island, and comes from the other replica at the same version."""
    # chaos.seed=1 draws the parameters of a page range, not its optimizer state.
    damage = "chaos.seed=1", chaos("step: 3, kind: corrupt, rank: 1, point: forward")
    found = run(tmp_path, "mesh=dp2", "mesh.tp=2", "mirror.verify_every=1", *damage)
    assert [(e["ranks"], e["step"]) for e in found.events if e["event"] == "corruption"] == [([1], 3)]
    assert found.bits == undisturbed.bits


def test_a_drained_worker_changes_no_bit(undisturbed: XlaRun, tmp_path: Path) -> None:
    found = run(tmp_path, "mesh=dp2", "mesh.tp=2", chaos("step: 6, kind: term, rank: 0"))
    assert found.changes.ranks("leave") == [[0]] and found.bits == undisturbed.bits
    found.assert_nothing_compiled_in_training(2)


def test_a_joiner_has_compiled_before_it_is_promoted(tmp_path: Path) -> None:
    """The run lasts until it has joined: how many steps that takes depends on the machine."""
    endless = ["optim.schedule=constant", "train.validate_every=0"]
    (tmp_path / "joined").mkdir()
    write_text(tmp_path / "joined")
    arguments = ["mesh.tp=2", "train.steps=1000000", *endless, chaos("step: 2, kind: join")]
    with launch(tmp_path / "joined", *SMALL, *arguments) as launched:
        events = tmp_path / "joined" / "run" / "events.jsonl"
        eventually(lambda: events.exists() and '"join"' in events.read_text(), launched.process)
        joined_after = next(e["after_step"] for e in read_events(events.parent) if e["event"] == "join")
        launched.wait_for_steps(joined_after + 5)
        os.killpg(launched.process.pid, signal.SIGINT)
        assert launched.finish().code == 130
    all_events = read_events(events.parent)
    assert [e["event"] for e in all_events if e["event"] in ("compile", "join")] == ["compile", "compile", "join"]
    assert not [e for e in all_events if e["event"] == "recompile"]
    found = [(line.loss_hex, line.grad_norm_hex) for line in read_metrics(events.parent)][: joined_after + 5]
    reference = run(tmp_path / "reference", "mesh.tp=2", f"train.steps={joined_after + 5}", *endless, optimized=True)
    assert found == list(zip(reference.bits.loss_hex, reference.bits.grad_norm_hex, strict=True))


def test_layers_that_move_change_no_bit_and_compile_nothing(tmp_path: Path) -> None:
    """Planned with costs that are wrong: what is measured moves layers to the other stage while training goes on."""
    larger = ["model.d_model=64", "train.seq_len=64", "train.global_batch=20", "mesh.tp=2"]
    # At validations workers wait for the controller, which may be held up: without them the run would end before.
    larger += ["train.validate_every=4", "data.validation_fraction=0.2"]
    # As users' devices compute: which layers it pays to move depends on what each of them costs.
    still = run(tmp_path / "still", *larger, optimized=True)
    write_text(tmp_path)
    layers = [LayerCost(f"layer {i}", 1.0 if i == 0 else 1e-3, 0.0) for i in range(LAYERS)]
    costs = tmp_path / "costs.json"
    costs.write_text(CostModel(tuple(layers), 1e9).to_json())
    following = [
        "schedule.layers=true",
        "schedule.every=2",
        "schedule.window=2",
        "schedule.patience=1",
        "schedule.lasting=0",
    ]
    moved = run(tmp_path / "moved", *larger, "mesh=pp2", f"schedule.profile={costs}", *following, optimized=True)
    assert [e["reason"] for e in moved.changes.of_kind("rebalance") if "layers by cost" in e["reason"]]
    assert moved.bits == still.bits
    moved.assert_nothing_compiled_in_training(2)


@pytest.mark.parametrize(("variable", "value"), [("CPU_NUM_DEVICES", "3"), ("WORLD_SIZE", "2")])
def test_variables_that_contradict_are_refused(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    write_text(tmp_path)
    with launch(tmp_path, *SMALL, "mesh=dp2", "mesh.tp=2") as launched:
        done = launched.finish()
    assert (done.code, done.out) == (2, f"{FIRST_LINE}\n") and variable in done.err and "Traceback" not in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        (["mesh.tp=3"], "no multiple of 3"),
        (["mesh.fsdp=2", "model.target=tests.tuple_models.AnySizes"], "fsdp"),
    ],
)
def test_islands_that_a_model_does_not_fit_are_refused(arguments: list[str], telling: str, tmp_path: Path) -> None:
    write_text(tmp_path)
    done = train(tmp_path, *SMALL, *arguments)
    assert done.code == 2 and telling in done.err and "Traceback" not in done.err
    assert not (tmp_path / "run").exists()


def test_a_layer_with_an_operator_that_xla_lacks_is_told(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "unfolds.py").write_text(UNFOLDS)
    words = (word for word in SMALL if not word.startswith("model.heads"))  # an MLP has none
    done = train(tmp_path, *words, "model.target=unfolds.Unfolds")
    assert done.code == 2 and "aten::unfold" in done.err and "layer block0" in done.err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()  # the check of the model says so before the first step


def test_a_loss_that_reads_a_number_of_the_batch_is_refused(
    tmp_path: Path,
) -> None:
    write_text(tmp_path)
    (tmp_path / "reads.py").write_text(READS)
    words = [*(word for word in SMALL if not word.startswith("model.heads")), "model.target=reads.Reads"]
    done = train(tmp_path, *words)
    assert done.code == 2 and "loss() or metrics(): the code reads the value of a tensor" in done.err, done.err
    assert train(tmp_path, *words, "runtime.device=cpu", "train.steps=2", "run.dir=cpu").code == 0


def test_another_size_of_islands_or_number_of_threads_is_not_resumed(tmp_path: Path) -> None:
    first = run(tmp_path, "mesh.tp=2", "train.steps=6", "train.validate_every=0", "checkpoint.every=3")
    assert first.summary["steps"] == 6
    for other in ("mesh.tp=1", "runtime.threads_per_worker=2"):
        done = train(tmp_path, "train.resume=run", "run.dir=again", other)
        assert done.code == 2 and "saved" in done.err, done.err


@pytest.mark.parametrize(
    ("mesh", "workers", "rank", "point"),
    [("dp2_pp2", 4, 3, "backward"), ("dp2", 2, 1, "sum")],
)
def test_a_device_that_computes_wrongly_is_found_in_its_step(
    undisturbed: XlaRun, tmp_path: Path, mesh: str, workers: int, rank: int, point: str
) -> None:
    wrong = chaos(f"step: 6, kind: miscompute, rank: {rank}, point: {point}")
    found = run(tmp_path, f"mesh={mesh}", "mesh.tp=2", "verify.rate=1", wrong)
    (corrupt,) = [event for event in found.events if event["event"] == "corrupt"]
    assert (corrupt["ranks"], corrupt["step"]) == ([rank], 6) and found.bits == undisturbed.bits
    found.assert_nothing_compiled_in_training(workers)


def test_tuples_between_layers_have_the_losses_of_the_cpu_and_equal_bits(tmp_path: Path) -> None:
    """Named tuples with masks and integers, through a kill."""
    words = ("model.target=tests.tuple_models.Skips",)
    alone = run(tmp_path / "alone", *words)
    write_text(tmp_path)
    done = train(tmp_path, *SMALL, *words, "runtime.device=cpu")
    assert done.code == 0, done.err
    cpu = [line.loss for line in read_metrics(tmp_path / "run")]
    assert len(cpu) == STEPS and all(abs(a - b) < 1e-4 for a, b in zip(cpu, alone.losses, strict=True))
    kill = chaos("step: 8, kind: kill, rank: 1, point: backward")
    killed = run(tmp_path / "killed", *words, "mesh=dp2_pp2", "sharding=zero3", kill)
    assert killed.changes.ranks("fail") == [[1]] and killed.bits == alone.bits
    killed.assert_nothing_compiled_in_training(4)


def test_terms_of_the_loss_have_equal_bits_on_islands(tmp_path: Path) -> None:
    """A tensor without dims goes from layer to layer, and from stage to stage."""
    words = ("model.target=tests.tuple_models.Mixture",)
    alone = run(tmp_path / "alone", *words)
    write_text(tmp_path)
    done = train(tmp_path, *SMALL, *words, "runtime.device=cpu")
    assert done.code == 0, done.err
    cpu = [line.loss for line in read_metrics(tmp_path / "run")]
    assert len(cpu) == STEPS and all(abs(a - b) < 1e-3 for a, b in zip(cpu, alone.losses, strict=True))
    found = run(tmp_path / "meshed", *words, "mesh=dp2_pp2", "sharding=zero2")
    assert found.bits == alone.bits
    found.assert_nothing_compiled_in_training(4)


def test_samples_of_any_kind_have_the_same_bits_after_a_kill(tmp_path: Path) -> None:
    """Padded sequences with a mask: tuples between layers, a loss with a weight, and metrics."""
    words = (
        *(word for word in SMALL if not word.startswith(("data", "model.heads", "model.d_model", "train.steps"))),
        *("model.target=sample_models.Tagger", "data.target=sample_models.Padded", "data.validation_fraction=0.2"),
        *("model.d_model=8", "train.steps=6", "train.validate_every=3"),
    )
    found = []
    for name, more in (("one", ()), ("two", ("mesh=dp2_pp2", chaos("step: 3, kind: kill, rank: 1, point: backward")))):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(sample_models.__file__, folder / "sample_models.py")
        done = train(folder, *words, *more)
        assert done.code == 0, done.err
        found.append(XlaRun.of(done, folder / "run"))
    one, two = found
    assert two.bits == one.bits and two.changes.ranks("fail") == [[1]]
    metrics = [[event["metrics"] for event in run.events if event["event"] == "validation"] for run in found]
    assert metrics[0] == metrics[1] and metrics[0][-1].keys() == {"accuracy", "length"}
    two.assert_nothing_compiled_in_training(4)
