"""Smoothing of measured times into a cost model, so that one unusual step changes no plan.

Measured seconds depend on the layer and on the worker. The two are separated as in Tukey's median polish (Exploratory
Data Analysis, 1977): a worker's speed is the median, over its layers, of expected over measured seconds; a layer's time
is the median, over its workers, of measured seconds times their speed. Both are medians over the last few steps, which
no single outlier moves.

Only products can be measured: if all workers of a stage were twice as fast, and all its layers twice as long, each
would take the seconds that it takes. Stages share neither workers nor layers, so each has such a factor of its own. It
is held to the seconds that its layers have taken in the long run, uncorrected; else noise would carry it off, and with
it the speeds of all workers of the stage.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, median_high, median_low

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.cost_model import CostModel

_Seconds = tuple[float, float]
"""(forward, backward) of one micro-batch."""

_LongRun = tuple[tuple[float, ...], float]
"""Logarithms of a layer's seconds: in the first steps, as many as `window`; and those that it takes in the long run."""

SLOWEST, FASTEST = 0.02, 50.0
"""The smallest and the largest relative speed that are reported: what is slower or faster counts as these."""

_LONG_RUN = 0.001
"""Weight of a step in the long run: a lone worker that has become slower counts as slow for about a thousand steps, and
its layers as long after that."""


