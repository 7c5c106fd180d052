"""What a run says of its mesh epochs: one event line for each, and one for what it cost."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from elaswave_spmd.conf.schema import GROUP, Settings
from elaswave_spmd.controller.summary import RunRecord
from elaswave_spmd.controller.supervision import Sign
from elaswave_spmd.errors import RunError
from elaswave_spmd.mesh import Mesh
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import EpochBegun
from elaswave_spmd.recovery.messages import AnyMessage, Applied, Damaged, Fingerprints, Heartbeat, Measured, Ready
from elaswave_spmd.recovery.replica_check import Copies, Disagreement
from elaswave_spmd.run_dir import MetricsLine, RunObserver
from elaswave_spmd.runtime.devices.process_group import GroupStore
from elaswave_spmd.sharding.layout import ModelLayout

_UNDISTURBED = 50  # steps whose median is the usual one


@dataclass
class _Recovered:
    """The line `recovered` of an epoch, until all of its members have applied the first step."""

    epoch: EpochBegun
    step: int
    fields: dict[str, object]
    applied: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Seen:
    """A loss: when it was seen, and the last that is known of the worker before."""

    at: float
    sign: Sign | None

    @property
    def detect_ms(self) -> float | None:
        return None if self.sign is None else max(0.0, round(1e3 * (self.at - self.sign.at), 3))

    @property
    def detect_from(self) -> str | None:
        return None if self.sign is None else "death" if self.sign.is_death else "heartbeat"


class EpochEvents:
    """Writes `fail`, `leave`, `join`, `link`, `rebalance` and `recovered` lines.

    Args:
        layout: of the state.
        element_bytes: of all kinds of state together, per element.

    Their fields that end in `_at` are time.monotonic() of this process (CLOCK_MONOTONIC on Linux, the same in all
    processes of a machine): the loss was seen, the first PREPARE was sent, the last STATUS came, the PLACE was sent,
    the next step was committed, the last member had applied it.
    """

    def __init__(self, observer: RunObserver, layout: ModelLayout, element_bytes: int) -> None:
        self._observer, self._layout, self._element_bytes = observer, layout, element_bytes
        self._seen: dict[int, _Seen] = {}  # rank -> its loss, until the epoch without it
        self._usual: deque[float] = deque(maxlen=_UNDISTURBED)
        self._disturbed: EpochBegun | None = None
        self._recovered: _Recovered | None = None
        self._prepared_at = self._answered_at = 0.0

    def lost(self, rank: int, at: float, sign: Sign | None) -> None:
        """A loss was seen at time.monotonic() = `at`; `sign`: the last that is known of the worker."""
        self._seen.setdefault(rank, _Seen(at, sign))

    def newcomer_lost(self, rank: int, mesh: Mesh, reason: str) -> None:
        """A worker was lost before it was a member: the mesh stays as it is."""
        message = f"worker {rank} is lost before it joined ({reason})"
        self._observer.on_event(
            "fail", ranks=[rank], mesh_epoch=mesh.epoch, mesh=mesh.shape.name, reason=reason, message=message
        )

    def preparing(self) -> None:
        """A PREPARE is about to be sent. Of a change that begins again the first one counts."""
        self._prepared_at = self._prepared_at or time.monotonic()

    def answered(self) -> None:
        """A STATUS has come."""
        self._answered_at = time.monotonic()

    def begun(self, epoch: EpochBegun) -> None:
        """The PLACE of an epoch has been sent."""
        mesh, now = epoch.placement.mesh, time.monotonic()
        self._write_recovered(None)
        if epoch.kinds:
            self._disturbed = epoch
        answered, prepared, self._prepared_at = self._answered_at, self._prepared_at, 0.0
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
                copies=epoch.num_copies,
                bytes_moved=moved,
                bytes_bound=bound,
                seen_at=seen_at,
                prepared_at=prepared,
                answered_at=answered,
                placed_at=now,
                message=_text(kind, ranks, reasons, epoch),
            )
        self._seen.clear()

    def _bytes(self, epoch: EpochBegun) -> tuple[int, int]:
        """Bytes of state that are copied because of an epoch, and the least that could be. After its PLACE is sent."""
        if epoch.plan is None:
            return 0, 0
        return self._element_bytes * epoch.plan.moved_elements, self._element_bytes * epoch.plan.least_elements

    def committed(self, line: MetricsLine) -> None:
        """A step has committed; the first one after an event tells what the event cost."""
        epoch, self._disturbed = self._disturbed, None
        if epoch is None:
            self._usual.append(line.seconds)
        elif self._usual:
            usual = statistics.median(self._usual)
            placement, workers = epoch.placement, len(epoch.placement.mesh.members)
            before = workers + sum({"join": -1, "link": 0}.get(kind, 1) for kind in epoch.kinds.values())
            microbatch = (
                usual * before / (placement.num_microbatches * placement.num_stages)
            )  # one micro-batch through one stage
            redo = epoch.microbatches_redone * microbatch / workers
            penalty = 1e3 * (line.seconds - usual - redo)
            fields: dict[str, object] = {
                "step": line.step,
                "mesh_epoch": placement.mesh.epoch,
                "penalty_ms": round(penalty, 3),
                "committed_at": time.monotonic(),
                "message": f"step {line.step} took {line.seconds:.3f} s, {penalty:.0f} ms more than work explains",
            }
            self._recovered = _Recovered(epoch, line.step, fields)

    def applied(self, rank: int, step: int) -> None:
        """A member has applied a step; its commit was told before."""
        waiting = self._recovered
        if waiting is None or step != waiting.step:
            return
        waiting.applied.add(rank)
        if waiting.applied >= set(waiting.epoch.placement.mesh.members):
            self._write_recovered(time.monotonic())

    def _write_recovered(self, all_applied_at: float | None) -> None:
        """Everybody has applied the step, or (None) the next epoch came first."""
        waiting, self._recovered = self._recovered, None
        if waiting is not None:
            self._observer.on_event("recovered", **waiting.fields, all_applied_at=all_applied_at)


def _text(kind: str, ranks: list[int], reasons: list[str], epoch: EpochBegun) -> str:
    mesh = epoch.placement.mesh
    who = f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "state"
    words = {"fail": "lost", "leave": "left", "join": "joined", "link": "linked again"}
    what = words.get(kind, "lies where it belongs")
    if epoch.why and not ranks:
        who, what = "placement", "is being changed, state is copied" if epoch.num_copies else "changed"
    why = f" ({'; '.join(reasons)})" if reasons else ""
    again = f", {epoch.microbatches_redone} micro-batches again" if epoch.microbatches_redone else ""
    return f"{who} {what}{why}: {mesh.shape.name}, mesh epoch {mesh.epoch}, after step {epoch.version}{again}"


# What workers compile: everything before they are ready, and nothing afterwards. The controller's record of it.
class Compilations:
    """Writes the events `compile` and `recompile`, and the record's `compiled`.

    Args:
        record: of the run.
    """

    def __init__(self, observer: RunObserver, record: RunRecord) -> None:
        self._observer, self._compiled = observer, record.compiled
        self._ready: set[int] = set()
        self.got_further_at = 0.0
        """time.monotonic() when a worker that is not ready said last that it had compiled something."""

    def take(self, message: AnyMessage) -> None:
        """Looks at what a worker says; other messages than those that tell of programs are ignored."""
        match message:
            case Ready(rank=rank, compiled=programs):
                self._ready.add(rank)
                if programs:
                    self._compiled[rank] = [programs, 0]
                    text = f"worker {rank} is ready, with {programs} programs"
                    self._observer.on_event("compile", rank=rank, programs=programs, message=text)
            case Measured(rank=rank, step=step, compiled=programs):
                known = self._compiled.setdefault(rank, [0, 0]) if programs else [0, 0]
                if (more := programs - sum(known)) > 0:
                    known[1] += more
                    text = f"worker {rank} compiled {more} programs in step {step}: training waited for them"
                    self._observer.on_event("recompile", rank=rank, step=step, programs=more, message=text)
            case Heartbeat(waiting=False) if message.rank not in self._ready:
                self.got_further_at = time.monotonic()


# Damaged memory, found by workers in their own copies or by comparing all copies; and devices that failed.
class CopyWatch:
    """Writes the events `corruption` and `device`, and says what follows.

    Args:
        distrust: called with (rank, reason): a worker whose copies a majority contradicts.
    """

    def __init__(self, observer: RunObserver, distrust: Callable[[int, str], None]) -> None:
        self._observer, self._distrust = observer, distrust
        self._copies = Copies()

    def damaged(self, message: Damaged) -> None:
        """A worker's copies are not what it wrote: located; others take over and it learns them again."""
        if message.reason:
            self._recovered(message)
            return
        runs = ", ".join(f"layer {layer} pages [{first}, {stop})" for layer, first, stop in message.runs[:4])
        self._observer.on_event(
            "corruption",
            ranks=[message.rank],
            step=message.step,
            runs=[list(run) for run in message.runs],
            message=f"worker {message.rank}: {runs} changed after they were written, before step {message.step}; "
            "other copies take their place",
        )

    def _recovered(self, message: Damaged) -> None:
        """A worker's device has failed and been brought back."""
        lost = f"; {len(message.runs)} runs of state are learned again" if message.runs else ""
        self._observer.on_event(
            "device",
            ranks=[message.rank],
            step=message.step,
            reason=message.reason,
            reloads=bool(message.runs),
            message=f"worker {message.rank}: its device failed in step {message.step} and was brought back "
            f"({message.reason}); the step is done again{lost}",
        )

    def fingerprints(self, message: Fingerprints) -> None:
        """Compares copies.

        Raises:
            RunError: two copies differ, and nothing says which of them is right.
        """
        for found in self._copies.add(message):
            self._disagree(found)

    def _disagree(self, found: Disagreement) -> None:
        layer, first, stop = found.run
        what = f"layer {layer} pages [{first}, {stop}) of workers {list(found.ranks)} differ after step {found.step}"
        if not found.minority:
            raise RunError(f"{what}, and each is what its worker wrote: nothing says which is right")
        self._observer.on_event("corruption", ranks=list(found.minority), step=found.step, message=what)
        for rank in found.minority:
            self._distrust(rank, "its copies of state differ from those of all others")


# Groups of stages as the controller has them: the store where their members meet, and what is told of them.
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
        grouped = applied.extension == m.GROUPED
        if grouped != self._serves and applied.epoch > self._told:
            self._serves = grouped
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


# Steps whose gradient was not finite: they change nothing, and too many in a row end a run.
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
