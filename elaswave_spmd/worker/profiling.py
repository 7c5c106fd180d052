"""How long layers take on this worker, measured while it trains."""

from __future__ import annotations

from dataclasses import dataclass, field

Row = tuple[int, float, float, int, int]
"""(layer, seconds of all forwards, seconds of all backwards, number of forwards, number of backwards)."""


@dataclass
class LayerTimes:
    """Wall time of layer programs since the last `take`. Two clock reads a program: about 0.1 microseconds."""

    _seconds: dict[tuple[int, bool], float] = field(default_factory=dict)
    _counts: dict[tuple[int, bool], int] = field(default_factory=dict)

    def add(self, layer: int, seconds: float, *, backward: bool) -> None:
        """A program of this layer has run for so long, on one unit."""
        key = layer, backward
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds
        self._counts[key] = self._counts.get(key, 0) + 1

    def take(self) -> tuple[Row, ...]:
        """What was measured since the last call, by layer."""
        seconds, counts = self._seconds, self._counts
        self._seconds, self._counts = {}, {}
        return tuple(
            (
                layer,
                seconds.get((layer, False), 0.0),
                seconds.get((layer, True), 0.0),
                counts.get((layer, False), 0),
                counts.get((layer, True), 0),
            )
            for layer in sorted({layer for layer, _ in counts})
        )
