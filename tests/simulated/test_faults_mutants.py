"""Schedules of faults find what they are made for: a rule of the protocol that is taken out shows as a failure."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.recovery.worker_protocol import Effect, WorkerProtocol
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.faults import SENDER, Fault, Link, MessageFault, ThenFault
from tests.cluster.schedules import Schedule, cluster_of, judge, run, undisturbed
from tests.cluster.tiny import TinyRun
from tests.simulated import mutants
from tests.simulated.bits_cases import one_thread
from tests.simulated.mutants import MUTANTS, planted, schedule_for, short_run

VERIFICATION = Path(__file__).parents[2] / "docs" / "verification.md"
# Seeds of schedules that show the damage; `python -m tests.simulated.mutants` finds others.
SEEDS: dict[str, tuple[int, ...]] = {
    "updates in an epoch after its Prepare was answered": (17487,),
    "takes a StepReport for an answer to every later Prepare": (50, 94, 109),
    "votes before the mirrored gradients": (43, 44, 48),
    "drops messages of future epochs": (7, 15, 23),
    "installs published parameters on receipt": (23, 29),
    "computes with parameters of any version": (0, 6),
    "applies a reduced gradient twice": (6, 23, 34),
    "votes two steps ahead": (15,),
    "counts votes of older epochs": (204, 277),
    "leaves frozen pages at the version at which they came": (0, 2, 8),
    "puts off without a limit": (0, 1, 2),
    "makes weight gradients twice that were put off": (0, 6, 16),
    "reports as put off what has left in part": (0, 6),
    "asks for the weight gradients alone of a lost worker": (0, 1, 5),
    "passes on no votes for a step that it has applied": (27, 28, 30),
    "passes on votes before it has voted": (0, 2, 6),
    "has no link to who has its inputs": (18, 41, 42),
    "has no link to mirrors in other stages": (3, 12, 14),
    "answers before there is a link": (0, 17, 24),
    "asks anybody to add once more": (48, 130, 160),
    "exchanges sums without the votes of all": (12, 15, 29),
    "gives up a sum that only this worker has exchanged": (20, 21, 29),
    "sends no sum again when a group has failed": (0, 4, 14),
    "sends no sum again when the epoch of a group is over": (0, 68, 82),
    "issues exchanges without a limit": (14, 66, 100),
    "sends nothing to a member that is to get no sum": (32, 59, 70),
    "issues exchanges in the order of its own sums": (0, 7, 19),
    "exchanges reduced gradients before their sums": (4, 6, 7),
    "leaves a gradient that the group takes to the group alone": (6, 21, 22),
    "takes a gradient for sent that only this worker has exchanged": (45, 55, 118),
    "sends no gradient again when a group has failed": (20, 30, 32),
    "sends no gradient again when the epoch of a group is over": (152, 249),
    "gives up its own sums when its host has them": (0, 22, 29),
    "takes the next payload of a pair for that of any message": (107, 162, 163),
    "sends no payload again when a pair has failed": (2, 6, 11),
    "sends no payload again when the epoch of a pair is over": (144,),
    "sends nothing again that was on a link that was lost": (2, 3, 10),
    "sends nothing again when a link was lost before its epoch was entered": (22, 26),
    "takes what was run through older layers for the new ones": (29, 117, 151),
    "sends nothing again when it has missed an epoch": (89,),
    "takes for written what has changed before a change of the mesh": (7, 29, 37),
    "votes without a look at what it has computed with": (36, 133, 156),
    "keeps what was computed from damaged parameters": (7, 16, 19),
    "joins page ranges of a step under way": (15, 26, 31),
    "keeps nothing for page ranges that are joined": (112, 167, 277),
    "uses pairs that were lost in an epoch before it has entered that": (802,),
    "refuses what a pair brings of a micro-batch that it checks": (0, 17, 18),
    "sends no replicas to a first mesh that was not planned": (0, 3, 6),
    "waits for workers that were lost while they started": (0, 3, 5),
    "gives a place to a spare that was lost": (12,),
    "votes before its checks have agreed": (4, 49, 55),
    "keeps what it computed in an older attempt": (8, 16, 17),
    "recovers a step in part that is known to be wrong": (1, 11, 21),
    "votes before replicas are compared": (22, 24, 32),
    "keeps parameters of a wrong replica": (8, 15, 24),
    "keeps state learned from a wrong replica": (14, 15, 20),
    "votes before its sums have agreed": (119, 123),
    "recovers a step in part that a loss has met at rate 1": (1, 48),
    "blames the checker": (21, 33, 44),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_schedule_finds_the_mutant(name: str) -> None:
    for seed in SEEDS[name]:
        schedule = schedule_for(name, seed)
        undisturbed(schedule.run.key)  # cached before the mutant is planted: it must not change what is expected
        assert short_run(schedule) == "", f"schedule {seed} fails without any damage"
        with planted(name):
            if short_run(schedule):
                return
    pytest.fail(f"none of the schedules {SEEDS[name]} shows it any more: find others")


def test_an_exception_of_the_mutant_itself_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here this file stands for that of the mutants."""
    monkeypatch.setattr(mutants, "_OF_A_MUTANT", f" in {Path(__file__).name}:")

    def raises(self: WorkerProtocol, *_: object) -> list[Effect]:
        raise TypeError("not as it is called")

    monkeypatch.setattr(WorkerProtocol, "_advance", raises)
    with pytest.raises(AssertionError, match="not as it is called"):
        short_run(Schedule(0, TinyRun(), "dp2"))


