"""The command line's words: choices that exist, mesh names without files, overrides, and defaults said once."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd import conf
from elaswave_spmd.conf.compose import CHOICES, choices_of, settings_from
from elaswave_spmd.conf.help import help_text
from elaswave_spmd.conf.mesh_names import FORMS, spell_out
from elaswave_spmd.conf.schema import GROUPS, Settings, Timeouts, TrainSettings
from elaswave_spmd.conf.schema import NAMES as ALL_NAMES
from elaswave_spmd.conf.section import declarations
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.mesh import MeshShape

FOLDER = Path(conf.__file__).parent
FILES = [(path.parent.name, path.stem) for path in sorted(FOLDER.glob("*/*.yaml"))]

# Names that scripts of users rely on. A new setting need not be here.
PROMISED_NAMES = """
seed run.dir run.tensorboard train.steps train.global_batch train.seq_len train.validate_every
train.validate_microbatches train.microbatch_size
train.resume page.size model.layers model.d_model model.heads model.dropout model.target
model.args optim.name optim.lr optim.weight_decay optim.clip optim.betas optim.eps optim.schedule optim.warmup_steps
optim.final_lr_ratio optim.max_skipped data.name data.path data.tokenizer data.target data.cache
data.validation_fraction runtime.device runtime.threads_per_worker runtime.dtype runtime.transport
runtime.activation_checkpointing runtime.compile runtime.check_model runtime.collectives runtime.pairs
mesh.dp mesh.pp mesh.stages mesh.tp mesh.fsdp
sharding.name elastic.enabled elastic.min_workers
elastic.replace mirror.count mirror.scatter mirror.verify_every checkpoint.every checkpoint.keep
timeouts.heartbeat timeouts.suspect timeouts.status timeouts.progress timeouts.progress_factor timeouts.start
timeouts.join timeouts.leave timeouts.controller timeouts.group timeouts.shutdown
chaos.events chaos.random chaos.seed chaos.rate elastic.evict_slower_than
schedule.microbatches schedule.layers schedule.stages schedule.memory_limit schedule.every
schedule.window schedule.min_gain schedule.patience schedule.profile
schedule.bandwidth schedule.latency schedule.frequency schedule.f_min schedule.f_max
schedule.f_margin run.trace
emulated.forward_ms emulated.backward_ms emulated.layer_costs emulated.weight_share
emulated.slow
"""


def settings(*overrides: str) -> Settings:
    return settings_from(overrides)


@pytest.mark.parametrize("name", PROMISED_NAMES.split())
def test_names_that_scripts_of_users_rely_on(name: str) -> None:
    assert name in ALL_NAMES


def test_the_defaults_of_the_command_line_and_of_the_dataclasses_are_the_same() -> None:
    assert settings() == Settings()


def test_files_are_choices_and_name_settings_that_exist() -> None:
    assert {group for group, _ in FILES} == CHOICES.keys() - {"mesh"}
    for group, choice in FILES:
        found = yaml.safe_load((FOLDER / group / f"{choice}.yaml").read_text(encoding="utf-8"))
        assert {*found} <= {declared.field for declared in declarations(GROUPS[group])}, f"{group}/{choice}.yaml"


@pytest.mark.parametrize(("group", "choice"), FILES, ids=["=".join(pair) for pair in FILES])
def test_every_choice_is_good(group: str, choice: str) -> None:
    paths = {name: ["data.path=a"] for name in ("text", "bin", "arrow", "parquet")}
    needs = {**paths, "custom": ["data.target=my_file.MyDataset"]}.get(choice, [])
    made = settings(f"{group}={choice}", *needs)
    if group in ("sharding", "model", "data", "optim"):
        assert getattr(made, group).name == choice


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ("", "single"),
        ("mesh=single", "single"),
        ("mesh=dp3", "dp3"),
        ("mesh=pp4", "pp4"),
        ("mesh=dp3_pp2", "dp3_pp2"),
        ("mesh=pp2_dp3", "dp3_pp2"),
        ("mesh=dp1", "single"),
        ("mesh=dp1000_pp16", "dp1000_pp16"),
        ("mesh=stages3-2", "stages3-2"),
        ("mesh=stages2-2", "dp2_pp2"),
        ("mesh=dp3_pp2 mesh.dp=4", "dp4_pp2"),
        ("mesh.dp=4 mesh=dp3_pp2", "dp4_pp2"),
        ("mesh.pp=2", "pp2"),
        ("mesh=dp3 mesh.pp=2", "dp3_pp2"),
        ("mesh=dp3_pp2 mesh.pp=null", "dp3"),
        ("mesh.stages=[3,2]", "stages3-2"),
        ("mesh=single mesh.stages=[1,3]", "stages1-3"),
        ("mesh.stages=[2,2]", "dp2_pp2"),
        ("mesh=dp2_pp2_tp2", "dp2_pp2_tp2"),
        ("mesh=dp2_pp2 mesh.tp=2", "dp2_pp2_tp2"),
        ("mesh=tp2_fsdp2", "tp2_fsdp2"),
        ("mesh=fsdp2", "fsdp2"),
        ("mesh=stages3-2_tp4", "stages3-2_tp4"),
        ("mesh=dp2_tp2 mesh.tp=null", "dp2"),
    ],
)
def test_mesh_names_and_overrides(overrides: str, name: str) -> None:
    assert settings(*overrides.split()).mesh.shape == MeshShape.parse(name)


@pytest.mark.parametrize("beside", ["mesh=dp2", "mesh=pp2", "mesh.dp=3", "mesh.pp=2", "mesh.dp=1"])
def test_stages_stand_alone(beside: str) -> None:
    with pytest.raises(ConfigError, match="and so do dp and pp"):
        settings(beside, "mesh.stages=[3,2]")


@pytest.mark.parametrize("name", ["dpp3", "dp0", "dp", "dp2-pp2", "dp2_dp3", "dp2_tp0", "dp2_tp2_tp2", "double"])
def test_a_typo_in_a_mesh_name_lists_what_exists(name: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a mesh") as caught:
        settings(f"mesh={name}")
    assert caught.value.where == f"mesh={name}" and "dpN_ppM" in caught.value.exists


@given(dp=st.integers(1, 10**6), pp=st.integers(1, 10**6))
def test_names_are_spelled_out(dp: int, pp: int) -> None:
    rest = {"stages": None, "tp": None, "fsdp": None}
    assert spell_out(f"dp{dp}_pp{pp}") == rest | {"dp": dp, "pp": pp}
    assert spell_out(f"dp{dp}") == rest | {"dp": dp, "pp": None}
    assert spell_out(f"dp{dp}_fsdp{pp}") == rest | {"dp": dp, "pp": None, "fsdp": pp}


@pytest.mark.parametrize(
    ("name", "like"),
    [("dp2_p2", "dp2_pp2"), ("dpp3", "dp3"), ("pd3", "dp3"), ("dp2-pp2", "dp2_pp2"), ("singel", "single"), ("x", "")],
)
def test_the_closest_mesh_is_advised(name: str, like: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(f"mesh={name}")
    assert caught.value.fix == f"mesh={like}" or (not like and "one of these forms" in caught.value.fix)


@pytest.mark.parametrize(
    ("heartbeat", "suspect", "num_workers", "period"),
    [
        (0.1, 2.0, 2, 0.1),
        (0.1, 2.0, 500, 0.1),
        (0.1, 2.0, 1500, 0.3),
        (0.1, 2.0, 100_000, 0.5),
        (0.6, 2.0, 100_000, 0.6),
    ],
)
def test_heartbeats_of_many_workers_are_no_more_than_a_controller_can_hear(
    heartbeat: float, suspect: float, num_workers: int, period: float
) -> None:
    assert Timeouts(heartbeat=heartbeat, suspect=suspect).heartbeat_of(num_workers) == period


def test_help_has_a_line_for_each_setting_and_each_choice() -> None:
    lines = help_text().splitlines()
    for section in (Settings, *GROUPS.values()):
        for declared in declarations(section):
            (line,) = [line for line in lines if line.startswith(f"  {declared.name}=")]
            assert line.endswith(declared.limits.meaning) or (
                declared.limits.choices and declared.limits.meaning in line
            )
    for group in CHOICES:
        assert f"  {group}: {', '.join(choices_of(group))}" in lines
    assert choices_of("mesh") == [*FORMS]
    assert all("got" not in line for line in lines) and max(map(len, lines)) < 200


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        ("mesh.dp=abc", "mesh.dp=abc"),
        ("train.steps=", "train.steps="),
        ("run.dir=", "run.dir="),
        ("mesh.stages=[]", "mesh.stages=[]"),
        ("data=text", "data=text"),
        ("data=bin", "data=bin"),
        ("data=arrow", "data=arrow"),
        ("data=parquet", "data=parquet"),
        ("data=custom", "data=custom"),
        ("train.steps=???", "train.steps=???"),
        ("+chaotic=1", "+chaotic=1"),
        ("timeouts.suspect=0.1", "timeouts.suspect=0.1 timeouts.heartbeat=0.1"),
        ("chaos.events=[]  chaos.rate=-1", "chaos.rate=-1"),
        ("+train.step=1", "+train.step=1"),
        ("trian.steps=3", "trian.steps=3"),
        ("model.args.window=3", "model.args.window=3"),
        ("data=custom data.target=a.B data.args={rows:3}", "data.args={rows:3}"),
        ("~model.args.window", "~model.args.window"),
        ("train=3", "train=3"),
        ("train={steps:3}", "train={steps:3}"),
        ("seed=1,2", "seed=1,2"),
        ("seed", "seed"),
        ("+seed=3", "+seed=3"),
        ("seed=${nowhere}", ""),
    ],
)
def test_words_that_cannot_be_are_refused_by_their_override(overrides: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*overrides.split())
    assert caught.value.where == where


@pytest.mark.parametrize(
    "word",
    ["seed=" + "9" * 5000, "+model.args.sizes=" + "[" * 3000 + "]" * 3000, "mesh=dp" + "9" * 5000],
    ids=["digits", "nested", "mesh"],
)
def test_words_that_are_too_long_to_be_read_are_refused_in_a_few_lines(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(word)
    assert caught.value.where.startswith(word[:100]) and len(str(caught.value)) < 2000


def test_arguments_of_a_users_model() -> None:
    made = settings("model.target=my_file.MyModel", "+model.args.window=8", "+data.args.shift=2").model
    assert made.args == {"window": 8} and made.label == "MyModel"


def test_an_argument_of_a_choice_can_be_removed() -> None:
    assert settings("model=llama_tiny").model.args == {"kv_heads": 2, "tied": True}
    assert settings("model=llama_tiny", "~model.args.kv_heads").model.args == {"tied": True}
    assert settings("~train.steps", "train.seq_len=64").train == TrainSettings(seq_len=64)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("model.layers=2 model=llama_tiny", ("llama_tiny", 2)),
        ("model=llama_tiny model.layers=2", ("llama_tiny", 2)),
        ("model.layers=2", ("gpt_tiny", 2)),
    ],
)
def test_a_value_counts_more_than_a_choice(words: str, values: tuple[str, int]) -> None:
    model = settings(*words.split()).model
    assert (model.name, model.layers) == values


def test_a_setting_may_name_another() -> None:
    assert settings("train.global_batch=8", "train.seq_len=${train.global_batch}").train.seq_len == 8


def test_choices_of_your_own(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: mine\nlayers: 7\n")
    made = settings(f"hydra.searchpath=[file://{tmp_path}]", "model=mine")
    assert (made.model.name, made.model.layers, made.model.target) == ("mine", 7, "gpt")


UNREAD = {
    "optim.momentum=0.5": ("optim.name=adamw", "optim.name=sgd"),
    "optim.momentum=0.9 optim=adamw": ("optim.name=adamw", "optim.name=sgd"),  # the default, and named
    "optim.betas=[0.5,0.6] optim.name=sgd": ("optim.name=sgd", "optim.name=adamw"),
    "optim=sgd ++optim.eps=1e-6": ("optim.name=sgd", "optim.name=adamw"),
    "optim.final_lr_ratio=0.2 optim.schedule=constant": (
        "optim.schedule=constant",
        "optim.schedule=linear or cosine or wsd",
    ),
}


@pytest.mark.parametrize("words", UNREAD)
def test_settings_that_the_optimizer_does_not_read_are_refused(words: str) -> None:
    chosen, readers = UNREAD[words]
    with pytest.raises(ConfigError, match=f"is given with {chosen}, which does not read it") as refused:
        settings(*words.split())
    assert refused.value.rule == f"it is read by {readers}"
    assert refused.value.where.partition("=")[0] in words


@pytest.mark.parametrize(
    "words", ["optim=sgd optim.momentum=0.5", "optim.betas=[0.5,0.6] optim.eps=1e-6", "optim=sgd ~optim.betas"]
)
def test_settings_that_the_optimizer_reads_are_taken(words: str) -> None:
    assert settings(*words.split()).optim


@pytest.mark.parametrize(
    ("words", "chosen", "fix"),
    [
        ("generate.tokens=5", "generate.prompt=null", "leave generate.tokens out, or generate.prompt=TEXT"),
        ("chaos.rate=0.5", "chaos.random=false", "leave chaos.rate out, or chaos=random"),
        ("++emulated.forward_ms=1", "runtime.device=cpu", "leave emulated.forward_ms out, or runtime.device=emulated"),
        (
            "emulated.slow=[{rank:1,speed:0.5}]",
            "runtime.device=cpu",
            "leave emulated.slow out, or runtime.device=emulated",
        ),
        (
            "schedule.f_min=0.8 runtime.device=cuda",
            "schedule.frequency=none",
            "leave schedule.f_min out, or schedule.frequency=nvml",
        ),
        ("schedule.f_margin=0 runtime.device=npu", "schedule.frequency=none", "leave schedule.f_margin out"),
        ("data=bin data.path=a data.cache=b", "data=bin", "leave data.cache out, or data=text"),
        ("data.target=a.B data.cache=b", "data.target=a.B", "leave data.cache out, or data=text"),
        ("mirror.count=0 mirror.scatter=2", "mirror.count=0", "leave mirror.scatter out, or mirror.count=1"),
        (
            "schedule.stages=true schedule.layers=false",
            "schedule.layers=false",
            "leave schedule.stages out, or schedule.layers=true",
        ),
        (
            "elastic.enabled=false schedule.stages=true",
            "elastic.enabled=false",
            "leave schedule.stages out, or elastic.enabled=true",
        ),
        (
            "elastic.enabled=false mirror.count=2",
            "elastic.enabled=false",
            "leave mirror.count out, or elastic.enabled=true",
        ),
        ("data.ahead=2", "data=stdlib", "leave data.ahead out, or data.target=my_file.MyDataset"),
        ("verify.rate=0 verify.action=report", "verify.rate=0", "leave verify.action out, or verify.rate=0.01"),
        (
            "runtime.agents_timeout=5",
            "runtime.rendezvous=null",
            "leave runtime.agents_timeout out, or runtime.rendezvous=HOST:PORT",
        ),
        (
            "runtime.encryption=false",
            "runtime.transport=shm",
            "leave runtime.encryption out, or runtime.transport=tcp",
        ),
    ],
)
def test_settings_that_nothing_reads_are_refused_where_they_are_named(words: str, chosen: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"is given with {chosen}, which does not read it") as refused:
        settings(*words.split())
    assert refused.value.fix == fix and refused.value.where.partition("=")[0] in words


@pytest.mark.parametrize(
    "words",
    [
        "generate.tokens=5 generate.prompt=Once",
        "chaos=random chaos.rate=0.5",
        "runtime.device=emulated emulated.forward_ms=1 schedule.frequency=simulated schedule.f_min=0.8",
        "~generate.tokens ~chaos.rate ~emulated.slow",
        "data=bin data.path=a data.cache=null",
        "data.target=a.B data.ahead=2",
        "schedule.stages=false schedule.layers=false elastic.enabled=false mirror.count=0",
        "mirror.verify_every=5 verify.rate=0 verify.action=report",
        "runtime.encryption=true",
    ],
)
def test_settings_that_something_reads_are_taken(words: str) -> None:
    assert settings(*words.split())


def test_settings_of_a_choice_of_your_own_that_the_optimizer_does_not_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    own = f"hydra.searchpath=[file://{tmp_path}]"
    (tmp_path / "optim" / "mine.yaml").write_text("name: sgd\nmomentum: 0.5\nbetas: [0.9, 0.95]\n")
    assert settings(own, "optim=mine").optim.momentum == 0.5, "betas are as they are by default"
    with pytest.raises(ConfigError, match=r"optim\.momentum=0\.5 is given with optim\.name=adamw"):
        settings(own, "optim=mine", "optim.name=adamw")


def test_nothing_of_hydra_is_left() -> None:
    plain = settings("optim.betas=[0.8,0.9]", "+model.args.sizes=[1,2]").to_dict()
    assert type(plain["model"]["args"]["sizes"]) is list and type(plain["optim"]["betas"]) is list
