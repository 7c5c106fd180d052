"""Replicas of which one is wrong: found before anything that came of it is committed (docs/protocol.md, H1 to H4)."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.controller_protocol import Policy
from tests.cluster.faults import Fault
from tests.cluster.processes import LostStateError
from tests.simulated.bits_cases import MirroredCluster, Run, expected, one_thread, outcome

RUN = Run(microbatches=5, steps=6)


def update(rank: int, count: int = 1, step: int = 3) -> Fault:
    """One bit of a worker's state is wrong: of the `count`-th page range that it updates in the step."""
    return Fault(step, "miscompute", rank, "apply", count)


def said(cluster: MirroredCluster, kind: str) -> list[dict[str, Any]]:
    return [dict(fields) for found, fields in cluster.events if found == kind]


@pytest.mark.parametrize("action", ["evict", "report"])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("mesh", "zero", "mirrors", "dtype"),
    [
        ("dp3", 0, 1, "fp32"),
        ("dp3", 1, 2, "fp32"),
        ("dp4", 2, 2, "bf16"),
        ("dp4", 3, 2, "fp32"),
        ("dp2_pp2", 1, 2, "bf16"),
        ("stages1-3", 3, 2, "fp32"),
    ],
)
@one_thread()
def test_of_three_the_odd_one_is_wrong(mesh: str, zero: int, mirrors: int, dtype: str, rank: int, action: str) -> None:
    run = Run(model="gpt_tied", microbatches=5, steps=6, dtype=dtype)
    for count in (1, 2):
        cluster = MirroredCluster(
            run,
            mesh,
            zero,
            faults=[update(rank, count)],
            verify_every=1,
            seed=count,
            policy=Policy(mirrors),
            action=action,
        )
        found = cluster.run()
        assert outcome(found) == expected(run) and cluster.plan.num_injected == 1
        (event,) = said(cluster, "corrupt")
        assert (event["ranks"], event["step"], event["tensor"]) == ([rank], 3, "state")
        assert event["unsure_steps"] == [] and event["checked"] == 2
        lost = [r for begun in found.epochs for r, kind in begun.kinds.items() if kind == "fail"]
        assert lost == ([rank] if action == "evict" else [])
        assert found.epochs[0].version == 3, "nothing of step 4 is committed before"


@pytest.mark.parametrize("step", [1, 5, 6])
@one_thread()
def test_also_after_the_first_step_at_a_validation_and_after_the_last_step(step: int) -> None:
    run = Run(microbatches=5, steps=6)
    cluster = MirroredCluster(run, "dp3", 1, faults=[update(2, 1, step)], verify_every=1, policy=Policy(2))
    assert outcome(cluster.run()) == expected(run) and [e["step"] for e in said(cluster, "corrupt")] == [step]


TWO_COPIES = pytest.mark.parametrize(("mesh", "zero", "mirrors"), [("dp2", 0, 1), ("dp2", 1, 1), ("dp4", 2, 1)])
UNDECIDED = r"workers \d, \d have different state after step 3.* nothing shows which of them is wrong"


@TWO_COPIES
@one_thread()
def test_of_two_nobody_can_tell_and_without_checkpoints_the_run_ends(mesh: str, zero: int, mirrors: int) -> None:
    cluster = MirroredCluster(RUN, mesh, zero, faults=[update(1)], verify_every=1, policy=Policy(mirrors))
    with pytest.raises(AssertionError, match=f"{UNDECIDED}; the run ends, since there is no checkpoint of step 2"):
        cluster.run()
    (event,) = said(cluster, "mismatch")
    assert (
        1 in event["ranks"]
        and (event["step"], event["ballot"]) == (3, [1, 0])
        and cluster.result.losses == list(expected(RUN).losses[:3])
    )


@pytest.mark.parametrize(("every", "back"), [(1, 2), (2, 2), (4, 0)])
@TWO_COPIES
@one_thread()
def test_where_nobody_can_tell_the_run_goes_back_once(
    mesh: str, zero: int, mirrors: int, every: int, back: int
) -> None:
    """To the newest checkpoint whose replicas were the same, or to its begin if there is none yet."""
    cluster = MirroredCluster(
        RUN, mesh, zero, faults=[update(1)], verify_every=1, policy=Policy(mirrors), checkpoint_every=every
    )
    assert outcome(cluster.run()) == expected(RUN) and cluster.result.restarts == [back]
    (event,) = said(cluster, "rollback")
    assert (event["step"], event["given_up"], event["ranks"]) == (back, 3, [])
    assert event["seconds"] > 0
    faults = [update(1), update(0, step=5)]
    cluster = MirroredCluster(
        RUN, mesh, zero, faults=faults, verify_every=1, policy=Policy(mirrors), checkpoint_every=every
    )
    with pytest.raises(AssertionError, match=UNDECIDED.replace("3", "5") + ", for the second time"):
        cluster.run()
    assert len(cluster.result.restarts) == 1


@one_thread()
def test_to_stop_is_to_begin_nothing_again() -> None:
    cluster = MirroredCluster(RUN, "dp2", 1, faults=[update(1)], verify_every=1, checkpoint_every=1, action="stop")
    back_to = "a run that is resumed goes back to .*/step_00000002"
    with pytest.raises(AssertionError, match=f"{UNDECIDED}; {back_to}$"):
        cluster.run()
    assert cluster.result.restarts == [] and [event["step"] for event in said(cluster, "rollback")] == [2]
    cluster = MirroredCluster(RUN, "dp3", 1, faults=[update(1)], verify_every=1, policy=Policy(2), action="stop")
    with pytest.raises(AssertionError, match="worker 1 has wrong state after step 3"):
        cluster.run()


