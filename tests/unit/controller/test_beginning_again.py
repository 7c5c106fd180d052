"""The settings of a run that begins again as it did, since no step was committed."""

from __future__ import annotations

from pathlib import Path

from elaswave_spmd.conf.schema import MeshSettings, Settings
from elaswave_spmd.controller.outcomes import RestartFrom
from elaswave_spmd.controller.startup import beginning_again


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
