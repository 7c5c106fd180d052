"""What a resumed run takes from the run before, and what from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from elaswave_spmd.conf.compose import settings_from
from elaswave_spmd.conf.format_version import FORMAT_VERSION
from elaswave_spmd.conf.resume import saved, words_resuming
from elaswave_spmd.conf.schema import MeshSettings, Settings
from elaswave_spmd.controller.failures import mesh_of
from elaswave_spmd.errors import ConfigError

SAVED = {
    "seed": 5,
    "mesh": {"dp": 2, "pp": 2},
    "sharding": {"name": "zero2"},
    "model": {"target": "mlp", "layers": 3, "args": {"window": 4}},
    "train": {"steps": 50, "global_batch": 8},
    "run": {"dir": "somewhere", "tensorboard": False},
    "chaos": {"events": [{"step": 7, "kind": "kill", "rank": 0}]},
    "checkpoint": {"every": 5},
}


@pytest.fixture
def resume(tmp_path: Path):
    """The settings of a command line that resumes a run with the settings SAVED."""
    (tmp_path / "config.yaml").write_text(f"format: {FORMAT_VERSION}\n" + Settings.from_dict(SAVED).to_yaml())

    def settings(*overrides: str) -> Settings:
        return settings_from([f"train.resume={tmp_path}", *overrides])

    return settings


def test_what_is_not_named_is_as_it_was(resume, tmp_path: Path) -> None:
    found, saved = resume(), Settings.from_dict(SAVED)
    assert found.train.resume == str(tmp_path)
    for name in ("seed", "mesh", "sharding", "model", "data", "optim", "checkpoint", "elastic"):
        assert getattr(found, name) == getattr(saved, name), name
    assert found.train.steps == 50 and found.train.global_batch == 8


def test_a_run_that_has_settings_which_its_optimizer_does_not_read_goes_on(tmp_path: Path) -> None:
    saved = Settings.from_dict({**SAVED, "optim": {"name": "sgd", "eps": 1e-6, "betas": [0.5, 0.6]}})
    (tmp_path / "config.yaml").write_text(f"format: {FORMAT_VERSION}\n" + saved.to_yaml())
    word = f"train.resume={tmp_path}"
    assert settings_from([word]).optim == settings_from([word, "optim.name=sgd"]).optim == saved.optim
    assert settings_from([word, "optim=sgd"]).optim.lr == 0.1
    for named in ("optim.betas=[0.5,0.6]", "optim.eps=1e-6"):
        with pytest.raises(ConfigError, match=r"is given with optim\.name=sgd, which does not read it"):
            settings_from([word, named])


def test_what_only_the_earlier_schedule_reads_is_left_behind(tmp_path: Path) -> None:
    """Nobody has given it to the command that names another one."""
    earlier = {"schedule": "wsd", "decay_steps": 8, "schedule_steps": 50, "warmup_steps": 2}
    saved = Settings.from_dict({**SAVED, "optim": earlier})
    (tmp_path / "config.yaml").write_text(f"format: {FORMAT_VERSION}\n" + saved.to_yaml())
    word = f"train.resume={tmp_path}"
    found = settings_from([word, "optim.schedule=constant"]).optim
    assert (found.schedule, found.decay_steps, found.schedule_steps) == ("constant", None, None)
    assert settings_from([word, "optim.schedule=cosine"]).optim.schedule_steps == 50
    assert settings_from([word]).optim == saved.optim
    with pytest.raises(ConfigError, match=r"optim\.decay_steps=8 is given with optim\.schedule=constant"):
        settings_from([word, "optim.schedule=constant", "optim.decay_steps=8"])


def test_the_directory_and_the_faults_are_not_taken_over(resume) -> None:
    assert resume().run.dir is None and resume().chaos.events == ()
    named = resume("run.dir=elsewhere", "chaos.events=[{step: 9, kind: kill, rank: 1}]")
    assert named.run.dir == "elsewhere" and [event.step for event in named.chaos.events] == [9]


def test_what_is_named_counts(resume) -> None:
    found = resume("mesh=dp3", "sharding=zero1", "checkpoint.every=7", "seed=6", "+model.args.depth=2")
    assert found.mesh == MeshSettings(dp=3) and found.sharding.name == "zero1" and found.seed == 6
    assert found.checkpoint.every == 7 and found.train.steps == 50
    assert found.model.args == {"window": 4, "depth": 2} and found.model.layers == 3


def test_a_mesh_is_named_as_a_whole(resume) -> None:
    assert resume("mesh.stages=[2,1]").mesh.stages == (2, 1)
    assert resume("mesh.dp=3").mesh == MeshSettings(dp=3)


def test_a_group_is_replaced_and_its_settings_stay_on_top(resume) -> None:
    found = resume("model.layers=2", "model=llama_tiny")
    assert found.model.target == "llama" and found.model.layers == 2 and "window" not in found.model.args


@pytest.mark.parametrize("text", ["cost ${x}", "${seed}", "a\\${seed}", "\\\\${seed}"])
def test_a_text_of_a_run_is_the_same_when_it_is_resumed(tmp_path: Path, text: str) -> None:
    folder = tmp_path / text
    folder.mkdir()
    saved = {**SAVED, "generate": {"prompt": text}, "model": {"target": "mlp", "args": {"texts": [text]}}}
    (folder / "config.yaml").write_text(f"format: {FORMAT_VERSION}\n" + Settings.from_dict(saved).to_yaml())
    found = settings_from(words_resuming([], str(folder)))
    assert found.generate.prompt == text and found.model.args == {"texts": [text]}
    assert found.train.resume == str(folder)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "- 1",
        "a: [",
        "a: 2020-13-01",
        "a: " + "[" * 3000 + "]" * 3000,
        f"format: {FORMAT_VERSION}\n2020-01-01: 1",
        f"format: {FORMAT_VERSION}\ntrain: 5",
        f"format: {FORMAT_VERSION}\nmodel: {{target: mlp, args: {{a: &a [1], b: *a}}}}",  # a few more are too many
    ],
    ids=["missing", "empty", "list", "torn", "date", "nested", "name", "group", "alias"],
)
def test_a_directory_without_a_run_is_refused(resume, tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "config.yaml"
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        resume()


def test_a_run_of_a_user_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot read ~nobody-has-this-name/run/config\.yaml"):
        saved("~nobody-has-this-name/run")


@pytest.mark.parametrize(
    ("inside", "what", "fix"),
    [
        ("checkpoints/step_00000020", "a checkpoint", "train.resume={run} train.resume_at=20 run.dir=DIR; "),
        ("checkpoints/step_20/", "a checkpoint", "train.resume={run} train.resume_at=20 run.dir=DIR; "),
        ("checkpoints/step_00000020/manifest.json", "a checkpoint", "train.resume={run} train.resume_at=20 run.dir="),
        ("checkpoints", "a part", "train.resume={run}"),
        ("config.yaml", "a part", "train.resume={run}"),
    ],
)
def test_a_part_of_a_run_is_told_with_the_settings_that_resume_it(
    resume, tmp_path: Path, inside: str, what: str, fix: str
) -> None:
    (tmp_path / "checkpoints" / "step_00000020").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        settings_from([f"train.resume={tmp_path / inside}"])
    assert caught.value.what == f"train.resume={tmp_path / inside} is {what} of the run {tmp_path}"
    assert caught.value.fix.startswith(fix.format(run=tmp_path))


def test_a_setting_that_is_unknown_is_refused(resume, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"format": FORMAT_VERSION, "train": {"speed": 3}}))
    with pytest.raises(ConfigError, match=r"train\.speed"):
        resume()


@pytest.mark.parametrize(
    ("first_line", "named"),
    [
        (f"format: {FORMAT_VERSION + 1}\n", f"format version {FORMAT_VERSION + 1},"),
        ("format: '1'\n", "format version 1,"),
        ("", "no format version,"),
    ],
)
def test_a_run_of_another_format_version_is_refused_with_both_named(
    resume, tmp_path: Path, first_line: str, named: str
) -> None:
    (tmp_path / "config.yaml").write_text(first_line + Settings.from_dict(SAVED).to_yaml())
    with pytest.raises(ConfigError) as caught:
        resume()
    assert named in caught.value.what and caught.value.what.endswith(f"format version {FORMAT_VERSION}")
    assert caught.value.where == f"train.resume={tmp_path}"


@pytest.mark.parametrize(
    ("workers", "stages", "mesh"),
    [
        (1, 1, MeshSettings(dp=1, pp=1)),
        (1, 3, MeshSettings(dp=1, pp=1)),
        (3, 2, MeshSettings(stages=(2, 1))),
        (4, 2, MeshSettings(dp=2, pp=2)),
        (5, 3, MeshSettings(stages=(2, 2, 1))),
    ],
)
def test_the_workers_that_are_left_make_a_mesh(workers: int, stages: int, mesh: MeshSettings) -> None:
    assert mesh_of(workers, MeshSettings(pp=stages)) == mesh and mesh.shape.num_workers == workers
    islands = mesh_of(workers, MeshSettings(pp=stages, tp=2, fsdp=3)).shape
    assert islands.stage_sizes == mesh.shape.stage_sizes and islands.island_size == 6


def test_the_command_after_one_that_has_died_goes_on_in_the_directory_of_the_run_with_the_same_words() -> None:
    words = ["mesh=dp2", "run.dir=a", "train.resume=b", "train.resume_at=3", "run.display=plain", "chaos=random"]
    assert words_resuming(words, "/runs/my run") == ["mesh=dp2", "run.display=plain", "train.resume=/runs/my run"]
    on_ray = ["runtime.launcher=ray", "train.steps=7", "chaos.events=[{step: 2, kind: kill, rank: 0}]", "run.dir=a"]
    assert words_resuming(on_ray, "/runs/a") == ["runtime.launcher=ray", "train.steps=7", "train.resume=/runs/a"]
    assert words_resuming(["optim.lr=1e-3"], "/runs/a") == ["optim.lr=1e-3", "train.resume=/runs/a"]


def test_a_command_that_has_died_may_have_come_before_its_other_learning_rates(resume, tmp_path: Path) -> None:
    words = [f"train.resume={tmp_path}", "train.reschedule=true", "optim.lr=2e-3"]
    again = words_resuming(words, str(tmp_path))
    assert settings_from(again) == settings_from(words) and settings_from(again).train.reschedule


@pytest.fixture
def begun_from(tmp_path: Path):
    """What `model.init_from` is when a run that has begun with weights `found` is resumed with words."""

    def init_from(found: str, *words: str) -> str | None:
        saved = {**SAVED, "model": {**SAVED["model"], "init_from": found}}
        (tmp_path / "config.yaml").write_text(f"format: {FORMAT_VERSION}\n" + Settings.from_dict(saved).to_yaml())
        return settings_from([*words, f"train.resume={tmp_path}"]).model.init_from

    return init_from


@pytest.mark.parametrize("part", ["weights.safetensors", "checkpoints/step_00000012"])
def test_a_command_that_began_with_the_weights_of_a_run_may_be_repeated(begun_from, part: str) -> None:
    for words in (
        words_resuming(["model.init_from=first", "run.dir=a"], "/runs/a")[:-1],  # those of a supervisor
        ["model.init_from=first"],
        ["model.init_from=first/"],
        [f"model.init_from={Path('first').absolute()}"],
        ["model=gpt_tiny", "model.init_from=first"],
        [f"model.init_from=first/{part}"],
        [],
    ):
        assert begun_from(f"first/{part}", *words) == f"first/{part}", words


def test_weights_that_a_run_has_not_begun_with_stay_another_setting(begun_from) -> None:
    for found, other in (
        ("first/weights.safetensors", "second"),
        ("first/weights.safetensors", "first/checkpoints/step_00000012"),
        ("first/checkpoints/step_00000012", "first/checkpoints"),
        ("first/model.safetensors", "first"),
        ("runs/first/weights.safetensors", "runs"),
    ):
        assert begun_from(found, f"model.init_from={other}") == other
    assert begun_from("first/weights.safetensors", "model.init_from=null") is None
