"""The fork server: workers come quickly, their ends are reported, and nothing is ever left behind."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaswave_spmd.by_value import ByValue
from elaswave_spmd.controller.orphaned_run import newcomers
from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.ready import is_any_ready
from elaswave_spmd.runtime.processes import fork_server as server_module
from elaswave_spmd.runtime.processes import fork_server_client as client_module
from elaswave_spmd.runtime.processes.adoption import Orphans, write_address
from elaswave_spmd.runtime.processes.fork_server import ForkServer
from elaswave_spmd.runtime.processes.fork_server_client import (
    Exited,
    ForkServerClient,
    ForkServerSpec,
    NoAnswerError,
    NotStartedError,
)
from elaswave_spmd.runtime.transport.links import socket_names
from tests.descriptors import OF_SELECT, beyond_select
from tests.locks import is_locked
from tests.multiprocess.forks_itself import exits
from tests.waiting import PATIENCE_S

StartForkServer = Callable[..., ForkServerClient]
THREAD = "import threading, time; threading.Thread(target=time.sleep, args=[600], daemon=True).start()"
ENDLESS = "import time\ntime.sleep(600)\n"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def start() -> Iterator[StartForkServer]:
    """ForkServerClient.start with this spec and no preload, stopped at the end of the test."""
    made: list[ForkServerClient] = []

    def begin(target: str = "runtime_targets:act", **arguments: object) -> ForkServerClient:
        spec = ForkServerSpec(**{"preload": ("numpy",), **arguments})  # pyright: ignore
        made.append(ForkServerClient.start(target, spec))
        return made[-1]

    yield begin
    for fork_server in made:
        fork_server.stop(0)


def state(pid: int) -> str:
    """The kernel's letter for what the process does; "X" when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def gone(pid: int) -> bool:
    """True if the process has ended, reaped or not."""
    return state(pid) in "ZX"


