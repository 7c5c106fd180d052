"""The part of a run that a process of torchrun's has: `torchrun ... -m elaswave_spmd train mesh=dp4 ...` on every node.

torchrun starts the same command everywhere and tells each process in variables where it stands. On the node of rank 0
the command is the controller's, on each other node an agent's, and a further process of a node has nothing to do. The
variables say nothing else than that, and arguments win over them.

`start_of` decides; the command line carries out what it returns. Does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

from elaswave_spmd.conf.compose import given_value, named_settings, settings_from
from elaswave_spmd.conf.schema import AUTO, TORCHRUN, Settings
from elaswave_spmd.errors import ConfigError

PORT = 29600
"""Where the controller listens, on the machine of MASTER_ADDR: MASTER_PORT is torchrun's own, and 29400 and 29500 are
the ports at which torchruns themselves meet. The next one where MASTER_PORT is this one."""

_DRAIN_S = 25
"""Seconds in which an agent's workers leave after SIGTERM: torchrun kills what it has passed that on to 5 later."""

_RUN_ID = "TORCHELASTIC_RUN_ID"
_MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT")
VARIABLES = (*_NUMBERS, "MASTER_ADDR", _RUN_ID)
"""What torchrun sets for each of its processes, as far as it is needed here."""

_OTHERS = ("GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
_FAMILY = "TORCHELASTIC_"
_OFF = "runtime.launcher=none, if this command is one of its own"


@dataclass(frozen=True)
class Place:
    """The place of this process among those that torchrun has started.

    Args:
        rank: among all.
        local_rank: on this node.
        local_size: the processes of each node.
        num_nodes: the machines, as torchrun counts them.
        address, port: where torchrun's processes would meet, on the machine of rank 0.
    """

    rank: int
    local_rank: int
    local_size: int
    num_nodes: int
    address: str
    port: int

    @property
    def rendezvous(self) -> str:
        """The address at which the controller listens, where no argument names one."""
        return f"{self.address}:{PORT if self.port != PORT else PORT + 1}"


@dataclass(frozen=True)
class Run:
    """This process is the command that trains, with these settings. `notice`: a line for the user, or ""."""

    settings: Settings
    notice: str = ""


@dataclass(frozen=True)
class Serve:
    """This process is the agent of its machine, with the arguments of the command `agent`."""

    arguments: tuple[str, ...]
    notice: str


@dataclass(frozen=True)
class End:
    """This process has nothing to do."""

    notice: str


Start = Run | Serve | End


def start_of(words: Sequence[str], environment: Mapping[str, str]) -> Start:
    """The part of this process in the run that `words` describe.

    Args:
        words: of the command line, `name=value`.
        environment: of this process.

    Raises:
        ConfigError: words or variables that cannot be, or that contradict each other. All nodes have the same words, so
            each of them refuses what it can see without the others.
    """
    place = place_of(given_value(words, "runtime.launcher", AUTO), environment)
    named = named_settings(words)
    if place is None:
        _refuse_places(named)
        return Run(settings_from(words))
    if place.local_rank:
        return End(
            f"torchrun: process {place.local_rank} of {place.local_size} on this node has nothing to do: the first one "
            "starts all workers of the node (--nproc-per-node=1)"
        )
    if place.num_nodes == 1:
        return Run(_launched(settings_from(words)), "torchrun: one node, whose first process is the whole command")
    _check_words(words, named, place)
    derived = {
        "runtime.rendezvous": place.rendezvous,
        "runtime.agents": place.num_nodes - 1,
        "runtime.transport": "tcp",
    }
    words = [*words, *(f"{name}={value}" for name, value in derived.items() if name not in named)]
    # An agent of a run that is resumed reads its settings as well: its workers will read their state from there.
    settings = _shared_out(settings_from(words), named, place)
    runtime = settings.runtime
    if place.rank == 0:
        return Run(
            settings,
            f"torchrun: rank 0 of {place.num_nodes} nodes, the controller: it meets {runtime.agents} "
            f"agent{'s' * (runtime.agents != 1)} at {runtime.rendezvous}",
        )
    assert runtime.rendezvous is not None and runtime.token_file is not None, "checked with the settings"
    return Serve(
        (
            *(runtime.rendezvous, "--token-file", runtime.token_file, "--workers", str(runtime.agent_workers)),
            *("--timeout", f"{runtime.agents_timeout:g}", "--drain", str(_DRAIN_S)),
        ),
        f"torchrun: rank {place.rank} of {place.num_nodes} nodes, an agent of the run at {runtime.rendezvous}",
    )


def place_of(launcher: object, environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun's variables give this process; None: it is a command of its own.

    Only torchrun sets TORCHELASTIC_RUN_ID. A RANK or WORLD_SIZE alone is that of a batch job or of another program in
    whose shell the command was typed, and means nothing.

    Args:
        launcher: `runtime.launcher`, as the command line names it.

    Raises:
        ConfigError: `runtime.launcher=torchrun` and a variable is missing, or the variables cannot be.
    """
    missing = [name for name in VARIABLES if name not in environment]
    if launcher not in (AUTO, TORCHRUN):  # a value that is none is refused with all other settings
        return None
    if missing and launcher == AUTO:
        return None
    if missing:
        raise ConfigError(
            f"runtime.launcher=torchrun is given, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
            "set",
            rule=f"torchrun sets {', '.join(VARIABLES)} for each of its processes",
            where="runtime.launcher=torchrun",
            fix="torchrun --nnodes=N --nproc-per-node=1 ... -m elaswave_spmd train ..., or leave runtime.launcher out",
        )
    number = {name: _whole(name, environment) for name in _NUMBERS}
    size, local_size = number["WORLD_SIZE"], number["LOCAL_WORLD_SIZE"]
    rank, local_rank, node = number["RANK"], number["LOCAL_RANK"], number["GROUP_RANK"]
    if size == 1 and launcher == AUTO:
        return None  # the only process there is: a command as any other
    if not 0 < local_size <= size or size % local_size:
        raise _impossible("WORLD_SIZE is a multiple of LOCAL_WORLD_SIZE: all nodes have as many processes", environment)
    if local_rank >= local_size or rank != node * local_size + local_rank or rank >= size:
        raise _impossible("RANK is GROUP_RANK x LOCAL_WORLD_SIZE + LOCAL_RANK, and below WORLD_SIZE", environment)
    if not 0 < number["MASTER_PORT"] < 2**16:
        raise _impossible("MASTER_PORT is a number from 1 to 65535", environment)
    if environment.get(_MAX_RESTARTS, "0") != "0":
        raise ConfigError(
            f"torchrun may start this command {environment[_MAX_RESTARTS]} times more (--max-restarts)",
            rule="a command that is started again is another run, from its first step; a run replaces what it loses "
            "itself",
            where=f"{_MAX_RESTARTS}={environment[_MAX_RESTARTS]}",
            fix=f"torchrun --max-restarts=0; or {_OFF}",
        )
    address = environment["MASTER_ADDR"]
    return Place(rank, local_rank, local_size, size // local_size, address, number["MASTER_PORT"])


def refuse_call(settings: Settings, named: Collection[str]) -> None:
    """Refuse what a call from Python does not follow: it is a whole run in its own process, whoever has started that.

    Args:
        named: the settings that the call gives.

    Raises:
        ConfigError: the call asks for torchrun, or for places on agents that nobody starts.
    """
    if settings.runtime.launcher == TORCHRUN:
        raise ConfigError(
            "runtime.launcher=torchrun is given to a call from Python",
            rule="the command `train` follows torchrun; a call from Python is a whole run in each process",
            where="runtime.launcher=torchrun",
            fix="torchrun ... -m elaswave_spmd train ..., or leave runtime.launcher out",
        )
    _refuse_places({*named})


def take_out(environment: MutableMapping[str, str]) -> None:
    """Remove torchrun's variables, once they are understood, so that no worker takes them for its own.

    torch_xla and much code of users reads them, and they count torchrun's processes, which are not the workers.
    """
    for name in [*environment]:
        if name in VARIABLES or name in _OTHERS or name.startswith(_FAMILY):
            del environment[name]


def _whole(name: str, environment: Mapping[str, str]) -> int:
    if not re.fullmatch("[0-9]{1,9}", environment[name], re.ASCII):
        raise _impossible(f"{name} is a whole number", environment)
    return int(environment[name])


def _impossible(rule: str, environment: Mapping[str, str]) -> ConfigError:
    values = " ".join(f"{name}={environment[name]}" for name in _NUMBERS)
    return ConfigError(
        f"the variables of torchrun contradict themselves: {values}",
        rule=rule,
        where=values,
        fix=f"unset {_RUN_ID}; or {_OFF}",
    )


def _gives(words: Sequence[str], name: str) -> bool:
    """True if the words give the setting a value other than null."""
    return given_value(words, name, None) is not None


def _refuse_places(named: set[str]) -> None:
    if "runtime.agent_workers" in named:
        raise ConfigError(
            "runtime.agent_workers is given, and neither torchrun nor Ray has started this command",
            rule="it says how many workers have a place on each agent that torchrun or Ray starts",
            where="runtime.agent_workers",
            fix="elaswave-spmd agent HOST:PORT --token-file FILE --workers N",
        )


def _check_words(words: Sequence[str], named: set[str], place: Place) -> None:
    """Refuse words with which the nodes would not become one run, before any of them starts something."""
    started = f"torchrun has started {place.num_nodes} nodes"
    if "runtime.rendezvous" in named and not _gives(words, "runtime.rendezvous"):
        raise ConfigError(
            f"{started}, and runtime.rendezvous=null asks for a run on one machine",
            rule="the nodes of torchrun are one run, which meets at its rendezvous",
            where="runtime.rendezvous=null",
            fix=f"leave it out ({place.rendezvous}); or runtime.launcher=none: each node is a run of its own",
        )
    resumes = _gives(words, "train.resume")
    if not resumes and not _gives(words, "runtime.token_file"):
        raise ConfigError(
            f"{started}, and runtime.token_file is not given",
            rule="machines that meet share a secret",
            where="runtime.token_file",
            fix="(umask 077; openssl rand -hex 32 > FILE), the same file on all nodes, and runtime.token_file=FILE",
        )
    if not resumes and not _gives(words, "run.dir"):
        raise ConfigError(
            f"{started}, and run.dir is not given",
            rule="torchrun starts the command again on all nodes when a node joins: that is refused in the same "
            "directory, and would be another run, from its first step, in a new one",
            where="run.dir",
            fix="run.dir=runs/NAME",
        )


def _shared_out(settings: Settings, named: set[str], place: Place) -> Settings:
    """The settings with the workers shared out among the nodes as evenly as can be, where no argument says otherwise.

    The node of the controller gets no more of them than the others. Where its share is none, local_workers stays null:
    0 would keep replacements off it as well, for which it is as good a node as any other.
    """
    workers, runtime, agents = settings.mesh.shape.num_workers, settings.runtime, place.num_nodes - 1
    local = runtime.local_workers if "runtime.local_workers" in named else None
    if "runtime.agent_workers" in named and runtime.agent_workers is not None:
        places = runtime.agent_workers
        if local is None:
            local = max(0, workers - agents * places)
    else:
        local = workers // place.num_nodes if local is None else local
        places = max(1, -(-(workers - local) // agents))
    if "runtime.local_workers" not in named:
        local = local or None
    return _launched(replace(settings, runtime=replace(runtime, local_workers=local, agent_workers=places)))


def _launched(settings: Settings) -> Settings:
    return replace(settings, runtime=replace(settings.runtime, launcher=TORCHRUN))
