"""A run as it is handed to a Ray cluster: made of the words of a command line, before anything touches Ray.

Ray has two kinds of actors for it. One supervises: it starts the controller, an ordinary `train` command, and again
after a crash. The others, one on each node, start an ordinary `agent`. So nothing of what the run sends goes through
Ray, and no secret is an argument of an actor: those are shown by Ray's dashboard. Secrets are files beside `run.dir`.

Imports neither torch nor Ray.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elaswave_spmd.conf.compose import given_value, named_settings, settings_from, word_of
from elaswave_spmd.conf.schema import AUTO, RAY, Settings
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices.registry import device_names, device_of
from elaswave_spmd.runtime.processes.supervisor import ADOPT_S

MARK = "ELASWAVE_ON_RAY"
"""The variable in which the supervisor tells the controller's command the words that it adds to those of the user."""

BIT_VARIABLES = (
    *("OMP_NUM_THREADS", "OMP_DYNAMIC", "MKL_NUM_THREADS", "MKL_DYNAMIC", "MKL_CBWR", "OPENBLAS_NUM_THREADS"),
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
)
"""Variables that may decide how a processor adds. All processes of a run have them as the command has that was typed;
Ray sets the first one for its workers."""

_TAKEN_ALONG = (*BIT_VARIABLES, "PYTHONPATH")
_OF_RAY = ("PYTHONBREAKPOINT", "SPT_NOENV")  # that Ray sets for its workers, beside RAY_*


