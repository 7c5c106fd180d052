"""The directory of a command's sockets: it goes with its last process, or with the next command."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.processes import command_lines
from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.recovery.admission import _ADDRESS
from elaswave_spmd.runtime.processes import scratch
from elaswave_spmd.runtime.processes.scratch import _OWNER, Scratch, _remove_dead, remove_with
from elaswave_spmd.runtime.transport import links
from elaswave_spmd.runtime.transport.links import SOCKETS, socket_directory
from tests.locks import is_locked
from tests.waiting import eventually

# A command, and a process that code of the user has forked from it; or with an argument its fork server, and a process
# that is forked from that, as a worker is. It tells the directory when it is held.
_HOLD = """
import os, sys
from elaswave_spmd.runtime.processes.scratch import Scratch, hold_scratch
scratch = Scratch() if len(sys.argv) < 2 else None
held = scratch.path if scratch else hold_scratch(sys.argv[1])
if os.fork():
    print(held, flush=True)
    os.wait()
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of all directories of sockets. Short, as their paths have to be."""
    folder = Path(tempfile.mkdtemp(prefix="ew", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@contextmanager
def holder(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that holds a directory until its standard input ends; and the directory, if it has made it."""
    command = [sys.executable, "-c", _HOLD, *words]
    # At the end of the `with` its standard input is closed, which ends the forked one.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def clear_up() -> None:
    """The next command begins, and ends."""
    Scratch().remove()


def removers(folder: str) -> list[int]:
    """The processes that were told to remove a directory."""
    return [pid for pid, words in command_lines().items() if folder in words and "scratch_remover" in " ".join(words)]


def holders(folder: str) -> set[int]:
    """The processes that have the directory open."""
    found = set()
    for process in os.listdir("/proc"):
        if not process.isdigit():
            continue
        # It may have just ended, of which `glob` would make an error before Python 3.12.
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                with suppress(OSError):  # just closed
                    if os.readlink(f"/proc/{process}/fd/{descriptor}") == folder:
                        found.add(int(process))
    return found


def test_the_last_process_that_is_killed_takes_the_directory_along() -> None:
    with holder() as (command, folder), holder(folder) as (fork_server, _):
        eventually(lambda: removers(folder))
        for killed in (command, fork_server):
            killed.kill()
            killed.wait()
            assert Path(folder).is_dir() and removers(folder), "the worker holds it too"
        for forked in (command, fork_server):  # the forked processes end
            assert forked.stdin is not None
            forked.stdin.close()
        eventually(lambda: not Path(folder).exists() and not removers(folder))


def test_what_is_forked_from_a_command_does_not_hold_the_directory() -> None:
    with holder() as (command, folder):
        eventually(lambda: removers(folder))
        command.kill()
        command.wait()
        eventually(lambda: not Path(folder).exists() and not removers(folder))
        assert command.stdin is not None and not command.stdin.closed, "the forked process lives until it is closed"


def test_what_is_forked_after_a_directory_is_removed_keeps_its_files(tmp_path: Path) -> None:
    mine = Scratch()
    mine.remove()
    with (tmp_path / "a").open("w") as a, (tmp_path / "b").open("w") as b:  # they get the numbers of the locks
        forked = os.fork()
        if not forked:
            with suppress(OSError):
                os.fstat(a.fileno())
                os.fstat(b.fileno())
                os._exit(0)
            os._exit(1)
        assert os.waitpid(forked, 0)[1] == 0


def is_left_alone(folder: str) -> bool:
    """True if systemd-tmpfiles, which takes this lock of each directory, would skip this one with all that is in it."""
    return is_locked(folder)


