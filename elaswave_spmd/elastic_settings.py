"""The settings of a run that survives: who may come and go, mirrors, checkpoints, faults on purpose.

Part of settings.py, in a file of its own; the waiting times are `recovery.timeouts.Timeouts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from elaswave_spmd.conf import checks
from elaswave_spmd.errors import ConfigError

ANY = "any"
CHAOS_KINDS = ("kill", "stop", "term", "join", "corrupt", "exit", "raise")
CHAOS_POINTS = ("forward", "backward", "reduce", "norm", "apply", "publish", ANY)
_CHAOS_FIX = "'chaos.events=[{step: 12, kind: kill, rank: 3, point: backward}]'"


@dataclass(frozen=True)
class ElasticSettings:
    """Who may come and go. Below `min_workers` the run writes a checkpoint and stops.

    `enabled=false`: the first loss ends the run. `replace`: a new worker takes the place of a lost one. `spares`:
    workers that wait beside the run, with everything imported, to be that one. `evict_slower_than`: a worker whose
    measured speed, that of the middle one being 1, stays below this is let go; 0: none is.
    """

    enabled: bool = True
    min_workers: int = 1
    replace: bool = False
    spares: int = 0
    evict_slower_than: float = 0.0

    def __post_init__(self) -> None:
        checks.flag("elastic.enabled", self.enabled)
        checks.whole("elastic.min_workers", self.min_workers, at_least=1)
        checks.flag("elastic.replace", self.replace)
        checks.whole("elastic.spares", self.spares, at_least=0)
        slowest = checks.number("elastic.evict_slower_than", self.evict_slower_than, at_least=0, below=1)
        checks.put(self, evict_slower_than=slowest)
        for name in ("replace", "spares", "evict_slower_than"):
            if (value := getattr(self, name)) and not self.enabled:
                raise ConfigError(
                    "a run that is not elastic ends with its first loss, and nobody joins it",
                    got=checks.override(f"elastic.{name}", value),
                    where=f"{checks.override(f'elastic.{name}', value)} elastic.enabled=false",
                    fix=f"leave one of the two out: elastic.enabled or elastic.{name}",
                )


@dataclass(frozen=True)
class MirrorSettings:
    """Mirrors of sharded state: `count` of each page, dealt over `scatter` other workers (0: as many as suit).

    Every `verify_every` steps the copies are compared by their hashes; 0: never.
    """

    count: int = 1
    scatter: int = 0
    verify_every: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "scatter", "verify_every"):
            checks.whole(f"mirror.{name}", getattr(self, name), at_least=0)
        if 0 < self.scatter < self.count:
            raise ConfigError(
                "mirror.scatter is at least mirror.count: the mirrors of a page lie on different workers",
                got=f"{self.count} mirrors of each page over {self.scatter} workers",
                where=f"mirror.scatter={self.scatter} mirror.count={self.count}",
                fix=f"mirror.scatter={self.count}, or 0 to have it chosen",
            )


@dataclass(frozen=True)
class CheckpointSettings:
    """Durable checkpoints: one every `every` steps (0: none), the newest `keep` stay."""

    every: int = 0
    keep: int = 2

    def __post_init__(self) -> None:
        checks.whole("checkpoint.every", self.every, at_least=0)
        checks.whole("checkpoint.keep", self.keep, at_least=1)


@dataclass(frozen=True)
class ChaosEvent:
    """A fault on purpose: once, at the first attempt of `step`, when a worker passes `point` of it.

    Args:
        kind: signals to the worker's process: `kill` (SIGKILL), `stop` (SIGSTOP), `term` (SIGTERM: it leaves). `exit`:
            the process ends; `raise`: an exception; `corrupt`: a bit of its state flips. `join`: a new worker is asked
            for at that moment.
        rank: the worker; a list: each of these; `any`: one of them.
        point: before a unit's `forward` or `backward`, at its `reduce`, at `norm`, `apply`, `publish`; `any` of these.
    """

    step: int
    kind: str
    rank: int | tuple[int, ...] | str = ANY
    point: str = ANY

    def __post_init__(self) -> None:
        checks.whole("chaos.events.step", self.step, at_least=1)
        checks.choice("chaos.events.kind", self.kind, CHAOS_KINDS)
        checks.choice("chaos.events.point", self.point, CHAOS_POINTS)
        if isinstance(self.rank, (list, tuple)):
            checks.put(self, rank=tuple(self.rank))
        if self.rank != ANY and not _are_ranks(self.ranks):
            raise ConfigError(
                "the rank of a chaos event is a worker's number, a list of different ones, or any",
                got=self.rank,
                where=checks.override("chaos.events.rank", self.rank),
                fix="rank: 3, rank: [1, 3] or rank: any",
            )

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The workers that are named; None: any one."""
        if isinstance(self.rank, tuple):
            return self.rank
        return None if isinstance(self.rank, str) else (self.rank,)


@dataclass(frozen=True)
class ChaosSettings:
    """Faults on purpose: those of `events`; if `random`, also what `seed` draws, `rate` expected per committed step."""

    events: tuple[ChaosEvent, ...] = ()
    random: bool = False
    seed: int = 0
    rate: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.events, (list, tuple)):
            where = checks.override("chaos.events", self.events)
            raise ConfigError("chaos.events is a list of events", got=self.events, where=where, fix=_CHAOS_FIX)
        checks.put(self, events=tuple(map(_event, self.events)))
        checks.flag("chaos.random", self.random)
        checks.whole("chaos.seed", self.seed, at_least=0)
        checks.put(self, rate=checks.number("chaos.rate", self.rate, at_least=0))


def check_elastic(elastic: ElasticSettings, chaos: ChaosSettings, num_workers: int, num_steps: int) -> None:
    """What these say together with the rest of a run.

    Raises:
        ConfigError: the run would begin below `elastic.min_workers`, or a chaos event would never happen.
    """
    if elastic.min_workers > num_workers:
        raise ConfigError(
            "elastic.min_workers is no more than the workers that the mesh begins with",
            got=f"{elastic.min_workers}, and the mesh has {num_workers}",
            where=f"elastic.min_workers={elastic.min_workers}",
            fix=f"elastic.min_workers={num_workers}, or a larger mesh",
        )
    if late := [event.step for event in chaos.events if event.step > num_steps]:
        raise ConfigError(
            "a chaos event happens in a step of the run",
            got=f"step {late[0]} of {num_steps}",
            where=f"chaos.events.step={late[0]} train.steps={num_steps}",
            fix=f"a step from 1 to {num_steps}",
        )


def _event(event: object) -> ChaosEvent:
    if isinstance(event, ChaosEvent):
        return event
    fields = {field.name: field for field in dataclasses.fields(ChaosEvent)}
    given = event if isinstance(event, Mapping) else {}
    unknown = [name for name in given if name not in fields]
    if not given or unknown or "step" not in given or "kind" not in given:
        raise ConfigError(
            "a chaos event has a step and a kind, and may have a rank and a point",
            got=str(unknown[0]) if unknown else event,
            where=checks.override("chaos.events", [event]),
            exists=", ".join(fields),
            fix=_CHAOS_FIX,
        )
    return ChaosEvent(**given)


def _are_ranks(ranks: object) -> bool:
    if not isinstance(ranks, tuple) or not ranks or len(set(map(str, ranks))) < len(ranks):
        return False
    return all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks)
