"""Settings: checked when made, plain when sent, and each error names the override."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.conf import schema
from elaswave_spmd.conf import schema as module
from elaswave_spmd.conf.schema import (
    FREQUENCIES,
    MeshSettings,
    OptimSettings,
    Settings,
    Timeouts,
    TrainSettings,
)
from elaswave_spmd.conf.section import unknown_setting
from elaswave_spmd.data.spec import CORPUS_NAMES
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.worker.learning_rate import SCHEDULES
from tests.unit.conf.settings_usage import read_in, settings_read_outside


def leaves(section: type = Settings, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(section):
        inner = field.default_factory
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            yield from leaves(inner, f"{prefix}{field.name}.")
        elif field.metadata:  # others are no settings
            yield prefix + field.name


def nested(name: str, value: object) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


BAD = [
    ("elastic.evict_slower_than", 1.0), ("elastic.evict_slower_than", -0.1), ("schedule.microbatches", "yes"),
    ("runtime.encryption", "curve"),
    ("schedule.layers", 1), ("schedule.stages", None), ("schedule.memory_limit", 0), ("schedule.every", 0),
    ("schedule.split_backward", "sometimes"), ("schedule.split_backward", False),
    ("schedule.window", 0), ("schedule.min_gain", 1.0), ("schedule.patience", 0), ("schedule.align", -0.1),
    ("schedule.lasting", -1.0), ("schedule.profile", ""),
    ("schedule.bandwidth", 0), ("schedule.latency", -1), ("schedule.frequency", "acpi"), ("schedule.frequency", None),
    ("schedule.frequency", "nvml"), ("schedule.f_min", 0), ("schedule.f_min", 1.5), ("schedule.f_max", 0.9),
    ("schedule.f_margin", -0.1), ("schedule.f_margin", 1),
    ("schedule.f_changes", -1), ("schedule.f_change_ms", -1.0),
    ("emulated.forward_ms", -1), ("emulated.backward_ms", "fast"), ("emulated.layer_costs", 3),
    ("emulated.weight_share", 1.1), ("emulated.weight_share", -0.1),
    ("emulated.layer_costs", [1, -1]), ("emulated.slow", 3), ("emulated.slow", [{"rank": 1}]),
    ("emulated.slow", [{"rank": 1, "speed": 0}]), ("emulated.slow", [{"rank": 1, "speed": 1, "step": 3, "until": 3}]),
    ("seed", -1), ("seed", 1.0), ("seed", None), ("seed", ""), ("seed", 2**63),
    ("mesh.dp", "abc"), ("mesh.dp", ""), ("mesh.dp", 0), ("mesh.dp", 1.5), ("mesh.dp", True), ("mesh.pp", -2),
    ("mesh.tp", 0), ("mesh.tp", "two"), ("mesh.fsdp", 1.5), ("mesh.fsdp", True),
    ("mesh.stages", "abc"), ("mesh.stages", []), ("mesh.stages", [3, 0]), ("mesh.stages", [3, "b"]), ("mesh.stages", 3),
    ("sharding.name", "zero4"), ("sharding.name", None),
    ("model.name", ""), ("model.target", None), ("model.target", ""), ("model.layers", 0), ("model.layers", None),
    ("model.layers", 1_000_000_000), ("model.d_model", 2**62), ("model.heads", 2**62),
    ("model.d_model", -8), ("model.heads", "four"), ("model.dropout", -0.1), ("model.dropout", 1.0),
    ("model.dropout", "abc"), ("model.dropout", float("nan")), ("model.args", 3), ("model.args", None),
    ("model.init_from", ""),
    ("data.name", "wikipedia"), ("data.path", ""), ("data.path", ["a"]), ("data.tokenizer", None),
    ("data.column", ""), ("data.target", ""), ("data.args", [1]), ("data.cache", ""), ("data.validation_fraction", 1.0),
    ("data.ahead", -1),
    ("optim.name", "adam"), ("optim.lr", 0), ("optim.lr", -1), ("optim.lr", float("inf")), ("optim.lr", "fast"),
    ("optim.weight_decay", -0.1), ("optim.clip", -1), ("optim.betas", 0.9), ("optim.betas", [0.9]),
    ("optim.betas", [0.9, 1.0]), ("optim.eps", 0), ("optim.momentum", 1.0), ("optim.schedule", "step"),
    ("optim.warmup_steps", -1), ("optim.final_lr_ratio", -0.5), ("optim.freeze", ""), ("optim.max_skipped", 0.5),
    ("optim.groups", [{"match": "head.*"}]), ("optim.decay_steps", 0), ("optim.schedule_steps", 0),
    ("optim.ema", 0), ("optim.ema", 1.0),
    ("train.resume_at", 0), ("train.reschedule", 1),
    ("train.steps", 0), ("train.steps", -3), ("train.steps", ""), ("train.steps", 1e3), ("train.global_batch", 0),
    ("train.seq_len", -1), ("train.validate_every", -1), ("train.validate_microbatches", 0), ("train.resume", ""),
    ("train.microbatch_size", 0), ("train.microbatch_size", ""), ("train.microbatch_size", None),
    ("page.size", 0), ("page.size", 100),
    ("runtime.device", "tpu"), ("runtime.threads_per_worker", 0), ("runtime.dtype", "fp16"),
    ("runtime.transport", "gloo"), ("runtime.activation_checkpointing", "yes"),
    ("runtime.compile", "yes"), ("runtime.compile", 1),
    ("runtime.check_model", "maybe"), ("runtime.collectives", "nccl"), ("runtime.collectives", None),
    ("runtime.pairs", "maybe"), ("runtime.pairs", True),
    ("runtime.host", ""), ("runtime.rendezvous", "node0"), ("runtime.rendezvous", "node0:70000"),
    ("runtime.agents", -1),
    ("runtime.agents_timeout", 0), ("runtime.local_workers", -1), ("runtime.token_file", ""),
    ("runtime.launcher", "mpirun"), ("runtime.launcher", None), ("runtime.agent_workers", 0),
    ("run.dir", ""), ("run.dir", ["a"]), ("run.tensorboard", 1), ("run.tensorboard", None),
    ("run.trace", "yes"), ("run.callbacks", "my_file.MyCallback"), ("run.display", "bar"), ("run.display", None),
    ("run.trackers", ["tensorboard"]), ("run.trackers", ["wandb", "wandb"]),
    ("generate.prompt", ""), ("generate.tokens", 0), ("generate.temperature", -0.5), ("generate.seed", -1),
    ("elastic.enabled", "yes"), ("elastic.min_workers", 0), ("elastic.min_workers", 2), ("elastic.replace", 1),
    ("elastic.max_workers", 0), ("elastic.spares", -1), ("elastic.replacements_per_minute", 0),
    ("mirror.count", -1), ("mirror.scatter", 0.5), ("mirror.verify_every", None),
    ("verify.rate", -0.1), ("verify.rate", 1.5), ("verify.rate", "all"), ("verify.action", "ignore"),
    ("checkpoint.every", -1), ("checkpoint.keep", 0), ("checkpoint.keep_best", -1),
    ("train.stop_patience", -1), ("train.stop_min_delta", 0.1), ("train.stop_min_delta", -1),
    *((f"timeouts.{field.name}", value) for field in dataclasses.fields(Timeouts) for value in (0, -1.0, "1 s")),
    *((f"timeouts.{field.name}", None) for field in dataclasses.fields(Timeouts) if field.name != "adopt"),
    ("timeouts.heartbeat", 1e-9), ("timeouts.heartbeat", 9e-4),
    ("chaos.events", None), ("chaos.events", {"step": 1, "kind": "kill"}), ("chaos.events", ["kill"]),
    ("chaos.events", [{"kind": "kill"}]), ("chaos.events", [{"step": 401, "kind": "kill"}]),
    ("chaos.random", "maybe"), ("chaos.seed", -1), ("chaos.rate", -0.1), ("chaos.rate", "often"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value!r}" for name, value in BAD])
def test_a_bad_value_is_refused_by_the_name_of_its_override(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_dict(nested(name, value))
    assert caught.value.where.startswith(name) and "=" in caught.value.where
    assert caught.value.fix or caught.value.exists


def test_every_setting_has_a_bad_value_above() -> None:
    missing = set(leaves()) - {name for name, _ in BAD}
    assert not missing, f"BAD has no value that is refused for {sorted(missing)}"
    assert {name for name, _ in BAD} <= set(leaves())


def test_every_setting_is_read_outside_conf() -> None:
    missing = set(leaves()) - settings_read_outside()
    assert not missing, f"no file outside conf/ reads {sorted(missing)}: see conf/README.md, step 2"


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("def f(settings: Settings): return settings.train.steps", {"train.steps"}),
        ("def f(train: TrainSettings): return train.steps", {"train.steps"}),
        ("class A:\n  def f(self): t = self._settings.train; return t.steps", {"train.steps"}),
        ("def f(other): return other.train.steps, other.steps", set()),
        ("def f(settings: Settings): settings.train.steps = 3", set()),
    ],
)
def test_what_counts_as_reading_a_setting(source: str, read: set[str]) -> None:
    names = {(type(section).__name__, name): f"train.{name}" for section in [TrainSettings()] for name in vars(section)}
    assert {names[pair] for pair in read_in(ast.parse(source)) if pair in names} == read


def test_the_screen_says_what_happened_then_the_rule_and_the_fix() -> None:
    with pytest.raises(ConfigError) as caught:
        MeshSettings(dp="abc")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "mesh.dp=abc is not a whole number\n"
        "  rule:   mesh.dp is a whole number, 1 or more\n"
        "  fix:    mesh.dp=VALUE, or leave it out"
    )


@pytest.mark.parametrize(
    ("name", "value", "told", "fix"),
    [
        ("optim.lr", "0.01", "optim.lr='0.01' is not a number", "optim.lr=0.01, without the quotes"),
        ("optim.lr", "nan", "optim.lr='nan' is not a number", "optim.lr=VALUE"),
        ("optim.lr", "abc", "optim.lr=abc is not a number", "optim.lr=VALUE"),
        ("train.steps", "10", "train.steps='10' is not a whole number", "train.steps=10, without the quotes"),
        ("train.steps", "1.5", "train.steps='1.5' is not a whole number", "train.steps=VALUE"),
        ("run.tensorboard", "true", "run.tensorboard='true' is neither true nor false", "run.tensorboard=true, "),
        ("optim.betas", ["0.9", 0.95], "optim.betas[0]='0.9' is not a number", "optim.betas[0]=0.9, without the"),
        ("mesh.stages", "[3,2]", "mesh.stages='[3,2]' is not a list, it is a text", "'mesh.stages=[3,2]'"),
    ],
)
def test_a_text_in_place_of_a_number_is_told_in_its_quotes(name: str, value: object, told: str, fix: str) -> None:
    """As Python gives it, `{"optim.lr": "0.01"}`: without them the message would refuse what the user meant to give."""
    with pytest.raises(ConfigError) as caught:
        Settings.from_dict(nested(name, value))
    assert caught.value.what == told and caught.value.fix.startswith(fix)


@pytest.mark.parametrize(
    ("unknown", "fix"),
    [
        ({"sed": 1}, "seed=1"),
        ({"model": {"layer": 2}}, "model.layers=2"),
        ({"chaos": {"event": []}}, "chaos.events=[]"),
        ({"optim": {"learning_rate": 0.1}}, "optim.lr=0.1"),
        ({"train": {"batch_size": 8}}, "train.global_batch=8"),
    ],
)
def test_unknown_settings_are_refused_with_the_closest_one(unknown: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match="there is no setting") as caught:
        Settings.from_dict(unknown)
    assert fix.partition("=")[0] in caught.value.exists and caught.value.fix == fix


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("model.depth=3", "+model.args.depth=3, if it is an argument of your own code"),  # not data.path
        ("model.microbatch_size=4", "train.microbatch_size=4"),
        ("train.warmup_steps=4", "optim.warmup_steps=4"),
    ],
)
def test_a_setting_of_another_group_is_named_if_that_is_meant(given: str, fix: str) -> None:
    assert unknown_setting(given.partition("=")[0], list(schema.NAMES), given).fix == fix


@pytest.mark.parametrize("value", [None, "", 3, "abc"])
def test_a_section_is_a_group(value: object) -> None:
    with pytest.raises(ConfigError, match="is not a group of settings"):
        Settings.from_dict({"model": value})


def test_microbatches_divide_the_batch() -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(train=TrainSettings(global_batch=12, microbatch_size=5))
    assert caught.value.where == "train.microbatch_size=5 train.global_batch=12"
    assert caught.value.exists == "train.microbatch_size of 1, 2, 3, 4, 6, 12"
    assert caught.value.fix == "train.microbatch_size=4, or train.global_batch=15"


@given(batch=st.integers(1, 10_000), size=st.integers(1, 10_000))
def test_microbatches_and_batch(batch: int, size: int) -> None:
    if batch % size == 0:
        train = TrainSettings(global_batch=batch, microbatch_size=size)
        assert Settings(train=train).num_microbatches * size == batch
    else:
        with pytest.raises(ConfigError) as caught:
            TrainSettings(global_batch=batch, microbatch_size=size)
        advised = int(caught.value.fix.partition(",")[0].removeprefix("train.microbatch_size="))
        assert batch % advised == 0


@given(
    dp=st.none() | st.integers(1, 2000),
    pp=st.none() | st.integers(1, 200),
    stages=st.none() | st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_mesh_of_sizes_or_of_stages(dp: int | None, pp: int | None, stages: list[int] | None) -> None:
    if stages is None:
        assert MeshSettings(dp, pp).shape.stage_sizes == (dp or 1,) * (pp or 1)
    elif dp is None and pp is None:
        assert MeshSettings(stages=tuple(stages)).shape.stage_sizes == tuple(stages)
    else:
        with pytest.raises(ConfigError, match=r"mesh\.stages=.* contradicts"):
            MeshSettings(dp, pp, tuple(stages))


@given(
    stages=st.none() | st.lists(st.integers(1, 9), min_size=1, max_size=4), tp=st.integers(1, 8), fsdp=st.integers(1, 8)
)
def test_devices_inside_workers_change_no_number_of_workers(stages: list[int] | None, tp: int, fsdp: int) -> None:
    mesh = MeshSettings(stages=tuple(stages) if stages else None, tp=tp, fsdp=fsdp)
    assert mesh.shape.island_size == tp * fsdp
    assert mesh.shape.stage_sizes == (tuple(stages) if stages else (1,))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 2**63 - 1),
            "mesh": st.fixed_dictionaries({"stages": st.lists(st.integers(1, 5), min_size=1)}),
            "model": st.fixed_dictionaries({"dropout": st.floats(0, 0.99), "args": st.just({"tied": True})}),
            "optim": st.fixed_dictionaries({"lr": st.floats(1e-30, 1e3), "betas": st.just([0.8, 0.99])}),
            "run": st.fixed_dictionaries(
                {"dir": st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)}
            ),
        },
    )
)
def test_dict_json_and_yaml_carry_settings_whole(fields: dict[str, Any]) -> None:
    made = Settings.from_dict(fields)
    assert Settings.from_dict(made.to_dict()) == made
    assert Settings.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert Settings.from_dict(yaml.safe_load(made.to_yaml())) == made


def test_values_take_their_own_type() -> None:
    made = Settings.from_dict({"optim": {"lr": 1, "betas": [0, 0.5]}, "run": {"dir": 7}, "mesh": {"stages": [3, 2]}})
    assert made.optim.lr == 1.0 and isinstance(made.optim.lr, float) and made.optim.betas == (0.0, 0.5)
    assert made.run.dir == "7" and made.mesh.stages == (3, 2)


def test_a_data_set_that_needs_more_says_so() -> None:
    for name, fix in (("text", "data.path"), ("custom", "data.target=my_file.MyDataset")):
        with pytest.raises(ConfigError, match=f"data={name} is given without") as caught:
            Settings.from_dict({"data": {"name": name}})
        assert fix in caught.value.fix


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OptimSettings().lr = 1.0  # type: ignore[misc]


def test_words_agree_with_the_rooms_that_own_them() -> None:
    assert set(module.SCHEDULES) == set(SCHEDULES)
    assert set(module.CORPORA) == set(CORPUS_NAMES)
    from elaswave_spmd.worker.spec import DTYPES

    assert set(schema.DTYPES) == set(DTYPES)


def test_a_users_model_is_called_by_its_class() -> None:
    assert Settings.from_dict({"model": {"target": "my_file.MyModel"}}).model.label == "MyModel"
    assert Settings().model.label == "gpt_tiny"


def test_zero_level() -> None:
    levels = [Settings.from_dict({"sharding": {"name": name}}).sharding.zero_level for name in module.SHARDINGS]
    assert levels == [None, 0, 1, 2, 3]


@pytest.mark.parametrize(("frequency", "device"), [("simulated", "emulated"), ("nvml", "cuda"), ("cpufreq", "cpu")])
def test_frequencies_are_of_the_devices_that_workers_run_on(frequency: str, device: str) -> None:
    from elaswave_spmd.runtime.devices.dvfs import BACKENDS

    assert {*BACKENDS, "none", "simulated"} == set(FREQUENCIES)  # emulated devices are set by their workers
    schedule = {"frequency": frequency}
    for other in schema.DEVICES:
        fields = {"schedule": schedule, "runtime": {"device": other}}
        if other == device:
            assert Settings.from_dict(fields).schedule.frequency == frequency
            continue
        with pytest.raises(ConfigError) as caught:
            Settings.from_dict(fields)
        assert caught.value.where == f"schedule.frequency={frequency}" and caught.value.fix.endswith("=none")


def test_frequencies_are_not_set_on_other_machines() -> None:
    meeting = {"transport": "tcp", "rendezvous": "node0:29400", "agents": 1, "token_file": "token"}
    with pytest.raises(ConfigError, match="on the controller's machine only"):
        Settings.from_dict({"schedule": {"frequency": "cpufreq"}, "runtime": meeting})