def is_lockable(directory: int) -> bool:
    """True if nobody else holds a directory, by its descriptor. A process that ends has it closed before it gives up
    the lock."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_cleaners_of_old_files_leave_the_directory_alone_while_a_process_of_it_lives() -> None:
    with holder() as (command, folder), holder(folder) as (fork_server, _):
        assert is_left_alone(folder)
        command.kill()
        command.wait()
        assert command.stdin is not None and fork_server.stdin is not None
        command.stdin.close()  # its forked process ends
        fork_server.kill()
        fork_server.wait()
        assert is_left_alone(folder), "the process that is forked from the fork server holds it"
        adopted = Scratch.adopted(folder)
        fork_server.stdin.close()
        eventually(lambda: not holders(folder) - {os.getpid()})
        assert is_left_alone(folder), "who has adopted it holds it"
        kept = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        adopted.give_up()
        eventually(lambda: is_lockable(kept))
        os.close(kept)
        eventually(lambda: not Path(folder).exists() and not removers(folder))


def test_what_is_removed_with_it_is_left_to_who_has_taken_its_name(base: Path, tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    with holder() as (command, folder):
        for path in (mine, theirs):
            path.touch()
            remove_with(folder, path)
        theirs.rename(tmp_path / "old")  # else its number may be used again
        theirs.touch()
        command.kill()
        assert command.stdin is not None
        command.stdin.close()
        eventually(lambda: not Path(folder).exists() and not removers(folder))
    assert theirs.exists() and not mine.exists()


@pytest.mark.parametrize("name", [b"a\nb", b"two\n\n", "\u00fc".encode(), b"\xfc", b" 1 2 3 "])
def test_what_is_removed_with_it_may_have_any_name(tmp_path: Path, name: bytes) -> None:
    path = tmp_path / os.fsdecode(name)
    path.touch()
    with holder() as (command, folder):
        remove_with(folder, path)
        command.kill()
        assert command.stdin is not None
        command.stdin.close()
        eventually(lambda: not Path(folder).exists() and not removers(folder))
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_removed_leaves_no_process() -> None:
    mine = Scratch()
    eventually(lambda: removers(mine.path))
    mine.remove()
    assert not removers(mine.path)


def test_to_remove_it_again_does_nothing(tmp_path: Path) -> None:
    """Numbers of descriptors are given again: what has them by then is not closed."""
    mine = Scratch()
    mine.remove()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((tmp_path / str(n)).open("w")) for n in range(4)]
        mine.remove()
        mine.give_up()
        assert [os.fstat(file.fileno()).st_size for file in files] == [0] * 4


NO_ROOM = OSError(errno.ENOSPC, "No space left on device")


def test_that_none_can_be_made_is_bad_input(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(prefix: str, dir: str) -> str:
        raise NO_ROOM

    monkeypatch.setattr(tempfile, "mkdtemp", no_room)
    with pytest.raises(ConfigError, match=r"no directory .* in .* \(No space left on device\)") as caught:
        Scratch()
    assert str(base) in caught.value.what and "XDG_RUNTIME_DIR" in caught.value.fix


@pytest.mark.parametrize("what", ["hold_lock", "_keep_from_cleaners"])
def test_one_that_cannot_be_held_is_bad_input_and_leaves_nothing(
    base: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(*_: object) -> int:
        raise NO_ROOM

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(scratch, what, fail)
    with pytest.raises(ConfigError, match=r"no directory .* in .* \(No space left on device\)") as caught:
        Scratch()
    assert str(base) in caught.value.what
    assert not list(base.iterdir()) and len(os.listdir("/proc/self/fd")) == before


def test_a_machine_without_another_process_is_no_bad_input(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(scratch, "_start_remover", fail)
    with pytest.raises(RunError, match=r"cannot begin .Resource temporarily unavailable.*ulimit -u"):
        Scratch()
    assert not list(base.iterdir())


def test_one_that_cannot_be_made_again_is_gone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for an agent whose machine has no room any more when the run begins again."""

    def fail(*_: object) -> int:
        raise NO_ROOM

    mine = Scratch()
    monkeypatch.setattr(scratch, "hold_lock", fail)
    with pytest.raises(ConfigError):
        mine.make_again()
    mine.remove()
    assert not list(base.iterdir())


