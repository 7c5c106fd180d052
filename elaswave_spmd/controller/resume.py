"""Where a run begins: with initial values, or from a checkpoint of an earlier run. Its directory is locked in any case.

Also here: `complete`, which makes a checkpoint of the shards that workers wrote after their controller had died.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.schema import MeshSettings, Settings
from elaswave_spmd.controller.changed_schedule import ScheduleChange, check_schedule_change
from elaswave_spmd.controller.model_checks import MODEL_CHECK
from elaswave_spmd.controller.run_fingerprint import as_far_as_saved, identity_of, without_average
from elaswave_spmd.data import PreparedData
from elaswave_spmd.errors import CheckpointError, ConfigError, DataError, FilesError
from elaswave_spmd.output import say
from elaswave_spmd.recovery.messages import Prepare
from elaswave_spmd.run_dir import MetricsLine, RunDir, RunInfo, RunObserver, read_events, read_metrics
from elaswave_spmd.run_dir.atomic_write import READ_ONLY, sync_file, writing
from elaswave_spmd.run_dir.checkpoint_shard import ShardInfo, UnreadableError, find_shards
from elaswave_spmd.run_dir.checkpoints import (
    Checkpoint,
    find_checkpoints,
    has_manifest,
    load_newest_good,
    open_checkpoint,
    remove_unfinished,
    step_of,
    write_manifest,
)
from elaswave_spmd.run_dir.directory import EVENTS, METRICS, SUMMARY
from elaswave_spmd.run_dir.discard import discard_after
from elaswave_spmd.run_dir.display import TOKENS
from elaswave_spmd.run_dir.journal import BALLOT, ORPHAN_GRACE, Ballot, next_incarnation, read_journal
from elaswave_spmd.run_dir.lock import RunLock, lock_run_dir, wait_for_workers
from elaswave_spmd.run_dir.manifest import Manifest, layout_fingerprint, sets_of_shards
from elaswave_spmd.run_dir.rollback import rollback_of, still_valid
from elaswave_spmd.run_dir.run_identity import check_identity
from elaswave_spmd.runtime.transport.credentials import Credentials
from elaswave_spmd.sharding.replicas import unsurvived_text
from elaswave_spmd.worker.checkpoint_writer import has_reports, read_reports, remove_reports
from elaswave_spmd.worker.learning_rate import LearningRate

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan
    from elaswave_spmd.worker.spec import Job


_Found = TypeVar("_Found")

_REAPING_S = 10.0  # how long a fork server may take to end workers that live longer than they may
_WAITING = "waiting for the workers of a controller that was killed: they write their state"


@dataclass(frozen=True)
class Adoption:
    """The facts with which a controller adopts the workers of one that has died, in the same directory.

    Args:
        run_dir: the run's directory.
        generation: the generation of this controller.
        last_epoch: the epoch number of the journal's next line, which this controller's adoption takes. It is above all
            mesh epochs so far, and new ones are above it.
        prepared: the Prepare that was journaled last; None if the mesh has never been about to change.
        credentials: the credentials of the run's links; None if they need none.
        newest_checkpoint: the step of the newest checkpoint that this life of the run has completed, or began at; 0 if
            there is none.
        pids: rank -> process id, of the workers on this machine that live.
        next_rank: all ranks below it have been given to workers. Some above it may have been, which the journal does
            not know yet: of newcomers, and of members of the first mesh.
        newcomers: ranks of the workers that were about to join, whether they live or have ended meanwhile.
        seconds: how long the workers have had no controller.
        made: ranks of all workers that were ever started on this machine.
        has_agents: True if workers may live on other machines, whose agents come back with them.
        scratch: the directory of the sockets, as the journal names it.
        mesh: the mesh on which the run begins again if no worker is left; None for the mesh of the settings.
    """

    run_dir: Path
    generation: int
    last_epoch: int
    prepared: Prepare | None = None
    credentials: Credentials | None = None
    newest_checkpoint: int = 0
    pids: Mapping[int, int] = field(default_factory=dict)
    next_rank: int = 0
    newcomers: tuple[int, ...] = ()
    seconds: float = 0.0
    made: tuple[int, ...] = ()
    has_agents: bool = False
    scratch: str = ""
    mesh: MeshSettings | None = None


@dataclass(frozen=True)
class ResumePoint:
    """The point at which a run begins.

    Args:
        run: id of the run.
        incarnation: the number of this life of the run.
        checkpoint: the checkpoint from which it goes on; None if it begins with initial values.
        bad: (path, reason) of newer checkpoints that are not good.
        lines: step -> line of metrics.jsonl, of the steps that were committed before. Steps after the checkpoint are
            computed again, and must have the same bits as their lines.
        validations: (step, number of micro-batches) -> loss_hex of the validations that were made before.
        digests: layer -> digest of the bits that its kind of layer computed when the run was first checked
            (`model_check`).
        schedule_change: how the length and the learning rates differ from those of the saved run; None for a new run.
        locks: held as long as the run lasts; the last one is that of the run's own directory.
        adoption: the facts for adopting living workers, which are at about the step of the last line; None if there
            are none.
    """

    run: str
    incarnation: int
    checkpoint: Checkpoint | None = None
    bad: tuple[tuple[Path, str], ...] = ()
    lines: Mapping[int, MetricsLine] = field(default_factory=dict)
    validations: Mapping[tuple[int, int], str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    schedule_change: ScheduleChange | None = None
    locks: tuple[RunLock, ...] = ()
    adoption: Adoption | None = None

    @classmethod
    def fresh(cls, run_dir: Path) -> ResumePoint:
        """The begin of a new run, in a directory of its own."""
        return cls(_new_id(), 1, locks=(lock_run_dir(run_dir),))

    @property
    def step(self) -> int:
        """The version at which the run begins, or at which an adopted run goes on."""
        if self.adoption is not None:
            return max(self.lines, default=0)
        return self.checkpoint.step if self.checkpoint is not None else 0

    @property
    def last_line(self) -> MetricsLine | None:
        """The line of metrics.jsonl of `step`; None if there is none."""
        return self.lines.get(self.step)

    def is_in(self, run_dir: Path) -> bool:
        """True if there is a checkpoint and it is in this directory, not in that of another run."""
        return self.checkpoint is not None and self.checkpoint.path.parents[1].absolute() == run_dir.absolute()

    def announce(self, observer: RunObserver, mesh: str) -> None:
        """Log that the run is resumed, if it is, and give the observer the lines that must come out bit for bit again.

        Args:
            mesh: the name of the mesh's shape.
        """
        if self.adoption is not None:
            observer.expect(self.lines, self.validations, first=self.step + 1, same=True)
            return
        if self.checkpoint is not None:
            observer.on_event("resume", **self._event(mesh))
            same = self.is_in(observer.run_dir.path)
            observer.expect(self.lines, self.validations, first=self.step + 1, same=same)

    def _event(self, mesh: str) -> dict[str, Any]:
        assert self.checkpoint is not None
        again = max([0, *self.lines]) - self.step
        bad = [f"{path.name}: {reason}" for path, reason in self.bad]
        text = f"step {self.step}, from {self.checkpoint.path}, on {mesh}"
        text += f"; {again} steps that were committed are computed again" if again > 0 else ""
        text += "".join(f"; not used: {line}" for line in bad)
        about: dict[str, Any] = {}
        if self.schedule_change is not None and self.schedule_change.changed:
            text += f"; {self.schedule_change.message}"
            about["changed"] = {name: list(values) for name, values in self.schedule_change.changed.items()}
        return {
            "step": self.step,
            "checkpoint": str(self.checkpoint.path),
            "mesh": mesh,
            "incarnation": self.incarnation,
            "steps_again": max(0, again),
            "bad": bad,
            **about,
            "message": text,
        }

    def life_began(self) -> None:
        """Note in the lock of the run's directory that a life of the run has begun, or goes on (RunLock.life_began)."""
        for lock in self.locks[-1:]:
            lock.life_began()

    def close(self) -> None:
        """Release the locks."""
        for lock in self.locks:
            lock.close()


