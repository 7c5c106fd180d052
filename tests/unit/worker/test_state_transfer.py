"""State is sent and received piece by piece, in the background of whatever else a worker does."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import pytest
import torch
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.worker_protocol import WorkerProtocol
from elaswave_spmd.worker import state as state_module
from elaswave_spmd.worker.channel import Incoming
from elaswave_spmd.worker.state import LEARNING, BackgroundCopies, HeldState
from elaswave_spmd.worker.state_transfer import receive_state, send_state
from tests.unit.worker.test_state import states, update

LAYER = 1


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "COPY_ELEMENTS", 24)  # no divisor of a page


class Sending:
    """A channel that lists what is sent, and lends memory for some peers."""

    copies_payloads = True
    rejected: Mapping[str, int] = {}

    def __init__(self, lends_for: Collection[int] = ()) -> None:
        self.sent: list[tuple[int, m.Message, Tensor | None]] = []
        self.lent: dict[int, Tensor] = {}
        self._lends_for = lends_for

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        self.sent.append((peer, message, payload))

    def lend(self, peer: int, num_elements: int) -> Tensor | None:
        return self.lent.setdefault(peer, torch.empty(num_elements)) if peer in self._lends_for else None

    def reaches(self, peer: int) -> bool:
        return True

    def receive_all(self) -> list[Incoming]:
        return []

    def reject(self, reason: str) -> None:
        raise AssertionError(reason)


def counted(log: list[str], name: str, pieces: int) -> Iterator[None]:
    for piece in range(pieces):
        log.append(f"{name}{piece}")
        yield
    log.append(f"{name} done")


def test_copies_are_done_in_turn_and_in_pieces() -> None:
    copies, log = BackgroundCopies(), []
    assert not copies.do_one()
    copies.add(counted(log, "a", 2))
    copies.add(counted(log, "b", 1))
    assert copies.do_one() and log == ["a0"]
    assert copies.do_one() and copies.do_one() and log == ["a0", "a1", "a done"]
    copies.finish()
    assert log[3:] == ["b0", "b done"] and not copies.do_one()
    copies.add(counted(log, "c", 1))
    copies.give_up()
    assert not copies.do_one() and log[-1] == "b done"


def test_the_state_of_one_page_range_is_sent_before_its_turn() -> None:
    copies, log = BackgroundCopies(), []
    for name, sent in (("a", (0, 0, 1)), ("b", (0, 1, 2)), ("c", None), ("d", (0, 1, 2))):
        copies.add(counted(log, name, 1), sent)
    assert copies.do_one() and log == ["a0"]
    copies.finish_sending((0, 1, 2))
    assert log[1:] == ["b0", "b done", "d0", "d done"]
    copies.finish_sending((0, 1, 2))
    copies.finish()
    assert log[5:] == ["a done", "c0", "c done"]


def test_a_copy_that_fails_is_not_begun_again() -> None:
    def failing() -> Iterator[None]:
        yield
        raise OSError("no memory")

    copies, log = BackgroundCopies(), []
    copies.add(failing())
    copies.add(counted(log, "b", 1))
    assert copies.do_one()
    with pytest.raises(OSError, match="no memory"):
        copies.do_one()
    copies.finish()
    assert log == ["b0", "b done"]


def sent_state(state: HeldState) -> tuple[m.PageState, Tensor]:
    """The message and payload that the primary of a layer's first page range sends."""
    part, channel = state.layers[LAYER][0], Sending()
    message = m.PageState(
        1, *part.pages.key, torch.arange(part.pages.stop - part.pages.first).float().numpy().tobytes()
    )
    pieces = sum(1 for _ in send_state(state, part, message, [4, 6], channel))
    sent = channel.sent
    assert pieces > 3 and [peer for peer, _, _ in sent] == [4, 6] and sent[0][2] is sent[1][2]
    _, sent_message, payload = sent[0]
    assert sent_message == message and payload is not None
    return message, payload


def without_state(*, separate: bool) -> HeldState:
    """Another worker that holds the same layer, without state."""
    (found,) = states(1, 1, separate=separate, dtype=torch.float32).values()
    runs = [part.pages for part in found]
    found.rebind([], found._values)
    found.rebind(runs, found._values)
    assert all(part.version == LEARNING for part in found)
    return found


