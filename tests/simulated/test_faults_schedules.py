"""Random schedules of faults: a seeded part of what `python -m tests.cluster.schedules` runs by thousands."""

from __future__ import annotations

import pytest

from tests.cluster.faults import RECEIVER, SENDER, Fault, MessageFault, ThenFault
from tests.cluster.link_breaks import RECONFIGURED, LinkBreak
from tests.cluster.schedules import Schedule, run, run_many
from tests.cluster.tiny import TinyRun
from tests.cluster.wires import Lateness

CHUNK = 20  # of each kind; `make golden` runs 2,000 more
# Failures that long searches have found, and that are mended: how the schedule ends, and the schedule.
FAILED_ONCE = {
    "state at the version of a checkpoint, for which nobody votes, was refused by the workers that were to learn it": (
        "bits",
        Schedule(
            seed=0,
            run=TinyRun(steps=6),
            mesh="dp6",
            checkpoint_every=2,
            verify_rate=1.0,
            faults=(
                Fault(4, "kill", 0, "backward"),
                ThenFault("kill", "mirror", 0),
                ThenFault("kill", "any", 60),
            ),
        ),
    ),
    "a learner of the loss page alone, which was a version behind, could not vote with the loss": (
        "lost",
        Schedule(
            seed=539,
            run=TinyRun(tied=True, dtype="bf16", microbatches=4),
            mesh="stages1-3",
            zero=3,
            scatter=2,
            hosts=2,
            faults=(
                MessageFault("kill", "Vote", SENDER, True, 14),
                MessageFault("kill", "Finished", SENDER, True, 1),
                MessageFault("kill", "StepReport", SENDER, True, 3),
            ),
        ),
    ),
    "a reduced gradient was dropped that was needed when the worker that had applied it was lost": (
        "bits",
        Schedule(
            seed=103745,
            run=TinyRun(blocks=2, tied=True, steps=3),
            mesh="dp2_pp2",
            zero=0,
            faults=(
                MessageFault("kill", "Activation", SENDER, False, 6),
                MessageFault("stop", "Reconfigure", RECEIVER, True, 1, turns=5),
            ),
        ),
    ),
    "a saved forward through the layers of an older stage was planned with, as a change overtook the one before": (
        "bits",
        Schedule(
            seed=151,
            run=TinyRun(blocks=2, microbatches=5, steps=4),
            mesh="pp3",
            mirror_count=2,
            scatter=2,
            uneven=True,
            faults=(
                Fault(4, "kill", 2, "weights", 3, 50),
                Fault(1, "kill", 2, "forward", 4, 50),
                MessageFault("kill", "ActivationGradient", RECEIVER, False, 11, turns=1),
            ),
            late=Lateness("backward", 30, 0.0, limits=152),
            breaks=(
                LinkBreak("Vote", 2, "all"),
                LinkBreak(RECONFIGURED, 4, "both"),
                LinkBreak("PartialSum", 24, "one"),
            ),
        ),
    ),
}


def test_no_schedule_of_faults_changes_a_bit_or_gets_stuck() -> None:
    """`make golden` runs the first 2,000 of them."""
    tally = run_many(range(2000, 2000 + CHUNK))
    assert tally.failures == {}
    assert tally.injected > CHUNK and tally.ends["bits"] > CHUNK // 2, "faults did happen, and runs came to their ends"


@pytest.mark.parametrize(("moving", "grouped"), [(False, False), (True, False), (False, True)])
def test_a_run_that_has_lost_state_begins_again_from_a_checkpoint(moving: bool, grouped: bool) -> None:
    """The controller ends with RestartFrom, and the run goes on from there, to the undisturbed bits."""
    tally = run_many(range(CHUNK), moving=moving, grouped=grouped, checkpoints=True)
    assert tally.failures == {}
    assert tally.restarts > CHUNK // 10, f"{tally.restarts} restarts"


@pytest.mark.parametrize("moving", [False, True])
def test_workers_that_live_are_taken_for_lost(moving: bool) -> None:
    tally = run_many(range(CHUNK), moving=moving, silent=True)
    assert tally.failures == {}
    assert tally.ends["bits"] > CHUNK // 2


@pytest.mark.parametrize("checkpoints", [False, True])
def test_workers_are_lost_while_they_start(checkpoints: bool) -> None:
    """At first, and, with checkpoints, when the run begins again; replacements and spares are lost as well."""
    tally = run_many(range(CHUNK), checkpoints=checkpoints, starting=True)
    assert tally.failures == {}
    assert tally.injected > CHUNK and tally.ends["bits"] > CHUNK // 2
    assert not checkpoints or tally.restarts > CHUNK // 10


@pytest.mark.parametrize(
    ("moving", "grouped", "checkpoints"),
    [(False, False, False), (True, False, False), (False, True, False), (False, False, True)],
)
def test_some_parameters_are_frozen(moving: bool, grouped: bool, checkpoints: bool) -> None:
    tally = run_many(range(CHUNK), moving=moving, grouped=grouped, checkpoints=checkpoints, frozen=True)
    assert tally.failures == {}
    assert tally.injected > CHUNK and tally.ends["bits"] > CHUNK // 2


