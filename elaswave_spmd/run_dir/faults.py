"""The count of a run's faults, for its summary, its final table and TensorBoard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

OF_WORKERS = ("fail", "corrupt", "leave", "join")
"""Kinds of events that are counted by the workers they name; the others by the event."""
UNDISTURBED_STEPS = 50
"""Steps without a fault whose median is the usual time of a step: more than that is the penalty of a fault."""
KINDS = (*OF_WORKERS, "link", "device", "corruption", "restart", "rollback")


class FaultCount:
    """The faults and changes of workers so far. The controller's thread calls it.

    Attributes:
        penalty_seconds: of all `recovered` events together.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.penalty_seconds = 0.0

    def add(self, kind: str, fields: Mapping[str, object]) -> dict[str, float]:
        """Count an event. Returns the scalars that have changed, by name; none for an event that is no fault."""
        if kind == "recovered":
            penalty = fields.get("penalty_ms")
            if not isinstance(penalty, (int, float)):
                return {}
            # A step may take less time than the usual one: that is no gain of the fault.
            self.penalty_seconds += max(0.0, penalty / 1e3)
            return {"penalty_ms": penalty}
        if kind not in KINDS:
            return {}
        ranks = fields.get("ranks")
        self._counts[kind] += len(ranks) if kind in OF_WORKERS and isinstance(ranks, (list, tuple)) else 1
        return {kind: self._counts[kind]}

    def summary(self) -> dict[str, float]:
        """The field `faults` of summary.json."""
        counts = {kind: self._counts[kind] for kind in KINDS}
        return {**counts, "penalty_seconds": round(self.penalty_seconds, 6)}


def faults_text(faults: Mapping[str, object]) -> str:
    """The field `faults` of a summary in one line: `1 fail, 1 join, 0.12 s beyond work`; `none`."""
    counts = [(kind, faults.get(kind)) for kind in KINDS]
    words = [f"{number:,} {kind}" for kind, number in counts if isinstance(number, int) and number]
    penalty = faults.get("penalty_seconds")
    if words and isinstance(penalty, (int, float)) and penalty > 0:
        words.append(f"{penalty:.2f} s beyond work")
    return ", ".join(words) or "none"
