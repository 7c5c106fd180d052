"""The group `schedule` of the settings: how a run follows what its workers measure."""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_spmd import checks


@dataclass(frozen=True)
class ScheduleSettings:
    """Units follow the measured speeds of workers (`dataflow`), layers the measured costs (`graph`).

    `stages`: there may be more or fewer stages than the mesh was begun with, when that is faster. `memory_limit`: bytes
    of state and activations that a worker has room for; None: layers are moved without a look at it.

    Looked at every `every` steps, on medians over `window` steps. A change is made if a step is expected to gain at
    least the part `min_gain` of its time, in `patience` looks in a row, and if that pays for what it moves.
    `profile`: costs.json of an earlier run of this model, to plan the first mesh with. `bandwidth` (bytes/s) and
    `latency` (s) of a link, for what moving costs.
    """

    dataflow: bool = True
    graph: bool = True
    stages: bool = False
    memory_limit: float | None = None
    every: int = 5
    window: int = 5
    min_gain: float = 0.1
    patience: int = 2
    profile: str | None = None
    bandwidth: float = 1e9
    latency: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("dataflow", "graph", "stages"):
            checks.flag(f"schedule.{name}", getattr(self, name))
        if self.memory_limit is not None:
            checks.put(self, memory_limit=checks.number("schedule.memory_limit", self.memory_limit, above=0))
        for name in ("every", "window", "patience"):
            checks.whole(f"schedule.{name}", getattr(self, name), at_least=1)
        checks.put(self, min_gain=checks.number("schedule.min_gain", self.min_gain, at_least=0, below=1))
        if self.profile is not None:
            checks.put(self, profile=checks.text("schedule.profile", self.profile))
        checks.put(self, bandwidth=checks.number("schedule.bandwidth", self.bandwidth, above=0))
        checks.put(self, latency=checks.number("schedule.latency", self.latency, at_least=0))