@dataclass(frozen=True)
class LayerSample:
    """One worker's measurement of one layer in one step: seconds of a micro-batch, usually the median over several.

    Args:
        weights_s: the part of backward_s that made weight gradients; 0: none were put off.

    Raises:
        PlanError: seconds that are negative or not finite.
    """

    rank: int
    layer: int
    forward_s: float
    backward_s: float
    weights_s: float = 0.0

    def __post_init__(self) -> None:
        longest = math.inf  # which nothing that is not a number is less than, either
        if not (0 <= self.forward_s < longest and 0 <= self.backward_s < longest and 0 <= self.weights_s < longest):
            raise PlanError(
                f"layer {self.layer} on rank {self.rank} took {self.forward_s} + {self.backward_s} s",
                rule="measured seconds are finite and not negative",
                fix="measure with a monotonic clock",
            )

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class ProfileSmoother:
    """The measurements of the last steps. An immutable value: `observe` and `forget` return the next one.

    Speeds are relative to the median worker, so that a newcomer without measurements has speed 1. Reported speeds are
    multiples of `grain` and change only when the smoothed speed differs by more than that. So there are few classes of
    workers, and plans do not change with noise.

    Args:
        num_layers: layers of the model.
        window: number of steps that the medians are taken over.
        grain: speeds that differ by less count as equal.
        layers: layer -> its seconds at speed 1 in the last steps, oldest first.
        shares: layer -> the part of its backward that made weight gradients, in the last steps in which any were put
            off, oldest first.
        workers: rank -> its relative speeds in the last steps, oldest first.
        reported: rank -> the speed to plan with.
        usual: layer -> the logarithms of its seconds in the first steps and in the long run.
    """

    num_layers: int
    window: int = 5
    grain: float = SLOWEST
    layers: Mapping[int, tuple[_Seconds, ...]] = field(default_factory=dict, hash=False)
    shares: Mapping[int, tuple[float, ...]] = field(default_factory=dict, hash=False)
    workers: Mapping[int, tuple[float, ...]] = field(default_factory=dict, hash=False)
    reported: Mapping[int, float] = field(default_factory=dict, hash=False)
    usual: Mapping[int, _LongRun] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        assert self.num_layers > 0 and self.window > 0 and 0 < self.grain < 1, self

    def observe(self, samples: Iterable[LayerSample]) -> ProfileSmoother:
        """The smoother after one more step. Layers and workers without a sample, or with one of 0 s, do not change.

        Raises:
            PlanError: a sample names a layer that the model does not have.
        """
        by_layer: defaultdict[int, list[LayerSample]] = defaultdict(list)
        by_rank: defaultdict[int, list[LayerSample]] = defaultdict(list)
        for sample in samples:
            if not 0 <= sample.layer < self.num_layers:
                raise PlanError(
                    f"rank {sample.rank} measured layer {sample.layer}, which the model does not have",
                    exists=f"layers 0 to {self.num_layers - 1}",
                )
            if sample.seconds > 0:
                by_layer[sample.layer].append(sample)
                by_rank[sample.rank].append(sample)
        # A worker's speed is how much faster it was than its layers usually are, by the median over its layers. Then
        # the layers' seconds are corrected by these speeds. It is one round of a median polish.
        expected = {layer: sum(self._layer_s(layer)) for layer in self.layers}
        # Layers that were never measured have no usual time yet: the median over the workers that ran them stands in.
        for layer in by_layer.keys() - expected.keys():
            expected[layer] = median_low(s.seconds * self._speed(s.rank) for s in by_layer[layer])
        now = {rank: median(expected[s.layer] / s.seconds for s in some) for rank, some in by_rank.items()}
        usual = self._usual_after(by_layer)
        for ranks, of_layers in _parts(by_layer):
            factor = _excess({layer: by_layer[layer] for layer in of_layers}, now, usual)
            now |= {rank: now[rank] / factor for rank in ranks}
        layers, shares, workers = dict(self.layers), dict(self.shares), dict(self.workers)
        for layer, some in by_layer.items():
            forward = median_low(s.forward_s * now[s.rank] for s in some)
            backward = median_low(s.backward_s * now[s.rank] for s in some)
            layers[layer] = (*layers.get(layer, ()), (forward, backward))[-self.window :]
            if parts := [min(1.0, s.weights_s / s.backward_s) for s in some if s.weights_s and s.backward_s]:
                shares[layer] = (*shares.get(layer, ()), median_low(parts))[-self.window :]
        for rank, speed in now.items():
            workers[rank] = (*workers.get(rank, ()), speed)[-self.window :]
        found = replace(self, layers=layers, shares=shares, workers=workers, usual=usual)
        return replace(found, reported=found._rounded())

    def _usual_after(self, by_layer: Mapping[int, Sequence[LayerSample]]) -> dict[int, _LongRun]:
        """`usual` after a step.

        It begins as the median over the first steps. A mean would keep what one odd step among them has added, such as
        one with cold caches, for as long as the long run lasts.
        """
        found = dict(self.usual)
        for layer, some in by_layer.items():
            first, before = found.get(layer, ((), 0.0))
            now = math.log(median_low(s.seconds for s in some))
            if len(first) < self.window:
                found[layer] = (*first, now), median((*first, now))
            else:
                found[layer] = first, before + _LONG_RUN * (now - before)
        return found

    def forget(self, ranks: Collection[int]) -> ProfileSmoother:
        """The smoother without workers that are gone."""
        workers = {rank: speeds for rank, speeds in self.workers.items() if rank not in ranks}
        reported = {rank: speed for rank, speed in self.reported.items() if rank not in ranks}
        return replace(self, workers=workers, reported=reported)

    def costs(self, base: CostModel) -> CostModel:
        """`base` with the measured seconds and speeds; its other fields stay.

        Raises:
            PlanError: `base` has another number of layers.
        """
        base.check(self.num_layers)
        middle, layers = self._middle(), list(base.layers)
        for layer in self.layers:
            forward, backward = self._layer_s(layer)
            layers[layer] = replace(layers[layer], forward_s=forward / middle, backward_s=backward / middle)
        for layer, recent in self.shares.items():
            layers[layer] = replace(layers[layer], weight_share=median(recent))
        speeds = {**dict(base.speeds), **self.reported}
        some = tuple((rank, speed) for rank, speed in speeds.items() if speed != 1.0)
        return replace(base, layers=tuple(layers), speeds=some)

    def _layer_s(self, layer: int) -> _Seconds:
        recent = self.layers[layer]
        return median(forward for forward, _ in recent), median(backward for _, backward in recent)

    def _speed(self, rank: int) -> float:
        recent: Sequence[float] = self.workers.get(rank, ())
        return median(recent) if recent else 1.0

    def _middle(self) -> float:
        """The speed that counts as 1: the median. Of two workers it is the faster, since workers slow down, not up."""
        return median_high([median(recent) for recent in self.workers.values()]) if self.workers else 1.0

    def _rounded(self) -> dict[int, float]:
        middle, found = self._middle(), {}
        for rank in self.workers:
            speed, before = self._speed(rank) / middle, self.reported.get(rank)
            # Hysteresis: within one grain the reported speed stays, or noise would change the plan at every step.
            if before is None or abs(speed - before) > self.grain:
                before = max(1, round(min(speed, FASTEST) / self.grain)) * self.grain
            found[rank] = before
        return found


def _parts(by_layer: Mapping[int, Sequence[LayerSample]]) -> list[tuple[set[int], set[int]]]:
    """The workers and layers of a step in parts, (ranks, layers), such that no worker has measured layers of two."""
    parts: list[tuple[set[int], set[int]]] = []
    for layer, some in by_layer.items():
        ranks, layers = {sample.rank for sample in some}, {layer}
        for part in [part for part in parts if not part[0].isdisjoint(ranks)]:
            parts.remove(part)
            ranks, layers = ranks | part[0], layers | part[1]
        parts.append((ranks, layers))
    return parts


def _excess(
    by_layer: Mapping[int, Sequence[LayerSample]], speeds: Mapping[int, float], usual: Mapping[int, _LongRun]
) -> float:
    """How much longer layers are than usual, all taken together, if their workers have these speeds."""
    corrected = (median_low(s.seconds * speeds[s.rank] for s in some) for some in by_layer.values())
    return math.exp(fmean(map(math.log, corrected)) - fmean(usual[layer][1] for layer in by_layer))
