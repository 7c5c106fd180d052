"""A worker's channel: when messages are sent, and which memory payloads are in. Links and devices are doubles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from elaswave_spmd.conf.schema import Timeouts
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.devices import HostCopy, device_of
from elaswave_spmd.runtime.devices.host import HostDevice
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.runtime.transport.mailbox import ControllerLost, Envelope, Mailbox, PeerClosed
from elaswave_spmd.worker import channel as module
from elaswave_spmd.worker.channel import SocketChannel, WorkerStopped
from tests.unit.runtime.runtime_cases import HOST

NEED = m.Need(1, 0, 0, 1)
PUBLISH = m.Publish(1, 0, 0, 1)


class RecordingLinks:
    """Links that keep the messages that are sent."""

    me = 0
    peers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.sent: list[tuple[int, m.AnyMessage, list[Any]]] = []

    def send(self, peer: int, header: bytes, payloads: Sequence[Any] = (), *, ordered: bool = True) -> bool:
        self.sent.append((peer, m.decode(header), list(payloads)))
        return True

    @property
    def told(self) -> list[tuple[int, str]]:
        return [(peer, type(message).__name__) for peer, message, _ in self.sent]


class SlowCopy:
    """A copy that is complete when a test sets it."""

    def __init__(self, values: Tensor) -> None:
        self._values, self.complete = values.clone(), False

    def done(self) -> bool:
        return self.complete

    def wait(self) -> Tensor:
        assert self.complete, "the loop must not wait"
        return self._values


class PinnedDouble(HostDevice):
    """A device that claims to overlap copies with computation, and counts the values that are copied to it."""

    def __init__(self) -> None:
        cpu = device_of("cpu")
        capabilities = replace(cpu.capabilities, streams=True, pinned_copies=True)
        super().__init__(cast(Any, SimpleNamespace(name="double", capabilities=capabilities)))
        self.copies: list[SlowCopy] = []
        self.placed: list[Tensor] = []

    def copy_to_host(self, values: Tensor) -> HostCopy:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.copies.append(SlowCopy(values))
        return self.copies[-1]

    def to_place(self, values: Tensor) -> Tensor:
        self.placed.append(values)
        return values


def port_on(device: HostDevice) -> tuple[SocketChannel, RecordingLinks, Mailbox]:
    links, mailbox = RecordingLinks(), Mailbox()
    return SocketChannel(cast(Links, links), mailbox, torch.float32, device), links, mailbox


def test_on_the_cpu_a_payload_leaves_at_once_from_where_it_lies() -> None:
    port, links, _ = port_on(HOST)
    payload = torch.arange(6.0)
    port.send(1, PUBLISH, payload)
    ((_, _, (frame,)),) = links.sent
    assert np.frombuffer(frame, np.float32).ctypes.data == payload.data_ptr() and not port.is_copying()


def test_a_payload_leaves_when_it_is_copied_and_nothing_to_its_peer_overtakes_it() -> None:
    device = PinnedDouble()
    port, links, _ = port_on(device)
    port.send(1, PUBLISH, torch.arange(4.0))
    port.send(1, NEED)
    port.send(2, NEED)
    port.send(1, PUBLISH, torch.arange(2.0))
    assert links.told == [(2, "Need")] and port.is_copying()
    device.copies[1].complete = True
    assert port.is_copying() and links.told == [(2, "Need")]
    device.copies[0].complete = True
    assert not port.is_copying()
    assert links.told == [(2, "Need"), (1, "Publish"), (1, "Need"), (1, "Publish")]
    assert np.frombuffer(links.sent[1][2][0], np.float32).tolist() == [0, 1, 2, 3]
    port.send(1, NEED)
    assert links.told[-1] == (1, "Need")


def test_receiving_messages_sends_payloads_whose_copy_is_complete() -> None:
    device = PinnedDouble()
    port, links, _ = port_on(device)
    port.send(1, PUBLISH, torch.arange(4.0))
    assert port.receive_all() == [] and not links.sent
    device.copies[0].complete = True
    assert port.receive_all() == [] and links.told == [(1, "Publish")]


@pytest.mark.parametrize("writable", [True, False])
def test_a_payload_without_elements_arrives_as_one(writable: bool) -> None:
    port, links, mailbox = port_on(HOST)
    message = m.Activation(1, 0, 1, (2, 0, 3))
    port.send(1, message, torch.empty(2, 0, 3))
    ((*_, (frame,)),) = links.sent
    assert frame.nbytes == 0
    mailbox.put(Envelope(1, m.encode(message), (memoryview(bytearray() if writable else b""),)))
    (incoming,) = port.receive_all()
    assert incoming.message == message and incoming.payload is not None and incoming.payload.shape == (0,)
    assert incoming.payload.dtype == torch.float32


def test_sums_come_to_the_device_and_other_payloads_stay_in_host_memory() -> None:
    device = PinnedDouble()
    port, _, mailbox = port_on(device)
    payload = memoryview(bytearray(np.arange(3, dtype=np.float32).tobytes()))
    for message in (
        m.PartialSum(1, 0, 0, 1, 0, 2),
        m.ReducedGradient(1, 0, 0, 1, b""),
        PUBLISH,
        m.PageState(1, 0, 0, 1, b""),
    ):
        mailbox.put(Envelope(1, m.encode(message), (payload,)))
    taken = [incoming.payload for incoming in port.receive_all()]
    assert [any(t is p for p in device.placed) for t in taken] == [True, True, False, False]
    assert all(t is not None and t.tolist() == [0, 1, 2] for t in taken)


@pytest.mark.parametrize(
    ("end", "adopt", "seconds"), [(ControllerLost(), None, 20.0), (PeerClosed(CONTROLLER), 100.0, 115.0)]
)
def test_an_orphan_gives_up_a_step_that_takes_as_long_as_it_may_live(
    end: ControllerLost | PeerClosed, adopt: float | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is killed in the middle of it, with its state. What has come is handled first: it may end the step."""
    now, mailbox, timeouts = [7.0], Mailbox(), Timeouts(controller=5.0, shutdown=30.0, adopt=adopt)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    port = SocketChannel(cast(Links, RecordingLinks()), mailbox, torch.float32, HOST, timeouts=timeouts)
    mailbox.put(end)
    assert [incoming.message for incoming in port.receive_all()] == [m.LinkClosed(0, CONTROLLER)]
    now[0] += seconds - 1
    assert port.receive_all() == []
    now[0] += 1
    mailbox.put(Envelope(1, m.encode(NEED)))
    assert [incoming.message for incoming in port.receive_all()] == [NEED]
    with pytest.raises(WorkerStopped):
        port.receive_all()


