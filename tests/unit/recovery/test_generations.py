"""A worker listens to one controller at a time, the newest: what those of the past had sent may come late."""

from __future__ import annotations

import msgspec
import pytest

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.generations import FIRST, ControllerFence, stamped
from elaswave_spmd.recovery.packed_reconfigure import Packer, reconfigure_of
from elaswave_spmd.recovery.peers import Peers

ADDRESS = "ipc:///tmp/controller"


def reconfigure(epoch: int, version: int = 3) -> m.Reconfigure:
    return m.Reconfigure(epoch, ((0, 1),), (0, 4), ((3, 2),), {0: "a", 1: "b"}, ((0, 0, 3, 1, (0,), ()),), version)


def through(fence: ControllerFence, data: bytes) -> m.AnyMessage | None:
    return fence.admitted(m.decode(data))


def test_the_first_controller_writes_no_generation() -> None:
    data = m.encode(m.Prepare(3, 7))
    assert stamped(data, FIRST) == data
    assert through(ControllerFence(), data) == m.Prepare(3, 7)


@pytest.mark.parametrize("message", [m.Prepare(4), m.Validated(3), m.Stop(), m.Written(8), m.ReplicasAgree(2, 3)])
def test_only_the_newest_generation_is_listened_to(message: m.Message) -> None:
    fence, data = ControllerFence(), m.encode(message)
    assert through(fence, stamped(data, 2)) is None, "nobody has said that there is a second one"
    assert not fence.was_adopted and through(fence, data) == message
    assert through(fence, m.encode(m.Adopt(2, ADDRESS))) == m.Adopt(2, ADDRESS)
    assert fence.was_adopted
    assert through(fence, data) is None, "it comes late"
    assert through(fence, stamped(data, 2)) == message
    assert through(fence, m.encode(m.Adopt(3, ADDRESS))) is not None
    assert through(fence, stamped(data, 2)) is None and through(fence, stamped(data, 3)) == message


def test_a_controller_of_the_past_adopts_nobody() -> None:
    fence = ControllerFence(3)
    assert not fence.was_adopted, "the third controller has started this worker"
    assert [through(fence, m.encode(m.Adopt(number, ADDRESS))) for number in (1, 2, 3)] == [None] * 3
    assert fence.generation == 3


def test_the_next_controller_sends_a_reconfigure_whole_and_a_late_change_harms_nobody() -> None:
    """A change that the controller before had sent is one of another Reconfigure than the last."""
    fence, before, after = ControllerFence(), Packer(), Packer()
    ((_, first),) = before.encoded([0, 1], reconfigure(0))
    ((_, late),) = before.encoded([0, 1], reconfigure(1))
    assert through(fence, first) == reconfigure(0)
    epoch, data = fence.unpacker.last
    assert (epoch, reconfigure_of(data)) == (0, reconfigure(0))
    fence.admitted(m.Adopt(2, ADDRESS))
    ((_, whole),) = after.encoded([0, 1], reconfigure(5))
    assert through(fence, stamped(whole, 2)) == reconfigure(5)
    assert through(fence, late) is None
    ((_, change),) = after.encoded([0, 1], reconfigure(6, 4))
    assert through(fence, stamped(change, 2)) == reconfigure(6, 4)


def test_addresses_of_peers_are_a_part_of_the_reconfigure_that_follows() -> None:
    fence, packer = ControllerFence(), Packer()
    encoded = [header for _, header in packer.encoded([0, 1], reconfigure(0), Peers.among((0, 1)))]
    assert [type(m.decode(header)) for header in encoded] == [m.PeerAddresses, m.PackedReconfigure]
    assert [through(fence, header) for header in encoded] == [None, reconfigure(0)]


def test_what_is_no_message_inside_is_an_error_of_its_own_kind() -> None:
    fence = ControllerFence(2)
    with pytest.raises(msgspec.MsgspecError):
        fence.admitted(m.OfGeneration(2, b"\xff nothing"))
