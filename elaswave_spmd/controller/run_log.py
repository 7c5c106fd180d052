"""The log of a run: metrics, events, summary and result. It only listens; nothing is decided here.

The controller gives `RunLog` every event that it takes and every action that it carries out. `RunLog` passes each to
the parts that it concerns: metrics and the result, mesh epochs and their cost, compiled programs, damaged replicas,
process groups of stages, steps without an update.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from elaswave_spmd.controller.actions import Action, CameBack, Record, WriteCosts
from elaswave_spmd.controller.backward_trial import SPLIT_BACKWARD
from elaswave_spmd.controller.events import BeatsReceived, Event, Received, Rejected
from elaswave_spmd.controller.model_checks import MODEL_CHECK
from elaswave_spmd.controller.rejections import RejectionLog
from elaswave_spmd.controller.resume import ResumePoint, model_check_of, run_info
from elaswave_spmd.controller.summary import RunRecord, make_summary, validation_fields
from elaswave_spmd.controller.supervision import Sign
from elaswave_spmd.controller.validations import Validations
from elaswave_spmd.errors import FilesError
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.mesh.mesh import named_workers
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import Broadcast, Committed, EpochBegun, RemoveMember, ValidationDone
from elaswave_spmd.recovery.messages import Applied, Damaged, Measured, Ready
from elaswave_spmd.run_dir import MetricsLine, RunObserver, weights_sha256
from elaswave_spmd.run_dir.directory import EVENTS
from elaswave_spmd.run_dir.faults import UNDISTURBED_STEPS
from elaswave_spmd.run_dir.rollback import ROLLBACK
from elaswave_spmd.worker.optimizers import averages

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan


@dataclass
class _Recovered:
    """The `recovered` event of a mesh epoch, kept until all of its members have applied the epoch's first step.

    Args:
        step: that first step.
        fields: the fields of the event, except `all_applied_at`.
        missing: the members that have not applied the step yet.
    """

    step: int
    fields: dict[str, object]
    missing: set[int]


@dataclass(frozen=True)
class _Seen:
    """A loss of a worker, as it was noticed.

    Args:
        at: the time at which it was noticed, in seconds of the controller's clock.
        sign: the worker's death or last sign of life before; None if it is not known.
    """

    at: float
    sign: Sign | None

    @property
    def detect_ms(self) -> float | None:
        """Milliseconds from the last sign of the worker until the loss was noticed."""
        return None if self.sign is None else max(0.0, round(1e3 * (self.at - self.sign.at), 3))

    @property
    def detect_from(self) -> str | None:
        return None if self.sign is None else "death" if self.sign.is_death else "heartbeat"


class EpochEvents:
    """Writes the events `fail`, `leave`, `join`, `link`, `rebalance` and `recovered`.

    Fields that end in `_at` are times of the controller's clock in seconds (CLOCK_MONOTONIC on Linux, which is the same
    in all processes of a machine). These are the times at which the loss was noticed (seen_at), the first Prepare was
    sent (prepared_at), the last StepReport arrived (answered_at), the Reconfigure was sent (placed_at), the next step
    was committed (committed_at), and the last member had applied it (all_applied_at).

    Args:
        observer: writes the events.
        element_bytes: bytes of all kinds of state together, per element.
    """

    def __init__(self, observer: RunObserver, element_bytes: int) -> None:
        self._observer = observer
        self._element_bytes = element_bytes
        self._seen: dict[int, _Seen] = {}  # rank -> its loss, until the epoch without it
        self._usual: deque[float] = deque(maxlen=UNDISTURBED_STEPS)
        self._disturbed: EpochBegun | None = None
        self._recovered: _Recovered | None = None
        self._prepared_at = 0.0
        self._answered_at = 0.0

    def first_mesh(self, planned: Mesh, first: m.Reconfigure) -> None:
        """The Reconfigure of the first mesh has been sent. Writes a `begin` event if its members are not as planned."""
        if first.stages != planned.stages:
            tp, fsdp = planned.shape.axis_size("tp"), planned.shape.axis_size("fsdp")
            mesh = MeshShape.of_stages(map(len, first.stages), tp=tp, fsdp=fsdp).name
            text = f"training begins on {mesh}, {named_workers([r for s in first.stages for r in s])}"
            self._observer.on_event(
                "begin",
                mesh=mesh,
                stages=first.stages,
                layer_cuts=first.layer_cuts,
                microbatch_counts=first.microbatch_counts,
                message=f"{text}: others were lost while workers started",
            )

    def lost(self, rank: int, at: float, sign: Sign | None) -> None:
        """The loss of a member was noticed, at time `at`. Args as in `_Seen`."""
        self._seen.setdefault(rank, _Seen(at, sign))

    def preparing(self, now: float) -> None:
        """A Prepare has been sent. If a change begins again, the time of its first Prepare counts."""
        self._prepared_at = self._prepared_at or now

    def answered(self, now: float) -> None:
        """A StepReport has arrived."""
        self._answered_at = now

    def begun(self, epoch: EpochBegun, now: float) -> None:
        """The Reconfigure of an epoch has been sent."""
        mesh = epoch.placement.mesh
        self._write_recovered(None)
        if epoch.kinds:
            self._disturbed = epoch
        answered, prepared = self._answered_at, self._prepared_at
        self._prepared_at = 0.0
        moved, bound = self._bytes(epoch)
        for kind in sorted(set(epoch.kinds.values())) or ["rebalance"]:
            ranks = sorted(rank for rank, k in epoch.kinds.items() if k == kind)
            seen = [loss for rank, loss in self._seen.items() if rank in ranks]
            seen_at = min((loss.at for loss in seen), default=None)
            latest = max(seen, key=lambda loss: loss.detect_ms or 0.0, default=None)
            reasons = sorted({epoch.reasons[rank] for rank in ranks if rank in epoch.reasons})
            reasons = reasons or [epoch.why] * bool(epoch.why)
            self._observer.on_event(
                kind,
                ranks=ranks,
                mesh_epoch=mesh.epoch,
                mesh=mesh.shape.name,
                reason="; ".join(reasons),
                after_step=epoch.version,
                detect_ms=latest.detect_ms if latest else None,
                detect_from=latest.detect_from if latest else None,
                edit_ms=None if seen_at is None else round(1e3 * (now - seen_at), 3),
                microbatches_redone=epoch.microbatches_redone,
                stages=mesh.stages,
                layer_cuts=epoch.placement.layer_cuts,
                microbatch_counts=epoch.placement.microbatch_counts,
                **({"phase": "run"} if kind == "fail" else {}),
                copies=epoch.num_copies,
                bytes_moved=moved,
                bytes_bound=bound,
                seen_at=seen_at,
                prepared_at=prepared,
                answered_at=answered,
                placed_at=now,
                message=_text(kind, ranks, reasons, epoch),
            )
        self._seen.clear()  # losses that are noticed from now on belong to the next mesh epoch

    def _bytes(self, epoch: EpochBegun) -> tuple[int, int]:
        """The bytes of state that are copied because of a mesh epoch, and the fewest that any reshard plan could copy.

        They are counted after the Reconfigure was sent, so that no worker waits for this.
        """
        if epoch.plan is None:
            return 0, 0
        return epoch.plan.moved_bytes(self._element_bytes), epoch.plan.least_bytes(self._element_bytes)

    def committed(self, line: MetricsLine, now: float) -> None:
        """A step is committed. The first step after a change of members shows what the change cost: `penalty_ms`.

        The penalty is the time of this step, less the usual time of a step, less the time for the micro-batches that
        are computed again.
        """
        epoch, self._disturbed = self._disturbed, None
        if epoch is None:
            self._usual.append(line.seconds)
        elif self._usual:
            usual = statistics.median(self._usual)
            placement, workers = epoch.placement, len(epoch.placement.mesh.members)
            # The number of members before the change: one more for each that was lost or has left, one less for each
            # that has joined.
            before = workers + sum({"join": -1, "link": 0}.get(kind, 1) for kind in epoch.kinds.values())
            # Seconds that one micro-batch takes on one stage, if all workers are busy all the time.
            microbatch = usual * before / (placement.num_microbatches * placement.num_stages)
            redo = epoch.microbatches_redone * microbatch / workers
            penalty = 1e3 * (line.seconds - usual - redo)
            more = f"{penalty:.0f} ms more" if penalty >= 0.5 else "no more"
            fields: dict[str, object] = {
                "step": line.step,
                "mesh_epoch": placement.mesh.epoch,
                "penalty_ms": round(penalty, 3),
                "committed_at": now,
                "message": f"step {line.step} took {line.seconds:.3f} s, {more} than work explains",
            }
            self._recovered = _Recovered(line.step, fields, set(placement.mesh.members))

    def applied(self, rank: int, step: int, now: float) -> None:
        """A member has applied a step, which is committed."""
        waiting = self._recovered
        if waiting is None or step != waiting.step:
            return
        waiting.missing.discard(rank)
        if not waiting.missing:
            self._write_recovered(now)

    def _write_recovered(self, all_applied_at: float | None) -> None:
        """Write the `recovered` event that is waiting, if there is one.

        Args:
            all_applied_at: when the last member had applied the step; None if the next mesh epoch came before that.
        """
        waiting, self._recovered = self._recovered, None
        if waiting is not None:
            self._observer.on_event("recovered", **waiting.fields, all_applied_at=all_applied_at)


def _text(kind: str, ranks: list[int], reasons: list[str], epoch: EpochBegun) -> str:
    mesh = epoch.placement.mesh
    who = named_workers(ranks) if ranks else "state"
    words = {"fail": "lost", "leave": "left", "join": "joined", "link": "linked again"}
    what = words.get(kind, "lies where it belongs")
    if epoch.why and not ranks:
        who, what = "placement", "is being changed, state is copied" if epoch.num_copies else "changed"
    why = f" ({'; '.join(reasons)})" if reasons else ""
    again = f", {epoch.microbatches_redone} micro-batches again" if epoch.microbatches_redone else ""
    return f"{who} {what}{why}: {mesh.shape.name}, mesh epoch {mesh.epoch}, after step {epoch.version}{again}"


class CompilationLog:
    """Writes the events `compile` and `recompile`, and the record's `compiled`.

    Workers compile all programs before they are ready. Training has to wait for any that they compile later.
    """

    def __init__(self, observer: RunObserver, record: RunRecord) -> None:
        self._observer = observer
        self._compiled = record.compiled

    def ready(self, message: Ready) -> None:
        """A worker is ready."""
        if message.compiled:
            self._compiled[message.rank] = [message.compiled, 0]
            text = f"worker {message.rank} is ready, with {message.compiled} programs"
            self._observer.on_event("compile", rank=message.rank, programs=message.compiled, message=text)

    def measured(self, message: Measured) -> None:
        """A worker reports its times of a step, and how many programs it has compiled so far."""
        rank, step = message.rank, message.step
        known = self._compiled.setdefault(rank, [0, 0]) if message.compiled else [0, 0]
        if (more := message.compiled - sum(known)) > 0:
            known[1] += more
            text = f"worker {rank} compiled {more} programs in step {step}: training waited for them"
            self._observer.on_event("recompile", rank=rank, step=step, programs=more, message=text)


class DamageLog:
    """Writes the events `corruption` (a worker found that its replica of state has changed in memory) and `device` (a
    device failed and was reset)."""

    def __init__(self, observer: RunObserver) -> None:
        self._observer = observer

    def damaged(self, message: Damaged) -> None:
        """A worker's replica is not what it had written, or (if there is a reason) its device failed."""
        if message.reason:
            self._device(message)
            return
        first_few = ", ".join(
            f"layer {layer} pages [{first}, {stop})" for layer, first, stop in message.page_ranges[:4]
        )
        self._observer.on_event(
            "corruption",
            ranks=[message.rank],
            step=message.step,
            page_ranges=[list(page_range) for page_range in message.page_ranges],
            message=f"worker {message.rank}: {first_few} changed after they were written, before step {message.step}; "
            "other copies take their place",
        )

    def _device(self, message: Damaged) -> None:
        lost = f"; {len(message.page_ranges)} page ranges of state are sent to it again" if message.page_ranges else ""
        self._observer.on_event(
            "device",
            ranks=[message.rank],
            step=message.step,
            reason=message.reason,
            reloads=bool(message.page_ranges),
            message=f"worker {message.rank}: its device failed in step {message.step} and was brought back "
            f"({message.reason}); the step is done again{lost}",
        )