@dataclass(frozen=True)
class _Source:
    """An earlier run, from whose newest good checkpoint this one goes on.

    Args:
        path: its directory.
        lock: the lock of its directory. It is kept as long as this run lasts, even if this run has another directory:
            no other controller may remove the checkpoint that workers are reading.
        is_run_dir: True if this run goes on in the same directory.
        checkpoint: the checkpoint from which this run goes on.
        bad, lines, digests, schedule_change: as in ResumePoint.
        validations: the events of validations that are still valid.
    """

    path: Path
    lock: RunLock
    is_run_dir: bool
    checkpoint: Checkpoint
    bad: tuple[tuple[Path, str], ...]
    lines: Mapping[int, MetricsLine]
    validations: list[dict[str, Any]]
    digests: Mapping[str, str]
    schedule_change: ScheduleChange


def open_run(plan: RunPlan, data: PreparedData, again: Path | None = None) -> tuple[RunDir, ResumePoint]:
    """Open and lock the run's directory, and find where the run begins.

    Args:
        again: the directory of a run that begins once more as it began, in the same directory; else None.

    Raises:
        ConfigError: the directory cannot be used; another controller has locked it; or the run would not compute the
            same bits as the one that it resumes.
        CheckpointError: there is no good checkpoint to resume from, or records of the run are missing.
    """
    with contextlib.ExitStack() as undo:
        source = None
        if (resume := plan.settings.train.resume) is not None:
            source = _open_source(plan, data, resume)
            undo.callback(source.lock.close)
        run_dir, start = _open_directory(plan, source, again, undo)
        if source is not None:
            start = replace(
                start,
                checkpoint=source.checkpoint,
                bad=source.bad,
                lines=source.lines,
                validations=_losses(source.validations),
                digests=source.digests,
                schedule_change=source.schedule_change,
            )
            if not source.is_run_dir and again is None:
                _copy_records(source, run_dir, plan.job)
        undo.pop_all()
    return run_dir, start


