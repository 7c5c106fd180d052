"""Commands whose standard streams are closed, as with `>&-` in a shell or under some batch systems."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The command's own file tells what it found, since its streams are closed.
COMMAND = """
import os, sys
from elaswave_spmd import cli
from elaswave_spmd.errors import ConfigError

def command():
    first = os.open(os.devnull, os.O_RDONLY)
    held = os.readlink(f"/proc/self/fd/{sys.argv[2]}")
    isatty = [stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)]
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    with open(sys.argv[1], "w") as out:
        print(first > 2, held, isatty, os.get_inheritable(int(sys.argv[2])), file=out)
    raise ConfigError("it is refused")

sys.exit(cli.guarded(command))
"""


@pytest.mark.parametrize("fd", [0, 1, 2])
def test_a_closed_stream_is_the_null_device(tmp_path: Path, fd: int) -> None:
    out = tmp_path / "found"
    words = ["sh", "-c", f'exec "$@" {fd}>&-', "sh", sys.executable, "-c", COMMAND, str(out), str(fd)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 2, done.stderr
    assert out.read_text() == f"True {os.devnull} [False, False, False] True\n"
    assert done.stdout == ("" if fd == 1 else "to stdout\n")
    assert done.stderr == ("" if fd == 2 else "to stderr\nerror: it is refused\n")


def test_a_command_without_an_output_ends_well() -> None:
    words = ["sh", "-c", 'exec "$@" >&- 2>&- <&-', "sh", sys.executable, "-m", "elaswave_spmd", "--help"]
    assert subprocess.run(words, capture_output=True).returncode == 0


REDIRECTED = """
import os, sys
from elaswave_spmd import cli
print("before", flush=True)
os.dup2(int(sys.argv[1]), 1)
sys.exit(cli.guarded(lambda: print("\\udcff", flush=True) or 0))
"""


def test_an_output_that_has_become_a_pipe_since_python_began_is_one(tmp_path: Path) -> None:
    """As in a process that is forked from another one and takes over the streams of the command."""
    read, write = os.pipe()
    with open(tmp_path / "out", "w") as out, open(read, encoding="utf-8") as pipe:
        words = [sys.executable, "-c", REDIRECTED, str(write)]
        done = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, text=True, pass_fds=(write,))
        os.close(write)
        assert (done.returncode, done.stderr, pipe.read()) == (0, "", "\\udcff\n")
