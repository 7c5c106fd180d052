"""Hosts for `soak --hosts`: network namespaces of this machine, joined by a bridge whose ports can be taken off it.

    controller 10.77.0.1 ---+
    agent      10.77.0.2 ---+--- bridge, in a namespace of its own
    agent      10.77.0.3 ---+

A port that is taken off drops every packet and tells neither end: a cable that is cut behind a switch. Needs root, the
program `ip`, and a kernel with namespaces and bridges; `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bits import Outcome, differences, read_outcome
from benchmarks.processes import Program, new_directory, processes_with, program
from benchmarks.soak_runs import Place, Watch

CUT_2, CUT_20, CUT, STOPPED, KILLED = "cut 2 s", "cut 20 s", "cut for ever", "stopped", "killed"
CUT_SHORT = "cut for less than timeouts.suspect"
FAULTS = {
    CUT_2: "the link of a host drops everything for 2 s",
    CUT_20: "the same for 20 s: its workers are given up meanwhile",
    CUT: "the same, for ever",
    STOPPED: "SIGSTOP to all processes of a host; SIGCONT when the run has ended",
    KILLED: "SIGKILL to an agent",
}
# 6.5 s: TCP would try after 6.2 s in vain, and then after 12.6 s, if nothing bounded the time between two tries.
_SECONDS = {CUT_2: 2.0, CUT_20: 20.0, CUT_SHORT: 6.5}
_PATIENT = ("timeouts.suspect=10", "timeouts.status=12", "timeouts.leave=14")
MESHES = {"dp6": ("sharding=zero3",), "dp3_pp2": ("sharding=zero1", "mirror.count=2")}
"""Mesh of six workers, two on each host -> its settings. A stage of three has two of one host: it needs two mirrors."""
_PORT = 29400
_BEGIN_STEP = 30
_START_S, _END_S = 120.0, 300.0
_LOOK_S = 0.02


@dataclass
class HostReport:
    """One run on three hosts."""

    mesh: str
    fault: str
    problems: list[str] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)
    agent_end: str = ""
    seconds: float = 0.0


class Network:
    """Three hosts on one bridge. All of it is gone after `close`."""

    def __init__(self) -> None:
        name = f"soak{secrets.token_hex(3)}"
        self.hosts = [f"{name}-{number}" for number in range(3)]
        self._bridge = f"{name}-b"
        self._made: list[str] = []

    def open(self) -> None:
        """Makes namespaces, links and the bridge.

        Raises:
            OSError, subprocess.CalledProcessError: not on this machine.
        """
        for name in (self._bridge, *self.hosts):
            _ip("netns", "add", name)
            self._made.append(name)
        _ip("-n", self._bridge, "link", "add", "name", "bridge0", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "bridge0", "up")
        for number, host in enumerate(self.hosts):
            port = ("name", f"p{number}", "netns", self._bridge)
            _ip("-n", host, "link", "add", "name", "eth0", "type", "veth", "peer", *port)
            _ip("-n", host, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", self._bridge, "link", "set", f"p{number}", "up", "master", "bridge0")

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def command(self, number: int, *words: str) -> list[str]:
        """The words that run a command on a host. The process is the command's own."""
        return ["ip", "netns", "exec", self.hosts[number], *words]

    def cut(self, number: int) -> None:
        """From now on the host's link drops everything."""
        _ip("-n", self._bridge, "link", "set", f"p{number}", "nomaster")

    def mend(self, number: int) -> None:
        _ip("-n", self._bridge, "link", "set", f"p{number}", "master", "bridge0")

    def close(self) -> None:
        while self._made:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "del", self._made.pop())


