"""One controller at a time drives a run, and none uses an epoch twice."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elaswave_spmd.errors import ConfigError, DataError, FilesError
from elaswave_spmd.run_dir.journal import EPOCHS, Ballot, Journal, next_incarnation, read_journal
from elaswave_spmd.run_dir.lock import LOCK, WORKERS_LOCK, lock_run_dir, wait_for_workers, workers_live
from tests.waiting import PATIENCE_S

_TRY = """
import sys
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.run_dir.lock import lock_run_dir
try:
    lock_run_dir(sys.argv[1])
except ConfigError as error:
    print(error.what)
else:
    print("locked")
"""

_HOLD = """
import subprocess, sys
from elaswave_spmd.run_dir.lock import lock_run_dir
lock = lock_run_dir(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=0)
print(child.pid, flush=True)
child.wait()
"""

_HOLD_AND_FORK = """
import os, sys
from elaswave_spmd.run_dir.lock import lock_run_dir
lock = lock_run_dir(sys.argv[1])
child = os.fork()
if child == 0:
    lock.close()  # it is that of the other process
os.write(1, f"{child}\\n".encode())  # whole: `print` writes twice where PYTHONUNBUFFERED is set
os.wait() if child else sys.stdin.read()
"""


def _try(run_dir: Path) -> str:
    """The result of an attempt to lock in another process: "locked", or the process that is named in the error."""
    done = subprocess.run(
        [sys.executable, "-c", _TRY, str(run_dir)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().removeprefix(f"run.dir={run_dir} is in use by ")


@contextlib.contextmanager
def _held(run_dir: Path, program: str = _HOLD) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock, and has a child that lives until its standard input is closed."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program, str(run_dir)], stdin=pipe, stdout=pipe, text=True) as holder:
        try:
            assert holder.stdout is not None
            told = [int(holder.stdout.readline()) for _ in range(2 if program == _HOLD_AND_FORK else 1)]
            assert max(told) > 0
            yield holder
        finally:
            holder.kill()


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    with lock_run_dir(tmp_path) as lock:
        assert _try(tmp_path) == f"process {os.getpid()}"
        lock.close()
        assert _try(tmp_path) == "locked"
    lock.close()


def test_a_second_lock_in_one_process_is_refused_and_leaves_the_first(tmp_path: Path) -> None:
    with lock_run_dir(tmp_path):
        with pytest.raises(ConfigError, match="is in use by") as caught:
            lock_run_dir(tmp_path)
        assert caught.value.what == f"run.dir={tmp_path} is in use by process {os.getpid()}"
        assert _try(tmp_path) == f"process {os.getpid()}"
    with lock_run_dir(tmp_path):
        pass


def test_the_number_of_a_process_that_is_not_here_is_that_of_another_machine(tmp_path: Path) -> None:
    """As on a file system of several machines: it must not be looked for, or ended, on this one."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(PATIENCE_S)
    with lock_run_dir(tmp_path):
        (tmp_path / LOCK).write_text(f"{ended.pid}\n")
        assert _try(tmp_path) == f"process {ended.pid} on the machine that has locked it"


@pytest.mark.parametrize("program", [_HOLD, _HOLD_AND_FORK], ids=["another program", "forked by code of the user"])
def test_the_lock_of_a_killed_process_is_free_though_its_child_lives(tmp_path: Path, program: str) -> None:
    with _held(tmp_path, program) as holder:
        with pytest.raises(ConfigError, match=f"process {holder.pid}"):
            lock_run_dir(tmp_path)
        holder.kill()
        holder.wait(PATIENCE_S)
        with lock_run_dir(tmp_path):
            assert _try(tmp_path) == f"process {os.getpid()}"


def test_what_a_death_has_left_stays_until_a_life_of_the_run_has_begun(tmp_path: Path) -> None:
    """It tells the next controller that workers may wait for it: also after an attempt to resume that has failed."""
    file = tmp_path / LOCK
    with _held(tmp_path) as holder:
        holder.kill()
        holder.wait(PATIENCE_S)
        left = file.read_text()
        assert left == f"{holder.pid}\n"
        for _ in range(2):
            with lock_run_dir(tmp_path) as lock:
                assert lock.was_left and file.read_text() == f"{os.getpid()}\n"
            assert file.read_text() == left
        with lock_run_dir(tmp_path) as lock:
            lock.life_began()
        assert file.read_text() == ""
        with lock_run_dir(tmp_path) as lock:
            assert not lock.was_left
        assert file.read_text() == ""


