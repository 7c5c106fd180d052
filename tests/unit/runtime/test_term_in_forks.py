"""SIGTERM in what a worker's code forks: it ends a fork, unless the worker has got it, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_S

_SCRIPT = """
import hashlib, multiprocessing, os, signal, sys, threading, time
from elaswave_spmd.runtime.processes.term_in_forks import TermInForks

def work(pipe, other_end):
    other_end.close()  # so it ends with its parent, should that be killed
    while True:
        pipe.send("alive")
        time.sleep(0.05)

forks = TermInForks()
signal.signal(signal.SIGTERM, lambda *_: forks.came())
context = multiprocessing.get_context("fork")
ours, theirs = context.Pipe()
child = context.Process(target=work, args=(theirs, ours))
child.start()
ours.recv()
signal.signal(signal.SIGUSR1, lambda *_: None)
if sys.argv[1] == "others":
    os.kill(os.getpid(), signal.SIGUSR1)
if sys.argv[1] == "many others":
    for _ in range(2000):  # far more than the socket has room for
        os.kill(os.getpid(), signal.SIGUSR1)
    forks.drop_others()
if sys.argv[1] in ("group", "busy", "many others"):
    began = time.monotonic()
    if sys.argv[1] != "group":  # in a call during which Python calls no handler
        threading.Timer(0.2, os.killpg, (0, signal.SIGTERM)).start()
        while time.monotonic() < began + 2:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 4_000_000)
    else:
        os.killpg(0, signal.SIGTERM)
    began = time.monotonic()
    while time.monotonic() < began + 2:  # longer than it looks whether it was meant alone
        ours.recv()
    ours.recv()
    assert child.is_alive(), child.exitcode
child.terminate()
child.join()
print(child.exitcode)
"""


def _result(which: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, which],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout.strip()


@pytest.mark.parametrize("which", ["alone", "others"])
def test_terminate_ends_a_fork_of_a_process_that_only_notes_the_signal(which: str) -> None:
    """Also after another signal, as Python tells of all of them in the same way."""
    assert _result(which) == str(-signal.SIGTERM)


@pytest.mark.parametrize("which", ["group", "busy", "many others"])
def test_a_fork_outlives_a_signal_to_the_whole_group(which: str) -> None:
    assert _result(which) == str(-signal.SIGTERM), "and later ends by its own"


_OVERTAKEN = """
import os, signal
from elaswave_spmd.runtime.processes.term_in_forks import TermInForks

class Overtaken(TermInForks):
    def _written_for(self):
        found = super()._written_for()
        self.came()  # as the handler of a SIGTERM that comes just now
        return found

forks = Overtaken()
signal.signal(signal.SIGUSR1, lambda *_: None)
os.kill(os.getpid(), signal.SIGUSR1)
forks.drop_others()
"""


def test_a_signal_may_come_while_room_is_made_for_it() -> None:
    subprocess.run(
        [sys.executable, "-c", _OVERTAKEN],
        timeout=PATIENCE_S,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
