"""An agent: `python -m elaswave_spmd agent HOST:PORT --token-file FILE`, once on each further machine of a run.

It offers places for workers to the controller that it finds at HOST:PORT, prepares the data here as the controller did
there, starts workers when the controller orders it, and reports how they end. It ends with the run, and when the
controller is gone.

The agent is no relay: its workers have links of their own to the controller and to all others. It exists because only a
process of a machine can start and kill processes there, and be the first to see how they end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import resource
import select
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from typing import Any

from elaswave_spmd.conf.format_version import FORMAT_VERSION
from elaswave_spmd.conf.schema import Settings, endpoint
from elaswave_spmd.controller.startup import data_spec, start_fork_server
from elaswave_spmd.data import PreparedData, prepare_data
from elaswave_spmd.errors import ConfigError, DataError, RunError, UserError
from elaswave_spmd.runtime.devices.selection import WorkerStart, worker_start
from elaswave_spmd.runtime.processes import agent_messages as am
from elaswave_spmd.runtime.processes.fd_limit import raise_fd_limit
from elaswave_spmd.runtime.processes.fork_server_client import Exited, ForkServerClient
from elaswave_spmd.runtime.processes.rendezvous import find_controller, read_secret, resolve_address
from elaswave_spmd.runtime.processes.scratch import Scratch
from elaswave_spmd.runtime.processes.stop_signals import StopSignals, signal_name
from elaswave_spmd.runtime.transport.agent_links import AgentLinks
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.runtime.transport.mailbox import Envelope, Item, PeerClosed, SelectableMailbox

_CONNECT_TIMEOUT_S = 10.0
_ORPHAN_GRACE_S = 10.0  # until the run's own is known
_FAREWELL_MS = 2000
_LOOK_S = 5.0  # between two looks at what the links have refused
_OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)  # SIGTERM is meant for this process alone, and ends it
# The fields that identify the data; the others are paths and names of this machine.
_SAME_DATA = ("corpus", "sha256", "num_tokens", "vocab_size", "seq_len", "num_train_samples", "num_validation_samples")


def main(arguments: Sequence[str], program: str) -> int:
    """Serve one run. Returns the exit code, 0: the controller has ended it.

    Raises:
        UserError: bad input of this machine, or an agent that the controller does not take.
        RunError: no controller, or it is gone. Nothing is left behind.
    """
    options = _parse(arguments, program)
    host, port = endpoint("HOST:PORT", options.rendezvous)
    secret = read_secret(options.token_file, where=f"--token-file {options.token_file}")
    address = None if options.host is None else resolve_address(options.host, where=f"--host {options.host}")
    scratch = Scratch()
    # Started first: it imports what workers need while this process looks for the controller.
    fork_server = start_fork_server(WorkerStart(), scratch.path, _ORPHAN_GRACE_S, here=True)
    try:
        found = find_controller(host, port, secret, options.timeout)
        address = address or found.local_host
        mailbox = SelectableMailbox()
        links = AgentLinks(found.peer, mailbox, credentials=found.credentials, host=address)
        try:
            links.connect(CONTROLLER, found.address)
            if links.wait_connected([CONTROLLER], _CONNECT_TIMEOUT_S):
                raise RunError(f"the controller cannot be reached at {found.address} (its runtime.host)")
            agent = Agent(links, mailbox, fork_server, scratch, {"host": address, "death_watch": None})
            # Ctrl-C in a terminal reaches the command beside it too, whose run then saves its state.
            with StopSignals(_OF_TERMINALS) as signals, signals.as_events(_tell, count=1):
                agent.serve(options.name or socket.gethostname(), options.workers, options.rendezvous)
        finally:
            links.close(_FAREWELL_MS)
            mailbox.close()
    finally:
        fork_server.stop(0.0)
        scratch.remove()
    return 0


def _tell(number: int) -> None:
    """Answer the first signal of a terminal by a line. Called by the handler."""
    text = f"{signal_name(number)}: the agent serves until the run ends; a second signal ends it at once\n"
    with contextlib.suppress(OSError):  # the terminal is closed
        os.write(2, text.encode())


class Agent:
    """Carries out the controller's orders on this machine, from the begin to the end of `serve`.

    Args:
        scratch: the directory of the fork server's sockets.
        own: the keys that replace those of the controller in the specification of each worker here: `host`, later
            `data`; and `death_watch`, None, as a robust mutex is shared memory of one machine.
    """

    def __init__(
        self,
        links: Links,
        mailbox: SelectableMailbox,
        fork_server: ForkServerClient,
        scratch: Scratch,
        own: dict[str, Any],
    ) -> None:
        self._links = links
        self._mailbox = mailbox
        self._fork_server = fork_server
        self._scratch = scratch
        self._own = own
        self._refused: dict[str, int] = {}

    def serve(self, name: str, capacity: int, rendezvous: str) -> None:
        """Offers `capacity` places on machine `name` and serves until the run is over. Leaves no worker.

        Raises:
            UserError: what the controller did not like, or this machine's data.
            RunError: the controller is gone, or workers cannot be made here.
        """
        import torch

        self._send(am.Hello(FORMAT_VERSION, self._links.address, name, capacity, str(torch.__version__)))
        print(f"agent on {name}: places for {capacity} workers of the run at {rendezvous}", flush=True)
        try:
            while not self._turn():
                pass
        except _ControllerLostError:
            # Not killed: the workers have lost the controller too, and may be writing their state (save_if_orphaned).
            self._fork_server.release()
            raise _lost_controller(rendezvous) from None
        except BaseException as error:
            self._fork_server.stop(0.0)
            self._send(am.AgentFailed(am.Problem.from_error(error, _report(error))))
            self._wait_for_stop()
            raise

    def _wait_for_stop(self) -> None:
        """Wait until the controller has received this agent's last message, which it answers by Stop or Refused.

        Another thread of the controller sees the end of the connection: without a wait it might be handled first.
        """
        deadline = time.monotonic() + _FAREWELL_MS / 1000
        while (left := deadline - time.monotonic()) > 0:
            item = self._mailbox.get(left)
            if isinstance(item, PeerClosed) or isinstance(self._order_in(item), (am.Stop, am.Refused)):
                return

    def _turn(self) -> bool:
        """Wait for messages and for ends of workers, and handle them. Returns True when the run is over."""
        select.select([self._mailbox, self._fork_server], [], [], _LOOK_S)
        self._report_refusals()
        # After the order to end nothing counts: the end of the controller's link may have come right behind it.
        if any(self._handle(item) for item in self._mailbox.take_all()):
            return True
        self._report_exits(self._fork_server.poll())
        return False

    def _handle(self, item: Item) -> bool:
        """Carry out an order. Returns True if it ends the run."""
        if isinstance(item, PeerClosed):
            raise _ControllerLostError
        match self._order_in(item):
            case am.PrepareRun(num_workers, settings, data):
                self._prepare(num_workers, Settings.from_dict(settings), PreparedData.from_dict(data))
            case am.Spawn(rank, spec):
                self._fork_server.spawn(rank, spec | self._own | {"directory": self._scratch.path})
            case am.Signal(rank, number):
                self._fork_server.signal(rank, number)
            case am.ReportExits():
                self._report_refusals()
                self._fork_server.signal(-1, 0)  # to no process; the answer follows the notices of all that have ended
                self._report_exits(self._fork_server.poll())
                self._send(am.ExitsReported())
            case am.Refused(problem):
                raise problem.to_error("the controller")
            case am.Stop(grace_s):
                self._report_exits(self._fork_server.stop(grace_s))
                return True
            case None:
                pass
            case _:
                self._links.reject(am.UNEXPECTED)
        return False

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
        raise_fd_limit(num_workers)
        self._restart_fork_server(worker_start(settings), settings.timeouts.orphan_grace)
        if hasattr(resource, "prlimit"):  # Linux; the fork server runs already, and its children inherit its limits
            resource.prlimit(self._fork_server.pid, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
        ours = prepare_data(data_spec(settings))
        check_same_data(ours, theirs)
        # What a model is told of a dataset is what the controller's model was told.
        self._own["data"] = dataclasses.replace(ours, attributes=theirs.attributes).to_dict()
        self._fork_server.ready()
        self._fork_server.set_orphan_grace(settings.timeouts.orphan_grace)
        self._send(am.Prepared())

    def _restart_fork_server(self, start: WorkerStart, orphan_grace_s: float) -> None:
        """Start the fork server again with the variables and modules of the run's device, if that has any.

        The first one was started before the run's settings were known.
        """
        if start == WorkerStart():
            return
        self._fork_server.stop(0.0)
        self._scratch.make_again()
        self._fork_server = start_fork_server(start, self._scratch.path, orphan_grace_s)

    def _report_exits(self, exits: Sequence[Exited]) -> None:
        for exited in exits:
            self._send(am.WorkerExited(exited.rank, exited.pid, exited.code, exited.signal))

    def _report_refusals(self) -> None:
        """Report the numbers of what the links have refused, if they have grown."""
        if (refused := self._links.rejected) != self._refused:
            self._refused = refused
            self._send(am.Refusals(refused))

    def _send(self, message: am.AgentMessage) -> None:
        self._links.send(CONTROLLER, am.encode(message))


class _ControllerLostError(Exception):
    pass


def _lost_controller(rendezvous: str) -> RunError:
    """The error of an agent whose connection to the controller has ended without an order to end."""
    return RunError(
        f"the connection to the controller of the run at {rendezvous} was lost: the controller was killed, or its "
        "machine or the network in between has failed. No worker is left here; they had time to write their state\n"
        "  a run that goes on has counted them as lost; one that has ended is resumed there, and takes this agent again"
    )


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
        fix="the same files on all machines; data=stdlib also needs the same version of Python",
    )


def _report(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, (RunError, UserError)) else traceback.format_exc()


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        f"{program} agent", description="Offers this machine to the run that meets at HOST:PORT."
    )
    parser.add_argument("rendezvous", metavar="HOST:PORT", help="the controller's runtime.rendezvous")
    parser.add_argument("--token-file", required=True, metavar="FILE", help="the secret; mode 0600")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="places for workers here (default 1)")
    parser.add_argument("--host", metavar="ADDRESS", help="of this machine; default: the one that reaches HOST")
    parser.add_argument(
        "--name", help="failure domain: agents that fail together have the same; default: the host name"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="to wait for the controller (default 300)"
    )
    options = parser.parse_args(arguments)
    if options.workers < 1:
        raise ConfigError(
            f"--workers {options.workers} leaves no place for a worker",
            rule="an agent has a place for at least 1 worker",
        )
    return options
