"""The outside of a controller in the simulated cluster: its clock, its processes, its links, its run directory.

The controller, its failure detector and everything that it decides are the product's own. Made up are only what lies
behind `ControllerIO` and the file system.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from elaswave_spmd.conf.schema import (
    LINKS,
    ChaosSettings,
    CheckpointSettings,
    ElasticSettings,
    MeshSettings,
    MirrorSettings,
    RuntimeSettings,
    Settings,
    Timeouts,
    VerifySettings,
)
from elaswave_spmd.controller.actions import Action, AgentOrder
from elaswave_spmd.controller.checkpoints import CheckpointSpec
from elaswave_spmd.controller.events import (
    CheckpointFound,
    Event,
    ExitsReported,
    ManifestWritten,
    OldRemoved,
    Received,
    Rejected,
    StopRequested,
    Tick,
    WorkerEnded,
)
from elaswave_spmd.controller.io import Spawned
from elaswave_spmd.controller.planning import HintRequest, PlanRequest
from elaswave_spmd.controller.resume import Adoption, ResumePoint
from elaswave_spmd.controller.run_log import RunLog
from elaswave_spmd.data import PreparedData
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import Broadcast, EpochBegun, Save, Unrecoverable
from elaswave_spmd.recovery.controller_protocol import Policy
from elaswave_spmd.run_dir import RunObserver
from elaswave_spmd.run_dir.checkpoint_shard import ShardInfo
from elaswave_spmd.run_dir.display import Pace
from elaswave_spmd.run_dir.faults import FaultCount
from elaswave_spmd.run_dir.manifest import Manifest, layout_fingerprint
from elaswave_spmd.runtime.processes.launcher import Machine
from elaswave_spmd.runtime.processes.stop_signals import signal_name
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.worker.checkpoint_orders import CheckpointOrders
from elaswave_spmd.worker.model_layout import ModelDescription
from elaswave_spmd.worker.plan_run import RunPlan, _unmeasured  # pyright: ignore[reportPrivateUsage]
from elaswave_spmd.worker.spec import Job
from elaswave_spmd.worker.state import MASTER
from tests.cluster.kept_checkpoints import RUN_DIR, KeptCheckpoint
from tests.cluster.processes import domain_of

if TYPE_CHECKING:
    from tests.cluster.cluster import SimulatedCluster

TURN_S = 0.01
"""Simulated seconds of a turn."""
HEARTBEAT_TURNS = 5
# The same ladder as for real runs. Workers may be slow, and so may links: what a worker owes is waited for long.
TIMEOUTS = Timeouts(
    heartbeat=TURN_S * HEARTBEAT_TURNS,
    suspect=TURN_S * HEARTBEAT_TURNS * 5,
    status=30.0,
    progress=60.0,
    start=120.0,
    join=60.0,
    leave=100.0,
    controller=10.0,
    shutdown=100.0,
)
ADOPTING = replace(TIMEOUTS, adopt=50.0)
"""The same where a controller that dies is followed by another one."""
LONGEST_TURNS = int(max(TIMEOUTS.start, TIMEOUTS.leave, TIMEOUTS.shutdown) / TURN_S) + 10 * HEARTBEAT_TURNS
"""Longer than any timeout of the controller: a run in which nothing has moved for so many turns never goes on."""
MOST_TURNS = 300_000
"""Many times what the longest run of the tests takes. A run that takes longer goes round in circles."""
STOP = m.encode(m.Stop())


def run_plan(
    job: Job,
    placement: Placement,
    description: ModelDescription,
    policy: Policy,
    elastic: ElasticSettings,
    action: str = "evict",
    *,
    adopts: bool = False,
    collectives: str = LINKS,
) -> RunPlan:
    """The plan of a run in the simulated cluster, with settings that say the same.

    Args:
        adopts: controllers die, and the next one adopts the workers.
        elastic: what is replaced.
        action: what becomes of a worker that is wrong (verify.action).
        collectives: as in `runtime.collectives`.
    """
    scatter = max(policy.mirror_scatter, policy.mirror_count) if policy.mirror_scatter else 0  # settings allow no less
    settings = Settings(
        mesh=MeshSettings(stages=tuple(map(len, placement.mesh.stages))),
        elastic=replace(elastic, min_workers=policy.min_workers),
        mirror=MirrorSettings(count=policy.mirror_count, scatter=scatter),
        verify=VerifySettings(action=action),
        checkpoint=CheckpointSettings(every=job.checkpoint_every),
        timeouts=ADOPTING if adopts else TIMEOUTS,
        runtime=RuntimeSettings(collectives=collectives),
        chaos=ChaosSettings(random=True),  # workers may ask for new ones
    )
    data = PreparedData("made up", "", 0, "", 2, job.seq_len, 1, 1, target="made up")
    return RunPlan(settings, data, job, description, placement, _unmeasured(job, description.layout))


def checkpoint_spec(plan: RunPlan, orders: CheckpointOrders, start: KeptCheckpoint | None) -> CheckpointSpec:
    """The identity that checkpoints of a simulated run have; nobody resumes from them in another environment."""
    layout, kinds = plan.description.layout, (MASTER, *plan.job.optimizer.state_names)
    num_pages = sum(layer.num_state_pages for layer in layout.layers)
    step = start.step if start is not None else 0
    return CheckpointSpec(
        orders.run, orders.incarnation, step, step, {}, layout_fingerprint(layout), kinds, num_pages, orders
    )


class MemoryObserver(RunObserver):
    """Keeps in memory the records that a run writes to files."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.run_dir = cast(Any, SimpleNamespace(path=RUN_DIR))
        self.last = None
        self.pace = Pace(1)
        self.faults = FaultCount()
        self.recent_events = deque(maxlen=1)
        self._cluster = cluster

    @property
    def wants_workers(self) -> bool:
        return False

    def on_start(self, info: object) -> None: ...

    def on_step(self, line: Any) -> None:
        """A step that is computed again, after a restart, has the bits that it had."""
        self.last = self._cluster.lines[line.step] = line
        result = self._cluster.result
        for values, value in ((result.losses, line.loss_hex), (result.norms, line.grad_norm_hex)):
            if line.step <= len(values):
                assert values[line.step - 1] == value, f"step {line.step} has other bits than before the restart"
            else:
                assert line.step == len(values) + 1
                values.append(value)

    def expect(self, lines: object, validations: object, *, first: int, same: bool) -> None: ...

    def on_event(self, kind: str, **fields: object) -> None:
        self._cluster.note("EVENT", kind, fields.get("message", ""))
        self._cluster.noted(kind, fields)

    def on_costs(self, text: str) -> None: ...

    def on_news(self) -> None: ...

    def on_validation(
        self, step: int, loss: float, num_microbatches: int, metrics: Mapping[str, float] | None = None
    ) -> None:
        self._cluster.validated(step, loss, metrics)

    def on_finish(self, summary: object, weights: Any, averages: Any = None) -> None:
        self._cluster.result.weights = cast(dict[str, np.ndarray], weights)
        self._cluster.result.averages = cast("dict[str, np.ndarray]", averages or {})

    def on_stop(self, error: BaseException) -> None: ...


