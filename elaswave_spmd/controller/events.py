"""The events that the controller takes, one at a time, from `ControllerIO.next_event`: plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from elaswave_spmd.controller.planning import Hinted, Planned
from elaswave_spmd.recovery.messages import AnyMessage, Heartbeat
from elaswave_spmd.recovery.reconfiguration import Goal
from elaswave_spmd.run_dir.manifest import Manifest
from elaswave_spmd.runtime.processes.agents import AgentBack, AgentCame, AgentGone, AgentNotice, AgentReady
from elaswave_spmd.runtime.processes.fork_server_client import Exited
from elaswave_spmd.runtime.transport.mailbox import Request


@dataclass(frozen=True, slots=True)
class Received:
    """A worker's message, with its payloads.

    Args:
        sender: the worker whose link it came over.
    """

    message: AnyMessage
    payloads: tuple[memoryview, ...]
    sender: int


@dataclass(frozen=True, slots=True)
class BeatsReceived:
    """Heartbeats that agents have sent on, in the order in which they came."""

    beats: tuple[Heartbeat, ...]


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker's process has ended, or the worker is to be treated as if it had.

    There may be two of these events about one worker: a death watch reports the end at once, and the second event tells
    how the process ended, once it is reaped.

    Args:
        rank: the worker.
        reason: what happened, in words.
        at: the time at which the end was noticed, in seconds of `ControllerIO.now`.
        exited: how the process ended; None if that is not known (yet).
    """

    rank: int
    reason: str
    at: float
    exited: Exited | None = None


@dataclass(frozen=True, slots=True)
class LinkEnded:
    """The controller's link to a worker is closed."""

    peer: int


@dataclass(frozen=True, slots=True)
class ManifestWritten:
    """The manifest of a checkpoint is on the disk, or (`error`) could not be written."""

    manifest: Manifest
    error: str = ""


@dataclass(frozen=True, slots=True)
class OldRemoved:
    """After a new checkpoint was complete, the older ones that are not kept any more were removed.

    Args:
        step: the step of the new checkpoint.
        why_not: why one of the older ones could not be removed; empty if all were.
    """

    step: int
    why_not: str = ""


class SavedState(Protocol):
    """A checkpoint that a run can go on from."""

    @property
    def step(self) -> int: ...

    @property
    def path(self) -> Path: ...


@dataclass(frozen=True, slots=True)
class CheckpointFound:
    """The answer to FindCheckpoint: the newest good checkpoint of the run, if there is one."""

    checkpoint: SavedState | None


@dataclass(frozen=True, slots=True)
class ExitsReported:
    """The answer to ReportExits: every process that had ended by then has had its WorkerEnded before this event."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A process of the run has refused connections or messages.

    Args:
        process: the process, in words.
        counts: reason -> number of refusals since the process began.
    """

    process: str
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class MoveRequested:
    """Micro-batches, layers or workers are to be moved, to the placement that `goal` describes."""

    goal: Goal


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A user or a batch system asks the run to end; `signal`: by which signal, such as SIGTERM."""

    signal: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The next deadline has come; nothing else may have happened.

    Args:
        read_until: all messages that came before this time, in seconds of `ControllerIO.now`, were returned as events
            before. Infinite if none waits. While a backlog is read it stays behind the time at which the tick comes: a
            worker whose answer waits there must not be taken for silent.
    """

    read_until: float = math.inf


Event: TypeAlias = (
    Received
    | BeatsReceived
    | WorkerEnded
    | LinkEnded
    | Request
    | ManifestWritten
    | OldRemoved
    | CheckpointFound
    | ExitsReported
    | Planned
    | Hinted
    | MoveRequested
    | Rejected
    | StopRequested
    | AgentCame
    | AgentBack
    | AgentReady
    | AgentGone
    | AgentNotice
    | Tick
)
