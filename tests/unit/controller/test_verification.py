"""Results of micro-batches that differ, at the controller: questions, verdicts, and what becomes of the run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from elaswave_spmd.conf.schema import Settings, VerifySettings
from elaswave_spmd.controller.actions import End, EvictWorker, Record
from elaswave_spmd.controller.verdicts import Verdicts
from elaswave_spmd.controller.verification import Verifier
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import EpochBegun
from elaswave_spmd.recovery.checks import CheckDraw, Pair
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from tests.unit.recovery.controller_cases import answer, messages, reconfigures, started

RIGHT, WRONG, ODD = b"r", b"w", b"o"


class Checked:
    """A run in which everything is checked, or a share of it: its protocol and its verifier.

    Args:
        stages: members of each.
        action: verify.action.
    """

    def __init__(self, *stages: int, action: str = "evict", rate: float = 1.0, version: int = 0) -> None:
        self.draw = CheckDraw(7, rate)
        self.protocol: ControllerProtocol = started(*stages, checks=self.draw, version=version)
        settings = Settings(verify=VerifySettings(rate=rate, action=action))
        self.verifier = Verifier(Verdicts(settings, self.protocol), self.draw, self.protocol)

    def pair(self, step: int, stage: int = 0) -> Pair:
        return self.draw.pairs(step, stage, self.protocol.placement)[0]

    def rows(self, stage: int, value: bytes) -> tuple[m.DigestRow, ...]:
        return tuple((layer, value, b"", value) for layer in self.protocol.placement.layers_of_stage(stage))

    def differing(self, step: int, pair: Pair, owned: bytes, checked: bytes) -> m.ChecksDiffer:
        epoch = self.protocol.placement.mesh.epoch
        owner_rows, checker_rows = self.rows(pair.stage, owned), self.rows(pair.stage, checked)
        return m.ChecksDiffer(pair.checker, epoch, step, pair.microbatch, pair.owner, owner_rows, checker_rows)

    def differ(self, step: int, pair: Pair, owned: bytes = WRONG, checked: bytes = RIGHT) -> list[Any]:
        return self.verifier.differ(self.differing(step, pair, owned, checked))

    def answers(self, step: int, pair: Pair, rank: int, value: bytes) -> list[Any]:
        epoch, rows = self.protocol.placement.mesh.epoch, self.rows(pair.stage, value)
        return self.verifier.answered(m.CheckedAgain(rank, epoch, step, pair.microbatch, rows))

    def commit(self, step: int) -> None:
        applied = m.Applied(step, self.protocol.placement.mesh.epoch, 0, 1.0, 1.0, True)
        self.protocol.applied(applied)
        self.verifier.committed(applied)

    def epoch_begins(self, version: int) -> None:
        for effect in answer(self.protocol, version):
            if isinstance(effect, EpochBegun):
                self.verifier.begun(effect)


def asked(actions: Iterable[Any]) -> tuple[int, ...]:
    """The workers that are to compute a micro-batch once more."""
    found = {message.ranks for _, message in messages(actions) if isinstance(message, m.CheckAgain)}
    return found.pop() if found else ()


def records(actions: Iterable[Any], kind: str) -> list[dict[str, Any]]:
    return [dict(action.fields) for action in actions if isinstance(action, Record) and action.kind == kind]


def evicted(actions: Iterable[Any]) -> list[int]:
    return [action.rank for action in actions if isinstance(action, EvictWorker)]


def accepted(actions: Iterable[Any]) -> list[tuple[int, int]]:
    return [(rank, message.step) for rank, message in messages(actions) if isinstance(message, m.CheckAccepted)]


def test_with_report_a_micro_batch_that_differs_in_step_after_step_keeps_nobody_waiting() -> None:
    """A question that is answered is closed: else the checker of the next step would get no answer, and never vote."""
    run = Checked(3, action="report")
    for step in (1, 2, 3):
        pair = run.pair(step)
        (judge,) = asked(run.differ(step, pair))
        actions = run.answers(step, pair, judge, RIGHT)
        assert [record["ranks"] for record in records(actions, "corrupt")] == [[pair.owner]]
        assert accepted(actions) == [(pair.checker, step)] and evicted(actions) == []
        run.commit(step)


def test_with_report_the_step_is_trusted_when_all_questions_are_answered() -> None:
    run = Checked(3, action="report", rate=0.9)
    one, other = run.draw.pairs(1, 0, run.protocol.placement)[:2]
    (judge_of_one,), (judge_of_other,) = asked(run.differ(1, one)), asked(run.differ(1, other))
    run.answers(1, one, judge_of_one, RIGHT)
    assert run.protocol._pending.results_differ, "the other one is open"
    run.answers(1, other, judge_of_other, RIGHT)
    assert not run.protocol._pending.results_differ


def test_an_answer_that_comes_twice_is_one_answer() -> None:
    run = Checked(2)
    pair = run.pair(1)
    assert asked(run.differ(1, pair)) == (pair.owner, pair.checker)
    assert run.answers(1, pair, pair.owner, RIGHT) == [] == run.answers(1, pair, pair.owner, WRONG)
    assert evicted(run.answers(1, pair, pair.checker, RIGHT)) == [pair.owner]
    assert run.answers(1, pair, pair.checker, WRONG) == []


def test_a_third_worker_that_is_wrong_itself_is_evicted_too() -> None:
    run = Checked(4)
    pair = run.pair(1)
    (judge,) = asked(run.differ(1, pair))
    (second,) = asked(run.answers(1, pair, judge, ODD))
    assert sorted(evicted(run.answers(1, pair, second, RIGHT))) == sorted([pair.owner, judge])


def test_where_each_repeats_its_result_nothing_shows_who_is_wrong() -> None:
    run = Checked(2, action="stop")
    pair = run.pair(1)
    run.differ(1, pair)
    run.answers(1, pair, pair.owner, WRONG)
    (end,) = run.answers(1, pair, pair.checker, RIGHT)
    assert isinstance(end, End) and "nothing shows which" in str(vars(end.outcome))


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 5},
        {"step": 0},
        {"step": 2},
        {"microbatch": 400},
        {"owner": 77},
        {"rank": 77},
        {"owner": "checker"},
        {"owner": "another stage"},
        {"rank": "owner"},
        {"owned": "other layers"},
        {"owned": "equal"},
    ],
)
def test_results_of_what_nobody_checks_are_ignored(change: dict[str, Any]) -> None:
    run = Checked(3, 1, rate=0.3)
    step = next(s for s in range(1, 50) if run.draw.pairs(s, 0, run.protocol.placement))
    pair = run.pair(step)
    whole = run.differing(step, pair, WRONG, RIGHT)
    names = {"checker": pair.checker, "owner": pair.owner, "another stage": 3, "equal": whole.checked}
    names["other layers"] = run.rows(1, WRONG)
    fields = {name: names.get(value, value) if isinstance(value, str) else value for name, value in change.items()}
    if change.get("step") == 2:
        fields["step"] = next(s for s in range(1, 50) if pair not in run.draw.pairs(s, 0, run.protocol.placement))
    if change.get("owned") == "other layers":
        fields["checked"] = run.rows(1, RIGHT)
    assert run.verifier.differ(msgspec.structs.replace(whole, **fields)) == []
    assert not run.protocol._pending.results_differ
    assert asked(run.verifier.differ(whole)), "as it is it counts"


def test_of_a_committed_step_nothing_is_asked() -> None:
    run = Checked(3)
    pair = run.pair(1)
    run.commit(1)
    assert run.differ(1, pair) == []


def test_a_step_that_only_a_lost_worker_has_committed_is_checked_on_the_new_mesh() -> None:
    """It had all votes; the others lacked its own, and compute the step again, where one of them may be wrong."""
    run = Checked(4)
    run.protocol.lost(3, "no heartbeat")
    run.epoch_begins(0)
    late = m.Applied(1, 0, 3, 1.0, 1.0, True)
    run.protocol.applied(late)
    run.verifier.committed(late)
    assert run.protocol.version == 1
    assert asked(run.differ(1, run.pair(1))), "else its checker would wait for ever"


def test_a_mesh_epoch_closes_all_questions_and_the_same_difference_opens_one_anew() -> None:
    run = Checked(4)
    pair = run.pair(1)
    (judge,) = asked(run.differ(1, pair))
    run.protocol.lost(judge, "killed")
    run.epoch_begins(0)
    assert run.answers(1, pair, judge, RIGHT) == []
    again = run.pair(1)
    (other,) = asked(run.differ(1, again))
    assert other != judge and evicted(run.answers(1, again, other, RIGHT)) == [again.owner]


# ---- exposure


def corrupt(run: Checked, step: int) -> dict[str, Any]:
    """The event of a wrong owner, the first time that any of its pairs is checked in a step."""
    pair = run.pair(step)
    (judge,) = asked(run.differ(step, pair))
    (found,) = records(run.answers(step, pair, judge, RIGHT), "corrupt")
    assert found["ranks"] == [pair.owner]
    return found


def test_a_run_that_was_resumed_is_exposed_since_then() -> None:
    run = Checked(3, version=9)
    for step in (10, 11):
        run.protocol.applied(m.Applied(step, 0, 0, 1.0, 1.0, True))  # nothing of them was checked, say
    found = corrupt(run, 12)
    assert found["checked"] is None and found["unsure_steps"] == [10, 11]


def test_a_newcomer_is_exposed_since_it_came() -> None:
    run = Checked(2)
    for step in (1, 2, 3, 4):
        run.protocol.applied(m.Applied(step, 0, 0, 1.0, 1.0, True))
    run.protocol.expect(2, None)
    run.protocol.ready(m.Ready(2, "at 2"))
    run.epoch_begins(5)
    epoch = run.protocol.placement.mesh.epoch
    assert reconfigures([]) == {} and 2 in run.protocol.placement.mesh
    for step in (5, 6, 7):
        run.protocol.applied(m.Applied(step, epoch, 0, 1.0, 1.0, True))
    pairs = run.draw.pairs(8, 0, run.protocol.placement)
    pair = next(pair for pair in pairs if pair.owner == 2)
    (judge,) = asked(run.differ(8, pair))
    (found,) = records(run.answers(8, pair, judge, RIGHT), "corrupt")
    assert found["ranks"] == [2] and found["unsure_steps"] == [6, 7]
