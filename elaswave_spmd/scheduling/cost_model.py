"""The cost model of plans: seconds and bytes of layers, speeds of workers, latency and bandwidth of links.

Seconds are those of one micro-batch on a worker of speed 1; a worker of speed v takes 1/v of them. Costs are measured
in the running job (`profiler`). A cost model is an immutable value that goes to and from JSON, so that a profile saved
by one run (schedule.profile) can be used by another.
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
from elaswave_spmd.sharding import Shardings

WEIGHT_SHARE = 0.5
"""The part of a backward that is assumed to make weight gradients, where that is not measured: as many products as make
the gradients of inputs."""

_SHOWN = 24  # layers, and slow workers, that `str` lists


PROFILE_FIX = (
    "the costs.json of a run of 10 steps or more; with elastic.enabled=false, or schedule.microbatches=false "
    "schedule.layers=false, a run may have none"
)
"""The fix in errors about a profile that cannot be read. Not every run writes one (docs/speed.md)."""


@dataclass(frozen=True)
class LayerCost:
    """The costs of one layer.

    Args:
        name: for messages.
        forward_s, backward_s: seconds of one micro-batch at speed 1.
        state_bytes: one copy of its optimizer state (master parameters and moments), which moves with the layer.
        value_bytes: its parameters in the compute dtype, which every worker of its stage has.
        gradient_bytes: its summed gradients.
        activation_bytes: bytes that one micro-batch keeps between forward and backward.
        boundary_bytes: its output for one micro-batch, which crosses a link if a stage ends here; the gradient of the
            output has as many.
        put_off_bytes: bytes that one micro-batch keeps between the two parts of a backward.
        weight_share: the part of backward_s that makes weight gradients, which may be put off; 0: backwards are whole.

    Raises:
        PlanError: seconds are negative or not finite, bytes are negative or not whole, or the share is not one.
    """

    name: str
    forward_s: float
    backward_s: float
    state_bytes: int = 0
    value_bytes: int = 0
    gradient_bytes: int = 0
    activation_bytes: int = 0
    boundary_bytes: int = 0
    put_off_bytes: int = 0
    weight_share: float = 0.0

    def __post_init__(self) -> None:
        where = f"layer {self.name!r}"
        if not isinstance(self.name, str):
            raise PlanError(f"a layer of the profile has the name {self.name!r}", rule="the name is text")
        for name in ("forward_s", "backward_s"):
            seconds = _number(getattr(self, name), f"{name} of {where}", at_least=0.0)
            object.__setattr__(self, name, seconds)
        share = _number(self.weight_share, f"weight_share of {where}", at_least=0.0)
        if share > 1:
            raise PlanError(f"weight_share of {where} is {share:g}", rule="it is a part of the backward, from 0 to 1")
        object.__setattr__(self, "weight_share", share)
        for field in fields(self)[3:-1]:
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise PlanError(
                    f"{field.name} of {where} is {value!r}",
                    rule="it is a whole number of bytes, 0 or more",
                    fix="measure it again, or leave it out for 0",
                )

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward of one micro-batch."""
        return self.forward_s + self.backward_s

    @property
    def weights_s(self) -> float:
        """The seconds of `backward_s` that may be put off."""
        return self.backward_s * self.weight_share


