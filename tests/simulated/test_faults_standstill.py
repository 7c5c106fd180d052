"""A message is lost without a trace: nothing moves, until the controller has all members send again, or ends the run.

Links of the product lose nothing unnoticed, so a lost message stands for a bug: it is what a bug looks like to others.
That nothing else stands still is checked in all runs of the simulated cluster (`SimulatedCluster.run`), and in
schedules by `schedules.judge`, where a message of the controller that is late may be the reason if it is on its way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from elaswave_spmd.controller.failures import FailureHandler
from elaswave_spmd.controller.outcomes import RunStopped
from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.transport.links import CONTROLLER
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.schedules import Outcome, Schedule, cluster_of, judge, run, run_many, undisturbed
from tests.cluster.tiny import TinyRun
from tests.cluster.wires import PUT_OFF, Lateness

RUN = TinyRun(steps=4, microbatches=5)

Drops = Callable[[int, int, Any, int], bool]
"""Whether a message is lost: (sender, receiver, message, its number among those of its kind)."""


class DroppingCluster(SimulatedCluster):
    """Messages are lost, and nobody notices."""

    drops: Drops

    def __init__(self, *args: Any, **options: Any) -> None:
        self.num_dropped = 0
        self._counts: Counter[str] = Counter()
        super().__init__(*args, **options)

    def _is_dropped(self, sender: int, receiver: int, message: Any) -> bool:
        self._counts[type(message).__name__] += 1
        is_dropped = self.drops(sender, receiver, message, self._counts[type(message).__name__])
        self.num_dropped += is_dropped
        return is_dropped

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        if not self._is_dropped(sender, peer, message):
            super().send(sender, peer, message, payload)

    def from_controller(self, rank: int, header: bytes) -> None:
        if not self._is_dropped(CONTROLLER, rank, m.decode(header)):
            super().from_controller(rank, header)


def dropping(drops: Drops, mesh: str = "dp3_pp2", zero: int = 1, **schedule: Any) -> DroppingCluster:
    """A cluster before its first step."""
    cluster = cluster_of(Schedule(0, RUN, mesh, zero, **schedule), kind=DroppingCluster)
    assert isinstance(cluster, DroppingCluster)
    cluster.drops = drops
    return cluster


def assert_sent_again(cluster: DroppingCluster) -> None:
    """It ends with the undisturbed bits, after one standstill."""
    assert Outcome.of(cluster.run(mends=["standstill"])) == undisturbed(RUN)
    (event,) = cluster.standstills
    assert cluster.num_dropped == 1 and not event["again"]
    assert {rank for ranks in event["waits"].values() for rank in ranks} == {*event["ranks"]}


LOST_ONCE: dict[type[m.Message], int] = {
    m.Activation: 2,
    m.ActivationGradient: 2,
    m.PartialSum: 2,
    m.ReducedGradient: 2,
    m.Publish: 1,
    m.Vote: 2,
    m.ValidationLoss: 2,
}
"""Message -> the step of those of which the first is lost."""


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("kind", LOST_ONCE, ids=lambda kind: kind.__name__)
def test_a_message_of_a_worker_that_is_lost_is_sent_again(kind: type[m.Message], zero: int) -> None:
    cluster = dropping(
        lambda _, __, it, ___: (
            isinstance(it, kind) and getattr(it, "step", 0) == LOST_ONCE[kind] and not cluster.num_dropped
        ),
        zero=zero,
    )
    assert_sent_again(cluster)


def test_a_result_that_is_not_complete_is_sent_again() -> None:
    assert_sent_again(dropping(lambda _, __, it, count: isinstance(it, m.Finished) and count == 2))


@pytest.mark.parametrize("kind", ["", "moving", "peers", "miscompute", "controllers"])
def test_no_schedule_with_a_lost_message_changes_a_bit_or_stands_still_twice(kind: str) -> None:
    tally = run_many(range(15), losing=True, **({kind: True} if kind else {}))
    assert not tally.failures, tally.failures
    assert tally.standstills >= 1


def test_who_has_waited_for_others_that_start_has_not_stood_still() -> None:
    """The first mesh is formed when the last of them is given up, after 120 s, and begins then."""
    found = run(Schedule.draw(40109, starting=True))
    assert found.how == "bits", (found.failure, found.detail)


def test_a_message_of_the_first_step_is_waited_for_longer() -> None:
    """As long as a first action may take."""
    cluster = dropping(lambda _, __, it, count: isinstance(it, m.Activation) and count == 1)
    assert_sent_again(cluster)
    assert cluster.standstills[0]["seconds"] == pytest.approx(120.0, abs=1.0)


def test_a_message_of_the_controller_that_is_lost_is_sent_again() -> None:
    cluster = dropping(lambda sender, rank, it, _: isinstance(it, m.Validated) and it.step == 2 and rank == 3)
    assert_sent_again(cluster)
    assert 3 in cluster.standstills[0]["waits"]["the end of validation 2"]


@pytest.mark.parametrize("kind", [m.CheckDigests, m.Addend], ids=lambda kind: kind.__name__)
def test_what_a_checker_waits_for_is_sent_again(kind: type[m.Message]) -> None:
    assert_sent_again(dropping(lambda _, __, it, count: isinstance(it, kind) and count == 40, verify_rate=1.0))


@pytest.mark.parametrize("kind", [m.Fingerprints, m.ReplicasAgree], ids=lambda kind: kind.__name__)
def test_a_comparison_of_replicas_that_does_not_end_is_made_again(kind: type[m.Message]) -> None:
    assert_sent_again(dropping(lambda _, __, it, count: isinstance(it, kind) and count == 9, verify_every=1))


def test_votes_that_are_passed_on_are_sent_again() -> None:
    cluster = dropping(lambda _, __, it, count: isinstance(it, m.Vote) and count == 20, mesh="dp3_pp2", widest=2)
    assert_sent_again(cluster)


def test_a_run_that_stands_still_again_ends_with_the_cause_and_its_state() -> None:
    """No sum of step 3 comes to anybody, whatever is done."""
    cluster = dropping(lambda _, __, it, ___: isinstance(it, m.PartialSum) and it.step == 3, mesh="dp3")
    outcome = cluster.controller.run()
    assert isinstance(outcome, RunStopped) and isinstance(outcome.error, RunError)
    assert [event["again"] for event in cluster.standstills] == [False, True]
    assert "stands still, also after all was sent again" in str(outcome.error)
    assert "after step 2: workers 0-2 wait for votes of step 3" in str(outcome.error)
    newest = cluster.checkpoints.newest
    assert (
        newest is not None and newest.step == 2 and f"Its state after step 2 is in {newest.path}" in str(outcome.error)
    )


def test_a_run_that_stands_still_after_its_last_step_ends() -> None:
    """What was computed cannot be had: worker 1 never says that it has sent all."""
    cluster = dropping(lambda _, __, it, ___: isinstance(it, m.Finished) and it.rank == 1, mesh="dp3")
    outcome = cluster.controller.run()
    assert isinstance(outcome, RunStopped)
    assert "after step 4: workers 0-2 wait for the end of the run, after step 4" in str(outcome.error)


def test_another_step_that_stands_still_later_is_sent_again_as_well() -> None:
    cluster = dropping(
        lambda _, __, it, count: isinstance(it, m.PartialSum) and count in (20, 60), mesh="dp3", checkpoint_every=1
    )
    assert Outcome.of(cluster.run(mends=["standstill"])) == undisturbed(RUN)
    assert [event["again"] for event in cluster.standstills] == [False, False]


def test_a_standstill_that_nobody_asked_for_fails_a_run() -> None:
    """Whatever its bits are. So do messages that are refused; test_forgeries.py has those that are asked for."""
    cluster = dropping(lambda _, __, it, count: isinstance(it, m.PartialSum) and count == 20, mesh="dp3")
    with pytest.raises(AssertionError, match="the run stood still"):
        cluster.run()
    cluster = dropping(lambda *_: False, mesh="dp3")
    cluster.rejected["for no reason"] += 1
    with pytest.raises(AssertionError, match="messages were refused"):
        cluster.run()


def test_a_late_message_excuses_a_standstill_that_it_explains_alone() -> None:
    late = Lateness(PUT_OFF, 0, 0.0)
    schedule = Schedule(0, RUN, "dp3", late=late)
    lost = dropping(lambda _, __, it, count: isinstance(it, m.PartialSum) and count == 20, mesh="dp3", late=late)
    assert judge(schedule, lost, undisturbed(RUN))[1] == "the run stood still"


def test_without_it_the_run_would_stand_still_for_ever() -> None:
    cluster = dropping(lambda _, __, it, count: isinstance(it, m.PartialSum) and count == 20, mesh="dp3")
    with (
        mock.patch.object(FailureHandler, "stands_still", lambda self, found: []),
        pytest.raises(AssertionError, match="nothing moves"),
    ):
        cluster.run()
