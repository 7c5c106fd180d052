"""Which runs a command adopts whose workers live on machines with agents, and what it leaves if it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.conf.format_version import FORMAT_FIELD, FORMAT_VERSION
from elaswave_spmd.conf.resume import CONFIG
from elaswave_spmd.conf.schema import AUTO, RAY, MeshSettings, Settings
from elaswave_spmd.controller import orphaned_run as orphaned_run_module
from elaswave_spmd.controller.launching import data_spec
from elaswave_spmd.controller.orphaned_run import adoption_record, find_orphaned_run
from elaswave_spmd.controller.run_fingerprint import identity_of
from elaswave_spmd.data import prepare_data
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.run_dir.directory import EVENTS, METRICS
from elaswave_spmd.run_dir.journal import Journal
from elaswave_spmd.run_dir.lock import LOCK
from elaswave_spmd.run_dir.manifest import layout_fingerprint
from elaswave_spmd.runtime.transport.credentials import RunToken
from elaswave_spmd.worker.plan_run import plan_run
from tests.unit.controller.made_up_workers import settings_in


def about(settings: Settings, folder: Path) -> dict[str, Any]:
    """What the first line of a life of the run has for the next controller."""
    return {"credentials": RunToken.make().to_dict(), **adoption_record(settings, str(folder / "gone"), 0)}


KILLED = "123456789\n"
"""What a controller that was killed has left in the file of its lock."""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a run with agents whose controller was killed. No worker is left on its machine."""
    fields = settings_in(tmp_path, timeouts={"adopt": 100.0}).to_dict()
    run = tmp_path / "run"
    agents = {"rendezvous": "127.0.0.1:1", "agents": 1, "transport": "tcp", "token_file": "token"}
    fields["runtime"] = {**fields["runtime"], **agents}
    fields["train"] = {**fields["train"], "resume": str(run)}
    found = Settings.from_dict(fields)
    run.mkdir()
    with Journal(run) as journal:
        journal.append(1, 0, "start", run="abc", **about(found, tmp_path))
        journal.append(1, 1, "prepare", after=3, next_rank=7)
    for name in (METRICS, EVENTS):
        (run / name).touch()
    (run / LOCK).write_text(KILLED)
    return found


def test_where_a_controller_was_killed_workers_of_agents_may_live(settings: Settings, tmp_path: Path) -> None:
    orphaned = find_orphaned_run(settings)
    assert orphaned is not None and orphaned.fork_server is None
    adoption = orphaned.adoption
    assert adoption.has_agents and (adoption.generation, adoption.next_rank, adoption.made) == (2, 7, ())
    assert (tmp_path / "run" / LOCK).read_text() != KILLED
    orphaned.give_back()
    assert (tmp_path / "run" / LOCK).read_text() == KILLED, "the next one finds them as well"
    again = find_orphaned_run(settings)
    assert again is not None
    again.start.life_began()
    again.give_back()
    assert (tmp_path / "run" / LOCK).read_text() == "", "their life is this one's to end"


def test_a_controller_that_has_ended_has_taken_its_agents_along(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / LOCK).write_text("")
    assert find_orphaned_run(settings) is None and not capsys.readouterr().out


