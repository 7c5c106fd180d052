"""Requests for parameters that cannot be answered yet: they are kept, and answered when they can be."""

from __future__ import annotations

from types import SimpleNamespace

from elaswave_spmd.recovery.messages import Need
from elaswave_spmd.worker.parameters import Parameters


class Answers:
    """A publisher that has everything, and a channel without a link to anybody at first."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self.linked: set[int] = set()

    def answer(self, peer: int, need: Need) -> bool:
        self.given.append(peer)
        return True

    def reaches(self, peer: int) -> bool:
        return peer in self.linked


def test_a_newcomer_that_asks_before_there_is_a_link_to_it_is_answered_when_there_is() -> None:
    """It was told of the epoch first. An answer without a link would be lost, and it would wait for ever."""
    answers, protocol = Answers(), SimpleNamespace(version=4)
    parameters = Parameters.__new__(Parameters)
    vars(parameters).update(
        _protocol=protocol, _unsure=set(), _publisher=answers, _needs={}, _context=SimpleNamespace(channel=answers)
    )
    parameters.needed(7, Need(4, 0, 0, 2))
    parameters.answer()
    assert answers.given == []
    answers.linked.add(7)
    parameters.answer()
    parameters.answer()
    assert answers.given == [7]


def test_a_request_of_a_step_that_all_have_left_is_forgotten() -> None:
    answers, protocol = Answers(), SimpleNamespace(version=4)
    parameters = Parameters.__new__(Parameters)
    vars(parameters).update(
        _protocol=protocol, _unsure=set(), _publisher=answers, _needs={}, _context=SimpleNamespace(channel=answers)
    )
    parameters.needed(7, Need(4, 0, 0, 2))
    protocol.version = 5
    answers.linked.add(7)
    parameters.answer()
    assert answers.given == [] and not parameters._needs