@dataclass(frozen=True)
class Job:
    """One run on Ray, the same value for all of its actors. It holds no secret.

    Args:
        run_dir: absolute, on a file system that all nodes share.
        words: of the command line, as they were typed.
        workers: of the mesh.
        aim: the workers that the run may have; nodes are added until their places are as many.
        agents: nodes that the run begins with; 0: as many as there are.
        places: of each agent; 0: an equal share.
        token_file: the secret of the run.
        timeout_s: in which the first nodes have room and their agents come.
        threads: of each worker.
        device: that workers compute on.
        folder: in which the command was typed; relative paths begin there, on all nodes.
        python: the interpreter, on all nodes.
        variables: of the command's environment, for all processes of the run; None: not set.
        nonce: written beside `run_dir`, by which a node sees that it shares the file system.
        adopt_s: for which workers of a controller that is lost wait for the next one (`timeouts.adopt`); None: none.
        not_adopted: why they do not, where nobody has said that they should not; else empty.
    """

    run_dir: str
    words: tuple[str, ...]
    workers: int
    aim: int
    agents: int
    places: int
    token_file: str
    timeout_s: float
    threads: int
    device: str
    folder: str
    python: str
    variables: Mapping[str, str | None]
    nonce: str = ""
    adopt_s: float | None = None
    not_adopted: str = ""

    @property
    def files(self) -> Path:
        """The folder of what the launcher keeps of the run: its log, its state, its secret."""
        return Path(f"{self.run_dir}.ray")

    @property
    def name(self) -> str:
        """The name under which Ray knows the run's actors and placement groups."""
        return f"elaswave:{self.run_dir}"

    @property
    def needs_device(self) -> bool:
        """True if workers compute on what Ray gives out. Then none is beside the controller, which has no device."""
        return bool(self._resource)

    @property
    def _resource(self) -> str:
        """Ray's name of the devices that workers compute on; "" if it gives out none."""
        return device_of(self.device).capabilities.resource if self.device in device_names() else ""

    @property
    def resources(self) -> dict[str, float]:
        """The resources that an agent asks Ray for."""
        asked = {"CPU": float(self.places * self.threads)}
        if self._resource:
            asked[self._resource] = float(self.places)
        return asked

    def shared_out(self, nodes: Sequence[Mapping[str, float]]) -> Job:
        """The job with its workers shared out among the nodes, where no argument says otherwise.

        Args:
            nodes: the resources of each living node.

        Raises:
            ConfigError: no node has room for a worker.
        """
        one = replace(self, places=1).resources
        usable = sum(all(node.get(name, 0.0) >= need for name, need in one.items()) for node in nodes)
        if not self.agents and not usable:
            raise ConfigError(
                f"none of the {len(nodes)} nodes of the Ray cluster has room for a worker",
                rule=f"a worker asks for {_text(one)}",
                where="runtime.launcher=ray",
                fix="runtime.agents=N, if nodes are to come: Ray's autoscaler is asked for so many",
            )
        agents = self.agents or min(self.workers, usable)
        return replace(self, agents=agents, places=self.places or -(-self.workers // agents))

    def described(self) -> str:
        """The job in words."""
        workers = f"{self.places} worker{'s' * (self.places > 1)}"
        return f"{self.agents} nodes, on each an agent with places for {workers} ({_text(self.resources)})"

    def has_room(self, resources: Mapping[str, float]) -> bool:
        """True if a node with these resources in all can have an agent."""
        return all(resources.get(name, 0.0) >= need for name, need in self.resources.items())


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{need:g} {name}" for name, need in resources.items())


@dataclass(frozen=True)
class HandOver:
    """This process hands a run to Ray."""

    job: Job
    settings: Settings


def hand_over(words: Sequence[str], environment: Mapping[str, str], folder: str) -> HandOver | None:
    """The run that these words hand to Ray; None: they do not.

    Args:
        environment: of this process.
        folder: the working directory.

    Raises:
        ConfigError: words that cannot be.
    """
    if given_value(words, "runtime.launcher", AUTO) != RAY or MARK in environment:
        return None
    named = named_settings(words)
    if given_value(words, "runtime.rendezvous", None) is not None:
        raise ConfigError(
            "runtime.rendezvous is given with runtime.launcher=ray",
            rule="Ray chooses the node of the controller, also another one later, and agents are told where it is",
            where="runtime.rendezvous",
            fix="leave it out",
        )
    if given_value(words, "runtime.local_workers", 0) not in (0, None):
        raise ConfigError(
            "runtime.local_workers is given with runtime.launcher=ray",
            rule="all workers are on agents, which have asked Ray for their resources; the controller has not",
            where="runtime.local_workers",
            fix="leave it out; runtime.agent_workers=N says how many workers have a place on each node",
        )
    directory = given_value(words, "run.dir", None) or given_value(words, "train.resume", None)
    if directory is None:
        raise ConfigError(
            "runtime.launcher=ray is given, and run.dir is not",
            rule="a controller that is started again, also on another node, goes on in the directory of the run, which "
            "all nodes share",
            where="run.dir",
            fix="run.dir=FOLDER/NAME, on a file system that all nodes share",
        )
    run_dir = os.path.join(folder, os.path.expanduser(str(directory)))
    token = given_value(words, "runtime.token_file", None)
    token_file = os.path.join(folder, os.path.expanduser(str(token))) if token else f"{run_dir}.ray/token"
    derived = _derived(words, "ray:1", 1, token_file)
    settings, not_adopted = settings_from([*words, *derived]), ""
    if (host := settings.runtime.host) is not None:
        raise ConfigError(
            f"runtime.host={host} is given with runtime.launcher=ray",
            rule="links listen on the addresses by which Ray knows its nodes; the controller may come to each of them",
            where=f"runtime.host={host}",
            fix="runtime.host=null",
        )
    if settings.timeouts.adopt is None and "timeouts.adopt" not in named:
        if (held := settings.held_by_controller) is None:
            settings = settings_from([*words, *derived, _adopting(ADOPT_S)])
        else:
            not_adopted = f"{held[0]}: {held[1]}"
    runtime, workers = settings.runtime, settings.mesh.shape.num_workers
    job = Job(
        run_dir=os.path.abspath(run_dir),
        words=tuple(words),
        workers=workers,
        aim=settings.elastic.max_workers or workers,
        agents=(runtime.agents or 0) if "runtime.agents" in named else 0,
        places=(runtime.agent_workers or 0) if "runtime.agent_workers" in named else 0,
        token_file=token_file,
        timeout_s=runtime.agents_timeout,
        threads=runtime.threads_per_worker,
        device=runtime.device,
        folder=folder,
        python=sys.executable,
        variables={name: environment.get(name) for name in _TAKEN_ALONG},
        nonce=secrets.token_hex(16),
        adopt_s=settings.timeouts.adopt,
        not_adopted=not_adopted,
    )
    return HandOver(job, settings)


def _derived(words: Sequence[str], rendezvous: str, agents: int, token_file: str) -> list[str]:
    """The words that make the controller's command of the user's."""
    given = [] if "runtime.agents" in named_settings(words) else [f"runtime.agents={agents}"]
    given += [] if "runtime.transport" in named_settings(words) else ["runtime.transport=tcp"]
    return [*given, f"runtime.rendezvous={rendezvous}", word_of("runtime.token_file", token_file)]


def _adopting(seconds: float) -> str:
    """The word by which workers of a controller that is lost wait for the next one."""
    return f"timeouts.adopt={seconds}"


def words_at(job: Job, rendezvous: str, agents: int, *, are_all: bool) -> list[str]:
    """The words that the supervisor adds to those of the user, for a controller that listens at `rendezvous`.

    Args:
        agents: that the controller waits for.
        are_all: they have places for all workers. Else the others are beside the controller.
    """
    local = "0" if are_all else "null"
    added = [f"runtime.agents={agents}", f"runtime.local_workers={local}", f"runtime.agent_workers={job.places}"]
    if job.adopt_s is not None and "timeouts.adopt" not in named_settings(job.words):
        added.append(_adopting(job.adopt_s))
    return [*_derived(job.words, rendezvous, agents, job.token_file), *added]


def controller_settings(words: Sequence[str], environment: MutableMapping[str, str]) -> Settings | None:
    """The settings of a controller that a supervisor has started; None: this process is none.

    The variable is removed, as it is meant for this process alone.
    """
    if (added := environment.pop(MARK, None)) is None:
        return None
    return settings_from([*words, *json.loads(added)])


def process_environment(job: Job, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process of the run, made of that of a Ray actor.

    Without what Ray sets for its workers, its token included; and with the variables that may decide about bits as
    they are in the command that was typed.
    """
    kept = {name: value for name, value in given.items() if not name.startswith("RAY_") and name not in _OF_RAY}
    for name, value in job.variables.items():
        kept.pop(name, None)
        if value is not None:
            kept[name] = value
    return kept


def differing(job: Job, environment: Mapping[str, str]) -> list[str]:
    """The variables of a process that are not as the run wants them, as NAME=VALUE."""
    return [
        f"{name}={environment[name]}" if name in environment else f"{name} not set"
        for name in BIT_VARIABLES
        if environment.get(name) != job.variables.get(name)
    ]