def test_an_owner_that_has_not_written_its_number(tmp_path: Path) -> None:
    with lock_run_dir(tmp_path):
        (tmp_path / LOCK).write_text("")
        assert _try(tmp_path) == "another process, which has not written its number yet"


def test_no_directory_no_lock(tmp_path: Path) -> None:
    with pytest.raises(FilesError, match="No such file"):
        lock_run_dir(tmp_path / "gone")


# ---- journal


def test_each_controller_takes_the_next_incarnation(tmp_path: Path) -> None:
    assert next_incarnation(tmp_path) == 1 and read_journal(tmp_path) == []
    for incarnation in (1, 2, 3):
        assert next_incarnation(tmp_path) == incarnation
        with Journal(tmp_path) as journal:
            assert journal.last() == (Ballot(incarnation - 1, 5) if incarnation > 1 else None)
            assert next_incarnation(tmp_path) == incarnation, "taken only once it is journalled"
            journal.append(incarnation, 0, "start")
            assert journal.append(incarnation, 5, "fail", ranks=[3]) == journal.last() == Ballot(incarnation, 5)
    assert read_journal(tmp_path)[-1] == {"incarnation": 3, "epoch": 5, "reason": "fail", "ranks": [3]}


@pytest.mark.parametrize("ballot", [(2, 4), (2, 3), (1, 9)])
def test_no_ballot_twice(tmp_path: Path, ballot: tuple[int, int]) -> None:
    with Journal(tmp_path) as journal:
        journal.append(2, 4, "start")
        with pytest.raises(AssertionError):
            journal.append(*ballot, "again")
    with Journal(tmp_path) as journal, pytest.raises(AssertionError):
        journal.append(*ballot, "again")
    assert len(read_journal(tmp_path)) == 1


def test_a_line_is_on_the_disk_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        sizes.append((tmp_path / EPOCHS).stat().st_size)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    with Journal(tmp_path) as journal:
        assert len(sizes) == 1, "the directory that has got a new file"
        journal.append(1, 0, "start")
        assert sizes[1:] == [(tmp_path / EPOCHS).stat().st_size]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_torn_line_is_dropped(tmp_path: Path, data: st.DataObject) -> None:
    (tmp_path / EPOCHS).unlink(missing_ok=True)
    with Journal(tmp_path) as journal:
        for epoch in range(3):
            journal.append(1, epoch, "é" * epoch)
    content = (tmp_path / EPOCHS).read_bytes()
    size = data.draw(st.integers(0, len(content)))
    (tmp_path / EPOCHS).write_bytes(content[:size])
    whole = content[:size].count(b"\n")
    assert [line["epoch"] for line in read_journal(tmp_path)] == list(range(whole))
    assert next_incarnation(tmp_path) == (2 if whole else 1)
    with Journal(tmp_path) as journal:
        assert journal.last() == (Ballot(1, whole - 1) if whole else None)
        journal.append(2, 0, "start")
    assert [line["incarnation"] for line in read_journal(tmp_path)] == [*[1] * whole, 2]


@pytest.mark.parametrize(
    "rubbish",
    [b"\0\0\0\n", b'{"incarnation": 1\n', b"[1, 2]\n", b'{"incarnation": 1}\n', b"\xff\n", b"[" * 200_000 + b"\n"],
)
def test_rubbish_is_dropped_at_the_end_and_is_damage_before_it(tmp_path: Path, rubbish: bytes) -> None:
    with Journal(tmp_path) as journal:
        journal.append(1, 0, "start")
    content = (tmp_path / EPOCHS).read_bytes()
    (tmp_path / EPOCHS).write_bytes(content + rubbish)
    with Journal(tmp_path) as journal:
        assert journal.last() == Ballot(1, 0)
    assert (tmp_path / EPOCHS).read_bytes() == content
    (tmp_path / EPOCHS).write_bytes(rubbish + content)
    for read in (Journal, next_incarnation, read_journal):
        with pytest.raises(DataError, match=r"epochs\.jsonl, line 1 is damaged: "):
            read(tmp_path)


