"""Groups of stages as the controller has them: the store where their members meet, and what is told of them."""

from __future__ import annotations

from elaswave_spmd.observe import RunObserver
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.group_store import GroupStore
from elaswave_spmd.runtime_settings import GROUP
from elaswave_spmd.settings import Settings


class Groups:
    """With `runtime.collectives=links` there is no store, and nothing to tell.

    Writes `group` lines: from this step on parameters are published through groups, or not any more.

    Args:
        host: the address on which this machine listens.

    Raises:
        ConfigError: the store has no port.
    """

    def __init__(self, settings: Settings, host: str, observer: RunObserver) -> None:
        self._store = GroupStore(host) if settings.runtime.collectives == GROUP else None
        self._observer, self._serve, self._reasons = observer, False, dict[int, str]()

    @property
    def address(self) -> str | None:
        """Of the store."""
        return self._store.address if self._store is not None else None

    def lost(self, message: m.GroupLost) -> None:
        """A worker says that the group of its stage has failed; it has told the others."""
        self._reasons.setdefault(message.epoch, f"worker {message.sender}: {message.reason}")

    def committed(self, applied: m.Applied) -> None:
        """A step is published in the one way or the other."""
        if applied.grouped == self._serve:
            return
        self._serve = applied.grouped
        reason = self._reasons.get(applied.epoch, "")
        why = f", {reason}" if reason else "" if self._serve else f", mesh epoch {applied.epoch} has none yet"
        message = f"step {applied.step}: parameters by {'group' if self._serve else 'links'}{why}"
        line = {"mesh_epoch": applied.epoch, "serves": self._serve, "reason": reason, "message": message}
        self._observer.on_event("group", step=applied.step, **line)

    def close(self) -> None:
        """Stops serving the store."""
        if self._store is not None:
            self._store.close()
