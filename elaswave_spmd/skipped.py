"""Steps whose gradient was not finite: they change nothing, and too many in a row end a run."""

from __future__ import annotations

from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery.messages import Applied
from elaswave_spmd.run_dir import RunObserver


class SkippedSteps:
    """Writes a `skip` line for each of them.

    Args:
        at_most: so many in a row, and the run ends.
    """

    def __init__(self, observer: RunObserver, at_most: int) -> None:
        self._observer, self._at_most = observer, at_most
        self._in_a_row = 0

    def committed(self, applied: Applied) -> None:
        """A step is applied, with an update or without.

        Raises:
            RunError: it is one too many.
        """
        self._in_a_row = 0 if applied.updated else self._in_a_row + 1
        if applied.updated:
            return
        message = f"step {applied.step}: gradient not finite, no update"
        self._observer.on_event("skip", step=applied.step, message=message)
        if self._in_a_row >= self._at_most:
            raise RunError(
                f"the gradient was not finite in {self._in_a_row} steps in a row (optim.max_skipped); "
                f"last: step {applied.step}, loss {applied.loss}. A lower optim.lr, or optim.warmup_steps, may help"
            )
