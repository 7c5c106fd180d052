"""The order of what a controller of real processes hears: without any process."""

from __future__ import annotations

import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_spmd.conf.schema import CheckpointSettings, RuntimeSettings, Timeouts
from elaswave_spmd.controller import io as module
from elaswave_spmd.controller.checkpoints import CheckpointSpec
from elaswave_spmd.controller.events import (
    BeatsReceived,
    CheckpointFound,
    ExitsReported,
    LinkEnded,
    ManifestWritten,
    OldRemoved,
    Received,
    StopRequested,
    Tick,
    WorkerEnded,
)
from elaswave_spmd.controller.io import ProcessIO, Spawned, _ManifestWriter, listen_host
from elaswave_spmd.controller.supervision import Supervision
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.recovery import admission
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.failure_detector import Suspect
from elaswave_spmd.run_dir.checkpoint_shard import checkpoint_path
from elaswave_spmd.run_dir.directory import EVENTS, METRICS
from elaswave_spmd.run_dir.manifest import Manifest
from elaswave_spmd.runtime.processes.agents import Agents, RemoteExited
from elaswave_spmd.runtime.processes.fork_server_client import Exited, ForkServerClient, NoAnswerError, NotStartedError
from elaswave_spmd.runtime.transport.links import Links
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox, PeerClosed, ReadMark
from tests.unit.runtime.test_launcher import FakeForkServer
from tests.waiting import PATIENCE_S, eventually

HEARTBEAT, FAILED = m.Heartbeat(0, 1, False, ""), m.Failed(0, "a traceback", 3)


class _Links:
    """Links that note which were dropped, and answer a mark at once."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.rejected: dict[str, int] = {}
        self.dropped: list[int] = []

    def drop(self, peer: int) -> None:
        self.dropped.append(peer)

    def mark(self, at: float) -> None:
        self._mailbox.put(ReadMark(at))


@pytest.fixture
def io() -> ProcessIO:
    """Worker 0 has said something, and why it fails, has closed its link and ended; nothing of it was looked at yet."""
    fork_server, made = FakeForkServer(), ProcessIO.__new__(ProcessIO)
    fork_server.exits = [Exited(0, 5, 1, None)]
    fork_server.mailbox.interrupt("there is something to poll")
    mailbox = made._mailbox = Mailbox()
    made._launcher, made._links = cast(ForkServerClient, fork_server), cast(Links, _Links(mailbox))
    made._ready, made._stops, made._deaths = deque(), deque(), deque()
    made._rejected, made._look_at = Counter(), 0.0
    made._has_ticked, made._read_until, made._awaits_mark = False, 0.0, False
    for item in (Envelope(0, m.encode(HEARTBEAT)), Envelope(0, m.encode(FAILED)), PeerClosed(0)):
        made._mailbox.put(item)
    return made


def test_what_a_worker_has_said_comes_before_its_end(io: ProcessIO) -> None:
    """Also to a controller that was kept from reading until the worker had ended."""
    heard, failed, closed, ended = (io.next_event(io.now() + 100.0) for _ in range(4))
    assert [heard, failed] == [Received(HEARTBEAT, (), 0), Received(FAILED, (), 0)]
    assert closed == LinkEnded(0) and isinstance(ended, WorkerEnded) and ended.rank == 0


def test_what_others_have_said_comes_after_an_end_which_may_be_its_cause(io: ProcessIO) -> None:
    io._mailbox.take_all()
    for rank in (0, 1, 0):
        io._mailbox.put(Envelope(rank, m.encode(m.Failed(rank, "a traceback"))))
    events = [io.next_event(io.now() + 100.0) for _ in range(4)]
    assert [getattr(event, "sender", None) for event in events] == [0, 0, None, 1]
    assert isinstance(events[2], WorkerEnded)


def test_ends_that_follow_an_end_come_with_it_and_nothing_that_comes_before_them_is_skipped(io: ProcessIO) -> None:
    cast(FakeForkServer, io._launcher).exits = [Exited(rank, 5 + rank, None, 9) for rank in (0, 1, 2)]
    io._mailbox.take_all()
    for rank in (3, 4):
        io._mailbox.put(Envelope(rank, m.encode(m.Failed(rank, "a traceback"))))
    assert isinstance(io.next_event(io.now() + 100.0), Received)
    first = io.next_event(io.now() + 100.0)
    assert [event.rank for event in (cast(WorkerEnded, first), *io.next_ends())] == [0, 1, 2]
    assert isinstance(io.next_event(io.now() + 100.0), Received) and io.next_ends() == []


def test_who_has_ended_has_no_link_any_more_unless_it_may_be_back_with_its_agent(io: ProcessIO) -> None:
    exits = [Exited(0, 5, 0, None), RemoteExited(1, 6, 0, None, "a"), RemoteExited(2, 0, None, 9, "b", "it is cut off")]
    cast(FakeForkServer, io._launcher).exits = exits
    io.report_exits()
    assert cast(_Links, io._links).dropped == [0, 1]


def test_nor_does_it_come_after_all_ends_are_reported(io: ProcessIO) -> None:
    io.report_exits()
    events = [io.next_event(io.now() + 100.0) for _ in range(5)]
    assert [type(event) for event in events] == [Received, Received, LinkEnded, WorkerEnded, ExitsReported]


def test_what_agents_send_on_is_heartbeats_or_counted(io: ProcessIO, monkeypatch: pytest.MonkeyPatch) -> None:
    beat, refused = m.Heartbeat(3, 17, False, "forward"), list[str]()
    good = [(3, m.encode(beat)), (4, m.encode(m.Heartbeat(4, 1, True)))]
    bad = [b"\xc1", m.encode(FAILED), m.encode(HEARTBEAT), m.encode(m.Heartbeat(5, 1, True, "x" * 5000))]
    given = [good + [(5, header) for header in bad], [(5, bad[0])], []]
    agents = SimpleNamespace(take_beats=lambda: given.pop(0))
    monkeypatch.setattr(ProcessIO, "_agents", cast(Agents, agents))
    io._links = cast(Links, SimpleNamespace(reject=refused.append))
    assert io._beats() == [BeatsReceived((beat, m.Heartbeat(4, 1, True)))]
    assert refused == [admission.UNREADABLE, admission.DIRECTION, admission.SENDER, admission.SIZE]
    assert not io._beats() and not io._beats()


def test_a_tick_is_due_whatever_waits_in_the_mailbox(io: ProcessIO) -> None:
    assert isinstance(io.next_event(io.now()), Tick) and len(io._mailbox) == 4  # and a mark


def test_nobody_is_lost_whose_answer_waits_to_be_read(io: ProcessIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rack is lost, and survivors send a message for each lost link before they answer. To read all of these takes
    the controller five times as long as an answer may take."""
    clock = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    cast(FakeForkServer, io._launcher).exits = []
    io._mailbox.take_all()
    timeouts = Timeouts(heartbeat=0.1, suspect=1.0, status=2.0, progress=4.0, start=16.0)
    supervision, answer = Supervision(timeouts, io.now()), m.StepReport(1, 0, 3, ())
    supervision.watch(0, io.now())
    for message in (*(m.LinkClosed(0, peer) for peer in range(1, 101)), answer, HEARTBEAT):
        io._mailbox.put(Envelope(0, m.encode(message)))
    num_ticks, unanswered = 0, (0,)
    while len(io._mailbox) > 1:
        clock[0] += 0.1  # handling an event takes so long
        event = io.next_event(supervision.next_tick)
        if isinstance(event, Tick):
            num_ticks += 1
            assert supervision.tick(io.now(), event.read_until, (1, unanswered), ()) == ([], None)
        elif event == Received(answer, (), 0):
            unanswered = ()
    assert num_ticks > 50 and clock[0] > 110.0 and not unanswered
    found: list[Suspect] = []
    for _ in range(20):  # it is silent from now on, and nothing waits to be read
        clock[0] += 0.1
        found += supervision.tick(io.now(), io.now(), (1, ()), ())[0]
    assert [suspect.is_silent for suspect in found] == [True]