def _open_directory(
    plan: RunPlan, source: _Source | None, again: Path | None, undo: contextlib.ExitStack
) -> tuple[RunDir, ResumePoint]:
    """Open and lock the run's directory: that of the run that it resumes or begins again, or a new one.

    Args:
        undo: gets the callbacks that release the directory if the run does not begin.
    """
    if source is not None and source.is_run_dir:
        remove_unfinished(source.path)
        run_dir, run = RunDir.reopen(source.path), source.checkpoint.manifest.run
        return run_dir, ResumePoint(run, next_incarnation(source.path), locks=(source.lock,))
    before = () if source is None else (source.lock,)
    if again is not None:
        lock = lock_run_dir(again)
        undo.callback(lock.close)
        remove_unfinished(again)
        run_dir = RunDir.reopen(again)
        return run_dir, ResumePoint(_new_id(), next_incarnation(again), locks=(*before, lock))
    settings = plan.settings
    label, mesh = settings.model.label, plan.placement.mesh.shape.name
    run_dir = RunDir.create(settings.run.dir, settings.to_yaml(), model=label, mesh=mesh)
    undo.callback(run_dir.discard)
    lock = lock_run_dir(run_dir.path)
    undo.callback(lock.close)
    return run_dir, ResumePoint(_new_id(), 1, locks=(*before, lock))


def _copy_records(source: _Source, run_dir: RunDir, job: Job) -> None:
    """Copy records of the run that is resumed, up to the checkpoint, into the files of a new directory.

    These are the metrics, and the validations if an early end or the choice of the best checkpoint depends on them.
    """
    for line in source.lines.values():
        if line.step <= source.checkpoint.step:
            run_dir.write_metrics(line)
    if job.early_stop is None and not job.saves_validated:
        return
    for event in source.validations:
        if event["step"] <= source.checkpoint.step:
            about = {name: value for name, value in event.items() if name not in ("event", "time")}
            run_dir.write_event("validation", event["time"], about)


