"""The functions that the processes of the runtime tests run, named as "runtime_targets:function" there."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from elaswave_spmd.runtime.transport.credentials import RunKeys, credentials_from_dict
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.runtime.transport.mailbox import ControllerLost, Envelope, Mailbox


def act(spec: dict[str, Any]) -> object:
    """Do what the spec says, then write what a worker sees to spec["report"]."""
    if "report" in spec:
        numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
        seen = {
            "spec": spec,
            "stdin": sys.stdin.read(),
            "sigint_ignored": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "sigterm_default": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            "random": [random.random(), numpy_random.random() if numpy_random else random.random()],
            "preloaded": "decimal" in sys.modules,
        }
        part = Path(spec["report"] + ".part")
        part.write_text(json.dumps(seen))
        part.rename(spec["report"])
    if "prints" in spec:
        os.write(1, spec["prints"].encode())
        Path(spec["printed"]).touch()
    if "raise" in spec:
        raise ValueError(spec["raise"])
    if "stubborn" in spec:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(spec["stubborn"]).touch()
    if "lingers" in spec:
        _end_late(**spec["lingers"])
    if "exit" in spec:
        sys.exit(spec["exit"])
    time.sleep(spec.get("sleep", 0))
    return spec.get("return")


def _end_late(ready: str, has_come: str, may_end: str, sleep: float) -> None:
    """End with the code 7, in order, after SIGTERM: not before there is a file `may_end`."""

    def end(*_: object) -> None:
        Path(has_come).touch()
        while not Path(may_end).exists():
            time.sleep(0.01)
        sys.exit(7)

    signal.signal(signal.SIGTERM, end)
    Path(ready).touch()
    time.sleep(sleep)


def use_by_value(spec: dict[str, Any]) -> int:
    """Ends with the number that the run has got by value, called as a function."""
    import by_value  # pyright: ignore[reportMissingImports]

    return by_value.number() + spec["rank"]


def peer(spec: dict[str, Any]) -> None:
    """Connect to the controller, echo what it sends, end when it is gone."""
    mailbox = Mailbox()
    links = Links(
        spec["rank"],
        mailbox,
        transport=spec["transport"],
        directory=spec["directory"],
        credentials=spec["credentials"] and credentials_from_dict(spec["credentials"]),
        life_fd=spec["life_fd"],
    )
    links.connect(CONTROLLER, spec["controller"])
    links.send(CONTROLLER, b"address " + links.address.encode())
    while not isinstance(item := mailbox.get(), ControllerLost):
        if isinstance(item, Envelope):
            links.send(CONTROLLER, item.header, item.payloads)
    links.close(100)


def controller(spec: dict[str, Any]) -> None:
    """A controller to be killed: starts two workers of its own and says their ids. Runs in a worker of the test."""
    from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient, ForkServerSpec

    os.setpgrp()  # as a command has: what it leaves behind is not for the fork server of the test to end
    fork_server = ForkServerClient.start(
        "runtime_targets:" + spec["inner"],
        ForkServerSpec(preload=(), orphan_grace_s=spec["grace"], scratch=[spec["scratch"]]),
    )
    pids = [fork_server.pid, *(fork_server.spawn(rank, spec["inner_spec"]) for rank in range(2))]
    child = _fork_a_sleeper() if spec.get("forks") else None
    _report(spec["report"], {"me": os.getpid(), "pids": pids, "child": child})
    time.sleep(1000)


def forks(spec: dict[str, Any]) -> None:
    """A worker whose user has it fork a process that stays: it has a process group of its own."""
    child = _fork_a_sleeper()
    os.setpgid(child, child)
    _report(spec["report"], {"child": child})
    time.sleep(1000)


def _fork_a_sleeper() -> int:
    """The id of a process that is forked from this one, and ends by a signal only."""
    if child := os.fork():
        return child
    while True:
        time.sleep(1000)


def _report(path: str, report: object) -> None:
    part = Path(path + ".part")
    part.write_text(json.dumps(report))
    part.rename(path)


def ends_slowly(spec: dict[str, Any]) -> None:
    """A worker that has something to save when its controller is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(spec["ready"]).touch()
    os.read(spec["life_fd"], 1)
    time.sleep(spec["seconds"])
    Path(spec["ended"]).touch()


def until_life_ends(spec: dict[str, Any]) -> None:
    """A worker that sits in the mailbox until the controller is gone, as a training thread would."""
    mailbox = Mailbox()
    links = Links(spec["rank"], mailbox, transport="tcp", credentials=RunKeys.make(), life_fd=spec["life_fd"])
    assert isinstance(mailbox.get(), ControllerLost)
    links.close()


def leave_behind(spec: dict[str, Any]) -> None:
    """Start a pool, with a process of its own, a daemon and others; write their ids to spec["report"], and stay.

    With spec["ends"] the worker ends by itself, in order, and leaves them all the same.
    """
    context = multiprocessing.get_context("fork")
    found: dict[str, Any] = {"memory": shared_memory.SharedMemory(create=True, size=64).name}
    ours, theirs = context.Pipe()
    pool = context.Process(target=_of_a_pool, args=(theirs,))
    pool.start()
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    detached = ["sh", "-c", "sleep 600 > /dev/null 2>&1 & echo $!"]  # the shell has ended then
    shell = subprocess.run(detached, capture_output=True, text=True, check=True)
    found |= {"started": [pool.pid, ours.recv(), int(shell.stdout)], "daemon": daemon.pid}
    _report(spec["report"], found)
    if not spec.get("ends"):
        time.sleep(600)


def orphans(spec: dict[str, Any]) -> None:
    """Start a process whose own parent ends at once, write its id to spec["report"], and stay."""
    detached = ["sh", "-c", "sleep 600 > /dev/null 2>&1 & echo $!"]
    variables = {"PATH": os.environ["PATH"]} if spec["plain"] else None
    shell = subprocess.run(detached, capture_output=True, text=True, check=True, env=variables)
    _report(spec["report"], {"orphan": int(shell.stdout)})
    time.sleep(600)


def _of_a_pool(pipe: Any) -> None:
    """Start a process, tell its id, and wait for what never comes."""
    pid = os.fork()
    if pid:
        pipe.send(pid)
    time.sleep(600)
