"""What becomes of workers that are wrong, and of a run in which nobody can tell who is."""

from __future__ import annotations

import pytest

from elaswave_spmd.conf.schema import CheckpointSettings, Settings, VerifySettings
from elaswave_spmd.controller.actions import Action, End, EvictWorker, GoBack
from elaswave_spmd.controller.outcomes import RunStopped
from elaswave_spmd.controller.verdicts import Verdicts
from elaswave_spmd.errors import ConfigError
from tests.unit.recovery.controller_cases import started


def verdicts(action: str, *, has_gone_back: bool = False) -> Verdicts:
    settings = Settings(verify=VerifySettings(action=action), checkpoint=CheckpointSettings(every=5))
    return Verdicts(settings, started(), has_gone_back=has_gone_back)


@pytest.mark.parametrize("action", ["evict", "rollback"])
def test_only_a_rollback_goes_back_and_only_if_steps_may_be_wrong(action: str) -> None:
    evicted: list[Action] = [EvictWorker(1, "it computed wrongly in step 9")]
    assert verdicts(action).without([1], "it computed wrongly in step 9", 8, []) == evicted
    (found,) = verdicts(action).without([1], "it computed wrongly in step 9", 4, [5, 8])
    if action == "evict":
        assert [found] == evicted
    else:
        assert isinstance(found, GoBack) and (found.newest, found.without) == (4, (1,))
        assert "worker 1: it computed wrongly in step 9; steps 5 to 8 may be wrong" in found.reason


@pytest.mark.parametrize("action", ["evict", "rollback", "report", "stop"])
def test_where_nobody_can_tell_the_run_goes_back_once(action: str) -> None:
    (found,) = verdicts(action).undecided("workers [0, 1] differ", 7)
    if action == "stop":
        assert isinstance(found, End)
    else:
        assert found == GoBack("workers [0, 1] differ", 7, is_undecided=True)
        (found,) = verdicts(action).undecided("workers [0, 1] differ", 7, [2])
        assert found == GoBack("workers [0, 1] differ", 7, (2,), is_undecided=True), "worker 2 does not come along"
    (found,) = verdicts(action, has_gone_back=True).undecided("workers [0, 1] differ", 7)
    assert isinstance(found, End) and isinstance(found.outcome, RunStopped)
    assert str(found.outcome.error) == "workers [0, 1] differ, for the second time"


def test_a_run_that_stops_says_which_steps_may_be_wrong_and_from_where_it_goes_on() -> None:
    (found,) = verdicts("stop").stopped("worker 1 computed wrongly", 8, [])
    assert isinstance(found, End)
    (found,) = verdicts("stop").stopped("worker 1 computed wrongly", 4, [5, 8])
    what = "the run stops (verify.action=stop): worker 1 computed wrongly; steps 5 to 8 may be wrong"
    assert found == GoBack(what, 4, ends=True)
    (found,) = verdicts("stop").undecided("workers [0, 1] differ", -1, [2])
    assert found == GoBack("workers [0, 1] differ", -1, (2,), is_undecided=True, ends=True), (
        "a committed step is doubted"
    )


def test_a_rollback_without_checkpoints_is_refused() -> None:
    with pytest.raises(ConfigError, match="rollback is given without checkpoints"):
        Settings(verify=VerifySettings(action="rollback"))