@pytest.mark.parametrize("separate", [False, True])
def test_what_is_received_is_what_was_sent_and_goes_on_alike(separate: bool) -> None:
    (state,) = states(1, 1, separate=separate, dtype=torch.float32).values()
    update(state, 1, 1.3)
    message, payload = sent_state(state)
    other, protocol, done = without_state(separate=separate), WorkerProtocol(4, 0, (), (), version=1), []
    job = receive_state(other, message, payload, protocol, lambda: done.append(True))
    (mine,), (theirs,) = other.layers[LAYER], state.layers[LAYER]
    for _ in job:
        assert mine.version == LEARNING and not done, "it counts when all of it is there"
    assert mine.version == 1 and done == [True]
    assert protocol.norms_at(1, mine.pages.key) == tuple(map(float, range(mine.pages.stop - mine.pages.first)))
    assert torch.equal(mine.master, theirs.master)
    for name, values in mine.optimizer_state.items():
        assert torch.equal(values, theirs.optimizer_state[name])
    assert other._values[LAYER].is_at(1)


@pytest.mark.parametrize("at", [0, 3, -1])
def test_parameters_that_are_published_meanwhile_are_left_alone(at: int) -> None:
    """A forward may have been run with them by then, and its backward refers to that very memory."""
    (state,) = states(1, 1, separate=False, dtype=torch.float32).values()
    update(state, 1, 1.3)
    message, payload = sent_state(state)
    other = without_state(separate=False)
    values, run = other._values[LAYER], other.layers[LAYER][0].pages
    job = receive_state(other, message, payload, WorkerProtocol(4, 0, (), (), version=1), lambda: None)
    for _ in range(at) if at >= 0 else job:
        next(job, None)
    if at >= 0:
        values.install(run.first, run.stop, state.compute_values(state.layers[LAYER][0]), 1)
        version = values.flat._version
        for _ in job:
            pass
        assert values.flat._version == version, "written to"
    assert torch.equal(values.flat, state._values[LAYER].flat) and values.is_at(1)


def test_only_page_ranges_that_wait_for_state_receive_it() -> None:
    (state,) = states(1, 1, separate=True, dtype=torch.float32).values()
    update(state, 1, 1.0)
    message, payload = sent_state(state)
    (other,) = states(1, 1, separate=True, dtype=torch.float32).values()
    before = [part.master.clone() for part in other]
    for _ in receive_state(other, message, payload * 0, WorkerProtocol(4, 0, (), (), version=1), lambda: None):
        pass
    assert all(torch.equal(part.master, b) and part.version == 0 for part, b in zip(other, before, strict=True))


def test_the_loss_page_is_sent_as_it_is() -> None:
    (state,) = states(1, 1, separate=True, dtype=torch.float32).values()
    channel, loss = Sending({3}), torch.tensor([1.0, 2.5])
    message = m.PageState(1, 2, 5, 6, b"")
    assert not list(send_state(state, loss, message, [3], channel))
    assert channel.sent == [(3, message, loss)]


@pytest.mark.parametrize(("lends_for", "written_to"), [({4, 6}, {6}), ({4}, set[int]()), ({6}, {6})])
def test_state_is_written_where_the_last_learner_reads_it(lends_for: set[int], written_to: set[int]) -> None:
    (state,) = states(1, 1, separate=True, dtype=torch.float32).values()
    part, channel = state.layers[LAYER][0], Sending(lends_for)
    for _ in send_state(state, part, m.PageState(1, *part.pages.key, b""), [4, 6], channel):
        pass
    assert channel.lent.keys() == written_to
    payloads = [payload for _, _, payload in channel.sent]
    assert len(payloads) == 2 and payloads[0] is payloads[1] and payloads[0] is not None
    assert not written_to or payloads[0] is channel.lent[6]
    assert torch.equal(payloads[0].view(len(part.rows), -1), torch.stack(part.rows))


def test_state_that_is_not_what_was_written_is_not_sent() -> None:
    state = states(1, 0, separate=True, dtype=torch.float32)[0]
    part, channel = next(iter(state)), Sending()
    message = m.PageState(0, *part.pages.key, b"")

    def send() -> None:
        copies = BackgroundCopies()
        copies.add(send_state(state, part, message, (1, 2), channel))
        copies.finish()

    def receivers() -> list[int]:
        return [peer for peer, _, _ in channel.sent]

    state.fingerprints()
    send()
    assert receivers() == [1, 2]
    part.master.view(torch.int32)[1] ^= 1 << 7
    send()
    state.disown([part])
    send()
    assert receivers() == [1, 2]