class SimulatedLog(RunLog):
    """The product's log, and a listener for what tests want to see of the controller's decisions."""

    def __init__(
        self,
        plan: RunPlan,
        cluster: SimulatedCluster,
        start: KeptCheckpoint | None,
        adoption: Adoption | None = None,
    ) -> None:
        job, known = plan.job, cluster.result.validation
        tokens = job.num_validation_microbatches * job.microbatch_size * job.seq_len
        validations = {(step, job.num_validation_microbatches): (loss / tokens).hex() for step, loss in known.items()}
        lines = cluster.lines if adoption is not None else {}
        checkpoint = cast(Any, start)
        point = ResumePoint("simulated", 1, checkpoint, lines=lines, validations=validations, adoption=adoption)
        super().__init__(plan, MemoryObserver(cluster), point)
        self._cluster = cluster

    def action(self, action: Action, now: float) -> None:
        super().action(action, now)
        self._cluster.controller_acts()
        match action:
            case Broadcast(ranks, m.Reconfigure(epoch=0)):
                self._cluster.first_mesh_begun(ranks)
            case Broadcast(_, m.Reconfigure(recovery_plan=plan)) if plan:
                self._cluster.reconfigured(plan)
            case EpochBegun():
                self._cluster.epoch_begun()
                self._cluster.result.epochs.append(action)
                self._cluster.note("EPOCH", action)
            case Save() | Unrecoverable():
                self._cluster.cannot_go_on(action)

    def finished(self) -> None:
        super().finished()
        self._cluster.finished()


