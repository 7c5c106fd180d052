"""A worker process before and after its main function, whether it was forked or spawned.

A spawned one runs this file as `python -m elaswave_spmd.runtime.processes.child`, with its orders as JSON on standard
input.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from elaswave_spmd import by_value
from elaswave_spmd.output import let_anybody_print
from elaswave_spmd.runtime.processes.strays import mark_own

_PR_SET_PDEATHSIG = 1


def resolve_target(target: str) -> Callable[[dict[str, Any]], object]:
    """The function that "module:function" names."""
    module, _, function = target.partition(":")
    if not module or not function:
        raise ValueError(f"a worker's main function is named module:function, got {target!r}")
    return getattr(importlib.import_module(module), function)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when `parent` dies (Linux); end at once if it is dead already.

    This is needed for the death of the fork server, after which no process is left to end and reap its workers. (A lost
    controller is noticed by the life pipe.)
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


GROUP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal or a batch system sends to the whole process group.

The fork server must outlive its children and ends by its pipe, so it blocks these signals. It does not ignore them: a
signal that is sent to a worker before the worker has set itself up stays pending until then."""


_TERMINAL = (signal.SIGINT, signal.SIGHUP)  # Ctrl-C, and the end of the terminal


def ignore_terminal() -> None:
    """Ignore what a terminal sends to the whole group: the controller alone reacts to it.

    To be called again when code of the user, which may have set handlers, was imported.
    """
    for number in _TERMINAL:
        signal.signal(number, signal.SIG_IGN)


def set_up() -> object:
    """Give a new worker its own signals, streams and random state; it gets the `GROUP_SIGNALS` from now on.

    Returns:
        What is to be kept for as long as the worker lives: by it the fork server knows whose strays it has (strays.py).
    """
    mark = mark_own()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ignore_terminal()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    let_anybody_print()
    # Python's own generator reseeds itself after a fork, but those of numpy and torch do not. A module that is not
    # imported yet needs no new seed, and importing it here would cost seconds.
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    return mark


def run(target: str, spec: dict[str, Any]) -> NoReturn:
    """Call the worker's main function and end the process without interpreter teardown.

    Exit code: 0, the argument of SystemExit, or 1 after printing the traceback of any other exception. An integer that
    the function returns is the exit code. Functions registered with atexit do not run.
    """
    code = 1
    try:
        code = _exit_code(resolve_target(target)(spec))
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the process that reads it may have ended
                stream.flush()
        os._exit(code & 0xFF)


def _exit_code(value: object) -> int:
    if value is None or isinstance(value, int):
        return int(value or 0)
    if isinstance(value, str):
        print(value, file=sys.stderr)
    return 1 if isinstance(value, str) else 0


def main() -> NoReturn:
    """The process of a spawned worker: read the orders, and run the worker."""
    orders = json.load(sys.stdin)
    die_with_parent(orders["parent"])
    sys.path[:] = orders["sys_path"]
    mark = set_up()  # noqa: F841  (kept until the worker ends)
    if (fd := orders["by_value"]) is not None:
        by_value.take(fd)
        os.close(fd)
    run(orders["target"], orders["spec"])


if __name__ == "__main__":
    main()