def _open_source(plan: RunPlan, data: PreparedData, resume: str) -> _Source:
    """Lock the directory of the run that is to be resumed, and check that this run goes on with the same bits.

    Raises:
        ConfigError, CheckpointError: as for `open_run`.
    """
    settings = plan.settings
    identity = identity_of(settings, data)
    path = Path(os.path.expanduser(resume))
    where = checks.override("train.resume", resume)
    with contextlib.ExitStack() as undo:
        # Locked before anything is read: if the controller of that run still lives, it goes on writing.
        lock = lock_resumed(path, where)
        undo.callback(lock.close)
        # Workers of a controller that was killed may still write their state, which this run goes on from.
        wait_for_workers(path, orphan_grace(path, settings) + _REAPING_S, lambda: say(_WAITING))
        same = settings.run.dir is None or Path(os.path.expanduser(settings.run.dir)).absolute() == path.absolute()
        if same and (path / SUMMARY).exists():
            what = f"the run in {path} has finished"
            raise _elsewhere(what, "a run that has finished has nothing left to do", where, exists=SUMMARY)
        if same and settings.train.resume_at is not None:
            raise ConfigError(
                f"train.resume_at={settings.train.resume_at} is given without another directory",
                rule="the steps after it are in the files of the run that is resumed, and stay there",
                where=checks.override("train.resume_at", settings.train.resume_at),
                fix="run.dir=DIR",
            )
        _finish_rollback(path)  # before `complete`, which must not complete a checkpoint that may be wrong
        # Before the newest checkpoint is looked for, which may be one that workers wrote without a controller. If
        # train.resume_at names an older one, it does not matter that the newest cannot be read now.
        with contextlib.suppress(*(() if settings.train.resume_at is None else (UnreadableError,))):
            complete(path)
        checkpoint, bad = load_newest_good(path, settings.train.resume_at)
        step, lines = checkpoint.step, _lines(path, checkpoint.step)
        saved = without_average(checkpoint.manifest.identity, identity)
        found = check_schedule_change(saved, as_far_as_saved(identity, saved), settings, lines, step, where=where)
        check_identity(checkpoint.manifest.layout, layout_fingerprint(plan.description.layout), where=where)
        until = found.same_until
        if same and until < max(lines, default=0):
            what = f"the steps {until + 1} to {max(lines)} of {path} were committed with other learning rates"
            raise _elsewhere(what, "what a run has committed is not written over", where)
        if same and settings.train.steps < max(lines, default=0):
            what = f"train.steps={settings.train.steps} is fewer than the {max(lines)} steps that {path} has committed"
            raise _elsewhere(what, "what a run has committed is not written over", where)
        # Steps that are computed again with other learning rates need not have the bits of their old lines.
        lines = {number: line for number, line in lines.items() if number <= until}
        validations = [event for event in still_valid(_read(read_events, path), "validation") if event["step"] <= until]
        if plan.job.early_stop is not None:
            _check_validations(plan.job, _losses(validations), step)
        digests = _digests(path)
        undo.pop_all()
    return _Source(path, lock, same, checkpoint, tuple(bad), lines, validations, digests, found)


def going_back_to(run_dir: Path) -> int | None:
    """The step of the checkpoint that a run was going back to when its controller ended; None: it was not.

    Raises:
        CheckpointError: its events are damaged.
    """
    return _read(rollback_of, run_dir)


def _finish_rollback(run_dir: Path) -> None:
    """Discard the results that a controller had given up as wrong, if it ended before it had removed them.

    Raises:
        CheckpointError: a file of the run is damaged, or the run was going back to its begin.
        FilesError: it cannot be written.
    """
    step = going_back_to(run_dir)
    if step == 0:
        raise CheckpointError(
            f"the run in {run_dir} was going back to its begin when its controller ended",
            rule="a run is resumed from a checkpoint, and all of its checkpoints may be wrong (its event rollback)",
            where=str(run_dir / EVENTS),
            fix="begin it again, by its own command with another run.dir",
        )
    if step is not None:
        say(f"the run was going back to step {step} when its controller ended: that is done first")
        discard_after(run_dir, step)


