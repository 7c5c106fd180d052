"""Damaged memory, found by workers in their own copies or by comparing all copies; and devices that failed."""

from __future__ import annotations

from collections.abc import Callable

from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery.messages import Damaged, Fingerprints
from elaswave_spmd.recovery.replica_check import Copies, Disagreement
from elaswave_spmd.run_dir import RunObserver


class CopyWatch:
    """Writes the events `corruption` and `device`, and says what follows.

    Args:
        distrust: called with (rank, reason): a worker whose copies a majority contradicts.
    """

    def __init__(self, observer: RunObserver, distrust: Callable[[int, str], None]) -> None:
        self._observer, self._distrust = observer, distrust
        self._copies = Copies()

    def damaged(self, message: Damaged) -> None:
        """A worker's copies are not what it wrote: located; others take over and it learns them again."""
        if message.reason:
            self._recovered(message)
            return
        runs = ", ".join(f"layer {layer} pages [{first}, {stop})" for layer, first, stop in message.runs[:4])
        self._observer.on_event(
            "corruption",
            ranks=[message.rank],
            step=message.step,
            runs=[list(run) for run in message.runs],
            message=f"worker {message.rank}: {runs} changed after they were written, before step {message.step}; "
            "other copies take their place",
        )

    def _recovered(self, message: Damaged) -> None:
        """A worker's device has failed and been brought back."""
        lost = f"; {len(message.runs)} runs of state are learned again" if message.runs else ""
        self._observer.on_event(
            "device",
            ranks=[message.rank],
            step=message.step,
            reason=message.reason,
            reloads=bool(message.runs),
            message=f"worker {message.rank}: its device failed in step {message.step} and was brought back "
            f"({message.reason}); the step is done again{lost}",
        )

    def fingerprints(self, message: Fingerprints) -> None:
        """Compares copies.

        Raises:
            RunError: two copies differ, and nothing says which of them is right.
        """
        for found in self._copies.add(message):
            self._disagree(found)

    def _disagree(self, found: Disagreement) -> None:
        layer, first, stop = found.run
        what = f"layer {layer} pages [{first}, {stop}) of workers {list(found.ranks)} differ after step {found.step}"
        if not found.minority:
            raise RunError(f"{what}, and each is what its worker wrote: nothing says which is right")
        self._observer.on_event("corruption", ranks=list(found.minority), step=found.step, message=what)
        for rank in found.minority:
            self._distrust(rank, "its copies of state differ from those of all others")
