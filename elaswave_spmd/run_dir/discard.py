"""Removes the results that a run gives up when it goes back to a checkpoint, because they may be wrong."""

from __future__ import annotations

import errno
import shutil
import time
from pathlib import Path

from elaswave_spmd.run_dir.atomic_write import replacing, sync_directory, sync_file, writing
from elaswave_spmd.run_dir.checkpoints import find_checkpoints, step_of
from elaswave_spmd.run_dir.directory import EVENTS, METRICS
from elaswave_spmd.run_dir.json_lines import json_text, read_json_lines
from elaswave_spmd.run_dir.manifest import MANIFEST

_WRITING_S, _PAUSE_S = 10.0, 0.05
"""For how long a folder may stay in use by workers that are being ended, and how often its removal is tried."""


def discard_after(run_dir: Path, step: int) -> None:
    """Remove the checkpoints and the lines of metrics.jsonl after a step. Called when the workers were told to end.

    Those on other machines may still write a shard for a moment: they are not waited for.

    The run's events have the event `rollback`, which is flushed to the disk before anything is removed: if the machine
    crashes meanwhile, whoever resumes the run must know what is in doubt.

    Raises:
        FilesError: a file cannot be written or removed.
    """
    with writing(run_dir / EVENTS):
        sync_file(run_dir / EVENTS)
    for path in find_checkpoints(run_dir):
        if step_of(path) > step:
            with writing(path):
                # The manifest first: a removal that is interrupted leaves an unfinished checkpoint.
                (path / MANIFEST).unlink(missing_ok=True)
                sync_directory(path)
                _remove_folder(path)
    kept = [line for line in read_json_lines(run_dir / METRICS) if line["step"] <= step]
    with replacing(run_dir / METRICS, durable=True) as scratch:
        scratch.write_text("".join(map(json_text, kept)), encoding="utf-8")


def _remove_folder(path: Path) -> None:
    """Remove a folder in which files may be made, and vanish, for a moment still.

    Raises:
        OSError: it cannot be removed, for another reason or for too long.
    """
    until = time.monotonic() + _WRITING_S
    while True:
        try:
            return shutil.rmtree(path)
        except OSError as error:
            # A file that a worker has renamed or removed meanwhile, and one that it has made.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST) or time.monotonic() >= until:
                raise
        if not path.exists():
            return None
        time.sleep(_PAUSE_S)