def lock_resumed(path: Path, where: str) -> RunLock:
    """Lock the directory of a run that is resumed.

    Args:
        where: the setting that names it, for errors.

    Raises:
        ConfigError: as for `lock_run_dir`; or nobody may write there.
        FilesError: the lock file cannot be written for another reason, such as a full disk.
    """
    try:
        return lock_run_dir(path)
    except FilesError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in READ_ONLY:
            raise
        raise ConfigError(
            f"{where} cannot be locked: {path} cannot be written ({error.why})",
            rule="a run that is resumed is locked meanwhile, also by a run that goes on in another run.dir, so that "
            "nobody removes the checkpoint that is read",
            where=where,
            fix=f"a directory that may be written to, or a copy: cp -r {path} DIR, then train.resume=DIR",
        ) from error


def orphan_grace(path: Path, settings: Settings) -> float:
    """The number of seconds that workers of the run's last life may take to end.

    This is longer than the present setting if that life allowed its workers to wait for adoption, by its journal.
    """
    journal = read_journal(path)
    lives = (line for line in journal if line["incarnation"] == journal[-1]["incarnation"])
    return max([settings.timeouts.orphan_grace, *(float(line[ORPHAN_GRACE]) for line in lives if ORPHAN_GRACE in line)])


def run_info(plan: RunPlan, data: PreparedData, run_dir: Path, step: int) -> RunInfo:
    """The header of a run that begins after `step`, for the display and the log."""
    placement, layout = plan.placement, plan.description.layout
    mesh, unsurvived = placement.mesh, ""
    if plan.settings.elastic.enabled and mesh.num_workers > 1:
        unsurvived = unsurvived_text(placement.replica_map(layout), mesh.members)
    return RunInfo(
        model=plan.settings.model.label,
        mesh=mesh.shape.name,
        sharding=placement.shardings.name,
        params=layout.num_parameters,
        total_steps=plan.job.steps,
        workers=mesh.num_workers,
        corpus=data.corpus + (f" ({data.num_bytes:,} bytes)" if data.num_bytes else ""),
        run_dir=str(run_dir),
        first_step=min(step + 1, plan.job.steps),
        unsurvived=unsurvived,
        stages=mesh.stages,
        layer_cuts=placement.layer_cuts,
        microbatch_counts=placement.microbatch_counts,
        unit=TOKENS if data.is_tokens else "samples",
        without_microbatches=plan.without_microbatches(),
    )


def _lines(run_dir: Path, step: int) -> dict[int, MetricsLine]:
    """The run's metrics by step.

    Raises:
        CheckpointError: lines up to the checkpoint's step are missing.
    """
    lines = {line.step: line for line in _read(read_metrics, run_dir)}
    if missing := [s for s in range(1, step + 1) if s not in lines]:
        older = [at for at in map(step_of, find_checkpoints(run_dir)) if at < missing[0]]
        fix = "put the file back, or begin a new run"
        raise CheckpointError(
            f"metrics.jsonl has no line of step {missing[0]}",
            rule=f"it has a line for every step up to the checkpoint, which is of step {step}",
            where=str(run_dir / METRICS),
            fix=f"{fix}; or go on from step {max(older)}: train.resume_at={max(older)} run.dir=DIR" if older else fix,
        )
    return lines


def _read(read: Callable[[Path], _Found], run_dir: Path) -> _Found:
    """What the records of a run that is resumed say.

    Raises:
        CheckpointError: their file is missing or damaged.
    """
    try:
        return read(run_dir)
    except DataError as error:
        rule = "a run that goes on has the metrics and events of its steps so far"
        fix = "put the file back, or begin a new run"
        raise CheckpointError(error.what, rule=rule, where=error.where or str(run_dir), fix=fix) from error


def _elsewhere(what: str, rule: str, where: str, exists: str = "") -> ConfigError:
    """The error of a run that may go on, but not in the directory in which it is."""
    fix = "run.dir=DIR to go on from its newest checkpoint in another directory"
    return ConfigError(what, rule=rule, where=where, exists=exists, fix=fix)


