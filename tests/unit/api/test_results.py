"""A run as a value: its columns, its weights, its model; and plans and scenarios without a run."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn

import elaswave_spmd as ew
from elaswave_spmd.api.keywords import Given
from elaswave_spmd.api.training import _error_of
from elaswave_spmd.by_value import ByValue
from elaswave_spmd.conf.compose import settings_from, words_of
from elaswave_spmd.conf.format_version import FORMAT_VERSION
from elaswave_spmd.controller import startup
from elaswave_spmd.controller.ending import Call
from elaswave_spmd.controller.startup import Unfinished
from elaswave_spmd.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    RunError,
    RunInterrupted,
    StoppedBySignal,
)
from elaswave_spmd.run_dir import MetricsLine, RunDir, weights_sha256
from elaswave_spmd.runtime.processes.stop_signals import StopSignals


class Net(ew.LayeredModel):
    def __init__(self, vocab_size: int, d_model: int, scale: float = 1.0) -> None:
        embed, head = nn.Embedding(vocab_size, d_model), nn.Linear(d_model, vocab_size, bias=False)
        embed.register_buffer("shift", scale * torch.rand(d_model))
        super().__init__({"embed": embed, "head": head}, ties=[ew.tie("head.weight", "embed.weight")])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of two steps that has finished, of a model that it got by value."""
    settings = {"seed": 3, "model": {"target": "by_value.Net", "d_model": 2}, "train": {"seq_len": 4}}
    run = RunDir.create(tmp_path / "run", yaml.safe_dump(settings), model="Net", mesh="single")
    for step, loss in ((1, 0.1), (2, math.inf)):
        run.write_metrics(
            MetricsLine.of(
                step=step, mesh_epoch=0, loss=loss, grad_norm=2.0, lr=1e-3, tokens=8, seconds=0.5, workers=step
            )
        )
        fields = {"step": step, "loss": 0.1, "loss_hex": (0.1).hex(), "microbatches": 2, "metrics": {"right": 0.5}}
        run.write_event("validation", 1.0, fields)
    run.write_event("rollback", 2.0, {"step": 1})
    run.write_weights({"embed.weight": np.arange(6, dtype=np.float32).reshape(3, 2)})
    run.write_summary({"steps": 2, "corpus": {"vocab_size": 3}})
    run.close()
    return tmp_path / "run"


def test_a_run_is_read_as_columns(run_dir: Path) -> None:
    run = ew.load_run(run_dir)
    assert run.finished and run.run_dir == run_dir and run.settings["model"]["d_model"] == 2
    history = run.history
    assert len(history) == 2 and history.step.dtype == np.int64 and history.loss.dtype == np.float64
    assert history.loss.tolist() == [0.1, math.inf] and history.workers.tolist() == [1, 2]
    assert history.grad_norm.tolist() == [2.0, 2.0] and history.seconds.tolist() == [0.5, 0.5]
    assert np.isnan(history.data_seconds).all()  # lines of data that nobody waits for
    assert run.validation.step.tolist() == [1]  # the other one was given up
    assert {name: values.tolist() for name, values in run.validation.metrics.items()} == {"right": [0.5]}
    assert [event["event"] for event in run.events] == ["validation", "validation", "rollback"]
    assert "2 steps" in repr(run) and "finished" in repr(run)


def test_a_run_that_was_resumed_with_other_metrics_has_all_of_them(run_dir: Path) -> None:
    with open(run_dir / "events.jsonl", "a", encoding="utf-8") as events:
        for step, metrics in ((2, {"metrics": {"wrong": 0.25}}), (3, {})):
            fields = {"event": "validation", "time": 3.0, "step": step, "loss": 0.1, "loss_hex": (0.1).hex()}
            events.write(json.dumps({**fields, "microbatches": 2, **metrics}) + "\n")
    found = ew.load_run(run_dir).validation
    assert found.step.tolist() == [1, 2, 3] and list(found.metrics) == ["right", "wrong"]
    np.testing.assert_equal(found.metrics["right"], [0.5, math.nan, math.nan])
    np.testing.assert_equal(found.metrics["wrong"], [math.nan, 0.25, math.nan])


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        ew.load_run(tmp_path)


