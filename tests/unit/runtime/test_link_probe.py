"""Measuring the latency and bandwidth of a link: with a made-up clock, and over real links."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.transport.link_probe import PROBE_BYTES, TRIES, LinkProbe
from elaswave_spmd.runtime.transport.links import Links
from elaswave_spmd.runtime.transport.mailbox import Envelope, Interrupted, Mailbox
from tests.waiting import PATIENCE_S, eventually


class Wire:
    """Two probes whose messages take `latency` and 1 / `bandwidth` a byte; `late` delays some of them."""

    def __init__(self, latency: float, bandwidth: float, late: Sequence[float] = ()) -> None:
        self.now, self.latency, self.bandwidth = 0.0, latency, bandwidth
        self._late, self._sent = deque(late), deque[tuple[int, Envelope]]()
        self.probes = {rank: LinkProbe(self._sender(rank), lambda: self.now) for rank in (0, 1, 2)}
        self.silent: set[int] = set()

    def _sender(self, rank: int) -> Any:
        def send(peer: int, header: bytes, payloads: Sequence[Any]) -> bool:
            self._sent.append((peer, Envelope(rank, header, tuple(map(memoryview, payloads)))))
            return True

        return send

    def deliver(self) -> None:
        while self._sent:
            peer, envelope = self._sent.popleft()
            num_bytes = sum(payload.nbytes for payload in envelope.payloads)
            self.now += self.latency + num_bytes / self.bandwidth + (self._late.popleft() if self._late else 0.0)
            if peer not in self.silent:
                assert self.probes[peer].tap(envelope)


def test_latency_and_bandwidth_are_found() -> None:
    wire = Wire(2e-4, 5e8)
    assert wire.probes[0].result is None
    wire.probes[0].start(1)
    wire.deliver()
    assert wire.probes[0].result == (pytest.approx(2e-4), pytest.approx(5e8))
    assert wire.probes[1].result is None


def test_messages_that_are_late_do_not_count() -> None:
    wire = Wire(1e-4, 1e9, late=[0.5] * (2 * TRIES - 2) + [0.0, 0.0] + [0.25] * (2 * TRIES - 2))
    wire.probes[0].start(1)
    wire.deliver()
    assert wire.probes[0].result == (pytest.approx(1e-4), pytest.approx(1e9))


def test_a_clock_that_sees_no_time_pass_gives_a_number() -> None:
    wire = Wire(0.0, float("inf"))
    wire.probes[0].start(1)
    wire.deliver()
    assert wire.probes[0].result == (0.0, pytest.approx(PROBE_BYTES * 1e6))


def test_a_neighbour_that_never_answers_gives_no_result_and_another_can_be_measured() -> None:
    wire = Wire(1e-4, 1e9)
    wire.silent = {1}
    wire.probes[0].start(1)
    wire.deliver()
    assert wire.probes[0].result is None
    wire.probes[0].start(2)
    wire.deliver()
    assert wire.probes[0].result == (pytest.approx(1e-4), pytest.approx(1e9))


def test_an_answer_to_an_earlier_probe_is_ignored() -> None:
    wire = Wire(1e-4, 1e9)
    wire.probes[0].start(1)
    wire.probes[0].start(2)  # the first question to 1 is under way
    stray = Envelope(2, struct.pack("<cBI", b"\xc1", 1, 1))
    assert wire.probes[0].tap(stray)
    wire.deliver()
    assert wire.probes[0].result == (pytest.approx(1e-4), pytest.approx(1e9))


@pytest.mark.parametrize("item", [Interrupted("x"), Envelope(3, b""), Envelope(3, m.encode(m.Stop()))], ids=repr)
def test_everything_else_goes_to_the_mailbox(item: Any) -> None:
    assert not LinkProbe(lambda *_: True).tap(item)


def test_no_message_of_the_protocol_looks_like_a_probe() -> None:
    assert not m.encode(m.Ready(3, "ipc://x")).startswith(b"\xc1")


def test_over_real_links(tmp_path: Path) -> None:
    probes: dict[int, LinkProbe] = {}
    links: dict[int, Links] = {}
    boxes: dict[int, Mailbox] = {}
    for rank in (0, 1):
        probes[rank] = LinkProbe(lambda *message, rank=rank: links[rank].send(*message))
        boxes[rank] = Mailbox(probes[rank].tap)
        links[rank] = Links(rank, boxes[rank], directory=str(tmp_path))
    try:
        for rank in (0, 1):
            links[rank].connect(1 - rank, links[1 - rank].address)
            assert not links[rank].wait_connected([1 - rank], PATIENCE_S)
        probes[0].start(1)
        probes[1].start(0)
        eventually(lambda: all(probe.result for probe in probes.values()))
        for probe in probes.values():
            assert probe.result is not None
            latency_s, bandwidth = probe.result
            assert latency_s > 0 and 0 < bandwidth <= PROBE_BYTES * 1e6
        assert not boxes[0] and not boxes[1]
    finally:
        for one in links.values():
            one.close()
