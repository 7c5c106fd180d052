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


def parameters_of(answers: Answers, protocol: SimpleNamespace) -> Parameters:
    """Return the parameters of a worker that only answers requests."""
    parameters, context = Parameters.__new__(Parameters), SimpleNamespace(channel=answers)
    vars(parameters).update(
        _protocol=protocol, _unsure=set(), _publisher=answers, _needs={}, _answered={}, _filed={}, _context=context
    )
    parameters._may_answer = lambda need: True
    parameters.grouped = SimpleNamespace(serves=False)  # pyright: ignore[reportAttributeAccessIssue]
    return parameters


def test_a_newcomer_that_asks_before_there_is_a_link_to_it_is_answered_when_there_is() -> None:
    """It was told of the epoch first. An answer without a link would be lost, and it would wait for ever."""
    answers, protocol = Answers(), SimpleNamespace(version=4)
    parameters = parameters_of(answers, protocol)
    parameters.needed(7, Need(4, 0, 0, 2))
    parameters.answer()
    assert answers.given == []
    answers.linked.add(7)
    parameters.answer()
    parameters.answer()
    assert answers.given == [7]


def test_a_request_of_a_step_that_all_have_left_is_forgotten() -> None:
    answers, protocol = Answers(), SimpleNamespace(version=4)
    parameters = parameters_of(answers, protocol)
    parameters.needed(7, Need(4, 0, 0, 2))
    protocol.version = 5
    answers.linked.add(7)
    parameters.answer()
    assert answers.given == [] and not parameters._needs


def test_what_was_answered_over_a_link_that_is_lost_is_answered_again() -> None:
    """Whoever asked may have entered the epoch in which the link is made again before it did: it does not ask again."""
    answers, protocol = Answers(), SimpleNamespace(version=4)
    parameters = parameters_of(answers, protocol)
    answers.linked |= {7, 8}
    parameters.needed(7, Need(4, 0, 0, 2))
    parameters.needed(8, Need(4, 0, 0, 2))
    parameters.link_lost(7)
    parameters.answer()
    assert answers.given == [7, 8, 7]
    protocol.version = 5
    parameters.published(5, extension="")
    parameters.link_lost(8)
    parameters.answer()
    assert answers.given == [7, 8, 7] and not parameters._needs, "whoever has applied step 5 has what it asked for"