def test_an_orphan_that_is_adopted_gives_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now, mailbox, links = [7.0], Mailbox(), RecordingLinks()
    links.__dict__ |= {"drop": lambda _: None, "connect": lambda *_: None}
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    port = SocketChannel(cast(Links, links), mailbox, torch.float32, HOST, timeouts=Timeouts(adopt=100.0))
    mailbox.put(ControllerLost())
    mailbox.put(Envelope(CONTROLLER, m.encode(m.Adopt(2, "ipc:///elsewhere"))))
    assert len(port.receive_all()) == 2
    now[0] += 1e6
    assert port.receive_all() == []


def test_links_that_are_found_closed_at_once_are_one_report() -> None:
    """The loss of a rack would otherwise take a message for each pair of a lost worker and a survivor."""
    mailbox, links = Mailbox(), RecordingLinks()
    port = SocketChannel(cast(Links, links), mailbox, torch.float32, HOST)
    closed = PeerClosed(3), PeerClosed(5, was_linked=False), PeerClosed(4), PeerClosed(CONTROLLER)
    for item in closed:
        mailbox.put(item)
    assert [incoming.message for incoming in port.receive_all()] == [
        m.LinkClosed(0, item.peer, item.was_linked) for item in closed
    ]
    assert [message for _, message, _ in links.sent] == [m.LinksClosed(0, (3, 4)), m.LinkClosed(0, 5, False)]
    mailbox.put(PeerClosed(6))
    port.receive_all()
    assert links.sent[2:] == [(CONTROLLER, m.LinkClosed(0, 6), [])]
