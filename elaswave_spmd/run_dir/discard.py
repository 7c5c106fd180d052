"""Discards what a run gives up when it goes back to a checkpoint, as what was committed after it may be wrong."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from elaswave_spmd.run_dir.atomic_write import replacing, sync_directory, writing
from elaswave_spmd.run_dir.checkpoints import find_checkpoints, step_of
from elaswave_spmd.run_dir.directory import METRICS
from elaswave_spmd.run_dir.json_lines import json_text, read_json_lines
from elaswave_spmd.run_dir.manifest import MANIFEST

ROLLBACK = "rollback"
"""The event of a run that goes back; `step`: what is after it was given up."""


def discard_after(run_dir: Path, step: int) -> None:
    """Remove the checkpoints and the lines of metrics.jsonl after a step. Called when no worker writes any more.

    Raises:
        FilesError: a file cannot be written or removed.
    """
    for path in find_checkpoints(run_dir):
        if step_of(path) > step:
            with writing(path):
                # The manifest first: a removal that is interrupted leaves an unfinished checkpoint.
                (path / MANIFEST).unlink(missing_ok=True)
                sync_directory(path)
                shutil.rmtree(path)
    kept = [line for line in read_json_lines(run_dir / METRICS) if line["step"] <= step]
    with replacing(run_dir / METRICS, durable=True) as scratch:
        scratch.write_text("".join(map(json_text, kept)), encoding="utf-8")


def unfinished_rollback(events: Iterable[dict[str, Any]]) -> int | None:
    """The step that a run was going back to when its controller was killed; None: it was not.

    Whatever ended it then, no life of the run has begun since, and what is after the step may be there still. A life
    begins when it has been discarded.
    """
    step: int | None = None
    for event in events:
        if event["event"] == ROLLBACK:
            step = event["step"]
        elif event["event"] == "start":
            step = None
    return step


def still_valid(events: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The events of a kind about steps that were not given up later, in order."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == ROLLBACK:
            found = [known for known in found if known["step"] <= event["step"]]
        elif event["event"] == kind:
            found.append(event)
    return found