def test_the_next_command_removes_what_nobody_holds_any_more() -> None:
    with holder() as (command, folder), holder(folder) as (fork_server, _):
        eventually(lambda: removers(folder))
        for pid in removers(folder):
            os.kill(pid, signal.SIGKILL)
        clear_up()
        assert Path(folder).is_dir()
        for killed in (command, fork_server):
            killed.kill()
            killed.wait()
            clear_up()
            assert Path(folder).is_dir(), "the worker holds it too"

    def removed() -> bool:
        clear_up()
        return not Path(folder).exists()

    eventually(removed)


@pytest.mark.parametrize("name", ["sockets", "a b", "a\tb", "\u00fc", "x" * 40])
def test_a_base_whose_name_cannot_be_in_the_address_of_a_socket_is_not_used(
    base: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each worker reports the address of its socket, which the controller takes only if it can be one."""
    (base / name).mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base / name))
    folder = Path(socket_directory())
    folder.rmdir()
    assert folder.parent == (base / name if name == "sockets" else Path("/tmp"))
    assert _ADDRESS.fullmatch(f"ipc://{folder}/1-{os.getpid()}")


def opened_in(folder: str) -> list[str]:
    """The files that this process has open in a directory, and the directory itself."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the look itself
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in found if name.startswith(folder)]


def test_directories_of_other_kinds_are_left_alone(base: Path) -> None:
    other = Path(socket_directory())
    mine = Scratch()
    clear_up()
    assert {*base.iterdir()} == {other, Path(mine.path)}, "one without an owner, and that of this process"
    assert len(opened_in(mine.path)) == 2
    mine.remove()
    assert {*base.iterdir()} == {other} and not opened_in(mine.path)


def abandoned(base: Path, name: str = "abandoned") -> Path:
    """A directory that its processes have left behind: the next command removes it."""
    folder = base / f"{SOCKETS}{name}"
    folder.mkdir(mode=0o700)
    (folder / _OWNER).touch()
    return folder


def test_links_and_files_of_other_kinds_are_not_followed_and_not_opened(base: Path, tmp_path: Path) -> None:
    mine, linked, by_link = abandoned(base), abandoned(tmp_path), base / f"{SOCKETS}link"
    by_link.symlink_to(linked)
    of_a_link, of_a_pipe = abandoned(base, "of_a_link"), abandoned(base, "of_a_pipe")
    for folder in (of_a_link, of_a_pipe):
        (folder / _OWNER).unlink()
    (of_a_link / _OWNER).symlink_to(linked / _OWNER)
    os.mkfifo(of_a_pipe / _OWNER)
    clear_up()
    assert not mine.exists()
    assert {*base.iterdir()} == {by_link, of_a_link, of_a_pipe} and (linked / _OWNER).exists()
    assert not opened_in(str(base)), "what was looked at is closed"


def test_directories_of_other_users_are_left_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, me = abandoned(base), os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: me + 1)
        _remove_dead(base)
        with pytest.raises(PermissionError, match="another user's"):
            Scratch.adopted(str(theirs))
    assert theirs.exists()
    Scratch.adopted(str(theirs)).give_up()
    clear_up()
    assert not theirs.exists(), "it is in order but for its user"


def test_a_directory_that_is_nested_too_deeply_to_be_removed_does_not_keep_a_command_from_starting(base: Path) -> None:
    deep = abandoned(base)
    at = os.open(deep, os.O_RDONLY)
    for _ in range(sys.getrecursionlimit() + 100):
        os.mkdir("d", dir_fd=at)
        inner = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)
    try:
        clear_up()
    finally:
        subprocess.run(["rm", "-rf", str(deep)], check=True)  # Python before 3.13 cannot


def test_sockets_are_not_where_they_are_removed_when_the_user_logs_out(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Path(socket_directory()).parent == base
    logins = base / "run"
    (logins / "1").mkdir(mode=0o700, parents=True)
    (base / "link").symlink_to(logins)
    monkeypatch.setattr(links, "_OF_LOGINS", str(logins))
    for folder in (logins, base / "link"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "1"))
        found = Path(socket_directory())
        found.rmdir()
        assert found.parent == Path("/tmp")