def test_a_run_on_one_machine_had_no_agents(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is resumed on several."""
    with Journal(tmp_path / "run") as journal:
        alone = {**about(settings, tmp_path), "settings": "of another command"}
        del alone["credentials"]
        journal.append(2, 0, "start", run="abc", **alone)
    assert find_orphaned_run(settings) is None and not capsys.readouterr().out


def test_on_ray_the_next_controller_may_be_at_another_place(settings: Settings, tmp_path: Path) -> None:
    """Its supervisor has told the agents; how many it waits for is what it has found."""

    def at(place: str, agents: int, launcher: str) -> Settings:
        runtime = replace(settings.runtime, rendezvous=place, agents=agents, launcher=launcher)
        return replace(settings, runtime=runtime)

    with Journal(tmp_path / "run") as journal:
        journal.append(2, 0, "resume", run="abc", **about(at("127.0.0.1:1", 4, RAY), tmp_path))
    orphaned = find_orphaned_run(at("127.0.0.1:2", 3, RAY))
    assert orphaned is not None
    orphaned.give_back()
    assert find_orphaned_run(at("127.0.0.1:1", 4, AUTO)) is None, "nobody tells them"


def test_workers_elsewhere_with_other_settings_are_told_of(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody knows whether there are any, so it is no error; their agents have them save their state."""
    other = replace(settings, optim=replace(settings.optim, lr=settings.optim.lr / 2))
    assert find_orphaned_run(other) is None
    assert "started with other settings, and are not adopted: they save their state" in capsys.readouterr().out
    assert (tmp_path / "run" / LOCK).read_text() == KILLED, "with the settings of the run they can still be adopted"
    orphaned = find_orphaned_run(settings)
    assert orphaned is not None
    orphaned.give_back()


# ---- the mesh: that of the workers, whatever it was before


def on(settings: Settings, mesh: MeshSettings) -> Settings:
    return replace(settings, mesh=mesh)


THEIRS, OTHER, EARLIER = MeshSettings(dp=2), MeshSettings(dp=3), MeshSettings(dp=5)


@pytest.fixture
def on_two(settings: Settings, tmp_path: Path) -> Settings:
    """Of a run whose workers train on less than it had earlier."""
    with Journal(tmp_path / "run") as journal:
        for life, mesh in ((2, EARLIER), (3, THEIRS)):
            journal.append(life, 0, "begin", run="abc", **about(on(settings, mesh), tmp_path))
    return on(settings, THEIRS)


def test_another_mesh_is_refused_while_workers_live(
    on_two: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphaned_run_module, "workers_live", lambda _: True)
    with pytest.raises(ConfigError, match="still live, on the mesh dp2, and another mesh is named, dp3") as refused:
        find_orphaned_run(on(on_two, OTHER))
    assert "has the mesh of the workers" in refused.value.rule and refused.value.fix.startswith("no mesh")
    assert (tmp_path / "run" / LOCK).read_text() == KILLED, "without it they can still be adopted"


def test_where_they_may_live_elsewhere_they_are_told_of(on_two: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_orphaned_run(on(on_two, OTHER)) is None
    assert "not adopted: they save their state" in capsys.readouterr().out


def test_the_mesh_of_the_begin_or_of_an_earlier_life_is_no_other_one(
    on_two: Settings, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Config.yaml has the one and a supervisor's command names the other; the run has begun again on less since."""
    text = on(settings, MeshSettings(dp=4)).to_yaml()
    (tmp_path / "run" / CONFIG).write_text(f"{FORMAT_FIELD}: {FORMAT_VERSION}\n{text}")
    for mesh in (EARLIER, MeshSettings(dp=4), MeshSettings(stages=(4,))):
        orphaned = find_orphaned_run(on(on_two, mesh))
        assert orphaned is not None and orphaned.settings.mesh == THEIRS
        orphaned.give_back()
        says = f"its mesh is theirs, dp2, and not {mesh.shape.name}, as earlier"
        assert says in capsys.readouterr().out


def test_nothing_is_said_of_the_mesh_that_they_have(on_two: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    for mesh in (THEIRS, MeshSettings(stages=(2,))):
        orphaned = find_orphaned_run(on(on_two, mesh))
        assert orphaned is not None and not capsys.readouterr().out
        orphaned.give_back()


# ---- what its files say now


def test_a_plan_of_another_model_or_of_other_data_than_the_workers_have_is_refused(
    settings: Settings, tmp_path: Path
) -> None:
    """Settings name files, which somebody may edit while a run goes on."""
    data = prepare_data(data_spec(settings))
    plan = plan_run(settings, data)
    begun = {"identity": identity_of(settings, data), "layout": layout_fingerprint(plan.description.layout)}
    with Journal(tmp_path / "run") as journal:
        journal.append(2, 0, "start", run="abc", **begun, **about(settings, tmp_path))
    orphaned = find_orphaned_run(settings)
    assert orphaned is not None
    orphaned.check_plan(plan)
    wider = plan_run(replace(settings, model=replace(settings.model, d_model=16)), data)
    with pytest.raises(ConfigError, match=r"layout\.layers\[0\]\.parameters\[0\]\.shape: saved .* now ") as refused:
        orphaned.check_plan(wider)
    assert refused.value.where == f"train.resume={tmp_path / 'run'}" and "still live" in refused.value.fix
    with pytest.raises(ConfigError, match=r"data\.sha256: saved "):
        orphaned.check_plan(replace(plan, data=replace(data, sha256="of other text")))
    orphaned.give_back()
