"""The cost model that plans rest on: what layers, workers and links take, as measured in the running job.

Seconds are of one micro-batch on a worker of speed 1; a worker of speed v takes 1/v of them. Everything here is a
value: it prints, compares, hashes, and goes to and from JSON, so that a profile saved with a run can be planned with
elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from elaswave_spmd.errors import PlanError
from elaswave_spmd.mesh.mesh import format_ints

_SHOWN = 24


@dataclass(frozen=True)
class LayerCost:
    """What one layer takes.

    Args:
        name: for readers.
        forward_s, backward_s: seconds of one micro-batch at speed 1.
        state_bytes: one copy of its optimizer state (master parameters and moments): what moves with the layer.
        value_bytes: its parameters as they are computed with, which each worker of its stage has.
        gradient_bytes: its summed gradients.
        activation_bytes: what one micro-batch keeps between its forward and its backward.
        boundary_bytes: its output for one micro-batch, and the gradient of that: what crosses a link if a stage ends
        here.

    Raises:
        PlanError: seconds that are negative or not finite, bytes that are negative or not whole.
    """

    name: str
    forward_s: float
    backward_s: float
    state_bytes: int = 0
    value_bytes: int = 0
    gradient_bytes: int = 0
    activation_bytes: int = 0
    boundary_bytes: int = 0

    def __post_init__(self) -> None:
        where = f"layer {self.name!r}"
        if not isinstance(self.name, str):
            raise PlanError("a layer of a profile has a name", got=self.name, fix="write a text")
        for name in ("forward_s", "backward_s"):
            seconds = _number(getattr(self, name), f"{name} of a layer", where, at_least=0.0)
            object.__setattr__(self, name, seconds)
        for field in fields(self)[3:]:
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise PlanError(
                    f"{field.name} of a layer is a whole number of bytes, 0 or more",
                    got=value,
                    where=where,
                    fix="measure it again, or leave it out for 0",
                )

    @property
    def seconds(self) -> float:
        """Forward and backward of one micro-batch."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class CostModel:
    """Costs of a model's layers, and of the workers and links they run on.

    Args:
        layers: first to last.
        bandwidth: bytes per second of a worker's link.
        latency_s: seconds until the first byte of a message arrives.
        speeds: relative speed of workers, as (rank, speed) pairs or a mapping; 1 where nothing is said.

    Raises:
        PlanError: no layer or no layer that takes time; a speed or bandwidth that is not above 0, a latency below 0, a
            number that is not finite; a rank that is negative or named twice.
    """

    layers: tuple[LayerCost, ...]
    bandwidth: float
    latency_s: float = 0.0
    speeds: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not sum(layer.seconds for layer in self.layers) > 0:
            raise PlanError(
                "the layers of a profile take time",
                got=f"{len(self.layers)} layers, 0 s altogether",
                where="layers",
                fix="measure them: forward_s and backward_s",
            )
        object.__setattr__(self, "bandwidth", _number(self.bandwidth, "bandwidth", "bandwidth", above=0.0))
        object.__setattr__(self, "latency_s", _number(self.latency_s, "latency_s", "latency_s", at_least=0.0))
        pairs = sorted(self.speeds.items() if isinstance(self.speeds, Mapping) else self.speeds)
        for rank, _ in pairs:
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
                raise PlanError("speeds are of ranks, 0 or more", got=rank, where="speeds", fix="name workers by rank")
        checked = tuple((rank, _number(v, "the speed of a worker", f"rank {rank}", above=0.0)) for rank, v in pairs)
        object.__setattr__(self, "speeds", checked)
        if len(self._speed_of) != len(checked):
            twice = sorted({a for (a, _), (b, _) in pairwise(checked) if a == b})
            raise PlanError("a worker has one speed", got=f"ranks {format_ints(twice)} twice", where="speeds")

    # ---- workers

    @cached_property
    def _speed_of(self) -> dict[int, float]:
        return dict(self.speeds)

    def speed(self, rank: int) -> float:
        """Relative speed of a worker."""
        return self._speed_of.get(rank, 1.0)

    def speeds_of(self, ranks: Sequence[int]) -> np.ndarray:
        """float64[len(ranks)]: their relative speeds."""
        if not self._speed_of:
            return np.ones(len(ranks))
        return np.array([self._speed_of.get(rank, 1.0) for rank in ranks], np.float64)

    def with_speeds(self, speeds: Mapping[int, float]) -> CostModel:
        """The same costs with these speeds of these workers; others keep theirs."""
        return replace(self, speeds=tuple({**self._speed_of, **speeds}.items()))

    def with_memory(self, rows: Iterable[tuple[int, int, int]]) -> CostModel:
        """The same costs with what was weighed: (layer, activation_bytes, boundary_bytes), the same anywhere."""
        layers = list(self.layers)
        for layer, kept, output in rows:
            layers[layer] = replace(layers[layer], activation_bytes=kept, boundary_bytes=output)
        return self if tuple(layers) == self.layers else replace(self, layers=tuple(layers))

    def with_links(self, latency_s: float | None, bandwidth: float | None) -> CostModel:
        """The same costs with links that take so much; None: as they were."""
        latency_s = self.latency_s if latency_s is None else latency_s
        return replace(self, latency_s=latency_s, bandwidth=bandwidth or self.bandwidth)

    def without(self, ranks: Collection[int]) -> CostModel:
        """The same costs without these workers."""
        gone = frozenset(ranks)
        return replace(self, speeds=tuple(pair for pair in self.speeds if pair[0] not in gone))

    def check(self, num_layers: int, ranks: Iterable[int] | None = None, where: str = "profile") -> CostModel:
        """This profile, if it is of such a model and of such workers.

        Raises:
            PlanError: it has more or fewer layers, or speeds of workers that there are none of.
        """
        if len(self.layers) != num_layers:
            raise PlanError(
                "a profile has the costs of each layer of the model",
                got=f"{len(self.layers)} layers ({_names(self.layers)})",
                where=where,
                exists=f"{num_layers} layers in the model (embedding and head included)",
                fix="measure this model, or plan with the model that was measured",
            )
        if ranks is not None:
            known = frozenset(ranks)
            if unknown := [rank for rank, _ in self.speeds if rank not in known]:
                raise PlanError(
                    "a profile has speeds of workers that exist",
                    got=f"ranks {format_ints(unknown)}",
                    where=f"speeds of {where}",
                    exists=f"ranks {format_ints(sorted(known))}",
                    fix="leave their speeds out, or plan for the mesh that was measured",
                )
        return self

    # ---- layers

    def prefix(self, field: str) -> np.ndarray:
        """[layers + 1]: sums over the first layers of a field of LayerCost; bytes as int64, seconds as float64."""
        if field not in self._prefixes:
            values = np.array([getattr(layer, field) for layer in self.layers])
            self._prefixes[field] = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
        return self._prefixes[field]

    @cached_property
    def _prefixes(self) -> dict[str, np.ndarray]:
        return {}  # by field, worked out when first asked for

    def stage_s(self, first: int, stop: int) -> tuple[float, float]:
        """Seconds of one micro-batch's forward and backward through layers [first, stop) at speed 1."""
        forward, backward = self.prefix("forward_s"), self.prefix("backward_s")
        return float(forward[stop] - forward[first]), float(backward[stop] - backward[first])

    def microbatch_s(self, first: int, stop: int, rank: int) -> float:
        """Seconds of one micro-batch's forward and backward through layers [first, stop) on a worker."""
        return sum(self.stage_s(first, stop)) / self.speed(rank)

    def message_s(self, layer: int) -> float:
        """Seconds until a micro-batch's output of a layer, or the gradient of it, has crossed a link."""
        return self.latency_s + self.layers[layer].boundary_bytes / self.bandwidth

    # ---- JSON

    def to_json(self) -> str:
        """One JSON object; `from_json` reads it back as an equal value."""
        layers = [{"index": i, **asdict(layer)} for i, layer in enumerate(self.layers)]
        speeds = {str(rank): speed for rank, speed in self.speeds}
        data = {"bandwidth": self.bandwidth, "latency_s": self.latency_s, "layers": layers, "speeds": speeds}
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "profile") -> CostModel:
        """Reads a stored profile. `where` names it in errors.

        Raises:
            PlanError: no JSON object, a layer or a field that is missing, unknown or of the wrong kind.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise PlanError("a profile is a JSON object", got=str(error), where=where, fix="save it again") from None
        names = {"bandwidth", "latency_s", "layers", "speeds"}
        data = _object(data, "a profile", names, {"bandwidth", "layers"}, where)
        if not isinstance(data["layers"], list):
            raise PlanError("layers of a profile are a list", got=data["layers"], where=where)
        speeds = _object(data.get("speeds", {}), "speeds", None, set(), where)
        if wrong := [rank for rank in speeds if not rank.isdecimal()]:
            raise PlanError("speeds are of ranks", got=wrong[0], where=f"speeds of {where}", fix="name ranks: 0, 1")
        by_rank = tuple((int(rank), speed) for rank, speed in speeds.items())
        return cls(_layers(data["layers"], where), data["bandwidth"], data.get("latency_s", 0.0), by_rank)

    def __str__(self) -> str:
        total = sum(layer.seconds for layer in self.layers)
        lines = [
            f"costs: {len(self.layers)} layers, {total:.4g} s a micro-batch; links {self.bandwidth:.4g} B/s, "
            f"{self.latency_s:.3g} s latency"
        ]
        for i, layer in enumerate(self.layers[:_SHOWN]):
            state, kept, sent = layer.state_bytes, layer.activation_bytes, layer.boundary_bytes
            lines.append(
                f"  {i} {layer.name}: {layer.forward_s:.4g} + {layer.backward_s:.4g} s, state {state:,} B, "
                f"{kept:,} B a micro-batch in flight, boundary {sent:,} B"
            )
        lines += [f"  ... {len(self.layers) - _SHOWN} more"] if len(self.layers) > _SHOWN else []
        slow = [f"{rank}: {speed:.3g}" for rank, speed in self.speeds if speed != 1.0]
        lines.append("  speeds: " + (", ".join(slow[:_SHOWN]) + (" ..." if len(slow) > _SHOWN else "") or "all 1"))
        return "\n".join(lines)


@dataclass(frozen=True)
class MemoryRule:
    """How much of its stage's bytes one worker has; from Rajbhandari et al., 2020 (ZeRO), with mirrors.

    The mirror that a stage of one worker has with a neighbour stage is not counted there.

    Args:
        zero_level: 0: all state on each worker; 1 or more: state dealt over the stage; 2 or more: gradients too, since
            a leaf is sent as soon as its layer is done, so that one worker's part stays.
        mirror_count: mirrors of each page of dealt state.
    """

    zero_level: int = 0
    mirror_count: int = 1

    def state_share(self, size: int) -> float:
        """Part of a stage's state that one of `size` workers has."""
        return 1.0 if self.zero_level == 0 else min(1.0, (1 + self.mirror_count) / size)

    def gradient_share(self, size: int) -> float:
        """Part of a stage's gradient sums that one of `size` workers has."""
        return 1.0 if self.zero_level < 2 else 1.0 / size

    def stage_bytes(self, costs: CostModel, *, size: int, microbatches: int, in_flight: int) -> np.ndarray:
        """float64[layers + 1, layers + 1]: bytes of a worker of a stage with layers [row, column).

        Values, gradients, state, activations of the micro-batches in flight, and the tensors that its micro-batches
        send over the stage's two ends, which are kept until the step is decided. Only row < column means anything.

        Args:
            size: workers of the stage.
            micro-batches: micro-batches of the worker in a step.
            in_flight: micro-batches that it may have between forward and backward.
        """
        whole = costs.prefix("value_bytes") + self.gradient_share(size) * costs.prefix("gradient_bytes")
        whole = whole + self.state_share(size) * costs.prefix("state_bytes")
        whole = whole + min(microbatches, in_flight) * costs.prefix("activation_bytes")
        ends = np.array([0, *(layer.boundary_bytes for layer in costs.layers[:-1]), 0]) * microbatches
        return whole[None, :] - whole[:, None] + ends[None, :] + ends[:, None]


