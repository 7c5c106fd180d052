"""Runs on three hosts for `soak --hosts`: the controller is on the first one, and one of the agents meets a fault.

The hosts are namespaces of this machine (namespaces.py). A link that is cut drops every packet and tells neither end: a
cable that is cut behind a switch.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bits import Outcome, differences, read_outcome
from benchmarks.namespaces import Hosts, host_address, hosts
from benchmarks.processes import Program, new_directory, processes_with, program
from benchmarks.soak_checks import mended
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
_START_S, _END_S = 300.0, 300.0
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


class HostRun:
    """One run over three hosts, of which one meets a fault."""

    def __init__(self, mesh: str, fault: str, place: Place, folder: Path) -> None:
        self.report = HostReport(mesh, fault)
        self._place = place
        self._folder = folder
        self._watch = Watch(folder / "run")
        self._victim = 2

    def carry_out(self, standard: Outcome) -> HostReport:
        """Starts controller and agents, strikes a host, waits for all ends, and checks what must hold."""
        began = time.monotonic()
        try:
            with contextlib.ExitStack() as stack:
                network = stack.enter_context(hosts())
                run, agents = self._start(stack, network)
                self._strike(run, agents[-1], network)
                self._ends(run, agents)
            self._check(standard)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            self.report.problems.append(str(error))
        self.report.told = Counter(event["event"] for event in self._watch.events)
        self.report.seconds = time.monotonic() - began
        return self.report

    def _start(self, stack: contextlib.ExitStack, network: Hosts) -> tuple[Program, list[Program]]:
        token = self._folder / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(16))
        meeting = f"{host_address(0)}:{_PORT}"
        several = [f"runtime.rendezvous={meeting}", "runtime.agents=2", "runtime.local_workers=2"]
        several += ["runtime.transport=tcp", f"runtime.token_file={token}", f"run.dir={self._watch.run_dir}"]
        several += _PATIENT if self.report.fault == CUT_SHORT else ()
        several += [f"mesh={self.report.mesh}", *MESHES[self.report.mesh], "elastic.replace=true"]
        train = [sys.executable, "train.py", "run.tensorboard=false", *self._place.words(), *several]
        run = stack.enter_context(self._program(network, 0, train))
        agent = [sys.executable, "-m", "elaswave_spmd", "agent", meeting, "--token-file", str(token)]
        agent += ["--timeout", "60", "--workers", "2"]
        agents = [stack.enter_context(self._program(network, n, agent)) for n in (1, 2)]
        return run, agents

    def _program(self, network: Hosts, number: int, words: Sequence[str]) -> contextlib.AbstractContextManager[Program]:
        own = {name: self._folder / f"{name[0].lower()}{number}" for name in ("TMPDIR", "XDG_RUNTIME_DIR")}
        for path in own.values():
            path.mkdir(0o700, parents=True, exist_ok=True)
        environment = {name: str(path) for name, path in own.items()}
        return program(network.command(number, *words), self._folder / f"h{number}", environment)

    def _strike(self, run: Program, agent: Program, network: Hosts) -> None:
        fault = self.report.fault
        run.wait(lambda: self._watch.step >= _BEGIN_STEP, _START_S)
        if fault == KILLED:
            agent.process.kill()
        elif fault == STOPPED:
            for pid in processes_with(agent.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
        else:
            network.cut(self._victim)
            if fault in _SECONDS:
                time.sleep(_SECONDS[fault])
                network.mend(self._victim)

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
        problems += mended(self._watch.events)
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