@dataclass(frozen=True)
class MoveDue:
    """Work is to move between the members. Where to is drawn when the controller takes the event, since only then it is
    certain who is a member."""


class SimulatedIO:
    """The controller's doorway to a simulated cluster. Time goes on, turn by turn, while the controller waits."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self.events: deque[Event | MoveDue] = deque()

    def now(self) -> float:
        return self._cluster.turn * TURN_S

    def next_event(self, until: float) -> Event:
        cluster = self._cluster
        cluster.controller_acts()
        while cluster.is_paused or (not self.events and self.now() < until):
            cluster.take_turn()
        if self.now() >= until:
            return Tick()
        event = self.events.popleft()
        if isinstance(event, MoveDue):
            return cluster.drawn_move()
        if isinstance(event, Received) and not isinstance(event.message, m.Heartbeat | m.FinalPages):
            cluster.check(event.message)
        return event

    def next_ends(self) -> list[WorkerEnded]:
        found: list[WorkerEnded] = []
        while self.events and isinstance(event := self.events[0], WorkerEnded):
            found.append(event)
            self.events.popleft()
        return found

    def stop_requested(self, number: int) -> None:
        self.events.append(StopRequested(signal_name(number)))

    def send(self, rank: int, message: bytes) -> None:
        self._cluster.from_controller(rank, message)
        self._cluster.controller_acts()

    def connect(self, rank: int, address: str, *, holds_mutex: bool) -> str:
        return ""

    def disconnect(self, rank: int) -> None: ...

    def spawn(self, rank: int, host: str | None = None) -> Spawned:
        self._cluster.spawn(rank)
        return Spawned(None, domain_of(self._cluster.first_mesh, rank))

    def machines(self) -> tuple[Machine, ...]:
        return ()

    def order_agent(self, order: AgentOrder) -> None: ...

    def kill(self, rank: int) -> None:
        self._cluster.kill_for_certain(rank)

    def reject(self, reason: str) -> None:
        self._cluster.rejected[reason] += 1

    def last_rejections(self) -> list[Rejected]:
        return []

    def report_exits(self) -> None:
        self.events.append(ExitsReported())

    def faulted_at(self, rank: int) -> float | None:
        return None

    def open_admin(self) -> str:
        return ""

    def journal(self, prepare: m.Prepare, next_rank: int) -> None:
        self._cluster.journal.append((prepare, next_rank))
        self._cluster.controller_acts()

    def adopt(self, rank: int, generation: int) -> None:
        self._cluster.from_controller(rank, m.encode(m.Adopt(generation, "sim://controller")))

    def find_shards(self) -> list[ShardInfo]:
        return []  # such a checkpoint does not become whole

    def settle(self) -> None:
        self._cluster.is_settled = True

    def plan(self, request: PlanRequest | HintRequest) -> None:
        self.events.append(request.answer())

    def write_manifest(self, manifest: Manifest, trusted: int | None, best: object) -> None:
        self._cluster.checkpoints.commit(manifest)
        self.events.append(ManifestWritten(manifest))

    def remove_shards(self, step: int, names: Sequence[str]) -> None: ...

    def find_checkpoint(self, newest: int | None) -> None:
        self.events.append(CheckpointFound(self._cluster.checkpoints.newest_up_to(newest)))

    def finish_writing(self) -> list[ManifestWritten | OldRemoved]:
        return []

    def close(self) -> None: ...