@dataclass(frozen=True)
class CostModel:
    """The costs of a model's layers, and of the workers and links that they run on.

    Args:
        layers: first to last.
        bandwidth: bytes per second of a worker's link.
        latency_s: seconds until the first byte of a message arrives.
        speeds: relative speeds of workers, as (rank, speed) pairs or a mapping; 1 for workers that are not in it.

    Raises:
        PlanError: no layer takes time; a speed or the bandwidth is not above 0; the latency is below 0; a number is not
            finite; a rank is negative or comes twice.
    """

    layers: tuple[LayerCost, ...]
    bandwidth: float
    latency_s: float = 0.0
    speeds: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not sum(layer.seconds for layer in self.layers) > 0:
            raise PlanError(
                f"the {len(self.layers)} layers of the profile take 0 s",
                rule="the layers of a profile take time",
                fix="measure forward_s and backward_s",
            )
        object.__setattr__(self, "bandwidth", _number(self.bandwidth, "bandwidth", above=0.0))
        object.__setattr__(self, "latency_s", _number(self.latency_s, "latency_s", at_least=0.0))
        pairs = sorted(self.speeds.items() if isinstance(self.speeds, Mapping) else self.speeds)
        for rank, _ in pairs:
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
                raise PlanError(f"speeds name rank {rank!r}", rule="ranks are whole numbers, 0 or more")
        checked = tuple((rank, _number(v, f"the speed of rank {rank}", above=0.0)) for rank, v in pairs)
        object.__setattr__(self, "speeds", checked)
        if len(self._speed_of) != len(checked):
            twice = sorted({a for (a, _), (b, _) in pairwise(checked) if a == b})
            raise PlanError(f"speeds name ranks {format_ints(twice)} twice", rule="a worker has one speed")

    # ---- workers

    @cached_property
    def _speed_of(self) -> dict[int, float]:
        return dict(self.speeds)

    def speed(self, rank: int) -> float:
        """The relative speed of a worker."""
        return self._speed_of.get(rank, 1.0)

    def speeds_of(self, ranks: Sequence[int]) -> np.ndarray:
        """float64 [len(ranks)]: the relative speeds of workers."""
        if not self._speed_of:
            return np.ones(len(ranks))
        return np.array([self._speed_of.get(rank, 1.0) for rank in ranks], np.float64)

    def with_speeds(self, speeds: Mapping[int, float]) -> CostModel:
        """The same costs with these speeds; other workers keep theirs."""
        return replace(self, speeds=tuple({**self._speed_of, **speeds}.items()))

    def with_memory(self, rows: Sequence[tuple[int, int, int]]) -> CostModel:
        """The same costs with measured sizes: rows of (layer, activation_bytes, boundary_bytes).

        Sizes do not depend on the worker, so one measurement of each layer is enough.
        """
        if not rows:
            return self
        layers = list(self.layers)
        for layer, kept, output in rows:
            layers[layer] = replace(layers[layer], activation_bytes=kept, boundary_bytes=output)
        return self if tuple(layers) == self.layers else replace(self, layers=tuple(layers))

    def with_links(self, latency_s: float | None, bandwidth: float | None) -> CostModel:
        """The same costs with this latency and bandwidth; None: unchanged."""
        latency_s = self.latency_s if latency_s is None else latency_s
        return replace(self, latency_s=latency_s, bandwidth=bandwidth or self.bandwidth)

    def without(self, ranks: Collection[int]) -> CostModel:
        """The same costs without these workers."""
        gone = frozenset(ranks)
        return replace(self, speeds=tuple(pair for pair in self.speeds if pair[0] not in gone))

    def check(self, num_layers: int, ranks: Iterable[int] | None = None, where: str = "profile") -> CostModel:
        """Returns this profile if it fits the model and the workers.

        Raises:
            PlanError: it has another number of layers than the model, or speeds of workers that do not exist.
        """
        if len(self.layers) != num_layers:
            raise PlanError(
                f"{where} has {len(self.layers)} layers ({_names(self.layers)}) and the model {num_layers}",
                rule="a profile has the costs of each layer of the model, embedding and head included",
                fix="measure this model, or plan with the model that was measured",
            )
        if ranks is not None:
            known = frozenset(ranks)
            if unknown := [rank for rank, _ in self.speeds if rank not in known]:
                raise PlanError(
                    f"{where} has speeds of ranks {format_ints(unknown)}, which do not exist",
                    exists=f"ranks {format_ints(sorted(known))}",
                    fix="leave their speeds out, or plan for the mesh that was measured",
                )
        return self

    # ---- layers

    def prefix(self, field: str) -> np.ndarray:
        """Prefix sums of a number of LayerCost: [layers + 1], int64 for bytes and float64 for seconds."""
        if field not in self._prefixes:
            values = np.array([getattr(layer, field) for layer in self.layers])
            self._prefixes[field] = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
        return self._prefixes[field]

    @cached_property
    def _prefixes(self) -> dict[str, np.ndarray]:
        return {}  # by field, filled on first use

    @cached_property
    def bytes_at_cuts(self) -> np.ndarray:
        """int64 [layers + 1]: bytes that a micro-batch sends over each cut, of a stage that begins with this layer."""
        return np.array([0, *(layer.boundary_bytes for layer in self.layers[:-1]), 0])

    def stage_s(self, first: int, stop: int) -> tuple[float, float]:
        """Seconds of one micro-batch's forward and backward through layers [first, stop) at speed 1."""
        forward, backward = self.prefix("forward_s"), self.prefix("backward_s")
        return float(forward[stop] - forward[first]), float(backward[stop] - backward[first])

    def message_s(self, layer: int) -> float:
        """Seconds until a micro-batch's output of a layer, or the gradient of the output, has crossed a link."""
        return self.latency_s + self.link_s(layer)

    def link_s(self, layer: int) -> float:
        """The part of `message_s` for which the message uses the sender's link, so that others wait for it."""
        return self.layers[layer].boundary_bytes / self.bandwidth

    # ---- JSON

    def to_json(self) -> str:
        """One JSON object, from which `from_json` makes an equal value."""
        layers = [{"index": i, **asdict(layer)} for i, layer in enumerate(self.layers)]
        speeds = {str(rank): speed for rank, speed in self.speeds}
        data = {"bandwidth": self.bandwidth, "latency_s": self.latency_s, "layers": layers, "speeds": speeds}
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "profile") -> CostModel:
        """Reads a stored profile. `where` names it in errors.

        Raises:
            PlanError: the text is not a JSON object, or a layer or a field is missing, unknown or of the wrong type.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{where} is not a JSON object ({error})", fix="save it again") from None
        names = {"bandwidth", "latency_s", "layers", "speeds"}
        data = _object(data, where, names, {"bandwidth", "layers"})
        if not isinstance(data["layers"], list):
            raise PlanError(f"the layers of {where} are {data['layers']!r}", rule="layers are a list")
        speeds = _object(data.get("speeds", {}), f"speeds of {where}", None, set())
        if wrong := [rank for rank in speeds if not rank.isdecimal()]:
            raise PlanError(f"the speeds of {where} name {wrong[0]!r}", rule="speeds name ranks: 0, 1, ...")
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
                + (f", {layer.weights_s:.4g} s may be put off" if layer.weight_share else "")
            )
        lines += [f"  ... {len(self.layers) - _SHOWN} more"] if len(self.layers) > _SHOWN else []
        slow = [f"{rank}: {speed:.3g}" for rank, speed in self.speeds if speed != 1.0]
        lines.append("  speeds: " + (", ".join(slow[:_SHOWN]) + (" ..." if len(slow) > _SHOWN else "") or "all 1"))
        return "\n".join(lines)


_WHOLE = Shardings()


@dataclass(frozen=True)
class MemoryRule:
    """The share of its stage's bytes that one worker has, by the model's specs and with mirrors.

    A stage of one worker has its mirror on a worker of a neighbouring stage; that copy is not counted.

    Args:
        shardings: the specs. Those of optim and grads decide (ZeRO; Rajbhandari et al., 2020).
        mirror_count: mirrors of each page of sharded state.
        state_limit: the most bytes of state that a plan may give one worker, whatever memory it has.
    """

    shardings: Shardings = _WHOLE
    mirror_count: int = 1
    state_limit: float = math.inf

    @cached_property
    def state_is_sharded(self) -> bool:
        """True if the workers of a stage share its optimizer state; else each has all of it."""
        return self.shardings.optim.splits_workers

    def state_share(self, size: int) -> float:
        """The part of a stage's state that one of `size` workers has."""
        return min(1.0, (1 + self.mirror_count) / size) if self.state_is_sharded else 1.0

    @cached_property
    def gradients_are_sharded(self) -> bool:
        """True if the workers of a stage share its gradient sums; else each has those of all layers."""
        return self.shardings.grads.splits_workers

    def gradient_share(self, size: int) -> float:
        """The part of a stage's gradients that each sum has which one of `size` workers holds.

        Sharded gradients are sent as soon as their layer is done, so that only one worker's part stays.
        """
        return 1.0 / size if self.gradients_are_sharded else 1.0

    def mirrors(self, size: int, workers: int) -> int:
        """The mirrors of each page in a stage of `size` workers, of so many in all."""
        return min(self.mirror_count, (size if size > 1 else workers) - 1) if self.state_is_sharded else size - 1

    def stage_bytes(
        self, costs: CostModel, *, size: int, microbatches: int, in_flight: int, sums: int = 1
    ) -> np.ndarray:
        """float64 [layers + 1, layers + 1]: bytes of a worker of a stage with layers [row, column).

        They are parameters, gradients, state, activations of the micro-batches in flight, and the tensors that its
        micro-batches send over the two ends of the stage, which are kept until the step is decided. Only entries with
        row < column have a meaning. They are infinite where the state alone exceeds `state_limit`.

        Args:
            size: number of workers of the stage.
            microbatches: micro-batches of the worker in a step.
            in_flight: the most micro-batches that it has between forward and backward.
            sums: gradient sums that it holds at once (`step_time.open_sums`).
        """
        cuts = np.arange(len(costs.layers) + 1)
        first, stop = cuts[:, None], cuts[None, :]
        counted = {"size": size, "microbatches": microbatches, "in_flight": in_flight, "sums": sums}
        return self.worker_bytes(costs, first, stop, **counted)

    def worker_bytes(
        self,
        costs: CostModel,
        first: int | np.ndarray,
        stop: int | np.ndarray,
        *,
        size: int,
        microbatches: int,
        in_flight: int,
        sums: int = 1,
    ) -> np.ndarray:
        """The entries of `stage_bytes` for the layers from `first` to before `stop`, float64 of their common shape."""
        state = self.state_share(size) * costs.prefix("state_bytes")
        whole = costs.prefix("value_bytes") + sums * self.gradient_share(size) * costs.prefix("gradient_bytes") + state
        whole = whole + min(microbatches, in_flight) * costs.prefix("activation_bytes")
        ends = costs.bytes_at_cuts * microbatches
        found = whole[stop] - whole[first]
        found += ends[stop]
        found += ends[first]
        if self.state_limit == math.inf:
            return found
        # A part in 10^9 more: a difference of prefix sums is rounded.
        return np.where(state[stop] - state[first] > self.state_limit * (1 + 1e-9), math.inf, found)