def test_weights_are_read_by_name_when_they_are_asked_for(run_dir: Path) -> None:
    weights = ew.load_run(run_dir).weights
    assert list(weights) == ["embed.weight"] and len(weights) == 1 and "head.weight" not in weights
    assert torch.equal(weights["embed.weight"], torch.arange(6.0).view(3, 2))
    (run_dir / "weights.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        _ = ew.load_run(run_dir).weights


def test_a_model_is_loaded_with_its_weights_ties_and_constants(run_dir: Path) -> None:
    model = ew.load_run(run_dir).model(Net)
    again = ew.load_model(run_dir, Net)
    assert not model.training and torch.equal(model.get_parameter("embed.weight"), torch.arange(6.0).view(3, 2))
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    shift = model.get_buffer("embed.shift")
    assert torch.equal(shift, again.get_buffer("embed.shift"))  # of the run's seed, not of this process
    assert model(torch.tensor([[0, 2]])).tolist() == [[[1.0, 3.0, 5.0], [5.0, 23.0, 41.0]]]


def test_a_model_has_its_weights_in_fp32_whatever_dtype_its_constructor_gave_them(run_dir: Path) -> None:
    class Short(ew.LayeredModel):
        def __init__(self, vocab_size: int, d_model: int) -> None:
            embed = nn.Embedding(vocab_size, d_model, dtype=torch.bfloat16)
            head = nn.Linear(d_model, vocab_size, bias=False, dtype=torch.bfloat16)
            super().__init__({"embed": embed, "head": head}, ties=[ew.tie("head.weight", "embed.weight")])

    values = torch.arange(6.0).view(3, 2) + 2**-20  # bf16 would round it
    save_file({"embed.weight": values}, run_dir / "weights.safetensors")
    model = ew.load_model(run_dir, Short)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.get_parameter("head.weight"), values)
    assert model(torch.tensor([[0, 2]])).dtype == torch.float32


def test_a_model_gets_what_its_run_was_told_of_samples_that_are_no_tokens(run_dir: Path) -> None:
    class Classifier(ew.LayeredModel):
        def __init__(self, num_classes: int) -> None:
            super().__init__({"embed": nn.Linear(2, num_classes, bias=False)})

    summary = json.loads((run_dir / "summary.json").read_text())
    summary["corpus"] = {"vocab_size": 0, "attributes": {"num_classes": 3}}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    model = ew.load_model(run_dir, Classifier)
    assert torch.equal(model.get_parameter("embed.weight"), torch.arange(6.0).view(3, 2))


def test_the_average_and_the_best_weights_are_loaded_where_the_run_has_them(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="has no average"):
        ew.load_model(run_dir, Net, ema=True)
    with pytest.raises(CheckpointError, match="no checkpoint of a step that was validated"):
        ew.load_run(run_dir).model(Net, best=True)
    save_file({"embed.weight": torch.ones(3, 2)}, run_dir / "weights_ema.safetensors")
    assert torch.equal(ew.load_model(run_dir, Net, ema=True).get_parameter("embed.weight"), torch.ones(3, 2))
    validation = {"event": "validation", "time": 3.0, "step": 2, "loss": 0.0, "loss_hex": (0.0).hex()}
    with open(run_dir / "events.jsonl", "a", encoding="utf-8") as events:
        events.write(json.dumps({**validation, "microbatches": 2}) + "\n")
    best = ew.load_model(run_dir, Net, best=True)  # the last step is the best one
    assert torch.equal(best.get_parameter("embed.weight"), torch.arange(6.0).view(3, 2))


def test_weights_that_are_not_those_of_the_summary_are_not_loaded(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    summary["weights_sha256"] = weights_sha256({"embed.weight": values})
    (run_dir / "summary.json").write_text(json.dumps(summary))
    assert torch.equal(ew.load_model(run_dir, Net).get_parameter("embed.weight"), torch.from_numpy(values))
    file = run_dir / "weights.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors does not match its sha256 in summary\.json"):
        ew.load_model(run_dir, Net)


def test_a_run_of_another_format_version_or_with_an_odd_summary_is_refused(run_dir: Path) -> None:
    (run_dir / "summary.json").write_text('{"steps": "two", "corpus": []}')
    with pytest.raises(DataError, match="has steps='two'"):
        ew.load_model(run_dir, Net, best=True)
    assert ew.load_model(run_dir, Net).get_parameter("embed.weight").shape == (3, 2)
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace(f"format: {FORMAT_VERSION}\n", "format: 99\n"))
    for read in (ew.load_run, ew.load_model):
        with pytest.raises(ConfigError, match="has format version 99, and this version of elaswave_spmd has"):
            read(run_dir)


