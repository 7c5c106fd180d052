"""What a run says of its mesh epochs: one event line for each, and one for what it cost."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field

from elaswave_spmd.mesh import Mesh
from elaswave_spmd.observe import MetricsLine, RunObserver
from elaswave_spmd.recovery.effects import EpochBegun

_UNDISTURBED = 50  # steps whose median is the usual one


@dataclass
class _Recovered:
    """The line `recovered` of an epoch, until all of its members have applied the first step."""

    epoch: EpochBegun
    step: int
    fields: dict[str, object]
    applied: set[int] = field(default_factory=set)


class EpochEvents:
    """Writes `fail`, `leave`, `join`, `rebalance` and `recovered` lines.

    Their fields that end in `_at` are time.monotonic() of this process (CLOCK_MONOTONIC on Linux, the same in all
    processes of a machine): the loss was seen, the first PREPARE was sent, the last STATUS came, the PLACE was sent,
    the next step was committed, the last member had applied it.
    """

    def __init__(self, observer: RunObserver) -> None:
        self._observer = observer
        self._seen: dict[int, float] = {}  # rank -> when its loss was seen, until the epoch without it
        self._usual: deque[float] = deque(maxlen=_UNDISTURBED)
        self._disturbed: EpochBegun | None = None
        self._recovered: _Recovered | None = None
        self._prepared_at = self._answered_at = 0.0

    def lost(self, rank: int, at: float) -> None:
        """A loss was seen at time.monotonic() = `at`."""
        self._seen.setdefault(rank, at)

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
        for kind in sorted(set(epoch.kinds.values())) or ["rebalance"]:
            ranks = sorted(rank for rank, k in epoch.kinds.items() if k == kind)
            seen = [at for rank, at in self._seen.items() if rank in ranks]
            reasons = sorted({epoch.reasons[rank] for rank in ranks if rank in epoch.reasons}) or [epoch.why] * bool(
                epoch.why
            )
            self._observer.on_event(
                kind,
                ranks=ranks,
                mesh_epoch=mesh.epoch,
                mesh=mesh.shape.name,
                reason="; ".join(reasons),
                after_step=epoch.version,
                edit_ms=round(1e3 * (now - min(seen)), 3) if seen else None,
                units_redone=epoch.units_redone,
                copies=epoch.learners,
                seen_at=min(seen) if seen else None,
                prepared_at=prepared,
                answered_at=answered,
                placed_at=now,
                message=_text(kind, ranks, reasons, epoch),
            )
        self._seen.clear()

    def committed(self, line: MetricsLine) -> None:
        """A step has committed; the first one after an event tells what the event cost."""
        epoch, self._disturbed = self._disturbed, None
        if epoch is None:
            self._usual.append(line.seconds)
        elif self._usual:
            usual = statistics.median(self._usual)
            placement, workers = epoch.placement, len(epoch.placement.mesh.members)
            before = workers + sum(1 if kind != "join" else -1 for kind in epoch.kinds.values())
            unit = usual * before / (placement.num_units * placement.num_stages)  # one unit through one stage
            redo = epoch.units_redone * unit / workers
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
    what = {"fail": "lost", "leave": "left", "join": "joined"}.get(kind, "lies where it belongs")
    if epoch.why and not ranks:
        who, what = "placement", "is being changed, state is copied" if epoch.learners else "changed"
    why = f" ({'; '.join(reasons)})" if reasons else ""
    again = f", {epoch.units_redone} units again" if epoch.units_redone else ""
    return f"{who} {what}{why}: {mesh.shape.name}, mesh epoch {mesh.epoch}, after step {epoch.version}{again}"
