"""Messages between the controller's launcher and the agents on other machines. Plain data, never pickle."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from elaswave_spmd import errors

UNEXPECTED = "message that no agent sends or gets"
"""The reason under which messages are counted that are not one of these, or come from the wrong side."""

_LONGEST_NAME = 253  # characters. Domain names have no more, and neither have names of nodes of Kubernetes or Ray
_MOST_SHOWN = 64  # characters of a refused name that an error shows


def refused_name(name: str, where: str) -> errors.ConfigError | None:
    """The error for a machine's name that cannot be accepted; None if it can.

    A name is printed as it is, in logs and on terminals, so it must be printable and not too long.

    Args:
        name: the name.
        where: where the name comes from, for the error.
    """
    if 0 < len(name) <= _LONGEST_NAME and name.isprintable():
        return None
    return errors.ConfigError(
        f"{shown_name(name)} is no name of a machine",
        rule=f"the name of an agent has 1 to {_LONGEST_NAME} characters, all of which can be printed",
        where=where,
        fix="--name node0",
    )


def shown_name(name: str) -> str:
    """A refused name in a form that can be shown: escaped and shortened."""
    return ascii(name[:_MOST_SHOWN]) + ("..." if len(name) > _MOST_SHOWN else "")


class AgentMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; encoded as a compact array [kind, fields ...]."""


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way to another machine.

    Args:
        kind: the name of its class, if that is a user's error of `errors`; empty for any other exception.
        what: what happened; for an exception that is not a user's error, its whole text.
        fields: the other arguments of the user's error.
    """

    kind: str
    what: str
    fields: dict[str, str] = {}

    @classmethod
    def from_error(cls, error: BaseException, report: str = "") -> Problem:
        """Encode an error; `report` is the text for one that is not a user's error."""
        if not isinstance(error, errors.UserError):
            return cls("", report or str(error))
        fields = error.fields()
        return cls(type(error).__name__, fields.pop("what"), fields)

    def to_error(self, source: str) -> errors.UserError | errors.RunError:
        """The error again, to be raised here; `source` names the machine that it came from."""
        if not self.kind:
            return errors.RunError(f"{source} failed:\n{self.what}")
        kinds = {kind.__name__: kind for kind in errors.UserError.__subclasses__()}
        fields = {name: text for name, text in self.fields.items() if name in ("rule", "where", "exists", "fix")}
        where = f"{fields['where']}, {source}" if "where" in fields else source
        return kinds.get(self.kind, errors.UserError)(self.what, **(fields | {"where": where}))


# ---- agent to controller ---------------------------------------------------------------------------------------------


class Hello(AgentMessage, frozen=True):
    """An agent listens at `address` and has room for `capacity` workers on machine `host`.

    An agent that has lost its link to the controller and joins the same run again names its earlier peer ids in
    `before`, so that the controller knows that these are gone.
    """

    format: int  # `FORMAT_VERSION` of the agent; first, so that it can be read whatever follows
    address: str
    host: str
    capacity: int
    torch: str  # version: other versions may give other bits
    before: tuple[int, ...] = ()  # the peer ids that this agent has had in this run


class Back(AgentMessage, frozen=True):
    """An agent has kept its workers while there was no controller, and asks the next one to adopt them.

    It is sent in place of Hello in a run with `timeouts.adopt`. A controller that does not adopt the workers answers
    with JoinAgain or Refused.

    Args:
        hello: the message with which it would join as a new agent.
        run: the id of the run that its workers are in.
        incarnation: the number of the life of this run.
        workers: rank -> address, of each worker that lives; "" for one that was not a member of the mesh yet.
        newcomers: ranks of workers that have ended, were not members yet, and were not replaced by any controller.
        gone: ranks of all other workers that have ended.
        seconds: for how many seconds there was no controller.
    """

    hello: Hello
    run: str
    incarnation: int
    workers: dict[int, str]
    newcomers: tuple[int, ...]
    gone: tuple[int, ...]
    seconds: float


class Prepared(AgentMessage, frozen=True):
    """The data exists and equals the controller's; workers can be spawned."""


class Notice(AgentMessage, frozen=True):
    """The agent was asked to end (SIGTERM), and will within `within_s` seconds. Its workers should leave before."""

    within_s: float