def test_code_that_was_given_by_value_is_given_again_and_is_the_same(run_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"load_model\(RUN, model=Net\)"):
        ew.load_model(run_dir)
    with pytest.raises(ModelError, match="has other parameters") as refused:
        ew.load_model(run_dir, lambda vocab_size: Net(vocab_size, 5))
    assert "embed.weight: (3, 5) in the model, (3, 2) in the run" in str(refused.value)


def test_code_by_value_and_agents_are_refused_before_anything_starts(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0" * 64)
    token.chmod(0o600)
    words = ["mesh=dp2", "runtime.rendezvous=localhost:1", "runtime.agents=1", "runtime.transport=tcp"]
    settings = settings_from([*words, f"runtime.token_file={token}", f"run.dir={tmp_path / 'run'}"])
    with StopSignals() as signals, pytest.raises(ConfigError, match="Net cannot be imported, and the run has agents"):
        startup.train(settings, signals, given=ByValue.of({"Net": lambda: None}))
    assert not (tmp_path / "run").exists()


def test_what_the_caller_gets_for_a_run_that_did_not_finish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, given = settings_from([]), Given()
    given.add("model", Net)
    stopped = _error_of(Unfinished(StoppedBySignal("it stops"), tmp_path), settings, given, {}, ())
    assert isinstance(stopped, RunInterrupted) and isinstance(stopped, KeyboardInterrupt)
    assert str(stopped).startswith("it stops\nnothing to resume") and stopped.run_dir == tmp_path
    assert capsys.readouterr().err == ""
    failure = RunError("a worker is gone")
    assert _error_of(Unfinished(failure, tmp_path), settings, given, {}, ()) is failure
    assert failure.run_dir == tmp_path and "nothing to resume" in capsys.readouterr().err


def test_the_call_that_goes_on() -> None:
    run = Path("/runs/a")
    assert Call().resuming(run, was_resumed=False) == "train(resume='/runs/a')"
    assert Call("Net").resuming(run, was_resumed=False, into=Path("/runs/a_2")) == (
        "train(resume='/runs/a', model=Net, run_dir='/runs/a_2')"
    )
    assert Call("...", "...", True).resuming(run, was_resumed=False) == (
        "train(resume='/runs/a', model=..., data=..., callbacks=...), with the model, data and callbacks of this "
        "call in place of ..."
    )


def test_the_call_that_goes_on_has_the_settings_that_are_not_those_of_the_run() -> None:
    """Trackers and callbacks belong to one command; a run that was resumed has what was given then, as well."""
    named = {
        "model.target": "by_value.lambda",
        "data.target": "my_file.Rows",
        "mesh": "dp2",
        "train.steps": np.int64(7),
        "optim.betas": (0.9, 0.99),
        "run.trackers": ["wandb"],
        "run.callbacks": [],
        "run.dir": "/runs/a",
        "train.resume": "/runs/a",
        "data.path": Path("/data"),
        "chaos.events": [{"step": 5, "kind": "kill", "rank": 1, "point": "backward"}],
    }
    call = Call("...", settings=named)
    for was_resumed, wanted in (
        (False, {"run.trackers": ["wandb"], "run.callbacks": []}),
        (
            True,
            {
                "data.target": "my_file.Rows",
                "mesh": "dp2",
                "train.steps": 7,
                "optim.betas": [0.9, 0.99],
                "run.trackers": ["wandb"],
                "run.callbacks": [],
                "data.path": "/data",
            },
        ),
    ):
        text = call.resuming(Path("/runs/a"), was_resumed=was_resumed)
        parsed = ast.parse(text.partition(", with the")[0], mode="eval").body
        assert isinstance(parsed, ast.Call)
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in parsed.keywords}
        assert given == {"resume": "/runs/a", "model": ..., "settings": wanted}
        assert settings_from([*words_of(wanted), "mesh=dp2"])
    assert "run.dir" not in (also := call.resuming(Path("/runs/a"), was_resumed=False, also=("mesh",)))
    assert "'mesh': 'dp2'" in also


def test_plans_and_scenarios_are_values() -> None:
    plan = ew.plan("dp2_pp2", "fail 3", settings={"model.layers": 4})
    assert plan.before.seconds < plan.decision.last.time.seconds and plan.as_json()["event"] == "fail 3"
    assert "throughput" in str(plan) and ew.plan(settings={"mesh.dp": 2, "mesh.pp": 2}).case.change.gone == ()
    with pytest.raises(ConfigError, match="no mesh is given"):
        ew.plan()
    with pytest.raises(ConfigError, match="scenario"):
        ew.simulate("nothing_like_it")
