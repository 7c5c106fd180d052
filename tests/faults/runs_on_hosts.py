"""Runs on three hosts in namespaces: the controller and two workers on node0, an agent with two places on each other.

They train a small model that waits for the file `go` from its sixth step on, so that what a test does to them happens
in the middle of the run however fast the machine is.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.namespaces import Hosts, host_name, hosts
from benchmarks.processes import Program, end_marked, environment_of, new_directory, processes_with, program
from benchmarks.soak_checks import Event, mended
from benchmarks.soak_runs import Watch
from tests.multiprocess import patient_model
from tests.multiprocess.real_runs import SMALL, TRAIN, train, train_server, write_text
from tests.multiprocess.test_agents import assert_same_bits
from tests.multiprocess.train_server import new_mark
from tests.waiting import PATIENCE_S, eventually

# Until it is let go, a run of so many steps takes five minutes, as long as a test waits for anything.
STEPS = [*SMALL, "train.steps=80", "train.validate_every=0"]
PORT = 29400
IMPATIENT = ["timeouts.suspect=5", "timeouts.status=6", "timeouts.leave=8"]
"""Five seconds of silence are a loss. For less, a busy machine may let one that lives be silent: all frames go through
one process."""
LOST = "the connection to the controller was lost"


def undisturbed(folder: Path, *words: str) -> Path:
    """The directory of the same run on one worker.

    Args:
        words: beside STEPS.
    """
    write_text(folder)
    (folder / "go").touch()
    done = train(folder, *STEPS, "mesh=single", *words, *patient_model.write(folder, folder / "go"))
    assert done.code == 0, done.err
    return folder / "run"


class RunOnHosts:
    """A run, its hosts, and what it has written so far. Made by `run_on_hosts`.

    Attributes:
        run: the controller's program, on node0.
        agents: host -> the program of its agent.
        model: the words that choose the model.
    """

    def __init__(self, network: Hosts, folder: Path, stack: ExitStack, run_dir: Path) -> None:
        self.network = network
        self.folder = folder
        self.run_dir = run_dir
        self.watch = Watch(run_dir)
        self.run: Program
        self.agents: dict[int, Program] = {}
        self._stack = stack
        self._ended: list[Program] = []
        self._num_programs = 0
        self._token, self._go = folder / "token", folder / "go"
        self._token.touch(0o600)
        self._token.write_text(secrets.token_hex(16))
        self.model = ["model.target=patient_model.PatientGPT", f"+model.args.go={self._go}"]
        for number in range(len(network)):
            self.home(number).mkdir()
            write_text(self.home(number))
            patient_model.write(self.home(number), self._go)

    def home(self, number: int) -> Path:
        """The folder in which a host's programs are started."""
        return self.folder / host_name(number)

    def start(self, *words: str, agents: Sequence[int] = (1, 2), options: Sequence[str] = ()) -> None:
        """Start the controller on node0, and agents with options on these hosts, which the run waits for."""
        several = [f"runtime.rendezvous={host_name(0)}:{PORT}", f"runtime.agents={len(agents)}"]
        several += ["runtime.local_workers=2", "runtime.transport=tcp", f"runtime.token_file={self._token}"]
        self.run = self._python(0, str(TRAIN), *STEPS, *self.model, *several, *words)
        for number in agents:
            self.start_agent(number, *options)

    def resume(self) -> None:
        """Start a controller again that has ended, on node0."""
        self._ended.append(self.run)
        self.run = self._python(0, str(TRAIN), f"train.resume={self.run_dir}")

    def start_agent(self, number: int, *options: str) -> None:
        """Start an agent on a host."""
        agent = ["-m", "elaswave_spmd", "agent", f"{host_name(0)}:{PORT}", "--token-file", str(self._token)]
        self.adopt_agent(number, self._python(number, *agent, "--workers", "2", *options))

    def adopt_agent(self, number: int, agent: Program) -> None:
        """An agent was started on a host; one that was there before has ended."""
        if number in self.agents:
            self._ended.append(self.agents[number])
        self.agents[number] = agent

    def start_shell(self, number: int, text: str, environment: Mapping[str, str]) -> Program:
        """Start a shell's commands on a host, in the folder of node0."""
        command = self.network.command(number, "bash", "-euo", "pipefail", "-c", text, folder=self.home(0))
        return self._stack.enter_context(program(command, self._new_folder(), environment))

    def _python(self, number: int, *words: str) -> Program:
        """Start `python WORDS` on a host, in its own folder: a fork of the train server (see there)."""
        return self._stack.enter_context(
            _forked(words, self.home(number), self.network.process(number), self._new_folder())
        )

    def _new_folder(self) -> Path:
        """A folder for what a program prints, and for its temporary files."""
        self._num_programs += 1
        return self.folder / f"p{self._num_programs}"

    def wait(self, condition: Any) -> None:
        """Wait until the condition holds, while the run goes on."""
        self.run.wait(condition, PATIENCE_S)

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.watch.events if event["event"] == kind]

    def ranks(self, kind: str) -> set[int]:
        """The workers that events of a kind name."""
        return {rank for event in self.events(kind) for rank in event["ranks"]}

    def agent_states(self, number: int) -> list[str]:
        """What the run tells of a host's agents, in order."""
        return [event["state"] for event in self.events("agent") if event["host"] == host_name(number)]

    def output_of(self, number: int) -> str:
        """What the agent of a host has printed so far."""
        return self.agents[number].log.read_text(errors="replace")

    def signal(self, number: int, what: signal.Signals) -> None:
        """Send a signal to all processes of a host's agent, which are the parent's first: none is made meanwhile."""
        for pid in sorted(processes_with(self.agents[number].mark)):
            with suppress(ProcessLookupError):
                os.kill(pid, what)

    def let_go(self) -> None:
        """From now on the model waits for nothing."""
        self._go.touch()

    def finish(self, wanted: Path, codes: dict[int, int], mends: Collection[str] = ()) -> None:
        """The run goes to its end. Its bits are those of another run, and nothing of it and of its agents is left.

        Args:
            codes: host -> the exit code of its agent.
            mends: kinds of events by which it may say that it has mended something.
        """
        self.let_go()
        self.run.finish(PATIENCE_S)
        for number, code in codes.items():
            assert self.agents[number].process.wait(PATIENCE_S) == code, self.output_of(number)
        ours = [self.run, *self.agents.values(), *self._ended]
        eventually(lambda: not any(processes_with(each.mark) for each in ours))
        assert_same_bits(self.run_dir, wanted)
        assert not (problems := mended(self.watch.events, mends)), problems
        left = [path for path in self.folder.rglob("elaswave-*") if path.is_dir()]
        assert not left, f"sockets left behind: {left}"


@contextmanager
def _forked(words: Sequence[str], folder: Path, host: int, directory: Path) -> Iterator[Program]:
    """As `program`, for `python WORDS` in the namespaces of a process, in a folder."""
    directory.mkdir()
    log, mark = directory / "output", new_mark()
    try:
        with log.open("wb") as output:
            environment = environment_of(directory, mark)
            process = train_server().start(words, folder, environment, output=output.fileno(), host=host)
        yield Program(process, log, mark)
    finally:
        end_marked(mark)


@contextmanager
def run_on_hosts(run_dir: str = "run") -> Iterator[RunOnHosts]:
    """Three hosts without a run. All of it is ended at the end.

    Args:
        run_dir: the run's directory in the folder of node0.
    """
    with new_directory("h-") as folder, hosts() as network, ExitStack() as stack:  # its path is short, for sockets
        yield RunOnHosts(network, folder, stack, folder / host_name(0) / run_dir)
