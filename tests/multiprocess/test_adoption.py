"""A fork server whose controller is gone, and what the next one is told: without workers of a run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaswave_spmd.controller.orphaned_run import newcomers
from elaswave_spmd.errors import RunError
from elaswave_spmd.runtime.processes.adoption import Orphans, write_address
from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient, ForkServerSpec
from elaswave_spmd.runtime.processes.supervisor import end_orphans
from tests.multiprocess.test_fork_server import gone
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def clients(scratch: Path) -> Iterator[list[ForkServerClient]]:
    """Those that have had the fork server, oldest first; the last one ends it."""
    first = ForkServerClient.start(
        "runtime_targets:act",
        ForkServerSpec(preload=("numpy",), orphan_grace_s=100.0, scratch=[str(scratch)], adopt_s=100.0),
    )
    made = [first]
    yield made
    made[-1].stop(0.0)
    first._process.wait()  # pyright: ignore[reportPrivateUsage]  (its parent is this process)


def adopted(clients: list[ForkServerClient], scratch: Path) -> Orphans:
    """The next controller takes the place of the last one, which leaves."""
    clients[-1].give_back()
    taken = ForkServerClient.adopt(str(scratch), 100.0)
    assert taken is not None
    clients.append(taken[0])
    return taken[1]


def test_ends_are_told_until_a_controller_has_made_them_good(clients: list[ForkServerClient], scratch: Path) -> None:
    pids = {rank: clients[0].spawn(rank, {"sleep": 1000}) for rank in range(2)}
    assert adopted(clients, scratch).pids == pids
    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: clients[-1].poll())
    assert adopted(clients, scratch).ended == (1,), "the one before had not made it good when it left"
    clients[-1].settle()
    found = adopted(clients, scratch)
    assert found.ended == () and found.pids == {0: pids[0]} and found.next_rank == 2


def test_how_a_fork_server_ended_that_was_adopted_is_not_said(clients: list[ForkServerClient], scratch: Path) -> None:
    """Its parent alone knows."""
    clients[0].spawn(0, {"sleep": 1000})
    adopted(clients, scratch)
    os.kill(clients[-1].pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"^the fork server \(pid \d+\), parent of .*, ended; its workers ended with it"):
        eventually(lambda: clients[-1].poll())


def test_workers_that_were_given_back_live_on(clients: list[ForkServerClient], scratch: Path) -> None:
    pid = clients[0].spawn(0, {"sleep": 1000})
    adopted(clients, scratch)
    clients[-1].give_back()
    assert clients[-1].stop(0.0) == [] and not gone(pid), "to stop afterwards does nothing"
    adopted(clients, scratch)


def test_a_run_that_has_its_result_leaves_no_worker(
    clients: list[ForkServerClient], scratch: Path, tmp_path: Path
) -> None:
    pid = clients[0].spawn(0, {"sleep": 1000})
    clients[0].give_back()
    lines = [{"reason": "begin", "scratch": "/of/an/earlier/life"}, {"reason": "begin", "scratch": str(scratch)}]
    (tmp_path / "epochs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    end_orphans(tmp_path)
    assert gone(pid) and not scratch.exists()


def test_what_nobody_reads_any_more_takes_no_memory(scratch: Path, tmp_path: Path) -> None:
    """Workers print into a file in memory whose reader is the controller that has made it."""
    with open(os.memfd_create("output"), "a+b", buffering=0) as captured:
        spec = ForkServerSpec(
            preload=("numpy",),
            orphan_grace_s=100.0,
            scratch=[str(scratch)],
            adopt_s=100.0,
            streams={1: captured.fileno()},
        )
        first = ForkServerClient.start("runtime_targets:act", spec)
        first.spawn(0, {"prints": "read\n", "printed": str(tmp_path / "printed"), "sleep": 1000})
        eventually((tmp_path / "printed").exists)
        assert os.pread(captured.fileno(), 100, 0) == b"read\n"
        clients = [first]
        adopted(clients, scratch)
        eventually(lambda: os.fstat(captured.fileno()).st_size == 0)
        clients[-1].spawn(1, {"prints": "lost\n", "printed": str(tmp_path / "printed too"), "sleep": 1000})
        eventually((tmp_path / "printed too").exists)
        eventually(lambda: os.fstat(captured.fileno()).st_size == 0)
        clients[-1].stop(0.0)
        first._process.wait()  # pyright: ignore[reportPrivateUsage]


def test_where_nobody_can_adopt_workers_have_all_of_their_time(tmp_path: Path) -> None:
    """Its socket cannot be made, so nothing is waited for before the workers save their state."""
    scratch = tmp_path / ("long" * 30)
    scratch.mkdir()
    fork_server = ForkServerClient.start(
        "runtime_targets:ends_slowly",
        ForkServerSpec(preload=("numpy",), orphan_grace_s=100.1, scratch=[str(scratch)], adopt_s=100.0),
    )
    pid = fork_server.spawn(0, {"seconds": 3.0, "ended": str(tmp_path / "ended"), "ready": str(tmp_path / "ready")})
    eventually((tmp_path / "ready").exists)
    fork_server.release()
    assert gone(pid) and (tmp_path / "ended").exists()


def test_newcomers_are_those_without_an_address_whether_they_live_or_not(tmp_path: Path) -> None:
    for rank in (0, 1, 2):  # 1 has left, and its process ended just afterwards
        write_address(str(tmp_path), rank, "ipc://somewhere")
    orphans = Orphans({0: 10, 2: 12, 3: 13}, 5, (1, 4), 1.0)
    assert newcomers(str(tmp_path), orphans) == (3, 4)