REPLICATED = MemoryRule()
"""All state on each worker of its stage: ZeRO-0."""


def _number(value: object, what: str, where: str, *, above: float = -math.inf, at_least: float = -math.inf) -> float:
    found = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if math.isfinite(found) and found > above and found >= at_least:
        return float(found)
    asked = f"above {above:g}" if math.isfinite(above) else f"of at least {at_least:g}"
    raise PlanError(f"{what} is a finite number {asked}", got=value, where=where, fix="measure it again")


def _object(
    data: object, what: str, names: Collection[str] | None, needed: Collection[str], where: str
) -> dict[str, Any]:
    """A JSON object with some of these names (None: any), and all that are needed."""
    if not isinstance(data, dict):
        raise PlanError(f"{what} is a JSON object", got=data, where=where)
    if names is not None and (unknown := sorted(set(data) - set(names))):
        exists = ", ".join(sorted(names))
        raise PlanError(f"{what} has fields that are known", got=unknown[0], where=where, exists=exists)
    if missing := sorted(set(needed) - set(data)):
        raise PlanError(f"{what} has all fields that are needed", got=f"no {missing[0]!r}", where=where)
    return data


def _layers(entries: Sequence[object], where: str) -> tuple[LayerCost, ...]:
    """The layers of a profile by index, each once."""
    names = {"index", *(field.name for field in fields(LayerCost))}
    found: dict[int, LayerCost] = {}
    for entry in entries:
        data = _object(entry, "a layer of a profile", names, {"index", "name", "forward_s", "backward_s"}, where)
        index = data.pop("index")
        if not isinstance(index, int) or isinstance(index, bool) or index < 0 or index in found:
            raise PlanError("a layer of a profile has an index of its own, 0 or more", got=index, where=where)
        found[index] = LayerCost(**data)
    if missing := sorted(set(range(max(found, default=-1) + 1)) - found.keys()):
        raise PlanError(
            "a profile has the costs of each layer",
            got=f"no layer {format_ints(missing)}",
            where=where,
            exists=f"layers {format_ints(sorted(found))}",
            fix="measure the missing layers",
        )
    return tuple(found[index] for index in sorted(found))


def _names(layers: Sequence[LayerCost]) -> str:
    shown = ", ".join(layer.name for layer in layers[:4])
    return shown + (", ..." if len(layers) > 4 else "")