class GroupLog:
    """Writes `group` events: whether a step is exchanged through process groups or through links.

    An event says that from its step on parameters are published through groups, and partial sums and reduced gradients
    from the step after it on; or that everything goes through links again, in a new mesh epoch or because a group has
    failed. Only the first failure of each mesh epoch is written. Without process groups nothing is written.
    """

    def __init__(self, observer: RunObserver) -> None:
        self._observer = observer
        self._serves = False
        self._failed_in = -1  # the newest mesh epoch in which a group has failed

    def lost(self, message: m.GroupLost, version: int) -> None:
        """A worker reports that the process group of its stage has failed.

        Args:
            version: the step that was committed last.
        """
        if message.epoch > self._failed_in:
            self._failed_in = message.epoch
            self._serves = False
            self._write(version + 1, message.epoch, f"worker {message.sender}: {message.reason}")

    def committed(self, applied: Applied) -> None:
        """A step is committed. Writes an event if it was exchanged in another way than the step before."""
        grouped = applied.extension == m.GROUPED
        if grouped != self._serves and applied.epoch > self._failed_in:
            self._serves = grouped
            self._write(applied.step, applied.epoch, "" if self._serves else "a new mesh epoch has none yet")

    def _write(self, step: int, epoch: int, reason: str) -> None:
        what = (
            f"parameters go by a group, and gradients from step {step + 1} on"
            if self._serves
            else "parameters and gradients go by links"
        )
        message = f"from step {step} on {what}" + (f": {reason}" if reason else "")
        line = {"mesh_epoch": epoch, "serves": self._serves, "reason": reason, "message": message}
        self._observer.on_event("group", step=step, **line)


