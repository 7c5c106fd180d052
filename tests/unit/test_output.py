"""An output that takes nothing, as its reader has gone or its disk is full, ends nobody, and changes no exit code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from elaswave_spmd.output import say, say_error
from tests.descriptors import unread

SAYS = """
import os, sys
from elaswave_spmd.output import flush_output, say, say_error
print("in the buffer", end="")
say("to the standard output")
say_error("to stderr")
flush_output()
say("again")
print("at the end", end="")
flush_output()
os._exit(7 if [os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2)] == [os.devnull] * 2 else 1)
"""
FORKS = """
import sys
from elaswave_spmd.runtime.processes.fork_server_client import fork_process
print("in the buffer", end="")
sys.stderr.buffer.write(b"in the buffer")
sys.exit(7 + fork_process(lambda: None, ()).wait())
"""
GUARDED = """
import sys
from elaswave_spmd import cli
from elaswave_spmd.errors import ConfigError

def command():
    print("in the buffer", end="")
    raise ConfigError("it is refused")

sys.exit(5 + cli.guarded(command))
"""
PRINTS = """
import os, sys
from elaswave_spmd.output import let_anybody_print
let_anybody_print()
for _ in range(3):
    print("of a model", flush=True)
    print("ü" * 10_000, file=sys.stderr)
    sys.stdout.buffer.write(b"bytes")
    sys.stdout.flush()
os._exit(7 if [os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2)] == [os.devnull] * 2 else 1)
"""


@pytest.fixture(autouse=True)
def _with_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is unless PYTHONUNBUFFERED is set: what an output has not taken stays in Python's buffer."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


CODES = pytest.mark.parametrize(
    "code", [SAYS, FORKS, GUARDED, PRINTS], ids=["lines", "a fork", "a refusal", "a user's code"]
)


@CODES
def test_a_reader_that_has_gone_ends_nobody(code: str) -> None:
    with unread() as fd:
        assert subprocess.run([sys.executable, "-c", code], stdout=fd, stderr=fd).returncode == 7


@CODES
def test_a_disk_that_is_full_ends_nobody(code: str) -> None:
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full).returncode == 7


@pytest.mark.parametrize("words", [["--help"], ["agent", "--help"], ["train", "--help"]], ids=" ".join)
def test_help_whose_reader_has_gone_is_no_error(words: list[str]) -> None:
    with unread() as fd:
        done = subprocess.run([sys.executable, "-m", "elaswave_spmd", *words], stdout=fd, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_is_said_is_seen_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    say("one")
    say_error(ValueError("two"))
    assert capfd.readouterr() == ("one\n", "two\n")


def test_what_a_users_code_prints_is_seen_as_before() -> None:
    code = (
        "import os; from elaswave_spmd.output import let_anybody_print as let; let(); print('ü'); os.write(1, b'then')"
    )
    for unbuffered, expected in (("1", b"\xfc\nthen"), ("", b"then\xfc\n")):
        env = {**os.environ, "PYTHONUNBUFFERED": unbuffered, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "1"}
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
        assert (done.returncode, done.stdout) == (0, expected)
