"""The guard puts frequencies back: when told to, when the job ends or is killed, and when it is ended itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices.dvfs import GuardedClock, GuardedFrequencies
from elaswave_spmd.runtime.devices.dvfs import guarded as guarded_module
from tests.frequency_trees import limits, make_policies
from tests.waiting import PATIENCE_S, eventually

FOUND = (1_000_000, 3_000_000)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def socket_in(tmp_path: Path) -> str:
    return str(tmp_path / "requests.sock")


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """What a test opens is closed where it fails as well: a socket that is left shows as a failure of another test."""
    with ExitStack() as stack:
        yield stack


def started(opened: ExitStack, path: str, root: Path) -> GuardedFrequencies:
    guarded = GuardedFrequencies.start("cpufreq", path, str(root), PATIENCE_S)
    opened.callback(guarded.close)
    return guarded


def test_workers_request_and_the_largest_request_counts(tmp_path: Path, opened: ExitStack) -> None:
    make_policies(tmp_path, 2)
    path = socket_in(tmp_path)
    guarded = started(opened, path, tmp_path)
    assert {name: device.cpus for name, device in guarded.devices.items()} == {"policy0": (0, 1), "policy1": (2, 3)}
    assert guarded.devices["policy0"].nominal == 3000.0
    assert guarded.poll() == ""
    clocks = [opened.enter_context(closing(GuardedClock(path, rank))) for rank in range(3)]
    assert clocks[0].set(0.5) == 1.0, "it uses no device yet"
    guarded.share({"policy0": [0, 1], "policy1": [2]})
    eventually(lambda: clocks[2].set(0.7) == 0.7)
    assert clocks[0].set(0.5) == 1.0, "another worker on it has not requested to be slower"
    assert clocks[1].set(0.6) == 0.6 and clocks[0].set(0.5) == 0.6
    assert (limits(tmp_path, 0)[1], limits(tmp_path, 1)[1]) == (1_800_000, 2_100_000)
    assert clocks[1].set(1.0) == 1.0 and limits(tmp_path, 0)[1] == FOUND[1]
    guarded.reset()
    eventually(lambda: limits(tmp_path, 0) == limits(tmp_path, 1) == FOUND)
    assert clocks[2].set(0.5) == 0.5
    assert guarded.poll() == ""
    guarded.close()
    guarded.close()
    assert limits(tmp_path, 1) == FOUND and not alive(guarded.pid)
    assert clocks[0].set(0.5) == 1.0 == clocks[0].frequency, "nobody answers any more"
    for clock in clocks:
        clock.close()
        clock.close()


def test_what_fails_is_told_and_the_guard_goes_on(tmp_path: Path, opened: ExitStack) -> None:
    make_policies(tmp_path, 1)
    path = socket_in(tmp_path)
    guarded = started(opened, path, tmp_path)
    guarded.share({"policy9": [0], "policy0": [1]})
    with closing(GuardedClock(path, 1)) as clock:
        eventually(lambda: clock.set(0.5) == 0.5)
    with closing(GuardedClock(path, 0)) as clock:
        assert clock.set(0.5) == 1.0
    error = guarded.poll(PATIENCE_S)
    assert "policy9" in error and "name one of these" in error
    guarded.close()
    assert limits(tmp_path, 0) == FOUND


def test_a_backend_that_cannot_work_is_refused_before_the_job_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no cpufreq policy") as caught:
        GuardedFrequencies.start("cpufreq", socket_in(tmp_path), str(tmp_path))
    assert caught.value.where == "schedule.frequency=cpufreq" and caught.value.fix


def test_sigterm_puts_back_and_ends(tmp_path: Path, opened: ExitStack) -> None:
    make_policies(tmp_path, 1)
    path = socket_in(tmp_path)
    guarded = started(opened, path, tmp_path)
    guarded.share({"policy0": [0]})
    with closing(GuardedClock(path, 0)) as clock:
        eventually(lambda: clock.set(0.5) == 0.5)
        for ignored in (signal.SIGINT, signal.SIGHUP):
            os.kill(guarded.pid, ignored)
        assert clock.set(0.6) == 0.6
    os.kill(guarded.pid, signal.SIGTERM)
    assert "has ended" in guarded.poll(PATIENCE_S)
    assert limits(tmp_path, 0) == FOUND
    guarded.close()


def test_a_guard_that_is_killed_is_told(tmp_path: Path, opened: ExitStack) -> None:
    make_policies(tmp_path, 1)
    guarded = started(opened, socket_in(tmp_path), tmp_path)
    os.kill(guarded.pid, signal.SIGKILL)
    assert "has ended" in guarded.poll(PATIENCE_S)
    guarded.reset()
    guarded.close()


def test_a_guard_whose_input_does_not_end_restores_when_it_is_asked_to_end(
    tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_policies(tmp_path, 1)
    path = socket_in(tmp_path)
    guarded = started(opened, path, tmp_path)
    guarded.share({"policy0": [0]})
    with closing(GuardedClock(path, 0)) as clock:
        eventually(lambda: clock.set(0.5) == 0.5)
    assert guarded._process.stdin is not None
    opened.callback(os.close, os.dup(guarded._process.stdin.fileno()))  # as in a process that C code has forked
    monkeypatch.setattr(guarded_module, "_END_S", 0.0)
    monkeypatch.setattr(guarded_module, "_TERM_S", PATIENCE_S)
    guarded.close()
    assert limits(tmp_path, 0) == FOUND and not alive(guarded.pid)
    assert capfd.readouterr().err == ""


def test_a_guard_that_hangs_is_killed_and_that_is_said(
    tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_policies(tmp_path, 1)
    guarded = started(opened, socket_in(tmp_path), tmp_path)
    os.kill(guarded.pid, signal.SIGSTOP)
    monkeypatch.setattr(guarded_module, "_END_S", 0.0)
    monkeypatch.setattr(guarded_module, "_TERM_S", 0.0)
    guarded.close()
    assert not alive(guarded.pid)
    said = capfd.readouterr().err
    assert f"(pid {guarded.pid}) was killed" in said and "limits of policy0 again by hand" in said


PARENT = """
import os, signal, sys, time
from elaswave_spmd.runtime.devices.dvfs import GuardedClock, GuardedFrequencies
guarded = GuardedFrequencies.start("cpufreq", sys.argv[1], sys.argv[2])
guarded.share({"policy0": [0]})
clock = GuardedClock(sys.argv[1], 0)
while clock.set(0.5) != 0.5:
    time.sleep(0.01)
