"""Limits of messages are found by the first bytes of a header, whatever the values of its fields."""

from __future__ import annotations

import pytest

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.transport.link_probe import MARK, PROBE_BYTES
from elaswave_spmd.worker.message_limits import message_limits

KINDS = (
    *("Activation", "ActivationGradient", "PartialSum", "ReducedGradient", "Publish", "PageState", "FinalPages"),
    "Addend",
    "PairSent",
)
LIMITS = {kind: 100 + number for number, kind in enumerate(KINDS)}
BIG = 2**40
EXAMPLES = (
    m.Activation(1, 2, 3, (4, 5)),
    m.Activation(BIG, BIG, BIG, (BIG,), True),
    m.Activation(1, 2, 3, (4, 5), False, BIG),
    m.Activation(1, 2, 3, (BIG,), forms=(m.TensorForm("bool", (BIG,), False),)),
    m.Activation(1, 2, 3, (BIG,), forms=(m.TensorForm("bool", (BIG,), False),), names=("mask",)),
    m.ActivationGradient(1, 2, 3, (BIG,), forms=(m.TensorForm("bool", (BIG,), False),)),
    m.ActivationGradient(1, 2, 3, (4, 5)),
    m.ActivationGradient(1, 2, 3, (4, 5), 7),
    m.PartialSum(1, 2, 3, 4, 5, BIG, 7),
    m.ReducedGradient(1, 2, 3, 4, b"x" * 1000, 7),
    m.PartialSum(1, 2, 3, 4, 5, BIG),
    m.ReducedGradient(1, 2, 3, 4, b"x" * 1000),
    m.Publish(1, 2, 3, 4),
    m.PageState(1, 2, 3, 4, b""),
    m.FinalPages(BIG, 0, 9),
    m.FinalPages(BIG, 0, 9, True),
    m.Addend(1, 2, 3, 4, BIG),
    m.Addend(1, 2, 3, 4, 5, True),
    m.Addend(1, 2, 3, 4, 5, False, BIG),
    m.PairSent(1, BIG, BIG, b"x" * 1000),
    m.PairSent(1, 2, 3, b"", True),
)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda it: type(it).__name__)
def test_each_kind_with_a_payload_has_its_own_limit(message: m.Message) -> None:
    assert message_limits(LIMITS).payload_limit(m.encode(message)) == LIMITS[type(message).__name__]


def test_without_pairs_nothing_has_a_payload_that_they_would_bring() -> None:
    limits = message_limits({kind: size for kind, size in LIMITS.items() if kind != "PairSent"})
    assert limits.payload_limit(m.encode(m.PairSent(1, 2, 3, b"", True))) == 0


def test_other_messages_have_no_payload_and_a_probe_has_its_own() -> None:
    limits = message_limits(LIMITS)
    for message in (m.Stop(), m.Vote(7, 3, 1, (0.5,)), m.Failed(0, "Activation")):
        assert limits.payload_limit(m.encode(message)) == 0
    assert limits.payload_limit(MARK + b"\0\1\0\0\0") == PROBE_BYTES
    assert limits.payload_limit(b"") == 0
