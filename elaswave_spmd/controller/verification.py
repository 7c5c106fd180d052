"""Decisions when two workers have computed different results of a micro-batch (`verify.rate`, docs/protocol.md).

The checker does not vote for the step, so the step cannot commit meanwhile. A third worker, or both workers once more,
compute the micro-batch again, which shows who is wrong (recovery/checks.py). `verify.action` decides what happens to
that worker. A change of the mesh in between closes all open questions: it begins another attempt of the step, in which
the same micro-batches are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elaswave_spmd.controller.actions import Action, Record
from elaswave_spmd.controller.checked_steps import CheckedSteps
from elaswave_spmd.controller.verdicts import Case, Verdicts, mismatch
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import Broadcast, EpochBegun, Send
from elaswave_spmd.recovery.checks import CheckDraw, Difference, Pair, first_difference, judges, verdict
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol

Rows = tuple[m.DigestRow, ...]


@dataclass(frozen=True)
class _Question:
    """An open question: two results of a pair (a micro-batch on a stage) differ, and it is not known which is wrong.

    Args:
        step: the step.
        pair: the pair.
        difference: the first difference between the two results.
        first: rank -> its first result, of the owner and the checker.
        asked: the workers that are asked to compute the pair once more.
        again: rank -> its result, of the workers that have answered.
    """

    step: int
    pair: Pair
    difference: Difference
    first: Mapping[int, Rows]
    asked: tuple[int, ...]
    again: Mapping[int, Rows] = field(default_factory=dict)


class Verifier:
    """The open questions of the present mesh epoch, and when each worker was checked last.

    Args:
        verdicts: decides what happens to workers that are wrong.
        draw: the pairs that are checked in each step.
    """

    def __init__(self, verdicts: Verdicts, draw: CheckDraw, protocol: ControllerProtocol) -> None:
        self._verdicts = verdicts
        self._draw = draw
        self._protocol = protocol
        self._layer_names = [layer.name for layer in protocol.layout.layers]
        self._questions: dict[tuple[int, int], _Question] = {}  # (stage, micro-batch) -> the open question about it
        self._checked = CheckedSteps(draw, protocol)
        self._decided = protocol.version
        """The last step that is committed in the present mesh epoch.

        The protocol's version may be one ahead of it: a worker that is lost now may have had all votes for a step that
        the others compute again, and its report may come late."""

    @property
    def trusted(self) -> int | None:
        """The last step up to which the results of all members were checked; None if nothing is ever checked."""
        return self._checked.trusted

    # ---- events

    def begun(self, begun: EpochBegun) -> None:
        """A mesh epoch begins, which closes all open questions."""
        self._questions.clear()
        self._decided = begun.version
        self._verdicts.begun(begun)
        self._checked.begun(begun)

    def committed(self, applied: m.Applied) -> None:
        """A step is committed: all of its checks have agreed."""
        if applied.epoch == self._protocol.placement.mesh.epoch:
            self._decided = applied.step
        if (placement := self._checked.placement_of(applied)) is None:
            return
        for stage in range(placement.num_stages):
            for pair in self._draw.pairs(applied.step, stage, placement):
                self._checked.note(applied.step, (pair.owner, pair.checker))

    def differ(self, message: m.ChecksDiffer) -> list[Action]:
        """A checker reports that its results differ from those of the micro-batch's worker."""
        pair, difference = self._pair_of(message), first_difference(message.owned, message.checked)
        if pair is None or difference is None or (pair.stage, pair.microbatch) in self._questions:
            return []
        first = {message.rank: message.checked, message.owner: message.owned}
        question = _Question(message.step, pair, difference, first, judges(pair, self._members_of(pair.stage)))
        self._protocol.note_difference()
        follows = self._ask(question, question.asked) if question.asked else self._decide(question)
        return [self._record_difference(question), *follows]

    def answered(self, message: m.CheckedAgain) -> list[Action]:
        """A worker has computed a micro-batch once more."""
        mesh = self._protocol.placement.mesh
        if message.epoch != mesh.epoch or message.rank not in mesh:
            return []
        at = mesh.stage_of(message.rank), message.microbatch
        question = self._questions.get(at)
        if question is None or message.step != question.step:
            return []
        if message.rank not in question.asked or message.rank in question.again:
            return []
        question = replace(question, again={**question.again, message.rank: message.rows})
        self._questions[at] = question
        return self._decide(question) if question.again.keys() == {*question.asked} else []

    def _pair_of(self, message: m.ChecksDiffer) -> Pair | None:
        """The pair of the step under way to which these results belong; None if the sender checks no such pair."""
        placement = self._protocol.placement
        if message.epoch != placement.mesh.epoch or message.rank not in placement.mesh:
            return None
        stage = placement.mesh.stage_of(message.rank)
        pair = Pair(stage, message.microbatch, message.owner, message.rank)
        layers = [layer for layer, *_ in message.checked]
        if message.step <= self._decided or layers != [*placement.layers_of_stage(stage)]:
            return None
        return pair if pair in self._draw.pairs(message.step, stage, placement) else None

    def _members_of(self, stage: int) -> list[int]:
        mesh = self._protocol.placement.mesh
        return [rank for rank in self._protocol.members if mesh.stage_of(rank) == stage]

    def _ask(self, question: _Question, ranks: tuple[int, ...]) -> list[Action]:
        """Have these workers compute the pair once more."""
        pair = question.pair
        self._questions[pair.stage, pair.microbatch] = question
        epoch = self._protocol.placement.mesh.epoch
        again = m.CheckAgain(epoch, question.step, pair.microbatch, pair.stage, ranks)
        return [Broadcast(self._protocol.members, again)]

    # ---- verdicts

    def _decide(self, question: _Question) -> list[Action]:
        pair, wrong = question.pair, verdict(question.pair, question.first, question.again)
        if not wrong and (more := judges(pair, self._members_of(pair.stage), question.asked)):
            return self._ask(replace(question, asked=(*question.asked, *more)), more)
        # The question is closed here and not only by the next mesh epoch: with verify.action=report the epoch goes on,
        # and the same micro-batch may differ again in a later step.
        self._questions.pop((pair.stage, pair.microbatch), None)
        if not wrong:
            return self._verdicts.not_found(self._case(question), {pair.owner, pair.checker})
        follows = self._verdicts.found(self._case(question), wrong)
        if self._questions:
            self._protocol.note_difference()  # other questions about this step are still open
        return follows

    def _case(self, question: _Question) -> Case:
        found, pair = question.difference, question.pair
        accepted = m.CheckAccepted(self._protocol.placement.mesh.epoch, question.step, pair.microbatch)
        return Case(
            question.step,
            self._layer_names[found.layer],
            found.kind,
            found.elements,
            f"micro-batch {pair.microbatch}, stage {pair.stage}",
            self._checked.by_rank,
            Send(pair.checker, accepted),
        )

    def _record_difference(self, question: _Question) -> Record:
        pair, case = question.pair, self._case(question)
        return mismatch(case, pair.owner, pair.checker, microbatch=pair.microbatch, stage=pair.stage)
