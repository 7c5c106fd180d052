"""The counts of a run's faults, for its summary, its final table and TensorBoard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

OF_WORKERS = ("fail", "corrupt", "leave", "join")
"""The kinds of events of which each named worker is counted. Events of other kinds count once."""
UNDISTURBED_STEPS = 50
"""The number of steps without a fault whose median is the usual time of a step. What a step takes beyond it is the
penalty of a fault."""
KINDS = (*OF_WORKERS, "link", "device", "corruption", "restart", "rollback")


class FaultCount:
    """The faults and changes of workers so far. Called by the controller's thread.

    A run that begins again by itself, from a checkpoint or as it began, goes on with the same counts.

    Attributes:
        penalty_seconds: the sum of the penalties of all `recovered` events.
        lost_workers: the number of lost workers, by the phase in which they were lost: while workers start, as members,
            before they joined, as spares.
        checks_dropped: the number of pairs that were drawn to be checked and were not, as a loss met their step.
        versions_compared: the number of versions at which all replicas were found to be the same (mirror.verify_every).
        replicas_wrong: how often a worker's replicas were wrong.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.penalty_seconds = 0.0
        self.lost_workers: dict[str, int] = {"start": 0, "run": 0, "join": 0, "spare": 0}
        self.checks_dropped = self.versions_compared = self.replicas_wrong = 0
        self._newest_compared = -1

    def add(self, kind: str, fields: Mapping[str, object]) -> dict[str, float]:
        """Count an event. Returns the scalars that have changed, by name; empty if the event is not counted."""
        if kind == "recovered":
            penalty = fields.get("penalty_ms")
            if not isinstance(penalty, (int, float)):
                return {}
            # The step may have taken less time than usual. That does not make up for other penalties.
            self.penalty_seconds += max(0.0, penalty / 1e3)
            return {"penalty_ms": penalty}
        if kind not in KINDS:
            return {}
        ranks = fields.get("ranks")
        num_ranks = len(ranks) if isinstance(ranks, (list, tuple)) else None
        self._counts[kind] += 1 if num_ranks is None or kind not in OF_WORKERS else num_ranks
        if kind == "restart" and num_ranks:  # their loss led to it, and no `fail` tells of them
            self._counts["fail"] += num_ranks
            return {name: self._counts[name] for name in (kind, "fail")}
        return {kind: self._counts[kind]}

    def add_comparison(self, version: int) -> None:
        """Count a version whose replicas are all the same; once, though another mesh or life may compare it again.

        A number, and no set of versions: a run of a year compares tens of millions. They run back only with the run.
        """
        self.versions_compared += version > self._newest_compared
        self._newest_compared = max(self._newest_compared, version)

    def summary(self) -> dict[str, float]:
        """The field `faults` of summary.json."""
        counts = {kind: self._counts[kind] for kind in KINDS}
        return {**counts, "penalty_seconds": round(self.penalty_seconds, 6)}


def faults_text(faults: Mapping[str, object]) -> str:
    """The field `faults` of a summary in one line, such as `1 fail, 1 join, 0.12 s beyond work`, or `none`."""
    counts = [(kind, faults.get(kind)) for kind in KINDS]
    words = [f"{number:,} {kind}" for kind, number in counts if isinstance(number, int) and number]
    penalty = faults.get("penalty_seconds")
    if words and isinstance(penalty, (int, float)) and penalty > 0:
        words.append(f"{penalty:.2f} s beyond work")
    return ", ".join(words) or "none"