def test_votes_are_passed_on_after_the_answer_to_a_prepare() -> None:
    """At the last step, where a Prepare is answered at once, somebody may be behind: few random schedules meet it."""
    faults = (
        MessageFault("kill", "Applied", SENDER, False, 17),
        ThenFault("term", "any", 24),
        ThenFault("join", "any", 40),
    )
    schedule = Schedule(
        31, TinyRun(microbatches=8, steps=3), "dp8", zero=2, mirror_count=2, uneven=False, faults=faults, widest=2
    )
    assert run(schedule).how == "bits"
    advance = WorkerProtocol._advance

    def _advance(self: WorkerProtocol, step: int) -> list[Effect]:
        return [] if self.promised > self.epoch and len(self._rounds) > 1 else advance(self, step)

    with mock.patch.object(WorkerProtocol, "_advance", _advance):
        ended = run(schedule)
    assert "votes of step 3" in ended.detail, ended.failure


class Holed(SimulatedCluster):
    """A message for a member without a link is lost, and its sender notices that there is none."""

    holes = 0

    def meets_stranger(self, link: Link, message: m.Message) -> None:
        if not self._is_broken(link):
            self.holes += 1
            self.break_link(link, was_linked=False)


@pytest.mark.parametrize("keeps", [True, False], ids=["linked from then on", "linked once"])
@pytest.mark.parametrize("name", ["has no link to who has its inputs", "has no link to mirrors in other stages"])
def test_a_peer_that_was_forgotten_costs_mesh_epochs_and_no_bit_and_no_worker(name: str, keeps: bool) -> None:
    """C16: such a pair is linked in the next one, and what was lost is sent again.

    A change more may meet other losses than before, so that state may be lost that nobody else had.

    Args:
        keeps: the pair is linked in later epochs as well, as the product does it; else it may be missed again.
    """
    holes, ends = 0, list[str]()
    for seed in SEEDS[name]:
        schedule = schedule_for(name, seed)
        wanted = undisturbed(schedule.run.key)
        with planted(name), one_thread(), ExitStack() as stack:
            if not keeps:
                stack.enter_context(mock.patch.object(ControllerProtocol, "missed", lambda self, ends: None))
            cluster = cluster_of(schedule, kind=Holed)
            assert isinstance(cluster, Holed), "schedules with groups have a cluster of their own"
            how, failure, detail = judge(schedule, cluster, wanted)
        assert failure == "", detail
        assert not [fields for kind, fields in cluster.events if kind == "fail" and "was lost again" in str(fields)]
        holes, ends = holes + cluster.holes, [*ends, how]
    assert holes and ends.count("bits") > 1, ends


def test_who_adds_once_more_has_links_from_all_that_have_gradients() -> None:
    """V8 on a large mesh. The last stage has two workers, which differ: the third one that adds is of another stage."""
    schedules = [
        Schedule(
            1,
            TinyRun(blocks=2),
            "dp2_pp3",
            faults=(Fault(step, "miscompute", rank, "sum"),),
            verify_rate=1.0,
            widest=2,
        )
        for step in (1, 2, 3)
        for rank in (4, 5)
    ]
    assert [run(schedule).failure for schedule in schedules] == [""] * len(schedules)
    with planted("asks anybody to add once more"):
        failures = [run(schedule).failure for schedule in schedules]
    assert any("has no link to" in failure for failure in failures), failures


def test_a_mutant_is_gone_after_its_with() -> None:
    before = {key: vars(key[0])[key[1]] for name in MUTANTS for key in MUTANTS[name]()}
    for name in MUTANTS:
        with planted(name):
            assert all(vars(owner)[method] is not before[owner, method] for owner, method in MUTANTS[name]())
    assert all(vars(owner)[method] is original for (owner, method), original in before.items())


def test_the_table_in_the_docs_has_the_same_seeds_in_the_same_order() -> None:
    table = VERIFICATION.read_text(encoding="utf-8").partition("| rule taken out |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| [^|]+ \| ([0-9, ]+) \|$", table, re.MULTILINE)
    assert [tuple(map(int, row.split(", "))) for row in rows] == list(SEEDS.values())
    assert list(SEEDS) == list(MUTANTS)
