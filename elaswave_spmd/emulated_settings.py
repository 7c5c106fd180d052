"""The group `emulated` of the settings: how long the programs of the emulated accelerator take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from elaswave_spmd.conf import checks
from elaswave_spmd.errors import ConfigError

_SLOW_FIX = "'emulated.slow=[{rank: 3, speed: 0.5, step: 10}]'"


@dataclass(frozen=True)
class SlowDevice:
    """Worker `rank` runs at `speed` (1: as configured) from step `step` on, before step `until` (None: for good)."""

    rank: int
    speed: float
    step: int = 1
    until: int | None = None

    def __post_init__(self) -> None:
        checks.whole("emulated.slow.rank", self.rank, at_least=0)
        checks.put(self, speed=checks.number("emulated.slow.speed", self.speed, above=0))
        checks.whole("emulated.slow.step", self.step, at_least=1)
        if self.until is not None:
            checks.whole("emulated.slow.until", self.until, at_least=self.step + 1)

    def holds_at(self, rank: int, step: int) -> bool:
        """Whether it speaks of this worker and step."""
        return rank == self.rank and self.step <= step and (self.until is None or step < self.until)


@dataclass(frozen=True)
class EmulatedSettings:
    """For `runtime.device=emulated`: a program of a layer of cost 1 takes `forward_ms` or `backward_ms` for one unit.

    `layer_costs`: relative cost of each layer (embedding, transformer layers, head); empty: 1 each. `slow`: workers
    that run at another speed for a while; of two that hold at the same time the later one in the list counts.
    """

    forward_ms: float = 10.0
    backward_ms: float = 20.0
    layer_costs: tuple[float, ...] = ()
    slow: tuple[SlowDevice, ...] = ()

    def __post_init__(self) -> None:
        for name in ("forward_ms", "backward_ms"):
            checks.put(self, **{name: checks.number(f"emulated.{name}", getattr(self, name), at_least=0)})
        for name, fix in (("layer_costs", "emulated.layer_costs=[1,1,2]"), ("slow", _SLOW_FIX)):
            if not isinstance(value := getattr(self, name), (list, tuple)):
                where = checks.override(f"emulated.{name}", value)
                raise ConfigError(f"emulated.{name} is a list", got=value, where=where, fix=fix)
        costs = tuple(checks.number("emulated.layer_costs", cost, at_least=0) for cost in self.layer_costs)
        checks.put(self, layer_costs=costs, slow=tuple(map(_slow, self.slow)))

    def speed(self, rank: int, step: int) -> float:
        """How fast a worker is in a step, but for its frequency."""
        return next((s.speed for s in reversed(self.slow) if s.holds_at(rank, step)), 1.0)

    def check_layers(self, num_layers: int) -> None:
        """Refuses costs that are not one for each layer of the model.

        Raises:
            ConfigError: with how many there are.
        """
        if self.layer_costs and len(self.layer_costs) != num_layers:
            raise ConfigError(
                "emulated.layer_costs has one number for each layer, embedding and head included",
                got=f"{len(self.layer_costs)} numbers, {num_layers} layers",
                where=checks.override("emulated.layer_costs", self.layer_costs),
                fix=f"{num_layers} numbers, or none",
            )


def _slow(value: object) -> SlowDevice:
    if isinstance(value, SlowDevice):
        return value
    fields = {field.name for field in dataclasses.fields(SlowDevice)}
    if not isinstance(value, Mapping) or not {"rank", "speed"} <= value.keys() <= fields:
        raise ConfigError(
            "a slow device has a rank and a speed, and may have a step and an until",
            got=value,
            where=checks.override("emulated.slow", [value]),
            exists=", ".join(sorted(fields)),
            fix=_SLOW_FIX,
        )
    return SlowDevice(**value)
