"""What the controller's launcher and the agents on other machines say to each other. Plain data, never pickle."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from elaswave_spmd import errors


class AgentMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; encodes as a compact array [kind, fields ...]."""


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way to another machine.

    Args:
        kind: name of its class, one of `errors`; empty for any other exception.
        what: what happened; the whole text of an exception that is not a user's error.
        fields: the other arguments of the user's error.
    """

    kind: str
    what: str
    fields: dict[str, str] = {}

    @classmethod
    def of(cls, error: BaseException, report: str = "") -> Problem:
        """The error in words; `report` is what to say of one that is not the user's."""
        if not isinstance(error, errors.UserError):
            return cls("", report or str(error))
        fields = error.fields()
        return cls(type(error).__name__, fields.pop("what"), fields)

    def error(self, source: str) -> errors.UserError | errors.RunError:
        """The error again, to be raised here; `source` says whose it is."""
        if not self.kind:
            return errors.RunError(f"{source} failed:\n{self.what}")
        kinds = {kind.__name__: kind for kind in errors.UserError.__subclasses__()}
        where = f"{self.fields['where']}, {source}" if "where" in self.fields else source
        return kinds.get(self.kind, errors.UserError)(self.what, **(self.fields | {"where": where}))


# ---- agent to controller ---------------------------------------------------------------------------------------------


class Hello(AgentMessage, frozen=True):
    """An agent listens at `address` and has places for `capacity` workers on machine `host`."""

    format: int  # `FORMAT_VERSION` of the agent; first, so that it can be read whatever follows
    address: str
    host: str
    capacity: int
    torch: str  # version: other versions may give other bits


class Prepared(AgentMessage, frozen=True):
    """The data is there and equal, workers can be spawned."""


class WorkerExited(AgentMessage, frozen=True):
    """A worker's process has ended and is reaped, as in `fork_server.Exited`."""

    rank: int
    pid: int
    code: int | None
    signal: int | None


class Looked(AgentMessage, frozen=True):
    """Answer to Look: every worker that had ended by then has been told of."""


class AgentFailed(AgentMessage, frozen=True):
    """The agent ends; its workers have ended."""

    problem: Problem


# ---- controller to agent ---------------------------------------------------------------------------------------------


class Refused(AgentMessage, frozen=True):
    """This agent is not taken."""

    problem: Problem


class Prepare(AgentMessage, frozen=True):
    """Make the data that `settings` ask for, equal to the controller's `data`, and the process that forks workers."""

    num_workers: int  # of the whole run
    settings: dict[str, Any]
    data: dict[str, Any]


class Spawn(AgentMessage, frozen=True):
    """Start worker `rank`. The agent puts what is of its own machine into `spec`: data, directory, host."""

    rank: int
    spec: dict[str, Any]


class Signal(AgentMessage, frozen=True):
    """Send a signal to worker `rank`, if it is still there."""

    rank: int
    number: int


class Look(AgentMessage, frozen=True):
    """Tell of all workers that have ended, then answer Looked."""


class Stop(AgentMessage, frozen=True):
    """End all workers (SIGTERM, after `grace_s` seconds SIGKILL), tell of them, and end."""

    grace_s: float


AnyAgentMessage: TypeAlias = (
    Hello | Prepared | WorkerExited | Looked | AgentFailed | Refused | Prepare | Spawn | Signal | Look | Stop
)


def encode(message: AgentMessage) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes | memoryview) -> AnyAgentMessage:
    """The inverse of `encode`.

    Raises:
        msgspec.ValidationError: not one of our messages.
    """
    return msgspec.msgpack.decode(data, type=AnyAgentMessage)
