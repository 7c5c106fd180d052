"""Runs a program that ends with the process that has started it: `python -m ...tied PARENT PROGRAM ARGUMENT ...`.

Ray ends an actor's process without a word when its raylet is lost, and what the actor has started would stay. The
kernel's death signal survives the exec.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from elaswave_spmd.runtime.processes.child import die_with_parent


def start(
    program: Sequence[str], environment: Mapping[str, str], folder: str, log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a program whose end is tied to that of this thread.

    Args:
        program: its first word is the Python interpreter.
        log: takes all that it prints.
    """
    return subprocess.Popen(
        [program[0], "-m", __name__, str(os.getpid()), *program],
        env=dict(environment),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def main(arguments: Sequence[str]) -> None:
    """Become the program."""
    die_with_parent(int(arguments[0]))
    # What Ray's worker ignores or blocks would stay so.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execv(arguments[1], [*arguments[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
