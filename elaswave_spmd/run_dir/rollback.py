"""What a run has given up, by its events, as it went back to a checkpoint. `discard.py` removes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from elaswave_spmd.run_dir.directory import EVENTS, read_events

_Event = TypeVar("_Event", bound=Mapping[str, Any])

ROLLBACK = "rollback"
"""The event of a run that goes back. Everything after the step in its field `step` is given up."""


def rollback_of(run_dir: Path) -> int | None:
    """The step of the checkpoint that a run was going back to when its controller ended; None: it was not.

    Raises:
        DataError: its events are damaged.
    """
    return unfinished_rollback(read_events(run_dir)) if (run_dir / EVENTS).exists() else None


def unfinished_rollback(events: Iterable[dict[str, Any]]) -> int | None:
    """The step to which a run was going back when its controller ended; None if it was not.

    That is the step of the last rollback if no life of the run has begun since (event `start`): a life begins only when
    everything after the step has been discarded, so some of it may still be there.
    """
    step: int | None = None
    for event in events:
        if event["event"] == ROLLBACK:
            step = event["step"]
        elif event["event"] == "start":
            step = None
    return step


def still_valid(events: Iterable[_Event], kind: str) -> list[_Event]:
    """The events of one kind, in order, without those about steps that a later rollback has given up."""
    found: list[_Event] = []
    for event in events:
        if event["event"] == ROLLBACK:
            found = [known for known in found if known["step"] <= event["step"]]
        elif event["event"] == kind:
            found.append(event)
    return found
