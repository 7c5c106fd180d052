"""The process that forks commands for tests: they end, fail and are found as if each had an interpreter of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.processes import processes_with
from tests.multiprocess.real_runs import Command, exec_command
from tests.multiprocess.train_server import ForkedCommand, TrainServer, new_mark
from tests.waiting import PATIENCE_S, eventually

LOOK = """
import json, os, signal, sys
fds = [int(name) for name in os.listdir("/proc/self/fd")]
told = {
    "threads": len(os.listdir("/proc/self/task")),
    "open": [fd for fd in sorted(fds) if os.path.exists(f"/proc/self/fd/{fd}")],  # one was that of the listing
    "handlers": {number.name: str(signal.getsignal(number)) for number in signal.valid_signals()
                 if isinstance(number, signal.Signals)},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "session": os.getsid(0) == os.getpid(),
    "folder": os.getcwd(),
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path[0],
    "name": __name__,
    "environment": dict(os.environ),
}
print(json.dumps(told))
"""
WAITS = """
import os, sys, time
if os.fork() == 0:
    while not os.path.exists("child"):
        time.sleep(0.01)
    os._exit(0)
print("up", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
print("end")
print("told", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture(autouse=True)
def files_that_are_waited_for(tmp_path: Path) -> Iterator[None]:
    """Nothing waits any longer than the test, however it ends."""
    yield
    for folder in (tmp_path, *filter(Path.is_dir, tmp_path.iterdir())):
        (folder / "child").touch()
        (folder / "go").touch()


@pytest.fixture(scope="module")
def server() -> Iterator[TrainServer]:
    server = TrainServer()
    yield server
    left = processes_with(server.mark)
    server.stop()
    assert list(left) == [server.pid]


def environment(mark: str) -> dict[str, str]:
    name, _, value = mark.partition("=")
    return {**os.environ, name: value}


def end_of(command: Command) -> tuple[int | None, str, str]:
    out, err = command.communicate(timeout=PATIENCE_S)
    return command.returncode, out, err


def started(server: TrainServer, folder: Path) -> tuple[ForkedCommand, str]:
    """A command that waits, and its mark."""
    (folder / "waits.py").write_text(WAITS)
    mark = new_mark()
    command = server.start([str(folder / "waits.py")], folder, environment(mark))
    assert command.stdout is not None and command.stdout.readline() == "up\n"
    return command, mark


@pytest.mark.parametrize("is_module", [False, True], ids=["script", "module"])
def test_a_forked_command_finds_what_a_new_interpreter_gives_it(
    server: TrainServer, tmp_path: Path, is_module: bool
) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    words = [*(["-m", "look"] if is_module else [str(tmp_path / "look.py")]), "a=1", ""]
    made = environment(new_mark())
    found = [end_of(start(words, tmp_path, made)) for start in (server.start, exec_command)]
    forked, executed = [json.loads(out) for _, out, _ in found]
    assert [(code, err) for code, _, err in found] == [(0, ""), (0, "")]
    assert forked["open"] == [0, 1, 2] and forked["threads"] == 1 and forked["session"]
    assert forked == executed


def test_code_output_and_processes_of_two_commands_at_once_are_their_own(server: TrainServer, tmp_path: Path) -> None:
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    commands = [started(server, folder) for folder in folders]
    for command, mark in commands:
        found = processes_with(mark)
        assert len(found) == 2 and found[command.pid] == server.pid
        assert command.pid in found.values(), "its child has its mark, too"
        assert command.poll() is None
    assert list(processes_with(server.mark)) == [server.pid]
    (first, first_mark), (second, second_mark) = commands
    (folders[0] / "go").touch()
    assert first.wait(PATIENCE_S) == 3, "it has ended; its child has not"
    with pytest.raises(subprocess.TimeoutExpired, match=r"waits\.py"):
        first.communicate(timeout=0)
    (folders[0] / "child").touch()
    assert end_of(first) == (3, "end\n", "told\n") == end_of(first)
    eventually(lambda: not processes_with(first_mark))
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0)
    second.terminate()
    assert second.wait(PATIENCE_S) == second.poll() == -signal.SIGTERM
    second.kill()  # nothing is there any more
    (folders[1] / "child").touch()
    assert end_of(second) == (-signal.SIGTERM, "", "")
    eventually(lambda: not processes_with(second_mark))


def test_output_may_be_merged_and_long(server: TrainServer, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text("import sys\nfor file in sys.stdout, sys.stderr: print('x' * 300_000, file=file)")
    command = server.start([str(tmp_path / "says.py")], tmp_path, environment(new_mark()), merged=True)
    assert end_of(command) == (0, 2 * ("x" * 300_000 + "\n"), "") and command.stderr is None


def test_a_command_may_change_its_stdout_where_that_of_the_tests_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text("import sys\nsys.stdout.reconfigure(errors='backslashreplace')\nprint('yes')")
    before = os.dup(1)
    with (tmp_path / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
    try:
        server = TrainServer()
    finally:
        os.dup2(before, 1)
        os.close(before)
    try:
        command = server.start([str(tmp_path / "says.py")], tmp_path, environment(new_mark()))
        assert end_of(command) == (0, "yes\n", "")
    finally:
        server.stop()


def test_a_command_that_cannot_start_says_why(server: TrainServer, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="has not started, but: ended 1"):
        server.start(["none.py"], tmp_path / "none", environment(new_mark()))
    failing = server.start([str(tmp_path / "none.py")], tmp_path, environment(new_mark()))
    code, _, err = end_of(failing)
    assert code == 1 and "none.py" in err


def test_the_end_of_the_server_is_told(tmp_path: Path) -> None:
    server = TrainServer()
    command, mark = started(server, tmp_path)
    server.stop()
    for name in ("child", "go"):
        (tmp_path / name).touch()
    with pytest.raises(AssertionError, match=r"the train server has ended: it does not say that .* has ended"):
        command.communicate(timeout=PATIENCE_S)
    eventually(lambda: not processes_with(mark))
    with pytest.raises(AssertionError, match="the train server has ended: it cannot start"):
        server.start(["none.py"], tmp_path, environment(new_mark()))
