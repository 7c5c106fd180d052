"""The group `schedule` of the settings: how a run follows what its workers measure."""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_spmd.conf import checks
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.sharding.layout import INTERLEAVED, PAGE_LAYOUTS

MOVES = ("live", "blocking")
FREQUENCIES = ("none", "simulated", "nvml", "cpufreq", "ascend")
_DEVICE_OF = {"simulated": "emulated", "nvml": "cuda", "cpufreq": "cpu", "ascend": "npu"}


@dataclass(frozen=True)
class ScheduleSettings:
    """Units follow the measured speeds of workers (`dataflow`), layers the measured costs (`graph`).

    `stages`: there may be more or fewer stages than the mesh was begun with, when that is faster. `memory_limit`: bytes
    of state and activations that a worker has room for; None: layers are moved without a look at it.

    Looked at every `every` steps, on medians over `window` steps. A change is made if a step is expected to gain at
    least the part `min_gain` of its time, in `patience` looks in a row, and if that pays for what it moves; the
    next change takes twice as many looks, until members come or go.
    `moves`: live, or with training standing still while state is copied. `pages`: how state is dealt over a stage,
    page by page of each layer or in one piece per worker. The second of each is there to be compared with.

    `profile`: costs.json of an earlier run of this model, to plan the first mesh with. `bandwidth` (bytes/s) and
    `latency` (s) of a link, for what moving costs; None: as measured.

    `frequency`: who sets the frequencies of devices, once nothing else is to be changed: from `f_min` to `f_max` of the
    normal one; what is lowered stays the part `f_margin` above what the schedule would allow, because times vary.
    """

    dataflow: bool = True
    graph: bool = True
    stages: bool = False
    memory_limit: float | None = None
    every: int = 5
    window: int = 5
    min_gain: float = 0.1
    patience: int = 3
    moves: str = "live"
    pages: str = INTERLEAVED
    profile: str | None = None
    bandwidth: float | None = None
    latency: float | None = None
    frequency: str = "none"
    f_min: float = 0.5
    f_max: float = 1.0
    f_margin: float = 0.05

    def __post_init__(self) -> None:
        for name in ("dataflow", "graph", "stages"):
            checks.flag(f"schedule.{name}", getattr(self, name))
        if self.memory_limit is not None:
            checks.put(self, memory_limit=checks.number("schedule.memory_limit", self.memory_limit, above=0))
        for name in ("every", "window", "patience"):
            checks.whole(f"schedule.{name}", getattr(self, name), at_least=1)
        checks.put(self, min_gain=checks.number("schedule.min_gain", self.min_gain, at_least=0, below=1))
        checks.choice("schedule.moves", self.moves, MOVES)
        checks.choice("schedule.pages", self.pages, PAGE_LAYOUTS)
        if self.profile is not None:
            checks.put(self, profile=checks.text("schedule.profile", self.profile))
        if self.bandwidth is not None:
            checks.put(self, bandwidth=checks.number("schedule.bandwidth", self.bandwidth, above=0))
        if self.latency is not None:
            checks.put(self, latency=checks.number("schedule.latency", self.latency, at_least=0))
        checks.choice("schedule.frequency", self.frequency, FREQUENCIES)
        checks.put(self, f_min=checks.number("schedule.f_min", self.f_min, above=0, at_most=1))
        checks.put(self, f_max=checks.number("schedule.f_max", self.f_max, at_least=1))
        checks.put(self, f_margin=checks.number("schedule.f_margin", self.f_margin, at_least=0, below=1))

    def check_device(self, device: str, agents: int) -> None:
        """Refuses frequencies of devices that workers do not run on, or that are out of reach.

        Raises:
            ConfigError: with the backend that would fit.
        """
        if self.frequency == "none":
            return
        rule, got = "schedule.frequency is of the devices that workers run on", f"runtime.device={device}"
        if _DEVICE_OF[self.frequency] == device:
            if not agents:
                return
            rule, got = "frequencies are set on the controller's machine", f"runtime.agents={agents}"
        fits = [name for name, of in _DEVICE_OF.items() if of == device and not agents]
        raise ConfigError(
            rule,
            got=got,
            where=checks.override("schedule.frequency", self.frequency),
            exists=f"for {device}: {', '.join([*fits, 'none'])}",
            fix=" or ".join(f"schedule.frequency={name}" for name in (*fits, "none")),
        )