def _check_validations(job: Job, known: Mapping[tuple[int, int], str], step: int) -> None:
    """Refuse a run that lacks an earlier validation: all of them decide after which step it ends.

    The validation of the checkpoint's own step may be missing, as it is made again.

    Raises:
        CheckpointError: one is missing.
    """
    for earlier in range(1, step):
        if job.validates_at(earlier) and (earlier, job.num_validation_microbatches) not in known:
            raise CheckpointError(
                f"events.jsonl has no validation of step {earlier}",
                rule="after which step a run ends early (train.stop_patience) depends on all of them",
                fix="put the file back, or begin a new run",
            )


def known_validations(run_dir: Path) -> dict[tuple[int, int], str]:
    """The validations of a run that a controller adopts: (step, micro-batches) -> loss_hex."""
    return _losses(still_valid(read_events(run_dir), "validation"))


def known_digests(run_dir: Path) -> dict[str, str]:
    """The digests of the check of the model, of a run that a controller adopts."""
    return _digests(run_dir)


def _losses(events: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], str]:
    return {(event["step"], event["microbatches"]): event["loss_hex"] for event in events}


def model_check_of(run_dir: Path) -> Mapping[str, Any] | None:
    """The run's first event of the check of the model, as all later ones have the same digests; None if it has none."""
    return next((event for event in read_events(run_dir) if event["event"] == MODEL_CHECK), None)


def _digests(run_dir: Path) -> dict[str, str]:
    found = model_check_of(run_dir)
    return {row["layer"]: row["digest"] for row in found["layers"]} if found else {}


def _new_id() -> str:
    return secrets.token_hex(8)


# ---- checkpoints that workers wrote when their controller had died, which the next controller completes


def complete(run_dir: Path) -> Path | None:
    """Write the manifest of the newest checkpoint that lacks a good one and whose shards contain all pages.

    Bad checkpoints that are newer than the newest good one are passed over: a run that went on from that one may have
    lost its controller before it had come so far again, and its workers have saved an earlier state, or that very one.

    Lines of metrics.jsonl that the dead controller did not write are made from the workers' own reports. Values in them
    that follow from settings are taken from the identity in the dead controller's journal; whether the run that goes on
    has the same identity is checked later. Only the holder of the run's lock may call this.

    Returns:
        The checkpoint's directory; None if there is nothing to complete.

    Raises:
        UnreadableError: a checkpoint that could perhaps be completed cannot be read now. A run that goes on from an
            older one removes it.
        CheckpointError: the records of the run are missing or damaged.
        FilesError: the disk is full.
    """
    found = find_checkpoints(run_dir)
    for number, path in enumerate(found):
        if is_complete := has_manifest(path):
            # To find out whether it is good is to read all of it, which is done only if something depends on it.
            if not any(map(_may_be_completed, found[number:])) or _is_good(path):
                return None
            if not _may_be_completed(path):
                continue
        shards, bad = find_shards(path)
        shards = _without_wrong(run_dir, step_of(path), shards)
        if shards and _complete_one(run_dir, path, shards):
            return path
        unread = [error.what for _, error in bad if isinstance(error, UnreadableError)]
        if unread and not is_complete:  # a run that goes on does not remove a checkpoint that has a manifest
            raise _unread(path, step_of(path), unread[0])
    return None


def _unread(path: Path, step: int, why: str) -> UnreadableError:
    return UnreadableError(
        f"{path} has the state after step {step}, or a part of it: {why}",
        rule="what workers have saved when their controller was gone is not given up because it cannot be read for a "
        "moment",
        where=str(path),
        fix=f"the same command when it can be read; or remove {path}: the run goes on from an earlier one then",
    )


def _may_be_completed(path: Path) -> bool:
    """True for a checkpoint without a manifest, and for one beside whose shards workers without a controller wrote."""
    try:
        return not has_manifest(path) or has_reports(path)
    except (UnreadableError, OSError):
        return True


def _is_good(path: Path) -> bool:
    try:
        open_checkpoint(path, verify=True)
    except CheckpointError:
        return False
    return True


def _without_wrong(run_dir: Path, step: int, shards: Sequence[ShardInfo]) -> list[ShardInfo]:
    """The shards of a step without those that may be of a wrong replica, or were never compared, by the run's events.

    They are removed only when the run is past that step, and their writers may have written them after that was found.

    Raises:
        CheckpointError: the events are damaged.
    """
    if not shards or not (run_dir / EVENTS).exists():
        return [*shards]
    about = (event for event in _read(read_events, run_dir) if event.get("step") == step and BALLOT in event)
    wrong_until = max((Ballot(*event[BALLOT]) for event in about), default=Ballot(0, 0))
    return [shard for shard in shards if shard.ballot > wrong_until]


