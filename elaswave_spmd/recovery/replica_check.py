"""Comparison of replicas: hashes of their state, compared by the controller as they arrive, beside the steps.

All replicas of a page apply the same gradients to the same state, so their bits are equal unless memory or a program is
at fault. A worker checks by itself that its state is still what it had written (HeldState.disown_damaged); this finds
the other case, in which a worker computed something else than the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elaswave_spmd.recovery.messages import Fingerprints

PageRange = tuple[int, int, int]

_KEPT_VERSIONS = 4
"""Number of versions that are remembered. Workers are at most two steps apart: no older hash comes any more."""


@dataclass(frozen=True)
class Disagreement:
    """Replicas of a page range whose states differ at a version, though each is what its worker wrote.

    Args:
        step: the version.
        pages: the page range.
        ranks: the workers whose hashes are known.
        minority: the workers to distrust, where a majority agrees; empty where there is none.
    """

    step: int
    pages: PageRange
    ranks: tuple[int, ...]
    minority: tuple[int, ...]


@dataclass
class Copies:
    """The hashes of the newest versions, by page range and worker."""

    _hashes: dict[int, dict[PageRange, dict[int, bytes]]] = field(default_factory=dict)

    def add(self, message: Fingerprints) -> list[Disagreement]:
        """File a worker's hashes. Returns the page ranges whose replicas are seen to differ now."""
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


def _judge(step: int, pages: PageRange, known: dict[int, bytes]) -> Disagreement:
    votes = sorted(known.values(), key=lambda digest: (list(known.values()).count(digest), digest))
    best = votes[-1]
    agree = [rank for rank, digest in known.items() if digest == best]
    minority = tuple(sorted(known.keys() - set(agree))) if 2 * len(agree) > len(known) else ()
    return Disagreement(step, pages, tuple(sorted(known)), minority)
