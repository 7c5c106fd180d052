"""Messages between the controller's launcher and the agents on other machines. Plain data, never pickle."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from elaswave_spmd import errors

UNEXPECTED = "message that no agent sends or gets"
"""The reason by which messages are counted that are none of these, or of the other direction."""

_LONGEST_NAME = 253  # characters; a domain name has no more, and so no name of a node of Kubernetes or of Ray
_MOST_SHOWN = 64  # of one that is refused


def refused_name(name: str, where: str) -> errors.ConfigError | None:
    """Why a machine's name is refused: it is printed as it is, in logs and on terminals. None: it is not.

    Args:
        where: it comes from, for the error.
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
    """A name that is refused, for people: escaped, and no longer than most are."""
    return ascii(name[:_MOST_SHOWN]) + ("..." if len(name) > _MOST_SHOWN else "")


class AgentMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; encoded as a compact array [kind, fields ...]."""


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

    An agent that has lost its link to the controller and joins the same run again says so: the peers of `before` are
    gone.
    """

    format: int  # `FORMAT_VERSION` of the agent; first, so that it can be read whatever follows
    address: str
    host: str
    capacity: int
    torch: str  # version: other versions may give other bits
    before: tuple[int, ...] = ()  # the peer ids that this agent has had in this run


class Back(AgentMessage, frozen=True):
    """An agent has kept its workers while there was no controller, and asks the next one to adopt them.

    In place of Hello, where the run has `timeouts.adopt`. Who does not adopt them answers JoinAgain, or Refused.

    Args:
        hello: with which it would join as a new agent.
        run, incarnation: of the life of the run that its workers are in.
        workers: rank -> address of each that lives; "": it was no member of the mesh yet.
        newcomers: those that have ended, were no members, and that no controller has started anew.
        gone: all others that have ended.
        seconds: for how long they have had no controller.
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
    """The agent was asked to end (SIGTERM), and will within so many seconds: its workers are to leave before."""

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
    """The run has given up the agent of peer id `peer`, and its workers. It may join again, as a new one."""

    peer: int
    reason: str


class ConnectAgain(AgentMessage, frozen=True):
    """Only the connection to the agent of peer id `peer` has ended, while workers are taken over: it comes back.

    With its workers, by Back, as if its own connection had ended, which it may never notice.
    """

    peer: int


class Drain(AgentMessage, frozen=True):
    """The workers of the agent are about to leave the run, and LetGo follows when they have.

    If it has not come within `within_s` seconds (None: without a limit) the agent ends all the same.
    """

    within_s: float | None
    says: str  # to who looks at the agent; may be empty


class LetGo(AgentMessage, frozen=True):
    """Nothing of the run is on the agent any more: it ends.

    Args:
        says: what it prints.
        lost: workers were lost before they had left. It ends with exit code 1 then.
    """

    says: str
    lost: bool = False


class PrepareRun(AgentMessage, frozen=True):
    """Prepare the data that `settings` ask for, equal to the controller's `data`, and the fork server."""

    num_workers: int  # of the whole run
    settings: dict[str, Any]
    data: dict[str, Any]


class Settled(AgentMessage, frozen=True):
    """The workers that the agent has kept are adopted, and all that died while there was no controller is made good."""


class Spawn(AgentMessage, frozen=True):
    """Start worker `rank`. The agent replaces the fields of `spec` that are its machine's: data, directory, host."""

    rank: int
    spec: dict[str, Any]


class Signal(AgentMessage, frozen=True):
    """Send a signal to worker `rank`, if it is still there."""

    rank: int
    number: int


class ReportExits(AgentMessage, frozen=True):
    """Report what was refused, and all workers that have ended, then answer ExitsReported."""


class BeatsHeard(AgentMessage, frozen=True):
    """Beats have come. The agent sends the next ones only then."""


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


# Immutable, so one serves all threads. To work out the types of all messages takes 40 us.
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
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec lets these through: text, and arrays nested deeply
        raise msgspec.DecodeError(str(error)) from error


def try_decode(data: bytes | memoryview) -> AnyAgentMessage | None:
    """The inverse of `encode`; None for what is not one of our messages, which the receiver counts as `UNEXPECTED`."""
    try:
        return decode(data)
    except msgspec.MsgspecError:
        return None