def test_a_clock_that_is_always_late_lets_messages_and_signals_through(io: ProcessIO) -> None:
    """Where ticks are due faster than they are handled, nothing was heard any more, not even Ctrl-C."""
    io.__dict__ |= {
        "_planning": SimpleNamespace(next_answer=lambda: None),
        "_writer": SimpleNamespace(next_result=lambda: None),
    }
    io.stop_requested(signal.SIGINT)
    events = [io.next_event(io.now()) for _ in range(12)]
    others = [event for event in events if not isinstance(event, Tick)]
    assert isinstance(events[0], Tick) and StopRequested("SIGINT") in others
    assert [type(event) for event in others if isinstance(event, (Received, LinkEnded))] == [
        Received,
        Received,
        LinkEnded,
    ]
    assert isinstance(events[-1], Tick)  # and with nothing to hear, ticks alone


def test_nobody_waits_for_a_fork_server_that_stands_still(io: ProcessIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is lost, which others wait for; and the run ends, with causes that are to be told."""
    fork_server, limits = cast(FakeForkServer, io._launcher), list[float | None]()

    def signalled(rank: int, number: int, limit_s: float | None = None) -> bool:
        limits.append(limit_s)
        raise NoAnswerError("it stands still")

    monkeypatch.setattr(fork_server, "signal", signalled)
    io.kill(3)
    assert fork_server.asked == [("order_signal", 3, signal.SIGKILL)] and not limits
    io.report_exits()
    assert io._ready[-1] == ExitsReported() and None not in limits


@pytest.mark.parametrize("others_train", [True, False])
def test_a_start_that_others_wait_for_has_a_limit(
    io: ProcessIO, others_train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []

    def spawn(rank: int, spec: object, limit_s: float | None = None) -> int:
        limits.append(limit_s)
        raise NotStartedError("it stands still")

    monkeypatch.setattr(io._launcher, "spawn", spawn)
    monkeypatch.setattr(module, "WorkerSpec", lambda *_: SimpleNamespace(to_dict=dict))
    io._links = cast(Links, SimpleNamespace(peers=(0, 1) if others_train else ()))
    io.__dict__ |= {"_spec": None, "_mutexes": None}
    assert io.spawn(2) == Spawned(why_not="it stands still")
    assert [limit is not None for limit in limits] == [others_train]


def test_links_of_several_machines_do_not_listen_where_no_other_machine_reaches() -> None:
    several: dict[str, Any] = {"transport": "tcp", "agents": 1, "token_file": "token", "host": "127.0.0.1"}
    assert listen_host(RuntimeSettings(**several, rendezvous="localhost:29400")) == "127.0.0.1", "all are on this one"
    with pytest.raises(ConfigError, match=r"^127\.0\.0\.1 is an address that other machines cannot reach") as caught:
        listen_host(RuntimeSettings(**several, rendezvous="node0:29400"))
    assert caught.value.where == "runtime.host=127.0.0.1"


class _Reads:
    """In place of `prune`: it reads checkpoints until it may go on, and then notes whether it may remove any."""

    def __init__(self) -> None:
        self.begun, self.goes_on, self.over = list[int](), threading.Event(), list[bool]()

    def __call__(self, run_dir: Path, keep: int, trusted: int, *_: object, is_over: Callable[[], bool], **__: object):
        self.begun.append(trusted)
        assert self.goes_on.wait(PATIENCE_S)
        self.over.append(is_over())


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Reads]:
    found = _Reads()
    monkeypatch.setattr(module, "prune", found)
    monkeypatch.setattr(module, "write_manifest", lambda *_: None)
    yield found
    found.goes_on.set()


def writer_in(run_dir: Path, patience_s: float = PATIENCE_S) -> _ManifestWriter:
    for name in (METRICS, EVENTS):
        (run_dir / name).touch()
    spec = cast(CheckpointSpec, SimpleNamespace(incarnation=1, run="r", fingerprint={}, layout={}, kinds=(), step=0))
    return _ManifestWriter(run_dir, CheckpointSettings(), spec, Mailbox(), None, {}, None, patience_s)


def written(writer: _ManifestWriter, step: int) -> None:
    writer.write(cast(Manifest, SimpleNamespace(step=step)), step, ())  # trusted as well, to tell removals apart


def test_the_end_of_a_run_waits_for_old_checkpoints_no_longer_than_it_may(tmp_path: Path, reads: _Reads) -> None:
    """A disk that does not answer keeps no controller from ending, and what is left of the removal stays undone."""
    writer = writer_in(tmp_path, 0.05)
    written(writer, 3)
    eventually(lambda: reads.begun == [3])
    closing = threading.Thread(target=writer.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S / 4)
    assert not closing.is_alive()
    reads.goes_on.set()
    eventually(lambda: reads.over == [True])


def test_no_manifest_and_no_result_waits_for_old_checkpoints_to_be_read(tmp_path: Path, reads: _Reads) -> None:
    """They take longer to read than there is between two checkpoints: it is done for the newest of them only."""
    writer = writer_in(tmp_path)
    written(writer, 3)
    eventually(lambda: reads.begun == [3])
    for step in (4, 5, 6):
        written(writer, step)
    assert [(type(it), it.manifest.step) for it in writer.finish() if isinstance(it, ManifestWritten)] == [
        (ManifestWritten, step) for step in (3, 4, 5, 6)
    ]
    reads.goes_on.set()
    writer.close()
    assert reads.begun == [3, 6] and reads.over == [False, False]
    assert writer.finish() == [OldRemoved(3), OldRemoved(6)]


def test_who_looks_for_a_checkpoint_has_none_removed_meanwhile(
    tmp_path: Path, reads: _Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ProcessIO.__new__(ProcessIO)
    found._run_dir, found._ready, found._writer = tmp_path, deque(), writer_in(tmp_path)
    written(found._writer, 3)
    eventually(lambda: reads.begun == [3])
    written(found._writer, 4)
    monkeypatch.setattr(module, "newest_checkpoint", lambda *_: None)
    found.find_checkpoint(None)
    assert [type(event) for event in found._ready] == [ManifestWritten, ManifestWritten, CheckpointFound]
    reads.goes_on.set()
    found._writer.close()
    assert reads.begun == [3] and reads.over == [True]


def test_shards_that_are_useless_are_removed_and_nothing_else(tmp_path: Path) -> None:
    directory = checkpoint_path(tmp_path, 5)
    directory.mkdir(parents=True)
    for rank in range(3):
        (directory / f"shard_{rank}").touch()
    writer = writer_in(tmp_path)
    writer.remove(5, ("shard_0", "is not there", "shard_2"))
    writer.remove(6, ("its directory is not there",))
    assert writer.finish() == [] and [file.name for file in directory.iterdir()] == ["shard_1"]
    writer.close()


def test_a_patience_that_is_longer_than_a_thread_can_wait_serves(tmp_path: Path, reads: _Reads) -> None:
    writer = writer_in(tmp_path, 1e300)
    reads.goes_on.set()
    written(writer, 3)
    eventually(lambda: reads.begun == [3])
    writer.remove(6, ("its directory is not there",))
    writer.close()
    assert not writer._is_left  # pyright: ignore[reportPrivateUsage]
