"""The run's log of strangers: connections that were not admitted, and messages that were dropped, by any process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from elaswave_spmd.run_dir import RunObserver

_MOST_REASONS = 64  # far more than there are; what a process that has gone wrong makes up is counted as one
_OTHER = "another reason"
_PERIOD_S = 10.0  # between two lines: whoever knocks a thousand times must not fill the disk


class RejectionLog:
    """Writes the events `rejected`: one at once, then one in 10 seconds at the most while the numbers grow.

    Args:
        totals: reason -> number, of the whole run; extended in place. It goes into the summary.
    """

    def __init__(self, observer: RunObserver, totals: Counter[str]) -> None:
        self._observer = observer
        self._totals = totals
        self._seen: dict[str, Counter[str]] = {}  # process -> the numbers that it has reported last
        self._new: dict[str, Counter[str]] = {}  # process -> what no line tells of yet
        self._quiet_until = 0.0

    def counted(self, process: str, counts: Mapping[str, int], now: float) -> None:
        """A process has refused so many connections and messages since it began: reason -> number."""
        known: Counter[str] = Counter()
        for reason, number in counts.items():
            names = self._totals.keys() | known.keys()
            known[reason if reason in names or len(names) < _MOST_REASONS else _OTHER] += number
        seen = self._seen.setdefault(process, Counter())
        if new := known - seen:
            self._seen[process] = seen + new
            self._new.setdefault(process, Counter()).update(new)
            self._totals.update(new)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Time has passed: write what is due."""
        if self._new and now >= self._quiet_until:
            self._quiet_until = now + _PERIOD_S
            self.flush()

    def flush(self) -> None:
        """Write all that no line tells of yet."""
        new, self._new = self._new, {}
        if not new:
            return
        reasons = sum(new.values(), Counter())
        counts = ", ".join(f"{number} x {reason}" for reason, number in sorted(reasons.items()))
        self._observer.on_event(
            "rejected",
            counts=dict(sorted(reasons.items())),
            processes=sorted(new),
            totals=dict(sorted(self._totals.items())),
            message=f"{', '.join(sorted(new))} refused {counts}; the run is not affected",
        )