class PairLog:
    """Writes `pair` events: the pair of two workers (runtime.pairs) has failed, so they use their link for the rest of
    the mesh epoch. Without pairs nothing is written."""

    def __init__(self, observer: RunObserver) -> None:
        self._observer = observer
        self._epoch = -1
        self._lost: set[tuple[int, int]] = set()  # pairs that have failed in this mesh epoch

    def lost(self, message: m.PairLost, version: int) -> None:
        """A worker reports that a pair has failed. The other worker may report it as well; it is written once.

        Args:
            version: as for `GroupLog.lost`.
        """
        if message.epoch > self._epoch:
            self._epoch = message.epoch
            self._lost.clear()
        pair = min(message.sender, message.other), max(message.sender, message.other)
        if message.epoch < self._epoch or pair in self._lost:
            return
        self._lost.add(pair)
        self._observer.on_event(
            "pair",
            step=version + 1,
            mesh_epoch=message.epoch,
            ranks=list(pair),
            reason=message.reason,
            message=f"workers {pair[0]} and {pair[1]} send each other over links: "
            f"worker {message.sender}: {message.reason}",
        )


class RunLog:
    """Listens to a run and logs it. All methods are called by the controller's thread.

    Args:
        observer: the run's directory, display and boards.
        start: the point at which the run begins.
    """

    def __init__(self, plan: RunPlan, observer: RunObserver, start: ResumePoint) -> None:
        self.observer = observer
        self._plan = plan
        self._start = start
        self._num_workers = plan.placement.mesh.num_workers
        self._version = start.step
        self._committed_at = 0.0
        # True once the Reconfigure of the first mesh was sent. Steps are timed from then on.
        self._placed = start.adoption is not None
        # Steps still to come that were done, or under way, while there was no controller: nobody has timed them.
        self._missing = 0
        self._each_s: float | None = None  # seconds to write down for each of them; None to time the step under way
        self._record = RunRecord(plan.description.layout, averages=averages(plan.job.optimizer))
        self.validations = Validations(plan.job, start.validations, start.step)
        """The losses of validations, which the controller adds when it decides about them."""
        kinds_of_state = 1 + len(plan.job.optimizer.state_names)
        self._epochs = EpochEvents(observer, 4 * kinds_of_state)
        self._compilations = CompilationLog(observer, self._record)
        self._damage = DamageLog(observer)
        self._groups = GroupLog(observer)
        self._pairs = PairLog(observer)
        self._rejections = RejectionLog(observer, self._record.rejected)
        self._seconds = array("d")  # that each step of this life of the run took, in order
        # Step that is not committed yet -> the longest time in seconds that any worker waited for its data.
        self._data_seconds: dict[int, float] = {}

    @property
    def has_all_weights(self) -> bool:
        """True once all pages of the trained parameters have arrived."""
        return self._record.has_all_weights

    def started(self) -> None:
        """The run begins. Writes its header, and from where it goes on if it is resumed."""
        plan, observer = self._plan, self.observer
        observer.on_start(run_info(plan, plan.data, observer.run_dir.path, self._start.step))
        if (adoption := self._start.adoption) is not None:
            self._record.generation = adoption.generation
            self._record.model_check = _checked_before(adoption.run_dir)
        self._start.announce(observer, plan.placement.mesh.shape.name)
        if told := plan.without_validation():
            observer.on_event("no_validation", message=told)
        if told := plan.short_of_peak():
            observer.on_event("short_of_peak", message=told)
        if told := plan.without_early_stop():
            observer.on_event("no_early_stop", message=told)
        if told := plan.without_checkpoints():
            observer.on_event("no_checkpoint", message=told)

    def event(self, event: Event, now: float) -> None:
        """The controller is about to decide about an event."""
        self.observer.on_news()
        if isinstance(event, Rejected):
            self._rejections.counted(event.process, event.counts, now)
        if isinstance(event, BeatsReceived):
            for beat in event.beats:
                self._heard(beat, now)
        if not isinstance(event, Received):
            self._rejections.tick(now)
            return
        match event.message:
            case m.Heartbeat() as message:
                self._heard(message, now)
            case m.StepReport():
                self._epochs.answered(now)
            case m.Applied() as message:
                self._epochs.applied(message.rank, message.step, now)
            case m.Ready() as message:
                self._compilations.ready(message)
            case m.Measured() as message:
                self._compilations.measured(message)
                if message.data_seconds is not None and message.step > self._version:
                    longest = self._data_seconds.get(message.step, 0.0)
                    self._data_seconds[message.step] = max(longest, message.data_seconds)
            case m.Damaged() as message:
                self._damage.damaged(message)
            case m.GroupLost() as message:
                self._groups.lost(message, self._version)
            case m.PairLost() as message:
                self._pairs.lost(message, self._version)
            case m.FinalPages() as message:
                self._record.add_pages(message, event.payloads[0])
            case m.Finished() as message:
                self._record.finished[message.rank] = message
                if message.rejected:
                    self._rejections.counted(f"worker {message.rank}", dict(message.rejected), now)

    def _heard(self, beat: m.Heartbeat, now: float) -> None:
        if beat.rejected:
            self._rejections.counted(f"worker {beat.rank}", dict(beat.rejected), now)

    def action(self, action: Action, now: float) -> None:
        """The controller has carried out an action.

        Raises:
            RunError: a step of a resumed run is not what it was before.
            FilesError: the disk is full.
        """
        match action:
            case Broadcast(message=m.Prepare()):
                self._epochs.preparing(now)
            case Broadcast(message=m.ReplicasAgree(step=version)):
                self.observer.faults.add_comparison(version)
            # The first step is timed from the first Reconfigure: before it, workers import and compile.
            case Broadcast(ranks=ranks, message=m.Reconfigure() as first) if not self._placed:
                self._placed = True
                self._num_workers = len(ranks)
                self._epochs.first_mesh(self._plan.placement.mesh, first)
                self._committed_at = now
            case CameBack(workers, steps, seconds):
                self._num_workers = workers
                self._missing = max(1, steps)
                self._committed_at = now - (0.0 if steps else seconds)
                self._each_s = seconds / steps if steps else None
            case Committed(applied):
                self._committed(applied, now)
            case ValidationDone(step):
                loss, metrics = mean_loss(self._plan, action), mean_metrics(self._plan, action)
                self._record.validation_loss, self._record.validation_metrics = loss, metrics
                number = self._plan.job.num_validation_microbatches
                self.observer.on_validation(step, loss, number, metrics)
            case EpochBegun():
                self.observer.faults.checks_dropped += action.checks_dropped
                self.observer.faults.lost_workers["run"] += list(action.kinds.values()).count("fail")
                self._num_workers = action.placement.mesh.num_workers
                self._epochs.begun(action, now)
            case RemoveMember(rank):  # the summary counts the bytes of the final members only
                self._record.finished.pop(rank, None)
            case Record(kind, fields):
                if kind == MODEL_CHECK:
                    facts = {name: value for name, value in fields.items() if name != "message"}
                    self._record.model_check = {"done": True, **facts}
                if kind == SPLIT_BACKWARD:
                    self._record.trials.append({name: fields[name] for name in ("kept", "times")})
                if kind == "corrupt" and fields["tensor"] == "state":
                    self.observer.faults.replicas_wrong += 1
                if kind == "fail":
                    self.observer.faults.lost_workers[str(fields["phase"])] += len(cast(list[int], fields["ranks"]))
                if kind == "restart":
                    self.observer.faults.lost_workers["run"] += len(cast(list[int], fields.get("ranks", [])))
                if kind == ROLLBACK:
                    fields = {**fields, "seconds": round(self._seconds_after(cast(int, fields["step"])), 3)}
                self.observer.on_event(kind, **fields)
            case WriteCosts(text):
                self.observer.on_costs(text)

    def _seconds_after(self, step: int) -> float:
        """The time of the steps after this one that were committed, in seconds: in this life of the run, or before."""
        first = self._start.step
        before = sum(line.seconds for number, line in self._start.lines.items() if step < number <= first)
        return before + sum(self._seconds[max(0, step - first) :])

    def lost(self, rank: int, at: float, sign: Sign | None) -> None:
        """The loss of a member was noticed, at time `at`; `sign` is its death or last sign of life, if known."""
        self._epochs.lost(rank, at, sign)

    def finished(self) -> None:
        """The run is complete. Writes its weights and summary."""
        plan, record = self._plan, self._record
        self._rejections.flush()
        if record.last is None:  # resumed at its last step: nothing was left but to collect the weights
            record.last = self._start.last_line
        elif not record.num_updates:
            # Every step was skipped, in fewer steps than optim.max_skipped, which would have ended the run, or with 0
            # steps there. Without this event the run would look like one that has trained.
            number, last = record.num_steps, record.last.step
            which = f"step {last}, the only one," if number == 1 else f"none of the steps {last - number + 1} to {last}"
            message = f"{which} had {'no' if number == 1 else 'an'} update: the weights are as they were before"
            self.observer.on_event("skip", step=last, steps=number, message=message)
        summary = make_summary(plan, plan.data, record, weights_sha256(record.weights), self.observer.faults)
        summary |= validation_fields(plan, self.validations, self._version, self.observer.run_dir.path)
        self.observer.on_finish(summary, record.weights, record.averages)

    def stopped(self, error: BaseException) -> None:
        """The run ends before its last step, by an error or a request to stop."""
        with suppress(FilesError):  # the disk is full, which may be why it ends
            self._rejections.flush()
        self.observer.on_stop(error)

    def _committed(self, applied: Applied, now: float) -> None:
        job = self._plan.job
        seconds = now - self._committed_at
        is_missing = self._missing > 0
        if is_missing:  # nobody knows how long each of them took
            self._missing -= 1
            seconds = seconds if self._each_s is None else self._each_s
        line = MetricsLine.of(
            step=applied.step,
            mesh_epoch=applied.epoch,
            loss=applied.loss,
            grad_norm=applied.grad_norm,
            lr=job.learning_rate.at(applied.step),
            tokens=job.tokens_per_step,
            seconds=seconds,
            workers=self._num_workers,
            data_seconds=self._data_seconds.pop(applied.step, None),
            weight=applied.weight,
        )
        self._committed_at = now
        self._version = applied.step
        self._groups.committed(applied)
        self._epochs.committed(line, now)
        # The Applied that commits a step also says that its sender has applied it.
        self._epochs.applied(applied.rank, applied.step, now)
        is_usual = not is_missing and not (applied.step > 1 and job.validates_at(applied.step - 1))
        self._seconds.append(line.seconds)
        self._record.add_step(line, after_validation=not is_usual)
        self.observer.on_step(line)
        self._record.num_steps += 1
        self._record.num_updates += applied.updated
        if not applied.updated:
            message = f"step {applied.step}: gradient not finite, no update"
            if applied.weight is not None and not applied.weight > 0:
                message = f"step {applied.step}: the weight of its loss is {applied.weight:g}, no update"
            self.observer.on_event("skip", step=applied.step, message=message)


def _checked_before(run_dir: Path) -> dict[str, object] | None:
    """The summary's facts of a check of the model that an earlier controller has recorded; None if it has not."""
    found = model_check_of(run_dir) if (run_dir / EVENTS).exists() else None
    of_the_line = ("event", "time", "message")
    return {"done": True, **{name: found[name] for name in found.keys() - of_the_line}} if found else None


def mean_loss(plan: RunPlan, done: ValidationDone) -> float:
    """The mean loss of a validation: per token; per sample if samples are not tokens; or by the weights of losses."""
    job = plan.job
    number = job.num_validation_microbatches * job.microbatch_size * job.seq_len
    return _ratio(done.total, number if done.weight is None else done.weight)


def mean_metrics(plan: RunPlan, done: ValidationDone) -> dict[str, float]:
    """The mean of each metric of a validation: per sample, or by its weights."""
    number = plan.job.num_validation_microbatches * plan.job.microbatch_size
    return {name: _ratio(total, number if weight is None else weight) for name, total, weight in done.metrics}


def _ratio(total: float, weight: float) -> float:
    return total / weight if weight else math.nan
