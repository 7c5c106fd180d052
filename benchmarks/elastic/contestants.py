"""The systems that are compared: how each is started, in which environment, and by which settings."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass

from benchmarks import peers

RAY = "ray[train]==2.60.0"


@dataclass(frozen=True)
class System:
    """A system, frozen: one command, which does all that the system's documentation leaves to its launcher.

    Args:
        name: in tables.
        module: its program, `python -m MODULE DIRECTORY OPTIONS`.
        options: further words of the command.
        package: what its environment has besides the packages of this one; "" is this one.
        imports: a module that the environment must be able to import.
        settings: in words, for the protocol page and the table.
        needs_torch: the version of torch from which on it runs.
    """

    name: str
    module: str
    options: tuple[str, ...] = ()
    package: str = ""
    imports: str = ""
    settings: str = ""
    needs_torch: tuple[int, ...] = ()

    def command(self, directory: str) -> list[str]:
        """The words that start it for the job in a directory."""
        python = peers.program_of("python", self.package) if self.package else sys.executable
        return [python, "-m", self.module, directory, *self.options]

    def prepare(self) -> str:
        """Makes its environment. Returns "", or the reason why it cannot run, in words."""
        if self.needs_torch > _installed():
            return f"needs torch {'.'.join(map(str, self.needs_torch))}; here is {importlib.metadata.version('torch')}"
        return peers.make(self.package, self.imports) if self.package else ""


def _installed() -> tuple[int, ...]:
    version = importlib.metadata.version("torch")
    return tuple(int(number) for number in version.partition("+")[0].split(".")[:2])


_SYSTEMS = "benchmarks.elastic.systems"
SYSTEMS = (
    System("this project", f"{_SYSTEMS}.elaswave", settings="dp4, state replicated, elastic.replace=true"),
    System(
        "torchft",
        f"{_SYSTEMS}.torchft_groups",
        ("recipe",),
        peers.TORCHFT,
        "torchft",
        "README.md and train_ddp.py: join timeout 10 s, tick 100 ms, heartbeat timeout 5 s; a shard for each replica",
    ),
    System(
        "torchft, batch divided again",
        f"{_SYSTEMS}.torchft_groups",
        ("divided",),
        peers.TORCHFT,
        "torchft",
        "join and heartbeat timeout 500 ms, tick 10 ms; the batch is divided over those that take part",
    ),
    System(
        "torchrun + DCP",
        f"{_SYSTEMS}.torchrun",
        settings="max-restarts without end, async_save every 5 steps, addresses not shared (pytorch#135712)",
    ),
    System(
        "Ray Train, elastic",
        f"{_SYSTEMS}.ray_train",
        package=RAY,
        imports="ray.train.torch",
        settings="num_workers=(1, 4), max_failures=-1, a checkpoint every 5 steps",
    ),
    System(
        "c10d reconfigure",
        f"{_SYSTEMS}.reconfigure",
        settings="a launcher of ours; collectives have 2 s, silent members 3 s; the batch is divided over the members",
        needs_torch=(2, 14),
    ),
)


def named(text: str) -> list[System]:
    """The systems whose names contain one of some words that commas separate; "" names all.

    Raises:
        ValueError: a word is in no name.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not any(word in system.name for system in SYSTEMS):
            raise ValueError(f"no system is called {word!r}; there are {', '.join(s.name for s in SYSTEMS)}")
    return [system for system in SYSTEMS if not words or any(word in system.name for word in words)]
