"""The actor of one node: it checks the node, and starts the agent of the run there, which ends with it.

The agent is an ordinary one. The actor tells it nothing but signals, and where the next controller is, for which it may
have kept its workers; and it tells the supervisor how the agent ends.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from elaswave_spmd.controller.address_note import AddressNote, take_note
from elaswave_spmd.controller.on_ray import tied
from elaswave_spmd.controller.on_ray.files import JobFiles
from elaswave_spmd.controller.on_ray.job import Job, differing, process_environment
from elaswave_spmd.controller.on_ray.vendor import ray_module
from elaswave_spmd.errors import ConfigError, FilesError
from elaswave_spmd.runtime.processes.rendezvous import read_secret

MONITOR = "RAY_memory_monitor_refresh_ms"
AUTH = "RAY_AUTH_MODE"
DRAIN_S = 30
"""Seconds in which the workers of a node leave after SIGTERM to its agent, where Ray gives no deadline."""

_LEAVES_S = DRAIN_S + 10.0
_LOOKS_S = 600
_UNREAD_S = 60.0
"""How long an agent may take to read that the run has moved. Else it has not noticed the end of its controller; or that
one lives, cut off from Ray: a raylet that is cut off ends within a minute, and the controller with it."""

_EXEC_S = 5.0
_LOOK_S = 0.01
_BEGIN = "agent on "  # what an agent says at its begin, and last if nothing has happened to it


@dataclass(frozen=True)
class NodeReport:
    """The state in which an actor finds its node.

    Args:
        node: its id.
        problem: why the run cannot use it, and what to do; empty: it can.
        facts: what was checked, in words.
        failure: why its agent was not started, though the run can use it; empty: it was, or nobody tried.
    """

    node: str
    problem: str
    facts: str
    failure: str = ""


@dataclass(frozen=True)
class AgentReport:
    """The agent of a node.

    Args:
        node: the node's id.
        serves: the rendezvous that the agent was started with, or told last; "": none was started, or it has not heard.
        start: a random name of its start.
        code: its exit code; None: it lives.
        said: its last line, if it has said more than that it is there.
        has_workers: workers of the run live there.
    """

    node: str
    serves: str = ""
    start: str = ""
    code: int | None = None
    said: str = ""
    has_workers: bool = False


def node_id() -> str:
    """The id of the node that this actor is on."""
    return ray_module().get_runtime_context().get_node_id()


def check_node(job: Job) -> NodeReport:
    """Check that the run can use this node: that it shares the run's files, and that Ray kills nothing of it."""
    try:
        problem = _problem_of_node(job)
    except OSError as error:  # of a mount that is stale or not to be read; one that is missing raises nothing
        problem = f"a file of the run cannot be looked at there ({error})"
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    wanted = job.variables.get("OMP_NUM_THREADS") or "not set"
    facts = f"memory monitor off, token authentication on, OMP_NUM_THREADS {wanted} (Ray: {threads})"
    return NodeReport(node_id(), problem, facts)


def _problem_of_node(job: Job) -> str:
    """Why the run cannot use this node; empty: it can.

    Raises:
        OSError: the file system does not tell.
    """
    problem = ""
    monitor, auth = os.environ.get(MONITOR), os.environ.get(AUTH, "")
    if monitor != "0":
        problem = (
            f"Ray's memory monitor is on there ({MONITOR}={monitor or 'not set'}), and kills actors when memory gets "
            f"short; start the node with {MONITOR}=0 in the environment of `ray start`"
        )
    elif auth.lower() != "token":
        problem = (
            f"the node asks for no token ({AUTH}={auth or 'not set'}), so whoever reaches it could run code as you and "
            f"read the run's secret; start all nodes with {AUTH}=token"
        )
    elif not Path(job.folder).is_dir():
        problem = f"{job.folder}, in which the command was typed, is not there; the run needs it on all nodes"
    elif why_not := JobFiles(job).why_not_shared():
        problem = f"the directory of the run is not shared: {why_not}; run.dir is on a file system that all nodes share"
    elif not Path(job.python).exists():
        problem = f"{job.python} is not there; the same environment is needed on all nodes"
    else:
        try:
            read_secret(job.token_file, where="runtime.token_file")
        except ConfigError as error:
            problem = error.what
    return problem