def _complete_one(run_dir: Path, path: Path, shards: list[ShardInfo]) -> bool:
    """Complete the checkpoint in `path`, if its good shards hold everything. Returns whether they do.

    Raises:
        UnreadableError, CheckpointError, FilesError: as for `complete`.
    """
    # Only of one incarnation: an earlier life may have computed the same step in another attempt.
    newest = max(shard.ballot.incarnation for shard in shards)
    manifest = _manifest(run_dir, [shard for shard in shards if shard.ballot.incarnation == newest])
    lines = None if manifest is None else _missing_lines(run_dir, path, manifest)
    if manifest is None or lines is None:
        return False
    # Metrics before the manifest: a checkpoint whose step has no line could not be resumed from.
    reopened = RunDir.reopen(run_dir)
    try:
        for line in lines:
            reopened.write_metrics(line)
    finally:
        reopened.close()
    # Flushed to the disk before the manifest, which is, too: the system may still hold the dead controller's lines.
    for name in (METRICS, EVENTS):
        with writing(run_dir / name):
            sync_file(run_dir / name)
    try:
        write_manifest(path, manifest)
    except UnreadableError:
        raise
    except CheckpointError:
        return False  # a shard is damaged: an older checkpoint will do
    # Their lines are on the disk. If they stayed, later resumes would read their newest checkpoint twice: `complete`.
    remove_reports(path)
    return True


def _manifest(run_dir: Path, shards: list[ShardInfo]) -> Manifest | None:
    """The manifest of shards of one incarnation; None if pages are missing, or if the journal has no identity for it.

    The identity is taken from the dead controller's journal. That of the run that is about to go on may differ, and is
    compared with it later.
    """
    ballot = max(shard.ballot for shard in shards)
    journal = [line for line in read_journal(run_dir) if line["incarnation"] == ballot.incarnation]
    about: dict[str, Any] = next((line for line in journal if "identity" in line), {})
    if not about:
        return None
    step, kinds = shards[0].step, tuple(about.get("kinds", ()))
    for some in sets_of_shards(shards):
        newest = max(shard.ballot for shard in some)
        with contextlib.suppress(CheckpointError, LookupError, TypeError, ValueError):  # an identity of other fields
            return Manifest(about["run"], step, newest, step, about["identity"], about["layout"], kinds, some)
    return None


def _missing_lines(run_dir: Path, path: Path, manifest: Manifest) -> list[MetricsLine] | None:
    """The lines up to the checkpoint's step that metrics.jsonl lacks; None if one of them cannot be made.

    Raises:
        UnreadableError: one cannot be made now, as a worker's records cannot be read.
    """
    step = manifest.step
    try:
        rate = LearningRate.of_identity(manifest.identity)  # of the dead controller's run
        tokens = _tokens_per_step(manifest.identity)
    except (LookupError, TypeError, AttributeError):
        return None  # its journal was changed
    last = max((line.step for line in _read(read_metrics, run_dir)), default=0)
    reports, unread = read_reports(path)
    if any(number not in reports for number in range(last + 1, step + 1)):
        if unread:
            raise _unread(path, step, unread[0])
        return None
    return [
        MetricsLine.of(
            step=number,
            mesh_epoch=reports[number].epoch,
            loss=reports[number].loss,
            grad_norm=reports[number].grad_norm,
            lr=rate.at(number),
            tokens=tokens,
            seconds=0.0,
            workers=reports[number].workers,
            weight=reports[number].weight,
        )
        for number in range(last + 1, step + 1)
    ]


def _tokens_per_step(identity: Mapping[str, Any]) -> int:
    """`Job.tokens_per_step` of a run, from its identity."""
    train = identity["train"]
    return train["global_batch"] * (train["seq_len"] if identity["data"]["vocab_size"] else 1)
