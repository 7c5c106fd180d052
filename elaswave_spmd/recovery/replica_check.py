"""Do the copies of state agree? Hashes of all replicas, compared as they come, off the path of any step."""

from __future__ import annotations

from dataclasses import dataclass, field

from elaswave_spmd.recovery.messages import Fingerprints

PageRange = tuple[int, int, int]

_KEPT_VERSIONS = 4


@dataclass(frozen=True)
class Disagreement:
    """Replicas of a run that wrote different states at a version, each of which is what its writer wrote.

    `minority`: those to distrust where a majority agrees; empty where there is none.
    """

    step: int
    run: PageRange
    ranks: tuple[int, ...]
    minority: tuple[int, ...]


@dataclass
class Copies:
    """The hashes of the newest versions, by run and worker."""

    _hashes: dict[int, dict[PageRange, dict[int, bytes]]] = field(default_factory=dict)

    def add(self, message: Fingerprints) -> list[Disagreement]:
        """Files a worker's hashes. Returns the runs whose copies are seen to differ now."""
        of_step = self._hashes.setdefault(message.step, {})
        for old in sorted(self._hashes)[:-_KEPT_VERSIONS]:
            del self._hashes[old]
        found = []
        for layer, first, stop, digest in message.rows:
            known = of_step.setdefault((layer, first, stop), {})
            known[message.rank] = digest
            if len(set(known.values())) > 1:
                found.append(_judge(message.step, (layer, first, stop), known))
        return found


def _judge(step: int, run: PageRange, known: dict[int, bytes]) -> Disagreement:
    votes = sorted(known.values(), key=lambda digest: (list(known.values()).count(digest), digest))
    best = votes[-1]
    agree = [rank for rank, digest in known.items() if digest == best]
    minority = tuple(sorted(known.keys() - set(agree))) if 2 * len(agree) > len(known) else ()
    return Disagreement(step, run, tuple(sorted(known)), minority)