class WorkerExited(AgentMessage, frozen=True):
    """A worker's process has ended and is reaped, as in `fork_server_client.Exited`; or it could not be started."""

    rank: int
    pid: int
    code: int | None
    signal: int | None
    not_started: str = ""  # why it could not be; `pid` is 0 then


class ExitsReported(AgentMessage, frozen=True):
    """Answer to ReportExits: every worker that had ended by then has been reported."""


class Refusals(AgentMessage, frozen=True):
    """The connections and messages that the agent's links have refused so far: reason -> number."""

    counts: dict[str, int]


class Beats(AgentMessage, frozen=True):
    """The newest heartbeats of the agent's workers: (rank, the worker's encoded message). Answered by BeatsHeard."""

    beats: tuple[tuple[int, bytes], ...]


class AgentFailed(AgentMessage, frozen=True):
    """The agent ends; its workers have ended."""

    problem: Problem


# ---- controller to agent ---------------------------------------------------------------------------------------------


class Refused(AgentMessage, frozen=True):
    """The run does not accept this agent."""

    problem: Problem


class JoinAgain(AgentMessage, frozen=True):
    """The run has given up the agent with the peer id `peer`, and its workers. It may join again as a new agent."""

    peer: int
    reason: str


class ConnectAgain(AgentMessage, frozen=True):
    """The controller has lost its connection to the agent with the peer id `peer`, while workers are taken over.

    The agent sends Back, with its workers, as if its own connection had ended as well. By itself it may never notice.
    """

    peer: int


class Drain(AgentMessage, frozen=True):
    """The workers of the agent are about to leave the run, and LetGo follows when they have.

    If LetGo has not come within `within_s` seconds, the agent ends nevertheless. None: it waits without a limit.
    """

    within_s: float | None
    says: str  # what the agent prints; may be empty


class LetGo(AgentMessage, frozen=True):
    """The run does not need the agent any more: the agent ends.

    Args:
        says: what the agent prints.
        lost: True if workers were lost before they had left. Then the agent ends with exit code 1.
    """

    says: str
    lost: bool = False


class PrepareRun(AgentMessage, frozen=True):
    """Prepare the data that `settings` ask for, equal to the controller's `data`, and the fork server."""

    num_workers: int  # of the whole run
    settings: dict[str, Any]
    data: dict[str, Any]


class Settled(AgentMessage, frozen=True):
    """The adoption is over: the agent's workers are adopted, and the ends of workers before are handled.

    The agent need not report these ends to a further controller.
    """


class Spawn(AgentMessage, frozen=True):
    """Start worker `rank`. The agent replaces the fields of `spec` that its machine decides: data, directory, host."""

    rank: int
    spec: dict[str, Any]


class Signal(AgentMessage, frozen=True):
    """Send a signal to worker `rank`, if it is still there."""

    rank: int
    number: int


class ReportExits(AgentMessage, frozen=True):
    """Report Refusals and all workers that have ended, then answer ExitsReported."""


class BeatsHeard(AgentMessage, frozen=True):
    """The controller has received Beats. Only then the agent sends the next ones."""


class Stop(AgentMessage, frozen=True):
    """End all workers (SIGTERM, after `grace_s` seconds SIGKILL), report their exits, and end."""

    grace_s: float


AnyAgentMessage: TypeAlias = (
    Hello
    | Back
    | Prepared
    | Notice
    | WorkerExited
    | ExitsReported
    | Refusals
    | Beats
    | AgentFailed
    | Refused
    | JoinAgain
    | ConnectAgain
    | Drain
    | LetGo
    | PrepareRun
    | Settled
    | Spawn
    | Signal
    | ReportExits
    | BeatsHeard
    | Stop
)


# A decoder has no state, so that all threads share this one. Making one for all these types takes 40 us.
_DECODER = msgspec.msgpack.Decoder(AnyAgentMessage)


def encode(message: AgentMessage) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes | memoryview) -> AnyAgentMessage:
    """The inverse of `encode`.

    Raises:
        msgspec.MsgspecError: not one of our messages.
    """
    try:
        return _DECODER.decode(data)
    # msgspec does not turn these two into its own errors: text that is not UTF-8, and arrays nested too deeply.
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def try_decode(data: bytes | memoryview) -> AnyAgentMessage | None:
    """The inverse of `encode`; None for what is not one of our messages, which the receiver counts as `UNEXPECTED`."""
    try:
        return decode(data)
    except msgspec.MsgspecError:
        return None
