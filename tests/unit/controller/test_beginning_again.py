"""A run that begins again: its settings, and what it gives up before that."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaswave_spmd.conf.schema import MeshSettings, Settings
from elaswave_spmd.controller import startup
from elaswave_spmd.controller.outcomes import RestartFrom, RunFinished
from elaswave_spmd.controller.startup import beginning_again
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.run_dir.lock import lock_run_dir
from elaswave_spmd.runtime.processes.stop_signals import StopSignals


def test_faults_of_the_first_step_have_happened_and_those_with_a_rate_go_on() -> None:
    kill = {"step": 1, "kind": "kill", "rank": [1, 2]}
    later = {"step": 2, "kind": "term", "rank": 0}
    wrong = {"step": 1, "kind": "miscompute", "rank": 0, "point": "reduce"}
    events = [kill, later, wrong, {**wrong, "rate": 0.5}]
    settings = Settings.from_dict({"mesh": {"dp": 3}, "chaos": {"events": events}})
    again = beginning_again(settings, RestartFrom(Path("run"), MeshSettings(dp=1), 0, is_begin=True))
    assert [(event.kind, event.step, event.rate) for event in again.chaos.events] == [
        ("term", 2, 0.0),
        ("miscompute", 1, 0.5),
    ]
    assert again.mesh == MeshSettings(dp=1)


def test_faults_at_points_that_one_stage_never_reaches_are_left_out() -> None:
    """The mesh that is left would be refused for them."""
    weights = {"kind": "kill", "rank": 1, "point": "weights"}
    events = [{**weights, "step": 5}, {**weights, "step": 9}, {"step": 9, "kind": "kill", "rank": 0}]
    settings = Settings.from_dict({"mesh": {"pp": 2}, "chaos": {"events": events}})
    one, two = MeshSettings(dp=1), MeshSettings(pp=2)
    again = beginning_again(settings, RestartFrom(Path("run"), one, 4))
    assert [(event.step, event.point) for event in again.chaos.events] == [(9, "any")]
    again.check_rules()
    again = beginning_again(settings, RestartFrom(Path("run"), two, 4))
    assert [(event.step, event.point) for event in again.chaos.events] == [(9, "weights"), (9, "any")]


def test_what_is_given_up_is_removed_under_the_lock_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two lives another command could resume the run, and remove the same at the same time."""
    lives: list[object] = [RestartFrom(tmp_path, MeshSettings(dp=1), 4, doubted=9), RunFinished()]
    removed: list[int] = []

    def discard_after(run_dir: Path, step: int) -> None:
        with pytest.raises(ConfigError, match="is in use by process"):
            lock_run_dir(run_dir)
        removed.append(step)

    monkeypatch.setattr(startup, "discard_after", discard_after)
    monkeypatch.setattr(startup._Lives, "_run_once", lambda *_, **__: lives.pop(0))
    with StopSignals() as signals:
        startup._Lives(Settings(), signals).run(here=False)
        assert removed == [4] and not lives
        lives.append(RestartFrom(tmp_path, MeshSettings(dp=1), 4, doubted=9))
        with lock_run_dir(tmp_path), pytest.raises(ConfigError, match="is in use by process"):
            startup._Lives(Settings(), signals).run(here=False)
    assert removed == [4], "who has the lock does it"
