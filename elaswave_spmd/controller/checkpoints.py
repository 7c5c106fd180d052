"""The controller's side of checkpoints: it collects the workers' reports until a checkpoint has all of its shards.

Workers write the shards. Once every page of state is in one of them, the controller has the manifest written that makes
them a checkpoint (by a thread behind ControllerIO). Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elaswave_spmd.controller.actions import Action, Record, RemoveShards, WriteManifest
from elaswave_spmd.controller.events import ManifestWritten, OldRemoved
from elaswave_spmd.controller.resume import ResumePoint
from elaswave_spmd.controller.run_fingerprint import identity_of
from elaswave_spmd.errors import CheckpointError
from elaswave_spmd.recovery.actions import Save
from elaswave_spmd.recovery.messages import ShardWritten
from elaswave_spmd.run_dir.checkpoint_shard import ShardInfo
from elaswave_spmd.run_dir.journal import BALLOT, Ballot
from elaswave_spmd.run_dir.manifest import Manifest, layout_fingerprint, sets_of_shards
from elaswave_spmd.sharding.replicas import PageRange
from elaswave_spmd.worker.checkpoint_orders import CheckpointOrders
from elaswave_spmd.worker.state import MASTER

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan


CHECKPOINT_KEPT = "checkpoint_kept"
"""The event of a checkpoint that is not to be kept any more and could not be removed."""


def kept_fields(step: int, why_not: str) -> dict[str, Any]:
    """The fields of the event `checkpoint_kept`.

    Args:
        step: after which an older checkpoint should have been removed.
        why_not: why it was not; only the first line is used.
    """
    return {"step": step, "message": f"an older checkpoint could not be removed: {why_not.splitlines()[0]}"}


@dataclass(frozen=True)
class CheckpointSpec:
    """The facts about a run that each of its checkpoints contains.

    Args:
        run: id of the run.
        incarnation: the number of this life of the run, which the ballots of its shards contain.
        step: the version at which this controller begins.
        newest: the step of the newest checkpoint that is in the run's directory already; 0 if there is none.
        fingerprint: everything that the bits of the run depend on.
        layout: the fingerprint of the layout of the state.
        kinds: the kinds of state: the master parameters, and the tensors that the optimizer keeps.
        num_pages: the number of pages of state in all layers together.
        orders: what workers need to know to write their shards.
        came_back: True if this controller adopts the workers of one that has died. Then there is no checkpoint of
            `step` in general.
    """

    run: str
    incarnation: int
    step: int
    newest: int
    fingerprint: Mapping[str, Any]
    layout: Mapping[str, Any]
    kinds: tuple[str, ...]
    num_pages: int
    orders: CheckpointOrders
    came_back: bool = False

    @classmethod
    def for_run(cls, plan: RunPlan, start: ResumePoint, run_dir: Path) -> CheckpointSpec:
        """Make the specification of a run that is in this directory and begins at `start`."""
        layout = plan.description.layout
        orders = CheckpointOrders(
            str(run_dir.absolute()),
            start.run,
            start.incarnation,
            plan.settings.checkpoint.every,
            plan.job.steps,
            str(start.checkpoint.path.absolute()) if start.checkpoint else None,
            max(start.lines, default=0),
            plan.job.validate_every if plan.job.saves_validated and plan.job.validates else 0,
        )
        return cls(
            run=start.run,
            incarnation=start.incarnation,
            step=start.step,
            newest=_newest(start, run_dir),
            fingerprint=identity_of(plan.settings, plan.data),
            layout=layout_fingerprint(layout),
            kinds=(MASTER, *plan.job.optimizer.state_names),
            num_pages=sum(layer.num_state_pages for layer in layout.layers),
            orders=orders,
            came_back=start.adoption is not None,
        )


def _newest(start: ResumePoint, run_dir: Path) -> int:
    if start.adoption is not None:
        return start.adoption.newest_checkpoint
    return start.step if start.is_in(run_dir) else 0


@dataclass
class _Pending:
    """A checkpoint some of whose shards have been reported."""

    since: float  # when the first shard was reported, in seconds of the controller's clock
    shards: dict[str, ShardInfo] = field(default_factory=dict)  # by name
    copy_ms: float = 0.0  # the longest of any worker: how long training stood still for the copy of its state
    write_ms: float = 0.0  # the longest of any worker: how long it took to write its shard
    is_queued: bool = False  # True once its manifest is being written
    # The page ranges of all shards. Shards may be of two mesh epochs, so ranges may overlap.
    ranges: set[PageRange] = field(default_factory=set)
    num_pages: int = 0  # pages in `ranges`, each range counted once: an upper bound of the pages that are there

    def add(self, shard: ShardInfo) -> None:
        """One more shard is on the disk."""
        self.shards[shard.name] = shard
        new = {*shard.pages} - self.ranges
        self.ranges |= new
        self.num_pages += sum(stop - first for _, first, stop in new)

    def of_epochs_after(self, epoch: int) -> _Pending:
        """The same checkpoint without the shards of mesh epochs up to this one."""
        found = _Pending(self.since, copy_ms=self.copy_ms, write_ms=self.write_ms)
        for shard in self.shards.values():
            if shard.ballot.epoch > epoch:
                found.add(shard)
        return found


class CheckpointCoordinator:
    """Collects the shards of a run's checkpoints. Reports of workers go in, actions come out.

    All methods are called by the controller's thread.

    Args:
        spec: the facts about the run that each checkpoint contains.
        compares: True if a shard counts only once all replicas of its mesh epoch were found to be equal. No controller
            adopts the workers of such a run (Settings.held_by_controller), so each comparison of its life is known.
    """

    def __init__(self, spec: CheckpointSpec, *, compares: bool = False) -> None:
        assert not (compares and spec.came_back)
        self._spec = spec
        self._compares = compares
        self._agreed: dict[int, set[int]] = {}  # version -> the mesh epochs in which its replicas were all equal
        self._distrusted: dict[int, int] = {}  # step -> the mesh epoch in which its replicas differed
        self._pending: dict[int, _Pending] = {}
        self._newest = spec.newest
        self._committed = spec.step
        # A checkpoint of this step or before may lack a shard forever, as its worker was lost before it was written.
        self._incomplete = 0 if spec.came_back else spec.step
        self._last: Save | None = None  # the order to save the state with which the run stops; None while it goes on
        self._failed: dict[int, str] = {}  # step -> why it will have no checkpoint
        self._useless: dict[int, list[str]] = {}  # step -> names of shards on the disk of which nothing will come
        self._not_removed = ""  # why an older checkpoint is still there that the newest was to replace
        self._validation: dict[str, object] | None = None

    @property
    def newest(self) -> int:
        """The step of the newest complete checkpoint in this run's directory; 0 if there is none."""
        return self._newest

    def why_not(self, step: int) -> str:
        """Why there will be no checkpoint of a step; empty while there may be one."""
        return self._failed.get(step, "")

    def awaits(self, step: int) -> bool:
        """True if the checkpoint of a step is due, and is still expected: no lost worker may have had a part of it."""
        # `_incomplete` is no less than the step at which a resumed run begins, of which it writes no checkpoint. That
        # step's may be in another directory, so `_newest` does not tell.
        begins = max(self._newest, self._incomplete)
        return self._spec.orders.is_due(step) and step > begins and step not in self._failed

    @property
    def awaits_newest(self) -> bool:
        """True if the newest checkpoint that is due is still expected. Older ones, if they come, come before it.

        If the newest one is known to be lost, this is about the newest one before it.
        """
        newest = self._spec.orders.newest_due(self._committed)
        while newest in self._failed:
            newest = self._spec.orders.newest_due(newest - 1)
        return self.awaits(newest)

    def worker_lost(self, until: int | None = None) -> None:
        """A worker is lost: what it had not written yet of checkpoints will not come.

        Args:
            until: the step after which it had left, and of later ones had no part; None: it was a member until now.
        """
        self._incomplete = max(self._incomplete, self._committed if until is None else until)

    def committed(self, step: int) -> list[Action]:
        """A step is committed. Returns the removals of what is useless from then on."""
        self._committed = step
        return self._removals() if self._useless else []

    def validated(self, step: int, loss: float) -> None:
        """A validation is complete. Later manifests contain the newest one, for people; resuming does not use it."""
        self._validation = {"step": step, "loss_hex": loss.hex()}

    def stop_and_save(self, save: Save) -> None:
        """The run stops at the checkpoint of this version, whose shards are about to be written.

        What went wrong with it before does not count; shards that are there already do.
        """
        self._last = save
        self._failed.pop(save.version, None)
        self._useless.pop(save.version, None)  # workers write them again, under the same names

    def wrote(self, message: ShardWritten, now: float) -> list[Action]:
        """A worker's shard is on the disk, or it could not be written (`message.error`)."""
        if message.step <= self._newest:
            return []  # a surplus shard: the mesh changed, and another worker has written the same pages, too
        # It may be from a wrong replica, or another shard is missing for good, which has been reported.
        if message.epoch <= self._distrusted.get(message.step, -1) or message.step in self._failed:
            return self._came_for_nothing(message)
        if message.error:
            last = self._last
            # When one more worker is lost the order to save is given again, in a newer mesh epoch. Then a failure of
            # the first attempt does not matter any more.
            if last is not None and message.step == last.version and message.epoch < last.epoch:
                return []
            why = f"worker {message.rank}: {message.error.splitlines()[0]}"
            return [*self._abandon(message.step, why), *self._removals()]
        pending = self._pending.setdefault(message.step, _Pending(now))
        pending.add(
            ShardInfo(
                message.name,
                self._spec.run,
                message.step,
                Ballot(self._spec.incarnation, message.epoch),
                message.rank,
                message.num_bytes,
                message.sha256,
                message.page_ranges,
            )
        )
        pending.copy_ms = max(pending.copy_ms, message.copy_ms)
        pending.write_ms = max(pending.write_ms, message.write_ms)
        return self._complete_if_whole(message.step, pending)

    def found(self, shards: Iterable[ShardInfo], now: float) -> list[Action]:
        """Shards were found on the disk whose reports may have been lost with the previous controller.

        Nothing of them was distrusted, as a run that compares replicas has no controller that comes back.
        """
        steps: set[int] = set()
        for shard in shards:
            if shard.step > self._newest and shard.step not in self._failed:
                self._pending.setdefault(shard.step, _Pending(now)).add(shard)
                steps.add(shard.step)
        return [action for step in sorted(steps) for action in self._complete_if_whole(step, self._pending[step])]

    def compared(self, version: int, epoch: int) -> list[Action]:
        """All replicas of this mesh epoch were equal at a version. Returns the manifest that waited only for this."""
        if not self._is_last(version) and not self._spec.orders.is_due(version):
            return []  # it is not saved
        self._agreed.setdefault(version, set()).add(epoch)
        pending = self._pending.get(version)
        return self._complete_if_whole(version, pending) if pending is not None else []

    def distrust(self, version: int, epoch: int) -> list[Action]:
        """Replicas differed at a version: the shards of it that are written up to this mesh epoch may be wrong.

        Most of them are still to come, as hashes are sent before anything is written.
        """
        pending = self._pending.get(version)
        if version <= self._newest or (pending is not None and pending.is_queued):
            return []  # it was complete
        self._distrusted[version] = epoch
        if self._is_last(version):
            self._pending.pop(version, None)
            return []
        if version in self._failed or version <= self._spec.step or not self._spec.orders.is_due(version):
            return []
        return [*self._abandon(version, "replicas of its state differ", wrong_until=epoch), *self._removals()]

    def ballot(self, epoch: int) -> list[int]:
        """The ballot of a mesh epoch, as events have it that say up to where shards of a step do not count (BALLOT)."""
        return [*Ballot(self._spec.incarnation, epoch)]

    def written(self, event: ManifestWritten, now: float) -> list[Action]:
        """A manifest is on the disk, so its checkpoint is complete; or it could not be written (`event.error`)."""
        step = event.manifest.step
        pending = self._pending.pop(step)
        if event.error:
            return self._abandon(step, event.error.splitlines()[0])
        self._newest = max(self._newest, step)
        actions: list[Action] = []
        for old in [s for s in self._pending if s < step]:
            actions += self._abandon(old, "a part of it was never written")
        shards = event.manifest.shards
        total = sum(shard.num_bytes for shard in shards)
        fields = {
            "step": step,
            "shards": len(shards),
            "bytes": total,
            "copy_ms": round(pending.copy_ms, 3),
            "write_ms": round(pending.write_ms, 3),
            "message": f"step {step}: {total:,} bytes in {len(shards)} shards; training stood still for "
            f"{pending.copy_ms:.1f} ms, on the disk {now - pending.since:.2f} s after the first shard",
        }
        actions.append(Record("checkpoint", fields))
        self._forget_before(step)
        return actions

    def removed(self, event: OldRemoved) -> list[Action]:
        """Older checkpoints were removed, or one could not be."""
        before, self._not_removed = self._not_removed, event.why_not
        # The same directory that cannot be removed is reported once, not after each new checkpoint.
        if not event.why_not or event.why_not == before:
            return []
        return [Record(CHECKPOINT_KEPT, kept_fields(event.step, event.why_not))]

    def _forget_before(self, step: int) -> None:
        """Drop what is known of steps that are older than the newest checkpoint, as no shards of them are expected.

        Why a validated step has no checkpoint is kept, since `why_not` is asked for it: the best of them are to have
        one.
        """
        validated = self._spec.orders.validate_every
        self._failed = {s: why for s, why in self._failed.items() if s > step or (validated and s % validated == 0)}
        self._distrusted = {s: epoch for s, epoch in self._distrusted.items() if s > step}
        self._agreed = {s: epochs for s, epochs in self._agreed.items() if s > step}
        self._useless = {s: names for s, names in self._useless.items() if s > step}  # the others are pruned

    def _complete_if_whole(self, step: int, pending: _Pending) -> list[Action]:
        """Complete a checkpoint if all of its pages are there, and, with `compares`, its replicas were equal."""
        if pending.is_queued:
            return []
        told: list[Action] = []
        if never := self._never_compared(step, pending):
            why, until = "the mesh changed before replicas of its state were compared", max(never)
            if not self._is_last(step):
                return [*self._abandon(step, why, wrong_until=until), *self._removals()]
            # It is written anew in the present mesh epoch. If that fails, whoever completes a checkpoint from what is
            # on the disk knows by this event which shards do not count.
            self._distrusted[step] = until
            pending = self._pending[step] = pending.of_epochs_after(until)
            message = f"what workers have saved of step {step} up to mesh epoch {until} does not count: {why}"
            told = [Record("uncompared", {"step": step, BALLOT: self.ballot(until), "message": message})]
        return [*told, *(self._complete(step, pending) if pending.num_pages >= self._spec.num_pages else [])]

    def _never_compared(self, step: int, pending: _Pending) -> set[int]:
        """The mesh epochs of shards that will never count, as replicas were compared in a later mesh epoch only.

        A worker whose replica was wrong may have been lost before that, or may not be a replica of the pages any more.
        """
        agreed = self._agreed.get(step, set())
        newest = max(agreed, default=0)
        return {shard.ballot.epoch for shard in pending.shards.values() if shard.ballot.epoch < newest} - agreed

    def _is_last(self, step: int) -> bool:
        """True for the version with which the run stops. All write it again in each mesh epoch that follows."""
        return self._last is not None and step == self._last.version

    def _complete(self, step: int, pending: _Pending) -> list[Action]:
        """Have the manifest written, if all shards that count, or those of one mesh epoch, contain all pages."""
        agreed = self._agreed.get(step, set())
        counting = [it for it in pending.shards.values() if not self._compares or it.ballot.epoch in agreed]
        for shards in sets_of_shards(counting) if counting else ():
            try:
                manifest = self._manifest_of(step, shards)
            except CheckpointError:
                continue  # pages are missing, or mesh epochs have cut them differently; more shards may come
            pending.is_queued = True
            return [WriteManifest(manifest)]
        return []

    def _manifest_of(self, step: int, shards: tuple[ShardInfo, ...]) -> Manifest:
        spec = self._spec
        return Manifest(
            spec.run,
            step,
            max(shard.ballot for shard in shards),
            max(self._committed, step),
            dict(spec.fingerprint),
            dict(spec.layout),
            spec.kinds,
            shards,
            self._validation,
        )

    def _abandon(self, step: int, why: str, wrong_until: int | None = None) -> list[Action]:
        """Give up the checkpoint of a step, unless its manifest is being written already: then it was complete.

        Args:
            wrong_until: the mesh epoch up to which its shards may be wrong; None if they are right.
        """
        if step in self._pending and self._pending[step].is_queued:
            return []
        self._failed[step] = why
        fields: dict[str, object] = {"step": step, "message": f"no checkpoint of step {step}: {why}"}
        if wrong_until is not None:
            self._distrusted[step] = wrong_until
            # The shards stay until they may be removed. If this controller ends before that, whoever completes a
            # checkpoint from what is on the disk knows by this that they do not count.
            fields[BALLOT] = self.ballot(wrong_until)
        pending = self._pending.pop(step, None)
        if pending is None and step <= self._newest:
            return []
        # A whole set of good shards may still be completed by a controller that resumes the run.
        if pending is not None and (pending.num_pages < self._spec.num_pages or step in self._distrusted):
            self._useless.setdefault(step, []).extend(pending.shards)
        return [Record("checkpoint_lost", fields)]

    def _came_for_nothing(self, message: ShardWritten) -> list[Action]:
        """A shard was written of a checkpoint that is given up."""
        if not message.error:
            self._useless.setdefault(message.step, []).append(message.name)
        return self._removals()

    def _removals(self) -> list[Action]:
        """The removals of shards of checkpoints that were given up, which would take the room of the next one.

        Only shards that were reported, so that nobody is writing them, and only of steps before the last committed one:
        if this controller stands still for long, its workers write their state at that version or a later one.
        """
        due = [step for step in self._useless if step < self._committed]
        return [RemoveShards(step, tuple(self._useless.pop(step))) for step in sorted(due)]
