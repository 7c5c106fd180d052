"""The actions that the controller decides on: those of the protocol (recovery/actions.py), and the ones below.

`Controller.execute` carries them out in the order of one queue. All are plain values, so that a decision can be tested
without a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from elaswave_spmd.controller.outcomes import Outcome
from elaswave_spmd.controller.planning import HintRequest, PlanRequest
from elaswave_spmd.errors import UserError
from elaswave_spmd.recovery import actions as protocol_actions
from elaswave_spmd.run_dir.manifest import Manifest
from elaswave_spmd.runtime.transport.mailbox import Request


@dataclass(frozen=True)
class Spawn:
    """Start these workers. Each sends Ready when it can be given work.

    Args:
        newcomers: False for the workers of the first mesh; True for all that are started later, or in place of them.
        host: for newcomers, the machine on which they are to run; None for the one with the most room.
    """

    ranks: tuple[int, ...]
    newcomers: bool = True
    host: str | None = None


@dataclass(frozen=True)
class AdmitAgent:
    """Let an agent that has asked to join prepare for the run: it gets the data, and reports when it is ready."""

    peer: int


@dataclass(frozen=True)
class DoubtAgent:
    """Workers of an agent fell silent, so its machine may be cut off: start no worker there for now.

    The doubt ends when the agent has reported the ends of these workers.
    """

    peer: int
    ranks: frozenset[int]


@dataclass(frozen=True)
class GiveUpAgent:
    """Treat an agent and all of its workers as lost, though its connection still exists.

    When the agent hears of it, it joins the run again as a new agent.
    """

    peer: int
    reason: str


@dataclass(frozen=True)
class DrainAgent:
    """Tell an agent that its workers are about to leave, and start no more workers there.

    Args:
        within_s: seconds after which the agent ends, even if its workers have not left; None if it waits for them.
        says: the text that the agent prints.
    """

    peer: int
    within_s: float | None
    says: str


@dataclass(frozen=True)
class LetAgentGo:
    """Tell an agent to end, as its workers have left.

    Args:
        says: the text that the agent prints.
        lost: True if some of its workers were lost before they had left; the agent's exit code says so.
    """

    peer: int
    says: str
    lost: bool = False


@dataclass(frozen=True)
class RefuseAgent:
    """Tell an agent that has asked to join to end, with this error."""

    peer: int
    error: UserError


AgentOrder: TypeAlias = AdmitAgent | RefuseAgent | DrainAgent | LetAgentGo | DoubtAgent | GiveUpAgent
"""A decision about one agent. It has no effect if the agent has gone meanwhile."""


@dataclass(frozen=True)
class UsePlaces:
    """Start workers on agents that have joined, as far as the run may grow (`Machines.use_places`).

    It is an action and not decided at once, so that the starts that are queued before it are counted.
    """


@dataclass(frozen=True)
class Connect:
    """Open the link to a worker that is ready, and watch for its death if it holds a mutex for that."""

    rank: int
    address: str
    holds_mutex: bool


@dataclass(frozen=True)
class AdoptWorker:
    """Open a link to a worker of the previous controller, and tell it that this one has taken that controller's place.

    The worker answers with Adopted. A worker that was not a member yet has no known address, and is killed.
    """

    rank: int


@dataclass(frozen=True)
class FindShards:
    """Look for shards on the disk whose reports may have been lost with the previous controller."""


@dataclass(frozen=True)
class Settled:
    """The adoption is complete: a later controller need not repeat anything for the previous one."""


@dataclass(frozen=True)
class CameBack:
    """The controller has adopted its workers, and training goes on. For the run log.

    Args:
        workers: the number of members of the newest mesh.
        steps: the number of steps that the previous controller had not written down. They are committed next.
        seconds: how long there was no controller.
    """

    workers: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class RecordLostWorker:
    """A member of the mesh was found to be lost at time `at`. For the run log only; other actions remove the member."""

    rank: int
    at: float


@dataclass(frozen=True)
class Kill:
    """Kill a worker's process (SIGKILL, which also ends a process that is stopped)."""

    rank: int


@dataclass(frozen=True)
class EvictWorker:
    """Treat a member as lost although its process lives, because what it computes is wrong."""

    rank: int
    reason: str


@dataclass(frozen=True)
class LinkFailed:
    """Two workers live, but cannot reach each other even after their link was opened again: one of them has to go.

    Args:
        ends: the two workers.
        rank: the worker that goes if both are on one machine. If not, one of the machines goes (Machines.link_failed).
        reason: what happened to the link, in words.
    """

    ends: frozenset[int]
    rank: int
    reason: str


@dataclass(frozen=True)
class GoBack:
    """The run begins again at a checkpoint, since what was committed after it may be wrong.

    Args:
        reason: why the run goes back, or ends, in words.
        newest: the last version that is not in doubt; the checkpoint is of this one or an older one.
        without: workers that compute wrongly, and are left out.
        is_undecided: True if nothing shows which worker is wrong, or whether others are wrong, too.
        ends: True if the run ends in place of that. Whoever resumes it goes back to that checkpoint.
    """

    reason: str
    newest: int
    without: tuple[int, ...] = ()
    is_undecided: bool = False
    ends: bool = False


@dataclass(frozen=True)
class Record:
    """Write an event to the run's events.jsonl.

    Args:
        kind: the name of the event.
        fields: its fields, JSON-ready; `message` is the text for the display.
    """

    kind: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class WriteCosts:
    """Write measured costs into the run's directory; `text`: JSON of a CostModel."""

    text: str


@dataclass(frozen=True)
class PlanChange:
    """Plan a change of the mesh, in the background; Planned follows."""

    request: PlanRequest


@dataclass(frozen=True)
class PlanFrequencies:
    """Make frequency hints, in the background; Hinted follows."""

    request: HintRequest


@dataclass(frozen=True)
class WriteManifest:
    """Write the manifest of a checkpoint, whose shards are all on the disk, and remove old checkpoints.

    One that the run may have to go back to stays (`Controller._trusted`).
    """

    manifest: Manifest


@dataclass(frozen=True)
class RemoveShards:
    """Remove shards of a checkpoint that was given up, in the background. Nobody is writing them.

    Args:
        step: of the checkpoint.
        names: of the shards' files.
    """

    step: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class FindCheckpoint:
    """Finish the manifest that is being written, and look for the newest good checkpoint; CheckpointFound follows.

    Args:
        newest: checkpoints of later steps are ignored; None for all.
    """

    newest: int | None = None


@dataclass(frozen=True)
class ReportExits:
    """Report all processes that have ended until now, as WorkerEnded events; ExitsReported follows them."""


@dataclass(frozen=True)
class Reply:
    """Answer an administrator's request; the answer is JSON-ready."""

    request: Request
    answer: Mapping[str, object]


@dataclass(frozen=True)
class End:
    """The run ends with this outcome. Actions that are still queued are dropped."""

    outcome: Outcome


Action: TypeAlias = (
    protocol_actions.ProtocolAction
    | Spawn
    | AgentOrder
    | UsePlaces
    | Connect
    | AdoptWorker
    | CameBack
    | FindShards
    | Settled
    | RecordLostWorker
    | Kill
    | EvictWorker
    | LinkFailed
    | GoBack
    | Record
    | WriteCosts
    | PlanChange
    | PlanFrequencies
    | WriteManifest
    | RemoveShards
    | FindCheckpoint
    | ReportExits
    | Reply
    | End
)
