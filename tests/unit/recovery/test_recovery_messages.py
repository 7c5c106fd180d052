"""Messages survive their encoding, and nothing else decodes as one."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.processes import agent_messages as am

numbers, ints = st.floats(allow_nan=False), st.integers(0, 2**40)
HELD = m.PartialStep(
    8,
    (0, 1, 4),
    (0,),
    (1,),
    ((2, 0), (2, 1)),
    ((1, 0),),
    {0: ((0, 1), (4, 6))},
    ((0, 0, 3, 2, ((0, 4),)),),
    ((0, 0, 3),),
)
FORMS = (m.TensorForm("float32", (2, 3), True), m.TensorForm("bool", (2,), False))
EXAMPLES: list[m.AnyMessage] = [
    m.Activation(1, 2, 3, (2, 8, 16)),
    m.Activation(1, 2, 3, (2, 8, 16), True),
    m.Activation(1, 2, 3, (128,), forms=FORMS, names=("hidden", "mask")),
    m.ActivationGradient(3, 0, 1, ()),
    m.ActivationGradient(3, 0, 1, (64,), forms=FORMS[:1]),
    m.PartialSum(1, 2, 3, 4, 5, 6),
    m.ReducedGradient(1, 2, 3, 5, b"\0\0\x80?\xff\0\0\0"),
    m.Publish(7, 0, 0, 3),
    m.PageState(7, 0, 0, 2, b"\0\0\x80?\xff\0\0\0"),
    m.Need(7, 0, 0, 3),
    m.Vote(1, 0, 4, (1.5, -0.0, 5e-324), 2.25),
    m.Vote(1, 0, 4, (), None),
    m.Ready(3, "ipc:///tmp/x"),
    m.Ready(3, "tcp://127.0.0.1:5", True),
    m.Checked(3, 0.25, ((0, 1, 4096, 512, 0, b"\0\xff"), (1, 4, 2**40, 512, 2**41, b"")), (0, 1, 1, 1, 1)),
    m.Constructed(3, (("block0.weight", False, b"\0\xff"), ("block0.table", True, b""))),
    m.Refused(3, {"what": "layer block0 draws", "fix": "KeyedDropout(p)"}),
    m.Prepare(4),
    m.Prepare(4, 17),
    m.StepReport(4, 1, 7, (HELD, m.PartialStep(9))),
    m.StepReport(4, 1, 7),
    m.StepReport(4, 1, 7, (HELD,), 4, ((0, 0, 2),), (0, 3)),
    m.Reconfigure(0, ((0, 1), (2,)), (0, 2, 4), ((3, 2), (5,)), {0: "a", 1: "b", 2: "c"}),
    m.Reconfigure(
        5,
        ((0, 1), (2,)),
        (0, 2, 4),
        ((3, 2), (5,)),
        {0: "a", 1: "b", 2: "c"},
        ((0, 0, 3, 1, (0, 2), (7,)), (0, 3, 4, 0, (), ())),
        7,
        (m.Recompute(0, 3, 1, True, 2), m.Recompute(1, 3, 2, False, 1)),
        6,
    ),
    m.Reconfigure(5, ((0,),), (0, 4), ((5,),), {0: "a"}, (), 7, ()),
    m.CaughtUp(3, 5),
    m.Fingerprints(3, 5, 8, ((0, 0, 3, b"\0\xff"), (1, 4, 5, b""))),
    m.ReplicasAgree(5, 8),
    m.Damaged(3, 5, 8, ((0, 0, 3), (1, 4, 5))),
    m.Damaged(3, 5, 8, (), "UCE ERROR"),
    m.Reconfigure(5, ((0, 1),), (0, 4), ((5, 0),), {0: "a", 1: "b"}, (), 7, (), None, False, (1,)),
    m.Reconfigure(5, ((0, 1),), (0, 4), ((5, 0),), {0: "a", 1: "b"}, (), 7, (), None, False, (), 4),
    m.PartialSum(8, 1, 0, 3, 2, 4, 5),
    m.CheckDigests(8, 2, ((0, b"a", b"", b"c"), (1, b"d", b"e", b"f")), 5),
    m.ChecksDiffer(1, 5, 8, 2, 0, ((0, b"a", b"", b"c"),), ((0, b"b", b"", b"c"),)),
    m.CheckAgain(5, 8, 2, 0, (3,)),
    m.CheckedAgain(3, 5, 8, 2, ((0, b"b", b"", b"c"),)),
    m.CheckAccepted(5, 8, 2),
    m.Pace(5, (0, 3), (0.75, 1.0), ((0, 2), (1, 2), (2, 2)), 0.25),
    m.Limits(5, (1, 2, 3), (0, 1, 2), (3, 2, 1)),
    m.Addend(8, 1, 0, 2, 3, True, 5),
    m.SumsDiffer(2, 5, 8, 1, 0, 2, 0, (b"a", b"1234"), (b"b", b"1234")),
    m.AddAgain(5, 8, 1, 0, 2, (0, 2, 3)),
    m.AddedUp(2, 5, 8, 1, 0, 2, True, ((1, 0, 2, b"a"),), ((b"b", b"1234"),)),
    m.SumAccepted(5, 8, 1, 0, 2),
    m.LinkClosed(3, 1),
    m.LinkClosed(3, 1, False),
    m.LinksClosed(3, (1, 7)),
    m.GroupLost(3, 1),
    m.GroupLost(3, 1, "Connection closed by peer"),
    m.PairSent(3, 17, 2**33, m.encode(m.PageState(7, 0, 0, 2, b""))),
    m.PairSent(3, 17, 0, b"", True),
    m.PairReceived(17),
    m.PairLost(3, 1, 2, "Connection closed by peer"),
    m.Vote(7, 3, 1, (0.5, 2.0**-60), 1.25, m.GROUPED),
    m.Applied(9, 0, 1, 0.1, 0.2, True, m.GROUPED),
    m.Leaving(3),
    m.SpawnRequest(3, 2),
    m.Heartbeat(3, 2**40, True, "votes of step 7"),
    m.Heartbeat(3, 2**40, True, "votes of step 7", (("malformed message", 2),)),
    m.Heartbeat(3, 2**40, True, "votes of step 7", (), True),
    m.Applied(9, 0, 1, 0.1, 0.2, False),
    m.Measured(3, 7, ((0, 0.25, 0.5, 4, 4), (1, 0.0, 0.5, 0, 4)), ((0, 4096, 1024),), 4, (1e-4, 2e9)),
    m.Measured(3, 7, ((1, 0.25, 0.5, 4, 4),), weights=((1, 0.25, 4),)),
    m.Measured(3, 7, (), data_seconds=0.0),
    m.ValidationLoss(5, 3, 2, (0, 2), (1.25, 3.0)),
    m.ValidationLoss(5, 3, 1, (), ()),
    m.Validated(5),
    m.Validated(5, True),
    m.Reconfigure(5, ((0,),), (0, 4), ((5,),), {0: "a"}, (), 7, (), is_last=True),
    m.Reconfigure(5, ((0, 2), (1,)), (0, 2, 4), ((2, 3), (5,)), {0: "a"}, (), 7, (), hosts=((0, 1), (0,))),
    m.PackedReconfigure(4, 300, bytes(8), b"packed"),
    m.PackedReconfigure(4, 300, bytes(8), b"packed", b"lines"),
    m.PeerAddresses(b"packed"),
    m.PeerAddresses(b"packed", (3, 7)),
    m.FinalPages(0, 0, 9),
    m.Finished(1, 3, {"params": 10, "optim": 2**40}, {"rss": 2**33}),
    m.Failed(0, "Traceback ...\n"),
    m.Failed(0, "Traceback ...\n", 12),
    m.Failed(0, "Traceback ...\n", 12, True),
    m.ShardWritten(20, 1, 3, "shard_1_1-3.safetensors", 2**33, "ab" * 32, ((0, 0, 3), (2, 1, 2)), 1.5, 20.25),
    m.ShardWritten(20, 1, 3, error="the disk is full"),
    m.Stop(),
    m.Adopt(2, "ipc:///tmp/c"),
    m.Adopted(1, 2, 7, 3, b"columns"),
    m.Adopted(
        1,
        2,
        7,
        3,
        b"columns",
        (m.Applied(7, 3, 1, 0.5, 0.25, True),),
        (m.Damaged(1, 3, 8, ((0, 0, 3),)),),
        (2,),
        True,
        True,
        True,
        m.Checked(1, 0.25, ((0, 2, 4096, 512, 64, b"\0"),), (0, 0)),
    ),
    m.OfGeneration(2, m.encode(m.Stop())),
    m.Written(64),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda it: type(it).__name__)
def test_a_message_survives_its_encoding(message: m.AnyMessage) -> None:
    data = m.encode(message)
    assert m.decode(data) == message and type(m.decode(memoryview(data))) is type(message)
    assert (
        hash(m.decode(data)) if not isinstance(message, m.Reconfigure | m.Finished | m.StepReport | m.Refused) else True
    )


def test_no_plan_and_an_empty_plan_are_two_things() -> None:
    """None: nothing of the step was begun. Empty: all of it was done, and nobody has anything left to do."""
    places = [
        m.decode(m.encode(m.Reconfigure(5, ((0,),), (0, 4), ((5,),), {}, recovery_plan=plan))) for plan in (None, ())
    ]
    assert [place.recovery_plan for place in places if isinstance(place, m.Reconfigure)] == [None, ()]


OPTIONS_OFF: list[tuple[m.Message, int]] = [
    (m.Vote(7, 3, 1, (0.5,), 1.25), 5),
    (m.Applied(9, 0, 1, 0.1, 0.2, True), 6),
    (m.Heartbeat(3, 7, False, "forward"), 4),
    (m.Damaged(3, 5, 8, ((0, 0, 3),)), 4),
    (m.LinkClosed(3, 1), 2),
    (m.Reconfigure(5, ((0,),), (0, 4), ((5,),), {0: "a"}, (), 7, ()), 10),
    (m.Activation(8, 2, 1, (4, 3)), 5),
    (m.ActivationGradient(8, 2, 1, (4, 3)), 4),
    (m.PartialSum(8, 1, 0, 3, 2, 4), 6),
    (m.ReducedGradient(8, 1, 0, 3, b""), 5),
    (m.Measured(3, 7, ((0, 0.25, 0.5, 4, 4),)), 6),
]
"""(a message of a run without options, the number of its other fields)."""


@pytest.mark.parametrize(("message", "num_fields"), OPTIONS_OFF, ids=lambda it: type(it).__name__)
def test_nothing_of_an_option_that_is_off_is_in_the_bytes(message: m.Message, num_fields: int) -> None:
    """Process groups extend votes and their result, recovery of devices the report of damage and what follows it."""
    kind, *fields = msgspec.msgpack.decode(m.encode(message))
    assert kind == type(message).__name__ and len(fields) == num_fields
    assert len(msgspec.structs.fields(message)) == num_fields + type(message).NUM_OPTIONS
    assert b"grouped" not in m.encode(message) and m.decode(m.encode(message)) == message


def test_an_option_that_is_on_is_the_last_field() -> None:
    *_, extension = msgspec.msgpack.decode(m.encode(m.Vote(7, 3, 1, (0.5,), 1.25, m.GROUPED)))
    assert extension == m.GROUPED


@pytest.mark.parametrize("tail", [b"\x91" * 5000 + b"\x01", b"\x81\xa1a" * 5000 + b"\x01"])
@pytest.mark.parametrize("decode", [m.decode, am.decode], ids=["workers", "agents"])
def test_what_no_decoder_can_read_is_one_kind_of_error(decode: Callable[[bytes], object], tail: bytes) -> None:
    """Arrays that are nested deeply end msgspec in a RecursionError, which ended the process that got them."""
    for kind in (b"Prepare", b"Stop", b"Signal", b"Failed"):
        with pytest.raises(msgspec.MsgspecError):
            decode(bytes((0x94, 0xA0 + len(kind))) + kind + tail * 3)


def test_text_that_is_none_is_no_message() -> None:
    with pytest.raises(msgspec.MsgspecError):
        m.decode(b"\x93\xa6Failed\x01\xa1\xff")


def test_every_kind_of_message_has_an_example() -> None:
    assert {type(message) for message in EXAMPLES} == set(typing.get_args(m.AnyMessage))


@given(step=ints, epoch=ints, sender=ints, norm=st.lists(numbers).map(tuple), loss=st.none() | numbers)
def test_votes_keep_every_bit(step: int, epoch: int, sender: int, norm: tuple[float, ...], loss: float | None) -> None:
    vote = m.decode(m.encode(m.Vote(step, epoch, sender, norm, loss)))
    assert isinstance(vote, m.Vote)
    assert [x.hex() for x in vote.norm] == [x.hex() for x in norm]
    assert (vote.loss is None) == (loss is None) and (loss is None or vote.loss is not None)
    assert loss is None or (vote.loss or 0.0) == loss


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_travel(value: float) -> None:
    applied = m.decode(m.encode(m.Applied(1, 0, 0, value, value, False)))
    assert isinstance(applied, m.Applied) and applied.loss.hex() == applied.grad_norm.hex() == value.hex()


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"hello", msgspec.msgpack.encode(["Nonsense", 1]), msgspec.msgpack.encode(["Vote", "x"])],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
        m.decode(data)
