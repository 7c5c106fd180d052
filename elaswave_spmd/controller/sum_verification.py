"""Decisions when a primary and its checker have different reduced gradients (`verify.rate`, docs/protocol.md).

The checker does not vote. Everybody who has made a sum of these pages tells what it had made, and the primary, the
checker and a third worker add up all gradients once more, as their makers have kept them. From these results it shows
who is wrong (recovery/sum_checks.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elaswave_spmd.controller.actions import Action, Record
from elaswave_spmd.controller.checked_steps import CheckedSteps
from elaswave_spmd.controller.verdicts import Case, Verdicts, mismatch
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import Broadcast, EpochBegun, Send
from elaswave_spmd.recovery.checks import CheckDraw
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.recovery.sum_checks import (
    SUM,
    Claim,
    Finding,
    Item,
    adders_of,
    are_drawn,
    checker_of,
    drawn_ranges,
    find_wrong,
    first_different,
    items_of_result,
    items_of_sums,
)
from elaswave_spmd.sharding.replicas import PageRange, ReplicaSet


@dataclass(frozen=True)
class _Question:
    """Two reduced gradients of a page range that differ.

    Args:
        difference: its kind, and the number of elements.
        checked: the checker's result.
        makers: the workers that have a part in it, and tell what they had made.
        asked: the workers that make all of it again.
        made, again: the answers.
    """

    step: int
    pages: ReplicaSet
    checker: int
    difference: tuple[str, int]
    checked: m.SumResult
    makers: frozenset[int]
    asked: tuple[int, ...] = ()
    made: Mapping[int, m.AddedUp] = field(default_factory=dict)
    again: Mapping[int, m.AddedUp] = field(default_factory=dict)

    @property
    def is_answered(self) -> bool:
        """True if all have answered."""
        return self.made.keys() >= self.makers and self.again.keys() >= {*self.asked}

    @property
    def finding(self) -> Finding | None:
        """The workers that are wrong, by the answers."""
        claims = [Claim(self.checker, item, value) for item, value in items_of_result(self.checked).items()]
        for rank, message in self.made.items():
            claims += [Claim(rank, item, value) for item, value in _items_of(message).items()]
        return find_wrong(claims, {rank: _items_of(message) for rank, message in self.again.items()})


def _items_of(message: m.AddedUp) -> dict[Item, bytes]:
    found = items_of_sums(message.sums)
    for result in message.results:
        found |= items_of_result(result)
    return found


class SumVerifier:
    """The open questions of the present mesh epoch, and when sums of each worker were checked last.

    Args:
        verdicts: what becomes of workers that are wrong.
        draw: what is checked in each step.
    """

    def __init__(self, verdicts: Verdicts, draw: CheckDraw, protocol: ControllerProtocol) -> None:
        self._verdicts = verdicts
        self._draw = draw
        self._protocol = protocol
        self._layout = protocol.layout
        self._questions: dict[PageRange, _Question] = {}
        self._checked = CheckedSteps(draw, protocol)

    @property
    def trusted(self) -> int | None:
        """The last step up to which sums of all members were checked; None: nothing is ever checked."""
        return self._checked.trusted

    # ---- events

    def begun(self, begun: EpochBegun) -> None:
        """A mesh epoch begins: what was open is open no more."""
        self._questions.clear()
        self._checked.begun(begun)

    def committed(self, applied: m.Applied) -> None:
        """A step is committed: all of its checks have agreed."""
        if (placement := self._checked.placement_of(applied)) is None:
            return
        uses: set[int] = set()
        for pages, checker in drawn_ranges(self._draw, applied.step, self._layout, placement.replica_map(self._layout)):
            self._checked.note(applied.step, (pages.primary, checker))
            uses.update(self._layout.uses_of(pages.layer, pages.first))
        self._checked.note(applied.step, adders_of(placement, uses))

    def differ(self, message: m.SumsDiffer) -> list[Action]:
        """A checker has another reduced gradient than the primary, or other norms of it."""
        key = message.layer, message.first, message.stop
        placement = self._protocol.placement
        difference = first_different(message.owned, message.checked)
        if message.epoch != placement.mesh.epoch or key in self._questions or difference is None:
            return []
        ranges = placement.replica_map(self._layout).get(message.layer, ())
        pages = next((pages for pages in ranges if pages.key == key), None)
        if pages is None or not are_drawn(self._draw, message.step, message.layer) or pages.primary != message.owner:
            return []
        if checker_of(message.step, pages) != message.rank or not {message.rank, message.owner} <= {*self._members}:
            return []
        makers = adders_of(placement, self._layout.uses_of(pages.layer, pages.first)) | {pages.primary}
        question = _Question(message.step, pages, message.rank, difference, message.checked, makers)
        self._protocol.note_difference()
        ranks = (*sorted({message.owner, message.rank}), *self._more(question))
        return [self._record_difference(question), *self._ask(question, ranks)]

    def added(self, message: m.AddedUp) -> list[Action]:
        """A worker tells the sums that it had made, or has made again."""
        question = self._questions.get((message.layer, message.first, message.stop))
        if question is None or message.epoch != self._protocol.placement.mesh.epoch or message.step != question.step:
            return []
        if message.again and message.rank in question.asked:
            question = replace(question, again={**question.again, message.rank: message})
        elif not message.again and message.rank in question.makers:
            question = replace(question, made={**question.made, message.rank: message})
        self._questions[question.pages.key] = question
        return self._decide(question) if question.is_answered else []

    @property
    def _members(self) -> tuple[int, ...]:
        return self._protocol.members

    def _more(self, question: _Question) -> tuple[int, ...]:
        """One more worker that can tell: a replica first, then one of the layer's stage. Nobody if all were asked.

        On a large mesh only who has a link from everybody that has a gradient to send.
        """
        pages, peers, mesh = question.pages, self._protocol.peers, self._protocol.placement.mesh
        stage = self._protocol.placement.stage_of_layer(pages.layer)
        left = set(self._members) - {pages.primary, question.checker, *question.asked}
        order = sorted(left, key=lambda rank: (rank not in pages.replicas, mesh.stage_of(rank) != stage, rank))
        return next(((rank,) for rank in order if peers is None or question.makers <= peers.of(rank)), ())

    def _ask(self, question: _Question, ranks: tuple[int, ...]) -> list[Action]:
        question = replace(question, asked=(*question.asked, *ranks))
        self._questions[question.pages.key] = question
        epoch = self._protocol.placement.mesh.epoch
        return [Broadcast(self._members, m.AddAgain(epoch, question.step, *question.pages.key, ranks))]

    # ---- verdicts

    def _decide(self, question: _Question) -> list[Action]:
        found = question.finding
        if not (found is not None and found.wrong) and (more := self._more(question)):
            return self._ask(question, more)
        # It is answered: where the run goes on with it (`report`), the same sum may differ in a later step.
        self._questions.pop(question.pages.key, None)
        if found is not None and found.wrong:
            follows = self._verdicts.found(self._case(question, found), found.wrong)
            if self._questions:
                self._protocol.note_difference()  # others are still open
            return follows
        disputed = found.disputed if found is not None else (question.pages.primary, question.checker)
        return self._verdicts.not_found(self._case(question, found), disputed)

    def _case(self, question: _Question, found: Finding | None) -> Case:
        pages, (kind, elements) = question.pages, question.difference
        layer, where = pages.layer, f"pages {pages.first} to {pages.stop - 1}"
        if found is not None:
            kind, elements = found.item.kind, found.elements
        if found is not None and kind == SUM:
            layer, last = found.item.use, found.item.hi - 1
            where = f"micro-batches {found.item.lo} to {last}, {where}"
        accepted = m.SumAccepted(self._protocol.placement.mesh.epoch, question.step, *pages.key)
        name, accept = self._layout.layers[layer].name, Send(question.checker, accepted)
        return Case(question.step, name, kind, elements, where, self._checked.by_rank, accept)

    def _record_difference(self, question: _Question) -> Record:
        pages, case = question.pages, self._case(question, None)
        place = {"layer": case.layer, "pages": [pages.first, pages.stop]}
        return mismatch(case, pages.primary, question.checker, **place)