ODD = {
    "orphan_grace": '"x"',
    "run": "7",
    "identity": "[]",
    "layout": "null",
    "kinds": '"master"',
    "scratch": "{}",
    "incarnation": str(10**30),
}


@pytest.mark.parametrize(("name", "value"), ODD.items(), ids=ODD)
def test_an_odd_field_is_damage_also_in_the_last_line(tmp_path: Path, name: str, value: str) -> None:
    """That line's ballot may be in use: it is not left out as a torn one is."""
    (tmp_path / EPOCHS).write_text(f'{{"incarnation":1,"epoch":0}}\n{{"incarnation":2,"epoch":0,"{name}":{value}}}\n')
    for read in (Journal, next_incarnation, read_journal):
        with pytest.raises(DataError, match=r"epochs\.jsonl, line 2 is damaged: "):
            read(tmp_path)


def test_ballots_out_of_order_are_damage(tmp_path: Path) -> None:
    line = b'{"incarnation":1,"epoch":%d,"reason":"x"}\n'
    (tmp_path / EPOCHS).write_bytes(line % 3 + line % 2)
    with pytest.raises(DataError, match="damaged"):
        next_incarnation(tmp_path)


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(tmp_path) as journal:
        journal.append(1, 0, "start")
        content = (tmp_path / EPOCHS).read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) + 20, hard))
        try:
            with pytest.raises(FilesError):
                journal.append(1, 1, "x" * 100)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (tmp_path / EPOCHS).read_bytes() == content
        assert journal.last() == Ballot(1, 0)
        journal.append(1, 1, "fail")
    assert [line["epoch"] for line in read_journal(tmp_path)] == [0, 1]


def test_two_threads_that_want_the_lock_at_once(tmp_path: Path) -> None:
    locks, refused = [], []

    def take() -> None:
        try:
            locks.append(lock_run_dir(tmp_path))
        except ConfigError:
            refused.append(1)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(locks) == 1 and len(refused) == 7
    locks[0].close()


# ---- the lock of the workers

_WORK = """
import fcntl, sys, time
fd = open(sys.argv[1], "a")
fcntl.flock(fd, fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def worker_of(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the workers' lock until its standard input ends."""
    command = [sys.executable, "-c", _WORK, str(run_dir / WORKERS_LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_a_directory_without_workers_is_not_waited_for(tmp_path: Path) -> None:
    told: list[int] = []
    wait_for_workers(tmp_path, 0.0, lambda: told.append(1))
    (tmp_path / WORKERS_LOCK).touch()
    wait_for_workers(tmp_path, 0.0, lambda: told.append(1))
    assert not told


def test_workers_are_waited_for_and_told_of_once(tmp_path: Path) -> None:
    told: list[int] = []
    with worker_of(tmp_path) as first, worker_of(tmp_path) as second:

        def end() -> None:
            told.append(1)
            for process in (first, second):
                assert process.stdin is not None
                process.stdin.close()

        wait_for_workers(tmp_path, 300.0, end)
    assert told == [1]


def test_workers_that_do_not_end_are_named_as_the_reason(tmp_path: Path) -> None:
    with worker_of(tmp_path), pytest.raises(ConfigError, match="in use by workers whose controller was killed"):
        wait_for_workers(tmp_path, 0.1, lambda: None)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def none(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / WORKERS_LOCK).touch()
    monkeypatch.setattr(fcntl, "flock", none)
    for look in (lambda: lock_run_dir(tmp_path), lambda: workers_live(tmp_path)):
        with pytest.raises(ConfigError, match=f"the file system of {tmp_path} has no locks by flock") as caught:
            look()
        assert os.strerror(number) in caught.value.what and "mount -o flock" in caught.value.fix


def test_an_error_of_the_disk_is_none_of_its_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, operation: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(FilesError, match="Input/output error"):
        lock_run_dir(tmp_path)