class NodeAgent:
    """The actor. One call at a time.

    Args:
        job: the run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._files = JobFiles(job)
        self._process: subprocess.Popen[bytes] | None = None
        self._note: AddressNote | None = None  # of an agent that may keep its workers
        self._serves = ""
        self._start = ""
        self._log = ""

    def check(self) -> NodeReport:
        """Check the node."""
        return check_node(self._job)

    def start(self, rendezvous: str, name: str) -> NodeReport:
        """Have the agent serve the controller at this rendezvous.

        One that is there and may have kept its workers is told the place. Else one is started, if the node can be used;
        an agent that is still there leaves first.

        Args:
            rendezvous: HOST:PORT of the controller.
            name: of the node, for the run.
        """
        now = time.monotonic()
        if self._note is not None and self._is_there and not self._is_deaf(now):
            try:
                self._note.tell(rendezvous, now)
            except FilesError as error:
                return NodeReport(node_id(), "", "", f"its agent cannot be told where the controller is ({error.why})")
            self._serves = rendezvous
            return NodeReport(node_id(), "", f"told that the controller is at {rendezvous}; it keeps its workers")
        self._end()
        report = check_node(self._job)
        if report.problem:
            return report
        job, self._log, start = self._job, f"agent-{name}.log", secrets.token_hex(8)
        words = [
            *(job.python, "-m", "elaswave_spmd", "agent", rendezvous, "--token-file", job.token_file),
            *("--workers", str(job.places), "--name", name, "--drain", str(DRAIN_S), "--timeout", str(_LOOKS_S)),
        ]
        if job.adopt_s is not None:
            self._note = AddressNote(self._files.note_for(name, start), rendezvous)
            words += ["--moved-file", str(self._note.path)]
        environment = process_environment(job, os.environ)
        with self._files.opened(self._log) as log:
            self._process = tied.start(words, environment, job.folder, log)
        self._serves, self._start = rendezvous, start
        if wrong := differing(job, _environment_of(self._process.pid, environment)):
            self._end()
            return NodeReport(report.node, f"the agent would have {', '.join(wrong)}, and other bits", report.facts)
        return report

    @property
    def _is_there(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _is_deaf(self, now: float) -> bool:
        """True if the agent has been told another place for so long that it will not hear of it."""
        unread_s = self._note.unread_s(now) if self._note is not None else None
        return unread_s is not None and unread_s > _UNREAD_S

    def state(self) -> AgentReport:
        """The state of the agent."""
        if self._process is None:
            return AgentReport(node_id())
        now, code = time.monotonic(), self._process.poll()
        said = "" if code is None else self._files.last_line(self._log)
        said = "" if said.startswith(_BEGIN) else said
        has_workers = code is None and any(_children_of(child) for child in _children_of(self._process.pid))
        has_ended_before = code is not None and self._note is not None and self._note.unread_s(now) is not None
        # It is to be started where the controller is now.
        serves = "" if has_ended_before or self._is_deaf(now) else self._serves
        return AgentReport(node_id(), serves, self._start, code, said, has_workers)

    def terminate(self) -> None:
        """Send SIGTERM to the agent: its workers leave the run."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def _end(self) -> None:
        """Have the agent end, if there is one. Workers that have lost their controller save their state first."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_LEAVES_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._note is not None:
            take_note(self._note.path)  # nobody else reads it
        self._process = self._note = None


def _environment_of(process: int, otherwise: dict[str, str]) -> dict[str, str]:
    """The environment of a process, as the kernel tells; where it does not, what was handed to it.

    For a moment of the exec by which a program becomes another one it tells of none.
    """
    deadline = time.monotonic() + _EXEC_S
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{process}/environ", "rb") as file:
                entries = file.read().decode("utf-8", "surrogateescape").split("\0")
        except OSError:
            break
        if found := dict(entry.split("=", 1) for entry in entries if "=" in entry):
            return found
        time.sleep(_LOOK_S)
    return otherwise


def _children_of(process: int) -> list[int]:
    """The process ids of the living children of a process (Linux)."""
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if int(parent) == process and state not in "ZX":
                found.append(int(entry))
    return found
