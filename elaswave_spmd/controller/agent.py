"""An agent serves one controller on another machine: it carries out its orders here, and reports how workers end.

It prepares the data here as the controller did there, and starts workers when the controller orders it. Of what its
workers send it relays their heartbeats alone, which on a large run are more than the controller could hear one by one
(runtime/processes/beat_relay.py): they have links of their own to the controller and to all others. It exists because
only a process of a machine can start and kill processes there, and be the first to see how they end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import signal
import time
import traceback
from collections.abc import Sequence

from elaswave_spmd.conf.format_version import FORMAT_VERSION
from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller.agent_deadline import Deadline
from elaswave_spmd.controller.agent_machine import ORPHAN_GRACE_S, Machine, release
from elaswave_spmd.controller.agent_search import Offer
from elaswave_spmd.controller.agent_workers import relay_path
from elaswave_spmd.controller.launching import data_spec
from elaswave_spmd.data import PreparedData, prepare_data
from elaswave_spmd.errors import DataError, RunError, UserError
from elaswave_spmd.mesh.mesh import named_workers
from elaswave_spmd.output import say
from elaswave_spmd.ready import is_any_ready
from elaswave_spmd.run_dir.display import count
from elaswave_spmd.runtime.devices.selection import worker_start
from elaswave_spmd.runtime.processes import agent_messages as am
from elaswave_spmd.runtime.processes.beat_relay import BeatRelay
from elaswave_spmd.runtime.processes.fd_limit import raise_fd_limit
from elaswave_spmd.runtime.processes.fork_server_client import Exited, ForkServerClient, NoAnswerError, NotStartedError
from elaswave_spmd.runtime.processes.stop_signals import Signalled, StopSignals, handle_again, signal_name
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.runtime.transport.mailbox import Envelope, Item, PeerClosed, SelectableMailbox

_LAST_ORDER_S = 1.0  # in which an order may follow the end of the connection
_DEADLINE_LOOK_S = 0.1
_LOOK_S = 5.0  # between two looks at what the links have refused
_FORK_SERVER_S = 60.0  # that an order to the fork server is waited for; then the others here go on without it
# The fields that identify the data; the others are paths and names of this machine.
_SAME_DATA = (
    *("corpus", "sha256", "tokens_sha256", "num_tokens", "vocab_size"),
    *("seq_len", "num_train_samples", "num_validation_samples"),
)


class Agent:
    """Carries out the controller's orders on this machine, from the begin to the end of `serve`.

    Args:
        terms: SIGTERM, which interrupts what the agent prepares, and is told by `terminate` otherwise.
        signals: the other stop signals that this process handles.
        drain_s: after SIGTERM, until it ends whatever has become of its workers.
    """

    def __init__(
        self,
        links: Links,
        mailbox: SelectableMailbox,
        machine: Machine,
        terms: StopSignals | None = None,
        signals: StopSignals | None = None,
        drain_s: float = 30.0,
    ) -> None:
        self._links = links
        self._mailbox = mailbox
        self._machine = machine
        self._workers = machine.workers
        self._relay: BeatRelay | None = None
        self._refused: dict[str, int] = {}
        self._terms = terms or StopSignals(())
        self._signals = signals or StopSignals(())
        self._drain_s = drain_s
        self._signalled: set[int] = set()  # workers that the controller had a signal sent to
        # Who has ended otherwise than in order (exit code 0) since it was to leave: perhaps its state had not moved.
        self._failed: dict[int, Exited] = {}
        self._deadline = Deadline()
        self._is_leaving = False  # it does not join again
        self._has_given_notice = False  # the controller knows of SIGTERM

    @property
    def farewell_s(self) -> float:
        """Seconds that a last message may take: its sending, or the wait for the answer."""
        return self._deadline.farewell_s

    @property
    def _fork_server(self) -> ForkServerClient:
        return self._machine.fork_server  # another one from `prepare` on

    def serve(self, offer: Offer, before: tuple[int, ...] = ()) -> None:
        """Offers places and serves until the run is over. Leaves no worker.

        Args:
            before: the peer ids that this process has had in the run.

        Raises:
            UserError: what the controller did not like, or this machine's data.
            RunError: workers cannot be made here, or were lost while they were to leave.
            LostControllerError: the controller is gone, or has given up this agent; no worker is left, but those that
                wait for another controller.
        """
        import torch

        version = str(torch.__version__)
        hello = am.Hello(FORMAT_VERSION, self._links.address, offer.name, offer.capacity, version, before)
        first = self._workers.offered(hello, self._machine.scratch.path, time.monotonic())
        self._send(first)
        what = f"places for {count(offer.capacity, 'worker')} of the run at {offer.rendezvous}"
        if isinstance(first, am.Back):
            what = f"a controller is at {offer.rendezvous} again, and may adopt {count(len(first.workers), 'worker')}"
        say(f"agent on {offer.name}: {what}")
        try:
            if isinstance(first, am.Back):
                self._start_relay()
            self._serve_orders()
        except _LeavesError:
            self._fork_server.stop(0.0)
            self._send(am.AgentFailed(am.Problem("", "it was asked to end by SIGTERM")))
            self._wait_for_stop()
            say("nothing was lost: no worker was here")
        except _DeadlineError:
            self._end_at_deadline()
        except _WorkersLostError as lost:
            raise RunError(str(lost)) from None
        except _GivenUpError as error:
            raise self._end_given_up(str(error)) from None
        except _ConnectionClosedError:
            raise self._end_disconnected() from None
        except BaseException as error:
            self._end_failed(error, has_kept=isinstance(first, am.Back))
            raise
        finally:
            self._end_relay()

    def _serve_orders(self) -> None:
        """Turn until the run is over."""
        try:
            while not self._turn():
                pass
        except NoAnswerError:
            if self._deadline.is_late:  # the fork server hangs, and the deadline does not wait for it
                raise _DeadlineError from None
            raise

    def terminate(self, number: int) -> None:
        """SIGTERM: the workers are to leave, and then this agent ends. Called by the signal's handler."""
        self._is_leaving = True
        self._set_deadline(self._drain_s)
        self._mailbox.interrupt(signal_name(number))

    def _set_deadline(self, within_s: float) -> None:
        if self._deadline.bring_forward(within_s):
            self._fork_server.wait_at_most_until(self._deadline.late_from)

    def _end_at_deadline(self) -> None:
        """End who is still here as if it were killed, since the deadline has come.

        Raises:
            RunError: workers were lost.
        """
        self._report_exits(self._fork_server.kill())
        self._send(am.AgentFailed(am.Problem("", f"its deadline of {self._deadline.within_s:g} s was over")))
        self._wait_for_stop()
        what = f"the deadline of {self._deadline.within_s:g} s was over"
        if lost := sorted(self._workers.ranks):
            what += f" before {named_workers(lost)} had left: lost, as if killed"
        elif not self._failed:
            say(f"{what}; no worker was left here, and none had ended otherwise than in order")
            return
        if self._failed:
            what += f"; {self._failures()}"
        raise RunError(
            f"{what}\n"
            "  the run goes on without them if their state has replicas on other machines, else from its checkpoint"
        )

    def _end_given_up(self, why: str) -> RunError | LostControllerError:
        """The controller has given this agent up, and its workers with it. Returns what that means here."""
        self._fork_server.stop(0.0)
        if self._is_leaving:
            return RunError(f"the run had given this agent up before its workers had left ({why})")
        # The controller may have been cut off from everybody, and may have ended since.
        return LostControllerError(f"the run has given this agent up ({why}); whether it goes on is not known here")

    def _end_disconnected(self) -> RunError | LostControllerError:
        """The controller is gone: workers wait for another one, or have time to end. Returns what that means here."""
        what = "the connection to the controller was lost"
        if self._workers.may_wait and not self._is_leaving:
            self._workers.controller_lost(time.monotonic())
            return LostControllerError(what, keeps_workers=True)
        had_time = self._release_workers()
        if not self._is_leaving:
            return LostControllerError(what)
        saved = "they had time to write their state" if had_time else "not all had time to write their state"
        return RunError(f"{what} while the workers of this machine were to leave; no worker is left here, and {saved}")

    def _end_failed(self, error: BaseException, *, has_kept: bool) -> None:
        """Something has failed here, or a second signal has come: end the workers, and tell the controller.

        Args:
            has_kept: workers of a controller before, which nobody has adopted if this one refuses the agent.
        """
        if isinstance(error, Signalled):
            self._fork_server.kill()  # who has sent a second signal waits for no answer of a fork server that may hang
        elif has_kept and isinstance(error, UserError):
            self._release_workers()
        else:
            self._fork_server.stop(0.0)
        self._send(am.AgentFailed(am.Problem.from_error(error, _report(error))))
        self._wait_for_stop()

    def _release_workers(self) -> bool:
        """Wait until workers have ended that no controller has any more. Returns True if all have by themselves.

        They are not killed at once, as they may be writing their state (save_if_orphaned).
        """
        return release(self._fork_server, time.monotonic() + self._workers.grace_s, lambda: self._deadline.is_late)

    def _failures(self) -> str:
        """Name the workers that have ended otherwise than in order since they were to leave."""
        return "; ".join(
            f"{exited}{' (the controller had sent it a signal)' * (rank in self._signalled)}"
            for rank, exited in sorted(self._failed.items())
        )

    def _tell_stopped(self) -> None:
        """The run has ended before the controller let this agent go, so nobody has said what became of its state.

        Raises:
            _WorkersLostError: workers have ended otherwise than in order, and not because the controller wanted it.
        """
        says = "the controller has ended the run; whether its state is saved is told there, not here"
        if self._failed.keys() - self._signalled:
            raise _WorkersLostError(f"{self._failures()}, before it had left\n  {says}")
        say(says)

    def _wait_for_stop(self) -> None:
        """Wait until the controller has received this agent's last message, which it answers by Stop or Refused.

        Another thread of the controller sees the end of the connection: without a wait it might be handled first.
        """
        deadline = time.monotonic() + self.farewell_s
        while (left := min(self.farewell_s, deadline - time.monotonic())) > 0:  # SIGTERM may come meanwhile
            item = self._mailbox.get(left)
            if isinstance(item, PeerClosed) or isinstance(self._order_in(item), (am.Stop, am.Refused)):
                return

    def _turn(self) -> bool:
        """Wait for messages and for ends of workers, and handle them. Returns True when the run is over."""
        until_s = _DEADLINE_LOOK_S if self._deadline.is_set else _LOOK_S
        is_any_ready([self._mailbox, self._fork_server], timeout_s=until_s)
        if self._deadline.is_set and not self._has_given_notice and self._terms.first is not None:
            self._has_given_notice = True
            say(f"SIGTERM: workers leave the run, and the agent ends within {self._drain_s:g} s")
            self._send(am.Notice(self._drain_s))
        self._report_refusals()
        self._fork_server.keep_up()
        # The end of the connection last, whenever it came: orders come by another one. After the order to end nothing
        # counts any more.
        items = sorted(self._mailbox.take_all(), key=lambda item: isinstance(item, PeerClosed))
        if any(self._handle(item) for item in items):
            return True
        self._report_exits(self._fork_server.poll())
        if self._deadline.is_late:  # last: after a pause, what had come in time counts
            raise _DeadlineError
        return False

    def _handle(self, item: Item) -> bool:
        """Carry out an order. Returns True if it ends the run."""
        if isinstance(item, PeerClosed):
            return self._handle_last_orders()
        match self._order_in(item):
            case am.JoinAgain(peer, reason):
                if peer == self._links.me:  # else it was meant for another agent, which had this address before
                    raise _GivenUpError(reason)
            case am.ConnectAgain(peer):
                if peer == self._links.me:
                    raise _ConnectionClosedError
            case am.PrepareRun(num_workers, settings, data):
                self._prepare(num_workers, Settings.from_dict(settings), PreparedData.from_dict(data))
            case am.Drain(within_s, says):
                self._is_leaving = True
                if within_s is not None:
                    self._set_deadline(within_s)
                say(says or "the workers of this machine leave the run")
            case am.LetGo(says, lost):
                self._fork_server.stop(0.0)
                if lost:
                    raise _WorkersLostError(says)
                say(says)
                return True
            case am.Spawn(rank, spec):
                self._workers.started(rank, spec)
                own = self._workers.specification(spec, self._machine.scratch.path, relays=self._relay is not None)
                try:
                    self._fork_server.spawn(rank, own, _FORK_SERVER_S)
                except NotStartedError as error:  # the others here go on
                    self._workers.ranks.discard(rank)
                    say(f"worker {rank} could not be started: {error}")
                    self._send(am.WorkerExited(rank, 0, 1, None, str(error)))
            case am.BeatsHeard() if self._relay is not None:
                self._relay.answered()
            case am.Settled():
                self._workers.settled()
            case am.Signal(rank, number):
                self._signalled.add(rank)
                self._fork_server.order_signal(rank, number)
            case am.ReportExits():
                self._report_refusals()
                with contextlib.suppress(NoAnswerError):
                    # To no process; the answer follows the notices of all that have ended.
                    self._fork_server.signal(-1, 0, _FORK_SERVER_S)
                self._report_exits(self._fork_server.poll())
                self._send(am.ExitsReported())
            case am.Refused(problem):
                raise problem.to_error("the controller")
            case am.Stop(grace_s):
                self._report_exits(self._fork_server.stop(grace_s), are_stopped=True)
                if self._is_leaving:
                    self._tell_stopped()
                return True
            case None:
                pass
            case _:
                self._links.reject(am.UNEXPECTED)
        return False

    def _handle_last_orders(self) -> bool:
        """The connection to the controller has ended. Its last order came by another one, and may be right behind.

        Returns True if that ends the run.

        Raises:
            _ConnectionClosedError: it does not.
        """
        until = time.monotonic() + _LAST_ORDER_S
        while True:
            left_s = min(until, self._deadline.late_from) - time.monotonic()
            item = self._mailbox.get(max(0.0, left_s))
            if item is None:
                raise _ConnectionClosedError
            # One to join again may be meant for another agent, and ends nothing.
            order = self._order_in(item)
            if isinstance(order, am.Stop | am.LetGo | am.Refused | am.JoinAgain) and self._handle(item):
                return True

    def _order_in(self, item: Item | None) -> am.AnyAgentMessage | None:
        """The controller's message in an item of the mailbox; None if it is something else, which is counted."""
        if not isinstance(item, Envelope):
            return None
        message = am.try_decode(item.header)
        if item.sender == CONTROLLER and message is not None:
            return message
        self._links.reject(am.UNEXPECTED)
        return None

    def _prepare(self, num_workers: int, settings: Settings, theirs: PreparedData) -> None:
        try:
            with self._terms.raising():
                if self._is_leaving:  # the signal came before, and only the next one would interrupt this
                    raise _LeavesError
                self._prepare_run(num_workers, settings, theirs)
        except Signalled as signalled:
            if signalled.number != signal.SIGTERM:
                raise
            raise _LeavesError from None
        self._send(am.Prepared())

    def _prepare_run(self, num_workers: int, settings: Settings, theirs: PreparedData) -> None:
        grace_s = settings.timeouts.agent_grace
        self._workers.set_timeouts(settings.timeouts.adopt, grace_s + ORPHAN_GRACE_S)
        raise_fd_limit(num_workers, strangers=True)
        self._machine.prepare(worker_start(settings), grace_s)
        if hasattr(resource, "prlimit"):  # Linux; the fork server runs already, and its children inherit its limits
            resource.prlimit(self._fork_server.pid, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
        ours = prepare_data(data_spec(settings))
        handle_again(self._signals, self._terms)  # of a dataset of the user's its module was imported
        check_same_data(ours, theirs)
        # What a model is told of a dataset is what the controller's model was told.
        self._workers.own["data"] = dataclasses.replace(ours, attributes=theirs.attributes).to_dict()
        self._fork_server.ready()
        self._fork_server.set_orphan_grace(grace_s)
        self._start_relay()

    def _start_relay(self) -> None:
        """Send on the heartbeats of the workers here. Where that cannot be had each of them sends its own."""
        self._end_relay()
        path, ranks = relay_path(self._machine.scratch.path), self._workers.ranks
        with contextlib.suppress(OSError, RuntimeError):
            self._relay = BeatRelay(path, ranks, lambda beats: self._send(am.Beats(tuple(beats))))

    def _end_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def _report_exits(self, exits: Sequence[Exited], *, are_stopped: bool = False) -> None:
        """Report ends of workers.

        Args:
            are_stopped: they have ended because the run has.
        """
        for exited in exits:
            self._workers.ended(exited.rank)
            if self._relay is not None:
                self._relay.forget(exited.rank)
            if self._is_leaving and not are_stopped and exited.code != 0:
                self._failed[exited.rank] = exited
            self._send(am.WorkerExited(exited.rank, exited.pid, exited.code, exited.signal))

    def _report_refusals(self) -> None:
        """Report the numbers of what the links have refused, if they have grown."""
        if (refused := self._links.rejected) != self._refused:
            self._refused = refused
            self._send(am.Refusals(refused))

    def _send(self, message: am.AgentMessage) -> None:
        self._links.send(CONTROLLER, am.encode(message))


class LostControllerError(Exception):
    """The controller is to be looked for again, for a reason in words.

    Args:
        keeps_workers: they wait for it; else no worker is left.
    """

    def __init__(self, what: str, *, keeps_workers: bool = False) -> None:
        super().__init__(what)
        self.keeps_workers = keeps_workers


class _WorkersLostError(Exception):
    """Workers were lost before they had left, in words. None is left here."""


class _ConnectionClosedError(Exception):
    """The connection to the controller has ended without an order to end."""


class _LeavesError(Exception):
    """SIGTERM has come while nothing was to be saved here."""


class _DeadlineError(Exception):
    """The deadline has come."""


class _GivenUpError(Exception):
    """The controller has given up this agent, for a reason in words."""


def check_same_data(ours: PreparedData, theirs: PreparedData) -> None:
    """Refuses data other than the controller's.

    Raises:
        DataError: with what differs.
    """
    names = [name for name in _SAME_DATA if getattr(ours, name) != getattr(theirs, name)]
    if not names:
        return
    raise DataError(
        "this machine's data differ: " + ", ".join(f"{name} {getattr(ours, name)}" for name in names),
        rule="all machines have the same data",
        where=f"data {ours.corpus}",
        exists=", ".join(f"{name} {getattr(theirs, name)}" for name in names) + " on the controller's machine",
        fix="the same files on all machines, and with data.tokenizer the same version of tokenizers; data=stdlib also "
        "needs the same version of Python",
    )


def _report(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, (RunError, UserError)) else traceback.format_exc()