def eventually(condition: Callable[[], object], seconds: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


methods = pytest.mark.parametrize("method", ["fork", "spawn"])


@methods
def test_workers_have_what_the_run_gets_by_value(start: StartForkServer, method: str) -> None:
    number = 40
    fork_server = start("runtime_targets:use_by_value", method=method, given=ByValue.of({"number": lambda: number}))
    for rank in (0, 2):
        fork_server.spawn(rank, {})
    assert sorted((exited.rank, exited.code) for exited in exits(fork_server, 2)) == [(0, 40), (2, 42)]


class _Fragile:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return eval, ("1 / 0",)


class _Threaded:
    """Starts a thread where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return exec, (THREAD,)


@pytest.mark.parametrize(("value", "said"), [(_Fragile(), "ZeroDivisionError"), (_Threaded(), "left 2 threads")])
def test_what_cannot_be_unpickled_for_workers_is_refused(start: StartForkServer, value: object, said: str) -> None:
    fork_server = start(given=ByValue.of({"value": value}))
    with pytest.raises(ConfigError, match=said):
        fork_server.ready()


@methods
def test_every_way_to_end_is_reported(start: StartForkServer, method: str, capfd: pytest.CaptureFixture[str]):
    fork_server = start(method=method)
    specs = [{}, {"return": 3}, {"exit": 4}, {"exit": "a message"}, {"raise": "told once"}, {"sleep": 100}]
    pids = [fork_server.spawn(rank, spec) for rank, spec in enumerate(specs)]
    assert fork_server.signal(5, signal.SIGKILL)
    codes = [0, 3, 4, 1, 1, None]
    assert exits(fork_server, 6) == [
        Exited(rank, pid, code, signal.SIGKILL if code is None else None)
        for rank, (pid, code) in enumerate(zip(pids, codes, strict=True))
    ]
    assert fork_server.poll() == []
    assert fork_server.signal(5, signal.SIGTERM) is False
    errors = capfd.readouterr().err
    assert errors.count("ValueError: told once") == 1
    assert "a message" in errors


def left_behind(report: Path) -> dict[str, Any]:
    """What a worker has started (`runtime_targets.leave_behind`)."""
    assert eventually(report.exists)
    return json.loads(report.read_text())


def test_an_orphan_in_a_worker_is_reaped_when_it_ends_and_left_alone_before(
    start: StartForkServer, tmp_path: Path
) -> None:
    fork_server, reports = start("runtime_targets:orphans"), [tmp_path / "0", tmp_path / "1"]
    for rank, report in enumerate(reports):
        fork_server.spawn(rank, {"report": str(report), "plain": rank == 1})
    first, second = (left_behind(report)["orphan"] for report in reports)
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: state(first) == "X"), "no zombie, while its worker lives"
    assert fork_server.signal(0, signal.SIGKILL) and exits(fork_server, 1)[0].rank == 0
    assert fork_server.signal(1, 0) and not gone(second), "nothing shows whose it is: it may be that of a living one"
    assert fork_server.signal(1, signal.SIGKILL) and exits(fork_server, 1)[0].rank == 1
    assert eventually(lambda: state(second) == "X")


@methods
@pytest.mark.parametrize("ends", [False, True])
def test_what_code_of_the_user_has_started_in_a_worker_ends_after_it(
    start: StartForkServer, tmp_path: Path, method: str, *, ends: bool
) -> None:
    fork_server = start("runtime_targets:leave_behind", method=method)
    reports = [tmp_path / "0", tmp_path / "1"]
    for rank, report in enumerate(reports):
        fork_server.spawn(rank, {"report": str(report), "ends": ends and not rank})
    first, second = map(left_behind, reports)
    try:
        if not ends:
            assert fork_server.signal(0, signal.SIGKILL)
        assert exits(fork_server, 1)[0].rank == 0
        assert eventually(lambda: all(state(pid) == "X" for pid in first["started"])), "and they are reaped"
        memory = Path("/dev/shm") / first["memory"]
        assert eventually(lambda: not memory.exists()), "the resource tracker does its work"
        assert not gone(first["daemon"]), "it was meant to stay"
        assert not any(gone(pid) for pid in (*second["started"], second["daemon"])), "their worker lives"
        fork_server.stop(0)
        assert eventually(lambda: all(gone(pid) for pid in second["started"]))
    finally:
        for found in (first, second):
            os.kill(found["daemon"], signal.SIGKILL)


@methods
def test_a_fork_server_may_be_given_descriptors_of_any_number(start: StartForkServer, method: str) -> None:
    """As by an agent to whose port strangers hold a thousand connections."""
    found: list[Exited] = []
    with beyond_select():
        fork_server = start(method=method)
        assert fork_server.fileno() >= OF_SELECT
        fork_server.spawn(0, {"return": 3})
        assert eventually(lambda: found.extend(fork_server.poll()) or found)
        fork_server.spawn(1, {"sleep": 600})
        assert fork_server.stop(0.0)[0].rank == 1
    assert [(exited.rank, exited.code) for exited in found] == [(0, 3)]


@methods
def test_a_fork_server_that_hangs_is_killed_with_its_workers_and_not_waited_for(
    start: StartForkServer, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_server = start(method=method)
    workers = [fork_server.spawn(0, {"stubborn": str(tmp_path / "there"), "sleep": 600}), fork_server.spawn(1, {})]
    # The answer that a worker has ended follows the notice of that.
    assert eventually((tmp_path / "there").exists) and eventually(lambda: not fork_server.signal(1, 0))
    os.kill(fork_server.pid, signal.SIGSTOP)

    def signalled(*arguments: Any) -> bool:
        """A wait for the answer, in which SIGTERM comes."""
        fork_server.wait_at_most_until(time.monotonic())
        return is_any_ready(*arguments)

    with monkeypatch.context() as patch, pytest.raises(NoAnswerError, match="until the deadline of this machine"):
        patch.setattr(client_module, "is_any_ready", signalled)
        fork_server.signal(0, signal.SIGTERM)
    with pytest.raises(NoAnswerError):
        fork_server.spawn(2, {"large": "x" * (4 << 20)})
    assert fork_server.kill() == [Exited(1, workers[1], 0, None)]
    assert gone(fork_server.pid) and eventually(lambda: gone(workers[0]))
    assert fork_server.kill() == fork_server.stop() == []


@methods
def test_an_answer_that_comes_after_its_order_was_given_up_is_not_that_of_the_next_one(
    start: StartForkServer, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And orders that are read together, as they have come while the fork server stood still, are all carried out; also
    one that is so large that it could be sent only in part."""
    fork_server = start(method=method)
    fork_server.spawn(0, {"sleep": 600})
    for rank, size in ((1, 0), (2, 4 << 20), (3, 0)):
        os.kill(fork_server.pid, signal.SIGSTOP)
        assert eventually(lambda: state(fork_server.pid) == "T")
        with monkeypatch.context() as patch:
            patch.setattr(client_module, "_ORDER_TIMEOUT_S", 0.0)
            with pytest.raises(NoAnswerError):
                fork_server.spawn(rank, {"sleep": 600, "large": "x" * size})
            with pytest.raises(NoAnswerError):
                fork_server.signal(rank, signal.SIGKILL)
        os.kill(fork_server.pid, signal.SIGCONT)
        assert fork_server.signal(0, 0) is True
        assert fork_server.signal(7, 0) is False
        assert [(exited.rank, exited.signal) for exited in exits(fork_server, 1)] == [(rank, signal.SIGKILL)]


@methods
def test_orders_that_nobody_waits_for_are_carried_out_when_the_fork_server_goes_on(
    start: StartForkServer, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that it has not started in time, as its order could be sent only in part, is ended by the next one."""
    fork_server = start(method=method)
    fork_server.spawn(0, {"sleep": 600})
    os.kill(fork_server.pid, signal.SIGSTOP)
    assert eventually(lambda: state(fork_server.pid) == "T")
    waits: list[float] = []

    def look(*arguments: Any) -> bool:
        waits.append(arguments[-1])
        return is_any_ready(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(client_module, "is_any_ready", look)
        fork_server.order_signal(0, signal.SIGKILL)
        with pytest.raises(NotStartedError, match="did not answer within 0 s"):
            fork_server.spawn(1, {"sleep": 600, "large": "x" * (4 << 20)}, 0.0)
        with pytest.raises(NotStartedError, match="stands still"):
            fork_server.spawn(3, {}, 600.0)
        fork_server.order_signal(7, signal.SIGKILL)
    assert {*waits} == {0.0}, "it was looked for room, and not waited for any"
    os.kill(fork_server.pid, signal.SIGCONT)
    ended: list[Exited] = []
    assert eventually(lambda: fork_server.keep_up() or ended.extend(fork_server.poll()) or len(ended) == 2)
    assert [(exited.rank, exited.signal) for exited in ended] == [(rank, signal.SIGKILL) for rank in (0, 1)]
    pid = fork_server.spawn(2, {"return": 7})
    assert exits(fork_server, 1) == [Exited(2, pid, 7, None)]


def test_answers_that_nobody_waits_for_do_not_hold_the_fork_server_up(start: StartForkServer) -> None:
    fork_server = start()
    pid = fork_server.spawn(0, {"sleep": 600})
    for _ in range(2000):  # more answers than a socket has room for
        fork_server.order_signal(7, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    ended: list[Exited] = []
    assert eventually(lambda: fork_server.keep_up() or ended.extend(fork_server.poll()) or ended)
    assert ended == [Exited(0, pid, None, signal.SIGKILL)]


def test_a_fork_server_that_hangs_while_it_imports_is_not_waited_for(
    start: StartForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless_module.py").write_text(ENDLESS)  # else it may be ready before it is stopped
    monkeypatch.syspath_prepend(str(tmp_path))
    fork_server = start(preload=("endless_module",))
    os.kill(fork_server.pid, signal.SIGSTOP)
    fork_server.wait_at_most_until(time.monotonic())
    with pytest.raises(NoAnswerError):
        fork_server.ready()
    assert fork_server.kill() == [] and gone(fork_server.pid)


def test_a_worker_that_cannot_be_forked_takes_no_other_with_it(start: StartForkServer, tmp_path: Path) -> None:
    limit = tmp_path / "limit"
    fork_server = start(preload=("no_processes_left",), env={"NO_PROCESSES": str(limit)})
    first = fork_server.spawn(0, {"sleep": 600})
    limit.touch()
    with pytest.raises(NotStartedError, match="Resource temporarily unavailable"):
        fork_server.spawn(1, {})
    assert fork_server.signal(1, signal.SIGKILL) is False and fork_server.poll() == [] and not gone(first)
    limit.unlink()
    second = fork_server.spawn(2, {"return": 7})
    assert exits(fork_server, 1) == [Exited(2, second, 7, None)] and not gone(first)


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of another process are Linux only")
def test_a_worker_that_cannot_be_spawned_takes_no_other_with_it(start: StartForkServer) -> None:
    """As on a full /tmp: its orders cannot be written."""
    fork_server = start(method="spawn")
    first = fork_server.spawn(0, {"sleep": 600})
    before = resource.prlimit(fork_server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(fork_server.pid, resource.RLIMIT_NOFILE, (3, before[1]))
    with pytest.raises(NotStartedError, match="Too many open files"):
        fork_server.spawn(1, {})
    assert fork_server.poll() == [] and not gone(first)
    resource.prlimit(fork_server.pid, resource.RLIMIT_NOFILE, before)
    second = fork_server.spawn(2, {"return": 7})
    assert exits(fork_server, 1) == [Exited(2, second, 7, None)] and not gone(first)


def test_exits_read_well():
    assert str(Exited(2, 10, None, 9)) == "worker 2 (pid 10) was ended by signal 9 (SIGKILL)"
    assert str(Exited(2, 10, 1, None)) == "worker 2 (pid 10) ended with exit code 1"


@methods
def test_what_a_worker_finds(start: StartForkServer, method: str, tmp_path: Path):
    fork_server = start(method=method, preload=("numpy", "decimal"))
    reports = [tmp_path / str(rank) for rank in range(2)]
    for rank, report in enumerate(reports):
        fork_server.spawn(rank, {"report": str(report), "given": [1, {"a": None}]})
    exits(fork_server, 2)
    first, second = (json.loads(report.read_text()) for report in reports)
    assert first["spec"]["rank"] == 0
    assert first["spec"]["given"] == [1, {"a": None}]
    assert isinstance(first["spec"]["life_fd"], int)
    assert first["stdin"] == ""
    assert first["sigint_ignored"] and first["sigterm_default"]
    assert first["preloaded"] == (method == "fork")
    assert first["random"][0] != second["random"][0] and first["random"][1] != second["random"][1]


def test_the_fork_server_has_one_thread_after_importing_torch(start: StartForkServer):
    fork_server = start(preload=("numpy", "torch", "zmq"))
    fork_server.ready()
    assert fork_server.num_threads == 1
    assert len(os.listdir(f"/proc/{fork_server.pid}/task")) == 1
    fork_server.spawn(0, {"return": 7})
    assert exits(fork_server, 1)[0].code == 7
    assert len(os.listdir(f"/proc/{fork_server.pid}/task")) == 1


def test_a_process_that_has_only_imported_is_forked_itself(tmp_path: Path):
    """In an interpreter of its own: here there are threads."""
    report = run_here(tmp_path, "import torch")
    assert report["command"] == report["own_command"], "a fork, that imports nothing again"
    assert report["descriptors"] == ["0", "1", "2", *sorted(report["kept"], key=int)], "nothing else is inherited"
    assert report["exits"] == [[7, None], [None, 9]] and report["left"] == []


def test_a_process_with_threads_starts_another_interpreter(tmp_path: Path):
    report = run_here(tmp_path, THREAD)
    assert report["command"] != report["own_command"] and report["exits"] == [[7, None], [None, 9]]


@pytest.mark.parametrize("before", ["pass", THREAD])
def test_who_ignores_hangups_has_workers_that_do(tmp_path: Path, before: str):
    """Hangups are ignored, as under nohup."""
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    assert run_here(tmp_path, f"{before}; {ignore}")["ignores_hup"] == [True, True]


def test_workers_leave_hangups_to_the_command_that_handles_them(tmp_path: Path):
    """A hangup reaches the whole group: the controller answers for all."""
    handle = "import signal; signal.signal(signal.SIGHUP, lambda *_: None)"
    assert run_here(tmp_path, handle)["ignores_hup"] == [False, True]


def run_here(tmp_path: Path, before: str) -> dict[str, Any]:
    """The report of `forks_itself.py` about its fork server and two workers, after `before`."""
    script = Path(__file__).with_name("forks_itself.py")
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])}
    command = [sys.executable, str(script), before]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_a_failing_import_is_reported_with_its_traceback(
    start: StartForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "broken_module.py").write_text("raise KeyError('why it failed')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    fork_server = start(preload=("broken_module",))
    with pytest.raises(RunError, match=r"(?s)could not import broken_module.*KeyError: 'why it failed'"):
        fork_server.ready()
    assert gone(fork_server.pid)
    with pytest.raises(RunError, match="stopped"):
        fork_server.spawn(0, {})


def test_a_module_that_leaves_a_thread_is_refused(
    start: StartForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lines = "import threading, time\nthreading.Thread(target=time.sleep, args=[50], daemon=True).start()\n"
    (tmp_path / "threading_module.py").write_text(lines)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RunError, match="threading_module left 2 threads"):
        start(preload=("threading_module",)).ready()


def test_a_fork_server_that_is_still_importing_is_stopped_at_once(
    start: StartForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    imports, waits = tmp_path / "imports", []
    (tmp_path / "endless_module.py").write_text(f"open({str(imports)!r}, 'w').close()\n{ENDLESS}")
    monkeypatch.syspath_prepend(str(tmp_path))
    fork_server = start(preload=("endless_module",))
    assert eventually(imports.exists)

    def no_answer(*_: object) -> None:
        waits.append("for an answer")
        raise NoAnswerError("it imports")

    monkeypatch.setattr(fork_server, "_wait_for", no_answer)
    fork_server.stop()
    assert gone(fork_server.pid) and not waits, "an order is answered after the imports, which do not end"
    fork_server.stop()


@methods
def test_a_signal_to_a_worker_that_still_boots_is_not_lost(start: StartForkServer, method: str):
    fork_server = start(method=method)
    for rank in range(8):
        fork_server.spawn(rank, {"sleep": 100})
        assert fork_server.signal(rank, signal.SIGTERM)
    assert {it.signal for it in exits(fork_server, 8)} == {signal.SIGTERM}


@methods
def test_stop_kills_the_stubborn_and_the_stopped(start: StartForkServer, method: str, tmp_path: Path):
    fork_server, stubborn = start(method=method), tmp_path / "stubborn"
    pids = [fork_server.spawn(0, {"sleep": 100, "stubborn": str(stubborn)}), fork_server.spawn(1, {"sleep": 100})]
    assert eventually(stubborn.exists)  # SIGTERM waits while a worker boots
    fork_server.signal(1, signal.SIGSTOP)
    assert eventually(lambda: state(pids[1]) == "T")  # a SIGTERM that comes before it has stopped ends it
    assert {it.rank: it.signal for it in fork_server.stop(0.3)} == {0: signal.SIGKILL, 1: signal.SIGKILL}
    assert all(map(gone, [fork_server.pid, *pids]))


@methods
def test_stop_lets_the_willing_end_within_the_grace(start: StartForkServer, method: str, tmp_path: Path) -> None:
    """However long that takes: for one of them until SIGTERM has come to it, and this test lets it end."""
    fork_server, willing, ready = start(method=method), tmp_path / "willing", tmp_path / "ready"
    has_come, may_end = tmp_path / "has_come", tmp_path / "may_end"
    lingers = {"ready": str(ready), "has_come": str(has_come), "may_end": str(may_end), "sleep": 600}
    specs = [{"sleep": 600, "report": str(willing)}, {"lingers": lingers}]
    pids = [fork_server.spawn(rank, spec) for rank, spec in enumerate(specs)]
    assert eventually(willing.exists) and eventually(ready.exists)

    def let_it_end() -> None:
        if eventually(has_come.exists):
            may_end.touch()

    (thread := threading.Thread(target=let_it_end)).start()
    ended = {it.rank: (it.code, it.signal) for it in fork_server.stop(PATIENCE_S)}
    assert ended == {0: (None, signal.SIGTERM), 1: (7, None)}
    assert all(map(gone, [fork_server.pid, *pids]))
    thread.join()


def test_who_does_not_end_is_killed_when_the_grace_is_over_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on where the fork server waits for an end."""
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    server = ForkServer(theirs, write)
    now, signals = [0.0], []

    def wait(readable: list[int], timeout_s: float) -> bool:
        now[0] += timeout_s
        return False

    def signalled(rank: int, number: int) -> bool:
        signals.append((rank, number, now[0]))
        if number == signal.SIGKILL:
            del server._pids[rank]
        return True

    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(server_module, "is_any_ready", wait)
    monkeypatch.setattr(server_module, "_REAP_PERIOD_S", 0.25)
    monkeypatch.setattr(server, "_signal", signalled)
    monkeypatch.setattr(server, "_reap", lambda: None)
    server._pids = {1: 0, 2: 0}
    server._end_all(3.0)
    killed = [(1, signal.SIGKILL, 3.0), (2, signal.SIGKILL, 3.0)]
    assert signals == [(1, signal.SIGTERM, 0.0), (2, signal.SIGTERM, 0.0), *killed]
    server._pids = {3: 0}
    server._end_all(0.0)
    assert signals[4:] == [(3, signal.SIGKILL, 3.0)], "without a grace there is no SIGTERM"
    for end in (ours, theirs):
        end.close()
    for fd in (read, write, server._wake_read, server._wake_write):
        os.close(fd)


def test_a_killed_fork_server_takes_its_workers_along_and_is_reported(start: StartForkServer):
    fork_server = start()
    pids = [fork_server.spawn(rank, {"sleep": 100}) for rank in range(2)]
    os.kill(fork_server.pid, signal.SIGKILL)
    assert eventually(lambda: all(map(gone, pids)))
    assert select.select([fork_server], [], [], PATIENCE_S)[0]
    with pytest.raises(RunError, match=r"ended by signal 9"):
        fork_server.poll()
    with pytest.raises(RunError, match=r"ended by signal 9"):
        fork_server.spawn(3, {})
    fork_server.stop()


def test_signals_to_the_whole_group_do_not_end_the_fork_server(start: StartForkServer):
    fork_server = start()
    fork_server.ready()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(fork_server.pid, number)
    fork_server.spawn(0, {"return": 5})
    assert exits(fork_server, 1)[0].code == 5


@pytest.mark.parametrize(
    ("inner", "inner_spec", "grace"),
    [("until_life_ends", {}, 20.0), ("act", {"sleep": 100}, 0.2)],
    ids=["workers see the life pipe", "workers see nothing"],
)
def test_a_killed_controller_leaves_nothing(
    start: StartForkServer, tmp_path: Path, inner: str, inner_spec: dict, grace: float
):
    scratch, report = tmp_path / "sockets", tmp_path / "report"
    scratch.mkdir()
    outer = start("runtime_targets:controller")
    spec = {"inner": inner, "inner_spec": inner_spec, "grace": grace, "scratch": str(scratch), "report": str(report)}
    controller = outer.spawn(0, spec)
    assert eventually(report.exists)
    told = json.loads(report.read_text())
    assert told["me"] == controller and not any(map(gone, told["pids"]))
    os.kill(controller, signal.SIGKILL)
    assert eventually(lambda: all(map(gone, told["pids"]))), [pid for pid in told["pids"] if not gone(pid)]
    assert not scratch.exists()


def test_a_killed_controller_is_missed_while_a_process_lives_that_its_user_has_forked(
    start: StartForkServer, tmp_path: Path
) -> None:
    """As a callback, or a dataset, with a pool of processes does."""
    scratch, report = tmp_path / "sockets", tmp_path / "report"
    scratch.mkdir()
    outer = start("runtime_targets:controller")
    spec = {"inner": "until_life_ends", "inner_spec": {}, "grace": 60.0, "scratch": str(scratch)}
    controller = outer.spawn(0, {**spec, "report": str(report), "forks": True})
    assert eventually(report.exists)
    told = json.loads(report.read_text())
    try:
        os.kill(controller, signal.SIGKILL)
        assert eventually(lambda: all(map(gone, told["pids"]))), [pid for pid in told["pids"] if not gone(pid)]
        assert not gone(told["child"])
    finally:
        os.kill(told["child"], signal.SIGKILL)


def test_a_process_that_a_worker_has_forked_holds_no_lock_of_the_run(start: StartForkServer, tmp_path: Path) -> None:
    """Else a run could not be resumed, nor its sockets be removed, as long as it lives."""
    scratch, lock, report = tmp_path / "sockets", tmp_path / "lock", tmp_path / "report"
    scratch.mkdir()
    (scratch / "owner").touch()
    fork_server = start("runtime_targets:forks", scratch=[str(scratch)])
    fork_server.ready()
    fork_server.hold(lock)
    worker = fork_server.spawn(0, {"report": str(report)})
    assert eventually(report.exists)
    child = json.loads(report.read_text())["child"]
    try:
        assert all(map(is_locked, (lock, scratch / "owner", scratch)))
        owner, folder = os.open(scratch / "owner", os.O_RDONLY), os.open(scratch, os.O_RDONLY)
        fork_server.stop(0)
        assert gone(worker) and not gone(child)
        assert not is_locked(lock)
        for fd in (owner, folder):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(fd)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("grace", [0.3, 60.0])
def test_the_time_of_orphans_may_be_told_later(start: StartForkServer, tmp_path: Path, grace: float):
    """A worker that takes longer to end is killed with the one, and ends by itself with the other."""
    fork_server = start("runtime_targets:ends_slowly", orphan_grace_s=60.0 if grace < 1 else 0.3)
    fork_server.set_orphan_grace(grace)
    spec = {"seconds": 1.5 if grace > 1 else 600.0, "ended": str(tmp_path / "ended"), "ready": str(tmp_path / "ready")}
    pid = fork_server.spawn(0, spec)
    assert eventually((tmp_path / "ready").exists)
    fork_server.release()
    assert gone(pid) and (tmp_path / "ended").exists() == (grace > 1)


def test_a_worker_that_has_ended_leaves_no_socket_and_is_still_known_as_a_member(
    start: StartForkServer, tmp_path: Path
) -> None:
    scratch = tmp_path / "sockets"
    scratch.mkdir()
    with start(scratch=[str(scratch)]) as fork_server:
        pids = {rank: fork_server.spawn(rank, {"sleep": 100}) for rank in (0, 1)}
        for rank, pid in pids.items():
            write_address(str(scratch), rank, "ipc:///somewhere")
            for name in socket_names(rank, pid):
                (scratch / name).touch()
        others = {path.name for path in scratch.iterdir() if path.name.startswith("0")}
        assert len(others) == 3 and fork_server.signal(1, signal.SIGKILL)
        assert exits(fork_server, 1)[0].rank == 1
        assert eventually(lambda: {path.name for path in scratch.iterdir()} == {*others, "1.address"})
        assert newcomers(str(scratch), Orphans({}, 2, (1,), 0.0)) == (), "it has left, and is not started again"


def test_stop_removes_the_scratch_directories(start: StartForkServer, tmp_path: Path):
    scratch = tmp_path / "sockets"
    scratch.mkdir()
    (scratch / "left").touch()
    with start(scratch=[str(scratch)]) as fork_server:
        fork_server.spawn(0, {"sleep": 100})
    assert not scratch.exists()


def test_bad_targets_and_methods_are_named(start: StartForkServer, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match="fork, spawn"):
        start(method="clone")
    fork_server = start("no_colon")
    fork_server.spawn(0, {})
    assert exits(fork_server, 1)[0].code == 1
    assert "module:function" in capfd.readouterr().err
