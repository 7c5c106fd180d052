"""What a run says of its mesh epochs: one event line for each, and one for what it cost."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field

from elaswave_spmd.controller.supervision import Sign
from elaswave_spmd.mesh import Mesh
from elaswave_spmd.recovery.actions import EpochBegun
from elaswave_spmd.recovery.movement import least_elements, moved_elements
from elaswave_spmd.run_dir import MetricsLine, RunObserver
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
                units_redone=epoch.units_redone,
                stages=mesh.stages,
                layer_cuts=epoch.placement.layer_cuts,
                unit_counts=epoch.placement.unit_counts,
                copies=epoch.learners,
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
        holders = epoch.placement.holders
        if epoch.target is None or holders is None:
            return 0, 0
        least = least_elements(holders, epoch.target, self._layout)
        return self._element_bytes * moved_elements(holders, self._layout), self._element_bytes * least

    def committed(self, line: MetricsLine) -> None:
        """A step has committed; the first one after an event tells what the event cost."""
        epoch, self._disturbed = self._disturbed, None
        if epoch is None:
            self._usual.append(line.seconds)
        elif self._usual:
            usual = statistics.median(self._usual)
            placement, workers = epoch.placement, len(epoch.placement.mesh.members)
            before = workers + sum({"join": -1, "link": 0}.get(kind, 1) for kind in epoch.kinds.values())
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
    words = {"fail": "lost", "leave": "left", "join": "joined", "link": "linked again"}
    what = words.get(kind, "lies where it belongs")
    if epoch.why and not ranks:
        who, what = "placement", "is being changed, state is copied" if epoch.learners else "changed"
    why = f" ({'; '.join(reasons)})" if reasons else ""
    again = f", {epoch.units_redone} units again" if epoch.units_redone else ""
    return f"{who} {what}{why}: {mesh.shape.name}, mesh epoch {mesh.epoch}, after step {epoch.version}{again}"