@one_thread()
def test_where_nothing_compares_replicas_a_wrong_one_changes_the_run() -> None:
    cluster = MirroredCluster(RUN, "dp3", 1, faults=[update(1)], policy=Policy(2))
    assert outcome(cluster.run()) != expected(RUN) and cluster.events == []


@one_thread()
def test_steps_between_two_comparisons_may_be_wrong_and_are_told() -> None:
    """Versions 3 and 7 are compared. The update of step 4 is wrong, so what steps 5 to 7 computed may be."""
    run = Run(microbatches=5, steps=8)
    cluster = MirroredCluster(run, "dp3", 1, faults=[update(1, step=4)], verify_every=4, policy=Policy(2))
    found = cluster.run()
    (event,) = said(cluster, "corrupt")
    assert (event["step"], event["checked"], event["unsure_steps"]) == (7, 3, [5, 7])
    assert found.losses[:4] == list(expected(run).losses[:4]) and outcome(found) != expected(run)


@pytest.mark.parametrize(("saved", "back"), [(1, 4), (2, 4), (4, 4), (8, 0)])
@one_thread()
def test_a_rollback_is_to_before_the_steps_that_may_be_wrong(saved: int, back: int) -> None:
    """The update of step 5 is wrong. State that is saved is compared: versions 4 and 6 or 8 show it."""
    run = Run(microbatches=5, steps=10)
    cluster = MirroredCluster(
        run,
        "dp3",
        1,
        faults=[update(1, step=5)],
        verify_every=9,
        policy=Policy(2),
        checkpoint_every=saved,
        action="rollback",
    )
    found = cluster.run()
    assert outcome(found) == expected(run)
    (event,) = said(cluster, "corrupt")
    if event["unsure_steps"]:
        (rollback,) = said(cluster, "rollback")
        assert found.restarts == [rollback["step"]] == [back] and rollback["ranks"] == [1]
        assert rollback["given_up"] == event["step"] == event["unsure_steps"][1]
    else:
        assert saved == 1 and found.restarts == [] and found.epochs[0].kinds == {1: "fail"}


@pytest.mark.parametrize("action", ["evict", "report"])
@one_thread()
def test_what_a_wrong_replica_has_saved_is_no_checkpoint(action: str) -> None:
    """State that is saved is compared, whatever `mirror.verify_every` is."""
    cluster = MirroredCluster(
        RUN, "dp3", 1, faults=[update(0, step=2)], verify_every=5, checkpoint_every=2, policy=Policy(2), action=action
    )
    assert outcome(cluster.run()) == expected(RUN)
    assert [(e["ranks"], e["step"]) for e in said(cluster, "corrupt")] == [([0], 2)]
    assert [e["step"] for e in said(cluster, "checkpoint")] == [4]
    (lost,) = said(cluster, "checkpoint_lost")
    assert (lost["step"], lost["ballot"]) == (2, [1, 0]) == (2, said(cluster, "corrupt")[0]["ballot"])


@pytest.mark.parametrize("seed", range(8))
@one_thread()
def test_comparisons_change_no_bit_through_losses_and_joins(seed: int) -> None:
    faults = [Fault(2, "kill", 1, "backward"), Fault(3, "join", 0, "forward"), Fault(4, "stop", 2, "norm")]
    cluster = MirroredCluster(RUN, "dp4", seed % 4, faults=faults, verify_every=1, seed=seed, policy=Policy(2))
    assert outcome(cluster.run()) == expected(RUN) and said(cluster, "corrupt") == said(cluster, "mismatch") == []


def damage(rank: int, step: int = 4) -> Fault:
    """A bit of a worker's state flips, before the next update."""
    return Fault(step, "corrupt", rank, "apply")


@one_thread()
def test_damaged_state_is_not_what_a_new_mirror_learns_when_the_only_one_is_lost() -> None:
    """Worker 1 has the mirror of worker 0's page: without it nobody has that state any more, and the run says so.

    The bit flips when another worker is to learn the page, and the next update finds it before that is sent.
    """
    cluster = MirroredCluster(RUN, "dp4", 1, faults=[Fault(4, "kill", 1, "backward"), damage(0)], verify_every=1)
    with pytest.raises(LostStateError, match="all replicas of 1 page ranges are lost"):
        cluster.run()


class Unheard(MirroredCluster):
    """Learners of the first change do not report that they have caught up."""

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        if not (isinstance(message, m.CaughtUp) and message.epoch == 1 and message.rank in (2, 3)):
            super().send(sender, peer, message, payload)


@one_thread()
def test_a_learner_that_gives_up_damaged_state_is_sent_it_again() -> None:
    """It had it all, but is still a learner, and its primary had sent that state."""
    run = Run(microbatches=5, steps=12)
    faults = [Fault(4, "kill", 1, "backward"), damage(2, 6)]
    cluster = Unheard(run, "dp4", 1, faults=faults, verify_every=1)
    assert outcome(cluster.run()) == expected(run)
    assert [kept.rank for kept in cluster.heard if isinstance(kept, m.Damaged)] == [2]
    assert cluster.protocol.settled