REPLICATED = MemoryRule()
"""Every worker of a stage has all of its state."""


def _number(value: object, name: str, *, above: float = -math.inf, at_least: float = -math.inf) -> float:
    """`value` as a float, if it is a finite number within the limits."""
    found = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if math.isfinite(found) and found > above and found >= at_least:
        return float(found)
    asked = f"above {above:g}" if math.isfinite(above) else f"of at least {at_least:g}"
    raise PlanError(f"{name} is {value!r}", rule=f"it is a finite number {asked}", fix="measure it again")


def _object(data: object, what: str, names: Collection[str] | None, needed: Collection[str]) -> dict[str, Any]:
    """`data` as a dict, if it has only fields of these names (None: any) and all that are needed."""
    if not isinstance(data, dict):
        raise PlanError(f"{what} is not a JSON object: {data!r}")
    if names is not None and (unknown := sorted(set(data) - set(names))):
        exists = ", ".join(sorted(names))
        raise PlanError(f"{what} has an unknown field {unknown[0]!r}", exists=exists)
    if missing := sorted(set(needed) - set(data)):
        raise PlanError(f"{what} has no {missing[0]!r}")
    return data


def _layers(entries: Sequence[object], where: str) -> tuple[LayerCost, ...]:
    """The layers of a profile in the order of their indices."""
    names = {"index", *(field.name for field in fields(LayerCost))}
    found: dict[int, LayerCost] = {}
    for entry in entries:
        data = _object(entry, f"a layer of {where}", names, {"index", "name", "forward_s", "backward_s"})
        index = data.pop("index")
        if not isinstance(index, int) or isinstance(index, bool) or index < 0 or index in found:
            raise PlanError(f"a layer of {where} has index {index!r}", rule="each layer has its own index, 0 or more")
        found[index] = LayerCost(**data)
    if missing := sorted(set(range(max(found, default=-1) + 1)) - found.keys()):
        raise PlanError(
            f"{where} has no layer {format_ints(missing)}",
            rule="a profile has the costs of each layer",
            exists=f"layers {format_ints(sorted(found))}",
            fix="measure the missing layers",
        )
    return tuple(found[index] for index in sorted(found))


def _names(layers: Sequence[LayerCost]) -> str:
    shown = ", ".join(layer.name for layer in layers[:4])
    return shown + (", ..." if len(layers) > 4 else "")