def why_not() -> str:
    """The reason why there can be no such hosts on this machine; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the program ip (iproute2) is not installed"
    network = Network()
    try:
        network.open()
    except (OSError, subprocess.CalledProcessError) as error:
        told = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else ""
        return f"no network namespaces or bridges here: {told or error}"
    finally:
        network.close()
    return ""


class HostRun:
    """One run over three hosts, of which one meets a fault."""

    def __init__(self, mesh: str, fault: str, place: Place, folder: Path) -> None:
        self.report = HostReport(mesh, fault)
        self._place = place
        self._folder = folder
        self._watch = Watch(folder / "run")
        self._network = Network()
        self._victim = 2

    def carry_out(self, standard: Outcome) -> HostReport:
        """Starts controller and agents, strikes a host, waits for all ends, and checks what must hold."""
        began = time.monotonic()
        try:
            self._network.open()
            with contextlib.ExitStack() as stack:
                run, agents = self._start(stack)
                self._strike(run, agents[-1])
                self._ends(run, agents)
            self._check(standard)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            self.report.problems.append(str(error))
        finally:
            self._network.close()
        self.report.told = Counter(event["event"] for event in self._watch.events)
        self.report.seconds = time.monotonic() - began
        return self.report

    def _start(self, stack: contextlib.ExitStack) -> tuple[Program, list[Program]]:
        token = self._folder / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(16))
        meeting = f"{self._network.address(0)}:{_PORT}"
        several = [f"runtime.rendezvous={meeting}", "runtime.agents=2", "runtime.local_workers=2"]
        several += ["runtime.transport=tcp", f"runtime.token_file={token}", f"run.dir={self._watch.run_dir}"]
        several += _PATIENT if self.report.fault == CUT_SHORT else ()
        several += [f"mesh={self.report.mesh}", *MESHES[self.report.mesh], "elastic.replace=true"]
        train = [sys.executable, "train.py", "run.tensorboard=false", *self._place.words(), *several]
        run = stack.enter_context(self._program(0, train))
        agent = [sys.executable, "-m", "elaswave_spmd", "agent", meeting, "--token-file", str(token)]
        agent += ["--timeout", "60", "--workers", "2", "--name"]
        agents = [stack.enter_context(self._program(n, [*agent, f"host{n}"])) for n in (1, 2)]
        return run, agents

    def _program(self, number: int, words: Sequence[str]) -> contextlib.AbstractContextManager[Program]:
        own = {name: self._folder / f"{name[0].lower()}{number}" for name in ("TMPDIR", "XDG_RUNTIME_DIR")}
        for path in own.values():
            path.mkdir(0o700, parents=True, exist_ok=True)
        environment = {name: str(path) for name, path in own.items()}
        return program(self._network.command(number, *words), self._folder / f"h{number}", environment)

    def _strike(self, run: Program, agent: Program) -> None:
        fault = self.report.fault
        run.wait(lambda: self._watch.step >= _BEGIN_STEP, _START_S)
        if fault == KILLED:
            agent.process.kill()
        elif fault == STOPPED:
            for pid in processes_with(agent.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
        else:
            self._network.cut(self._victim)
            if fault in _SECONDS:
                time.sleep(_SECONDS[fault])
                self._network.mend(self._victim)

    def _ends(self, run: Program, agents: list[Program]) -> None:
        """Waits for the end of the run, of its agents, and of all their processes."""
        run.finish(_END_S)
        if self.report.fault == STOPPED:
            for pid in processes_with(agents[-1].mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        codes = [agent.process.wait(_END_S) for agent in agents]
        until = time.monotonic() + _END_S
        while left := [pid for each in (run, *agents) for pid in processes_with(each.mark)]:
            if time.monotonic() > until:
                raise RuntimeError(f"processes {left} are left")
            time.sleep(_LOOK_S)
        told = agents[-1].log.read_text(errors="replace").splitlines()
        errors = [line for line in told if line.startswith("error: ")]
        self.report.agent_end = ": ".join([str(codes[-1]), *errors])
        if codes[0]:
            self.report.problems.append(f"the agent that was left alone ended with {codes[0]}")
        # A link that was cut for some seconds only may have outlived it: then the agent has ended with the run.
        says_why = codes[-1] == 1 and len(errors) == 1
        if self.report.fault != KILLED and not says_why and (codes[-1] or self.report.fault == CUT):
            self.report.problems.append(f"the agent of the host that was struck ended with {self.report.agent_end}")

    def _check(self, standard: Outcome) -> None:
        problems = self.report.problems
        try:
            problems += differences(read_outcome(self._watch.run_dir, self._place.steps), standard)
        except (OSError, ValueError) as error:
            problems.append(str(error))
        lost = {rank for event in self._watch.events if event["event"] == "fail" for rank in event["ranks"]}
        if self.report.fault == CUT_SHORT and lost:
            problems.append(f"workers {sorted(lost)} were lost, though the link was back in time")
        if self.report.fault not in (CUT_2, CUT_SHORT) and len(lost) < 2:
            problems.append(f"events.jsonl tells the loss of workers {sorted(lost)}, and a host had two")
        for folder in (path for path in self._folder.iterdir() if path.name[0] in "tx"):
            if folder.is_dir():
                problems += [f"left: {path}" for path in folder.rglob("*")]


def run_hosts(mesh: str, fault: str, place: Place, standard: Outcome, keep: Path | None) -> HostReport:
    """One run on three hosts with one fault. What a run with problems has left is moved to `keep`."""
    with new_directory("h-", place.directory) as folder:
        report = HostRun(mesh, fault, place, folder).carry_out(standard)
        if report.problems and keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                os.rename(folder, keep / f"hosts-{mesh}-{fault.replace(' ', '-')}-{os.getpid()}")
        return report


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
