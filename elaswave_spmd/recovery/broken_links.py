"""Links that are lost while both their ends live: reports and heartbeats in, verdicts out. No clock, no I/O.

A link also ends with either of its processes, and such a death is seen elsewhere, at about the same moment. So a report
counts once both ends have shown since that they live. A pair is linked again once; then one of the two has to go.
"""

from __future__ import annotations

from dataclasses import dataclass

_PROOF = 2  # heartbeats: the first may have been on its way already when its sender died


@dataclass(frozen=True)
class Verdict:
    """Both ends of a lost link live.

    Args:
        ends: the two workers; one worker alone: the link was the controller's.
        evicted: who has to go; None: they are linked again.
    """

    ends: frozenset[int]
    evicted: int | None

    @property
    def reason(self) -> str:
        """In words."""
        if len(self.ends) == 1:
            return "its link to the controller was lost"
        first, second = sorted(self.ends)
        again = " again" if self.evicted is not None else ""
        return f"the link between workers {first} and {second} was lost{again}"


class BrokenLinks:
    """The links of a run that were reported lost.

    Both directions of a pair may be reported; until the verdict that is one loss.
    """

    def __init__(self) -> None:
        self._beats: dict[frozenset[int], dict[int, int]] = {}  # ends of a lost link -> heartbeats since, by end
        self._linked_again: set[frozenset[int]] = set()

    def closed(self, *ends: int) -> None:
        """A link between two workers, or between the controller and one worker, is reported lost."""
        assert ends and len(set(ends)) == len(ends) <= 2, ends
        self._beats.setdefault(frozenset(ends), dict.fromkeys(ends, 0))

    def forget(self, rank: int) -> None:
        """A worker is lost, or was let go: its links end with it."""
        for ends in [ends for ends in self._beats if rank in ends]:
            del self._beats[ends]

    def heartbeat(self, rank: int) -> list[Verdict]:
        """A worker lives. What that proves."""
        found = []
        for ends, beats in list(self._beats.items()):
            if rank in beats:
                beats[rank] += 1
                if min(beats.values()) >= _PROOF:
                    del self._beats[ends]
                    found.append(self._judge(ends))
        return found

    def _judge(self, ends: frozenset[int]) -> Verdict:
        if len(ends) == 1 or ends in self._linked_again:
            return Verdict(ends, max(ends))
        self._linked_again.add(ends)
        return Verdict(ends, None)