@pytest.mark.parametrize(
    ("moving", "checkpoints", "frozen", "miscompute"),
    [(False, False, False, False), (True, False, True, False), (False, True, False, False), (True, False, False, True)],
)
def test_small_layers_are_cut_together(moving: bool, checkpoints: bool, frozen: bool, miscompute: bool) -> None:
    """A layer may lie on fewer workers than its stage has, whole on one; later meshes cut it over all of them."""
    tally = run_many(
        range(CHUNK), joined=True, moving=moving, checkpoints=checkpoints, frozen=frozen, miscompute=miscompute
    )
    assert tally.failures == {}
    assert tally.injected > CHUNK and tally.ends["bits"] > CHUNK // 2


@pytest.mark.parametrize(
    ("moving", "grouped", "checkpoints", "frozen", "miscompute"),
    [
        (False, False, False, False, False),
        (True, False, True, False, False),
        (False, True, False, True, False),
        (False, False, False, False, True),
    ],
)
def test_steps_are_interrupted_between_the_two_parts_of_backwards(
    moving: bool, grouped: bool, checkpoints: bool, frozen: bool, miscompute: bool
) -> None:
    tally = run_many(
        range(10, 10 + CHUNK),  # of the first ten none with checks asks for weight gradients alone
        moving=moving,
        grouped=grouped,
        checkpoints=checkpoints,
        frozen=frozen,
        miscompute=miscompute,
        late=True,
    )
    assert tally.failures == {}
    assert tally.injected > CHUNK and tally.ends["bits"] > CHUNK // 2
    assert tally.put_off and tally.weights_only, "reports did name weight gradients, and plans asked for them alone"


@pytest.mark.parametrize(
    ("moving", "grouped", "checkpoints", "miscompute", "late"),
    [
        (False, False, False, False, False),
        (True, False, True, False, False),
        (False, True, False, False, True),
        (False, False, False, True, False),
    ],
)
def test_votes_are_passed_on(moving: bool, grouped: bool, checkpoints: bool, miscompute: bool, late: bool) -> None:
    """In two or three rounds, as on meshes of hundreds of workers and more."""
    tally = run_many(
        range(CHUNK),
        moving=moving,
        grouped=grouped,
        checkpoints=checkpoints,
        miscompute=miscompute,
        late=late,
        votes=True,
    )
    assert tally.failures == {}
    assert tally.injected > CHUNK and tally.ends["bits"] > CHUNK // 2


@pytest.mark.parametrize(
    ("moving", "grouped", "checkpoints", "frozen", "late", "miscompute"),
    [
        (False, False, False, False, False, False),
        (True, False, True, False, False, False),
        (False, True, False, True, False, False),
        (True, False, False, False, True, False),
        (False, False, False, False, False, True),
        (True, False, False, False, False, True),
    ],
)
def test_workers_have_links_to_their_peers_alone(
    moving: bool, grouped: bool, checkpoints: bool, frozen: bool, late: bool, miscompute: bool
) -> None:
    """As on meshes of more than 32 workers. A message to anybody else is a failure (`meets_stranger`).

    With `miscompute` the inputs of checked micro-batches and the gradients of checked sums go to other peers as well.
    """
    tally = run_many(
        range(CHUNK),
        moving=moving,
        grouped=grouped,
        checkpoints=checkpoints,
        frozen=frozen,
        late=late,
        miscompute=miscompute,
        peers=True,
    )
    assert tally.failures == {}
    assert tally.injected > CHUNK and tally.ends["bits"] > CHUNK // 2
    # With checks the stages before and after are peers as well.
    assert tally.strangers > (CHUNK // 2 if miscompute else CHUNK), "not everybody had a link to everybody"


@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"moving": True, "late": True},
        {"grouped": True, "miscompute": True},
        {"paired": True, "checkpoints": True},
        {"peers": True, "moving": True},
        {"votes": True, "late": True},
        {"controllers": True, "starting": True},
        {"silent": True, "frozen": True},
        {"relayed": True},
        {"relayed": True, "moving": True},
    ],
    ids=lambda kinds: ", ".join(kinds) or "plain",
)
def test_links_are_lost_between_living_workers(kinds: dict[str, bool]) -> None:
    """C11: nobody is lost by it, but for an end of one that is lost again."""
    tally = run_many(range(30), links=True, **kinds)
    assert tally.failures == {}
    assert tally.lost_links > 30 and tally.ends["bits"] > 10


@pytest.mark.parametrize(
    "kinds",
    [{}, {"grouped": True}, {"moving": True, "late": True}, {"checkpoints": True}, {"silent": True, "peers": True}],
    ids=lambda kinds: ", ".join(kinds) or "plain",
)
def test_bits_flip_in_memory(kinds: dict[str, bool]) -> None:
    """H5: no bit of the run is another one, or state is lost that nobody else had."""
    tally = run_many(range(CHUNK), flips=True, **kinds)
    assert tally.failures == {}
    assert tally.ends["bits"] > CHUNK // 2


def test_a_controller_that_comes_back_to_a_large_mesh_finds_everybody_linked_to_everybody() -> None:
    """It has the addresses of all members from any of them."""
    tally = run_many(range(CHUNK), peers=True, controllers=True)
    assert tally.failures == {}
    assert tally.comebacks > CHUNK and tally.ends["bits"] > CHUNK // 5 and not tally.strangers


@pytest.mark.parametrize("name", FAILED_ONCE)
def test_a_schedule_that_failed_once(name: str) -> None:
    how, schedule = FAILED_ONCE[name]
    ended = run(schedule)
    assert (ended.how, ended.failure) == (how, ""), ended.detail