fork = 0
if sys.argv[3] == "forks":  # as a pool in a callback does; it outlives this process
    fork = os.fork()
    if not fork:
        os.close(1)
        while True:
            signal.pause()
print(guarded.pid, fork, flush=True)
if sys.stdin.readline():
    guarded.close()
    print(guarded._process.returncode, flush=True)
"""


@contextmanager
def job(tmp_path: Path, does: str) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A job that has set a frequency, the pid of its guard, and that of a process that it has forked, or 0."""
    make_policies(tmp_path, 1)
    command = [sys.executable, "-c", PARENT, socket_in(tmp_path), str(tmp_path), does]
    here, pipe = Path(__file__).parents[2], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=here) as parent, ExitStack() as ended:
        ended.callback(parent.kill)
        assert parent.stdout is not None
        guard, fork = map(int, parent.stdout.readline().split())
        if fork:
            ended.callback(os.kill, fork, signal.SIGKILL)
        assert limits(tmp_path, 0)[1] == 1_500_000
        yield parent, guard, fork


@pytest.mark.parametrize("does", ["nothing", "forks"])
def test_a_killed_job_leaves_no_frequency_behind(tmp_path: Path, does: str) -> None:
    with job(tmp_path, does) as (parent, guard, fork):
        parent.kill()
        eventually(lambda: not alive(guard))
        assert limits(tmp_path, 0) == FOUND
        assert not fork or alive(fork)


def test_a_job_that_has_forked_ends_its_guard_by_the_end_of_its_input(tmp_path: Path) -> None:
    with job(tmp_path, "forks") as (parent, _, fork):
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write("close\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "0\n"
        assert limits(tmp_path, 0) == FOUND and alive(fork)
