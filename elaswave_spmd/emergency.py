"""Checkpoints that workers wrote when their controller was gone: the next controller completes those that are whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from elaswave_spmd.errors import CheckpointError
from elaswave_spmd.run_dir import MetricsLine, RunDir, read_metrics
from elaswave_spmd.run_dir.checkpoint_shard import ShardInfo, find_shards
from elaswave_spmd.run_dir.checkpoints import find_checkpoints, write_manifest
from elaswave_spmd.run_dir.lock import read_journal
from elaswave_spmd.run_dir.manifest import MANIFEST, Manifest
from elaswave_spmd.worker.checkpoint_writer import read_reports

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan


def complete(run_dir: Path, plan: RunPlan) -> Path | None:
    """Writes the manifest of the newest checkpoint that lacks one and whose shards hold everything.

    The lines of metrics.jsonl that its controller did not live to write come from the workers' own reports. Only the
    holder of the run's lock may call this.

    Args:
        plan: of the run that is to go on, for the learning rate and the tokens of a step. That it has the same bits is
            checked afterwards, against what the dead controller wrote down of itself.

    Returns:
        The checkpoint's directory; None where there is nothing to complete.

    Raises:
        FilesError: the disk is full.
    """
    for path in find_checkpoints(run_dir):
        if (path / MANIFEST).exists():
            return None
        shards, _ = find_shards(path)
        if not shards:
            continue
        newest = max(shard.ballot.incarnation for shard in shards)
        shards = [shard for shard in shards if shard.ballot.incarnation == newest]
        lines = _missing_lines(run_dir, path, shards[0].step, plan)
        manifest = _manifest(run_dir, shards) if lines is not None else None
        if manifest is None or lines is None:
            continue
        reopened = RunDir.reopen(run_dir)
        try:
            for line in lines:
                reopened.write_metrics(line)
        finally:
            reopened.close()
        try:
            write_manifest(path, manifest)
        except CheckpointError:
            continue
        return path
    return None


def _manifest(run_dir: Path, shards: list[ShardInfo]) -> Manifest | None:
    """None: pages are missing, or nobody knows what the run was."""
    ballot = max(shard.ballot for shard in shards)
    journal = [line for line in read_journal(run_dir) if line["incarnation"] == ballot.incarnation]
    told: dict[str, Any] = next((line for line in journal if "identity" in line), {})
    if not told:
        return None
    step, run = shards[0].step, told["run"]
    try:
        return Manifest(run, step, ballot, step, told["identity"], told["layout"], tuple(told["kinds"]), tuple(shards))
    except CheckpointError:
        return None


def _missing_lines(run_dir: Path, path: Path, step: int, plan: RunPlan) -> list[MetricsLine] | None:
    """The lines up to `step` that metrics.jsonl lacks; None: one is not known."""
    last = max((line.step for line in read_metrics(run_dir)), default=0)
    reports = read_reports(path)
    if any(number not in reports for number in range(last + 1, step + 1)):
        return None
    return [
        MetricsLine.of(
            step=number,
            mesh_epoch=reports[number].epoch,
            loss=reports[number].loss,
            grad_norm=reports[number].grad_norm,
            lr=plan.job.learning_rate.at(number),
            tokens=plan.job.tokens_per_step,
            seconds=0.0,
            workers=reports[number].workers,
        )
        for number in range(last + 1, step + 1)
    ]
