"""The actions that the controller decides on: the protocol's (recovery/actions.py), and the ones below.

They are carried out by `Controller.execute`, in the order of one queue. All are plain values, so that a decision can be
tested without a process, and replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from elaswave_spmd.controller.outcomes import Outcome
from elaswave_spmd.controller.planning import PlanRequest
from elaswave_spmd.errors import UserError
from elaswave_spmd.recovery import actions as protocol_actions
from elaswave_spmd.run_dir.manifest import Manifest
from elaswave_spmd.runtime.transport.mailbox import Request


@dataclass(frozen=True)
class Spawn:
    """Start these workers. Each sends Ready when it can be given work.

    Args:
        host: of newcomers, the machine that was asked for; None: where there is most room.
    """

    ranks: tuple[int, ...]
    newcomers: bool = True
    host: str | None = None


@dataclass(frozen=True)
class AdmitAgent:
    """Have an agent that has asked to join prepare for the run."""

    peer: int


@dataclass(frozen=True)
class DoubtAgent:
    """These workers of an agent fell silent: none is started there until the agent has reported their ends."""

    peer: int
    ranks: frozenset[int]


@dataclass(frozen=True)
class GiveUpAgent:
    """An agent is lost with all of its workers, though its connection is not: it joins again when it hears of that."""

    peer: int
    reason: str


@dataclass(frozen=True)
class DrainAgent:
    """The workers of an agent are about to leave: none is started there any more, and the agent hears of it.

    Args:
        within_s: seconds after which it ends whatever has become of them; None: it waits.
        says: what it prints.
    """

    peer: int
    within_s: float | None
    says: str


@dataclass(frozen=True)
class LetAgentGo:
    """The workers of an agent have left: it ends, and prints what it `says`.

    Args:
        lost: some were lost before they had left, which the agent's exit code tells.
    """

    peer: int
    says: str
    lost: bool = False


@dataclass(frozen=True)
class RefuseAgent:
    """Have an agent that has asked to join end, with this error."""

    peer: int
    error: UserError


AgentOrder: TypeAlias = AdmitAgent | RefuseAgent | DrainAgent | LetAgentGo | DoubtAgent | GiveUpAgent
"""An order carries out a decision about one agent. It is void if the agent has gone meanwhile."""


@dataclass(frozen=True)
class UsePlaces:
    """Start workers on agents that have come, as far as they are to be used, once what was decided before is done."""


@dataclass(frozen=True)
class Connect:
    """A worker is ready: open the link to it, and watch for its death where it holds a mutex for that."""

    rank: int
    address: str
    holds_mutex: bool


@dataclass(frozen=True)
class AdoptWorker:
    """Open a link to a worker of the controller before, and tell it that this one has taken its place.

    Adopted is its answer. A worker that was no member yet cannot be found, and is ended.
    """

    rank: int


@dataclass(frozen=True)
class FindShards:
    """Look for shards on the disk whose reports a controller of the past may not have lived to count."""


@dataclass(frozen=True)
class Settled:
    """All that died with the controller before is made good: the next one need not know of it."""


@dataclass(frozen=True)
class CameBack:
    """The controller has adopted its workers, and a mesh of so many members goes on. For the run log.

    Args:
        steps: that the controller before had not written down, and follow.
        seconds: for how long there was none.
    """

    workers: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class RecordLostWorker:
    """A member of the mesh was found to be lost at time `at`. For the run log; what follows are other actions."""

    rank: int
    at: float


@dataclass(frozen=True)
class Kill:
    """End a worker's process for certain, even one that is stopped."""

    rank: int


@dataclass(frozen=True)
class EvictWorker:
    """A member is lost to the run though its process lives: what it computes is wrong."""

    rank: int
    reason: str


@dataclass(frozen=True)
class LinkFailed:
    """Two workers live and cannot reach each other, though their link was made again: one of them has to go.

    Args:
        rank: the one that goes, unless they are on two machines.
    """

    ends: frozenset[int]
    rank: int
    reason: str


@dataclass(frozen=True)
class GoBack:
    """The run begins again at a checkpoint, since what was committed after it may be wrong.

    Args:
        reason: in words.
        newest: the last version that is not in doubt.
        without: workers that are wrong, and do not come back.
        is_undecided: nothing shows who is wrong, or who else is.
    """

    reason: str
    newest: int
    without: tuple[int, ...] = ()
    is_undecided: bool = False


@dataclass(frozen=True)
class Record:
    """Write a line into the run's events."""

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
class WriteManifest:
    """Write the manifest of a checkpoint, whose shards are all on the disk, and remove old checkpoints.

    One that the run may have to go back to stays (`Controller._trusted`).
    """

    manifest: Manifest


@dataclass(frozen=True)
class FindCheckpoint:
    """Finish the manifest that is being written, and look for the newest good checkpoint.

    Args:
        newest: of this step or an older one; None: of any.
    """

    newest: int | None = None


@dataclass(frozen=True)
class ReportExits:
    """Report the processes that have ended until now, then ExitsReported."""


@dataclass(frozen=True)
class Reply:
    """Answer an administrator's request; the answer is JSON-ready."""

    request: Request
    answer: Mapping[str, object]


@dataclass(frozen=True)
class End:
    """The run ends in this way. Actions that are still queued are dropped."""

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
    | WriteManifest
    | FindCheckpoint
    | ReportExits
    | Reply
    | End
)
