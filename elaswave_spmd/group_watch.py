"""Groups of stages as the controller has them: the store where their members meet, and what is told of them."""

from __future__ import annotations

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.run_dir import RunObserver
from elaswave_spmd.runtime.group_store import GroupStore
from elaswave_spmd.runtime_settings import GROUP


class GroupWatch:
    """With `runtime.collectives=links` there is no store, and nothing to tell.

    Writes `group` lines: from this step on parameters are published through groups, or not any more; or a group has
    failed, the first of each mesh epoch.

    Args:
        host: the address on which this machine listens.

    Raises:
        ConfigError: the store has no port.
    """

    def __init__(self, settings: Settings, host: str, observer: RunObserver) -> None:
        self._store = GroupStore(host) if settings.runtime.collectives == GROUP else None
        self._observer, self._serves, self._told = observer, False, -1

    @property
    def address(self) -> str | None:
        """Of the store."""
        return self._store.address if self._store is not None else None

    def lost(self, message: m.GroupLost, step: int) -> None:
        """A worker says that the group of its stage has failed, and the others know. `step`: committed last."""
        if message.epoch > self._told:
            self._told, self._serves = message.epoch, False
            self._tell(step + 1, message.epoch, f"worker {message.sender}: {message.reason}")

    def committed(self, applied: m.Applied) -> None:
        """A step is published in the one way or the other."""
        if applied.grouped != self._serves and applied.epoch > self._told:
            self._serves = applied.grouped
            self._tell(applied.step, applied.epoch, "" if self._serves else "a new mesh epoch has none yet")

    def _tell(self, step: int, epoch: int, reason: str) -> None:
        way = "a group" if self._serves else "links"
        message = f"from step {step} on parameters go by {way}" + (f": {reason}" if reason else "")
        line = {"mesh_epoch": epoch, "serves": self._serves, "reason": reason, "message": message}
        self._observer.on_event("group", step=step, **line)

    def close(self) -> None:
        """Stops serving the store."""
        if self._store is not None:
            self._store.close()
